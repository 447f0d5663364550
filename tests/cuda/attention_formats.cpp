// SPDX-License-Identifier: Apache-2.0
// Everything that K and V can be stored as, read by the bodies of the device's kernels.
#include "attention_support.hpp"

using namespace kvcache_test;

namespace {

template <class K, class V, class Tail = bf16, unsigned Dim = 64>
struct formats {
  using k = K;
  using v = V;
  using tail = Tail;
  static constexpr unsigned dim = Dim;
};

}  // namespace

TEMPLATE_TEST_CASE("Device attention reads every format", "[cuda][dtype]", (formats<f16, f16>), (formats<f16, bf16>),
                   (formats<f32, f32>), (formats<bf16, f32>), (formats<fp8_e4m3, fp8_e5m2>),
                   (formats<fp8_e5m2, fp8_e4m3, bf16, 80>), (formats<int8_per_token, int8_per_token>),
                   (formats<int8_per_token, int4_grouped<32>, bf16, 80>),
                   (formats<int4_grouped<16>, int4_grouped<64>, bf16, 128>),
                   (formats<int4_grouped<128>, int4_grouped<128>, bf16, 192>),
                   (formats<int4_grouped_asymmetric<32>, int4_grouped_asymmetric<16>>),
                   (formats<int8_per_channel, int8_per_channel>), (formats<int4_per_channel, int4_grouped<32>, f16>),
                   (formats<int4_per_channel_symmetric, int2_per_channel>), (formats<bf16, int4_per_channel>),
                   (formats<int4_per_channel, fp8_e4m3, f16, 96>),
                   (formats<rotated<int4_grouped<32>>, rotated<int4_grouped<32>>>),
                   (formats<rotated<fp8_e4m3>, bf16, bf16, 96>),
                   (formats<rotated<int4_per_channel>, rotated<int8_per_channel>>)) {
  using K = typename TestType::k;
  using V = typename TestType::v;
  constexpr unsigned dim = TestType::dim;
  for (const std::uint32_t block_size : {7u, 16u, 64u}) {
    if (!thorough && block_size == 7) continue;
    for (const std::uint32_t group : {1u, 6u}) {
      if (!thorough && group == 1) continue;
      const shape form{.block_size = block_size,
                       .kv_heads = 2,
                       .group = group,
                       .head_dim = dim,
                       .heads_outside = block_size == 16,
                       .aligned = block_size == 64 ? 16u : 4u};
      const scene<K, V, typename TestType::tail> s(form, {{1, 150}, {9, 40}, {1, 600}});
      const expectation e = expected<causal>(s);
      each_device_run([&](const device_run& how) {
        const bool tile = how.kernel == device_kernel::few_rows || how.kernel == device_kernel::many_rows;
        if (tile && (dtype_traits<K>::bits == 32 || dtype_traits<V>::bits == 32)) return;
        INFO(dtype_traits<K>::name << ' ' << dtype_traits<V>::name << " block_size " << block_size << " group "
                                   << group);
        CHECK(distance(attend_on_device<causal, dim>(s, {}, how), e) < 1);
      });
    }
  }
}

TEST_CASE("Device attention gives back what was subtracted from keys", "[cuda][dtype]") {
  scene<fp8_e4m3> s({.kv_heads = 2, .group = 3, .aligned = 16}, {{1, 150}, {9, 40}});
  for (std::size_t i = 0; i < 2 * 64; ++i) s.key_offset.push_back(static_cast<float>(i % 5) - 2);
  const expectation e = expected<causal>(s);
  each_device_run([&](const device_run& how) { CHECK(distance(attend_on_device<causal>(s, {}, how), e) < 1); });
}
