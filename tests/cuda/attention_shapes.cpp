// SPDX-License-Identifier: Apache-2.0
// Shapes: heads, groups, blocks and strides, by the bodies of the device's kernels.
#include "attention_support.hpp"

#include <array>

using namespace kvcache_test;

namespace {

template <unsigned DimK, unsigned DimV = DimK>
void hold(std::uint32_t block_size, std::uint32_t group, bool heads_outside, std::uint32_t aligned) {
  const shape form{.block_size = block_size,
                   .kv_heads = 2,
                   .group = group,
                   .head_dim = DimK,
                   .head_dim_v = DimV,
                   .heads_outside = heads_outside,
                   .aligned = aligned};
  const scene<bf16> s(form, {{1, 130}, {9, 40}, {1, 700}});
  const expectation e = expected<causal>(s);
  each_device_run([&](const device_run& how) {
    INFO(text(form, cpu_isa::scalar) << " aligned to " << aligned);
    CHECK(distance(attend_on_device<causal, DimK, DimV>(s, {}, how), e) < 1);
  });
}

}  // namespace

TEST_CASE("attention_11 device: head_dim 64 to 256, K and V alike and not", "[cuda]") {
  hold<64>(1, 1, false, 8);
  hold<80>(7, 3, true, 8);
  hold<96>(16, 8, false, 16);
  hold<112>(64, 2, true, 16);
  hold<128>(256, 5, false, 8);
  hold<192>(16, 4, true, 16);
  hold<256>(7, 2, false, 16);
  hold<192, 128>(16, 3, false, 16);
  hold<64, 128>(16, 3, true, 8);
}

TEST_CASE("attention_11 device: groups of 1 to 16, 64 and 128, block sizes 1 to 256", "[cuda]") {
  std::uint32_t i = 0;
  for (const std::uint32_t group : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 10u, 11u, 12u, 13u, 14u, 15u, 16u, 64u, 128u}) {
    hold<64>(std::array{1u, 7u, 16u, 64u, 256u}[i % 5], group, i % 2 == 0, i % 3 == 0 ? 8 : 16);
    ++i;
  }
}
