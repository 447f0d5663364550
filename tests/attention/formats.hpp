// SPDX-License-Identifier: Apache-2.0
// What the tests of attention over formats share: a sweep over shapes, and scenes of the very same numbers without a
// format.
#pragma once

#include <functional>

#include "support.hpp"

namespace kvcache_test {

// Pairs that several files take. cpu_kernels.hpp has their kernels.
using fp8_small = kv_dtype<fp8_e4m3>;
using fp8_large = kv_dtype<fp8_e5m2>;
using int8 = kv_dtype<int8_per_token>;
using int4 = kv_dtype<int4_grouped<32>>;
using int4_asymmetric = kv_dtype<int4_grouped_asymmetric<32>>;
using int4_channels = kv_dtype<int4_per_channel>;
using int2_channels = kv_dtype<int2_per_channel>;
using int4_rotated = kv_dtype<rotated<int4_grouped<32>>>;
using int8_beside_int4 = kv_dtype<int8_per_channel, int4_grouped<64>>;
using channels_beside_rotated = kv_dtype<int4_per_channel, rotated<int4_grouped<32>>>;

template <class Dtype, class Tail = bf16>
using scene_of = scene<typename Dtype::k, typename Dtype::v, Tail>;

/// A scene of f32 with the numbers that another one has stored, turned back where they are rotated, by the definition
/// of a Hadamard matrix, in double, and with what was subtracted from keys added again.
inline scene<f32> plain_twin(const any_scene& s) {
  shape form = s.form();
  form.tails = false;
  const batch_view batch = s.batch();
  std::vector<sequence> sequences;
  for (std::uint32_t r = 0; r < batch.rows(); ++r)
    sequences.push_back({batch.query_offsets[r + 1] - batch.query_offsets[r], batch.kv_lengths[r]});
  scene<f32> twin(form, sequences);
  twin.q = s.q;
  std::vector<float> x;
  twin.write_all([&](bool keys, std::size_t r, std::uint32_t t, std::uint32_t h, std::uint32_t d) {
    const stored_head from = s.stored(keys, r, t, h);
    const std::uint32_t dim = keys ? form.head_dim : form.v_dim();
    if (d == 0) {
      x.resize(dim);
      read_head(from, dim, x.data());
    }
    const float offset = keys && !s.key_offset.empty() ? s.key_offset[std::size_t{h} * dim + d] : 0.0f;
    if (!is_rotated(from.dtype)) return x[d] + offset;
    const std::uint32_t run = dim & (~dim + 1);
    double sum = 0;
    for (std::uint32_t i = d / run * run; i < d / run * run + run; ++i)
      sum += std::popcount((i % run) & (d % run)) % 2 == 0 ? static_cast<double>(x[i]) : -static_cast<double>(x[i]);
    return static_cast<float>(sum / std::sqrt(static_cast<double>(run)) + static_cast<double>(offset));
  });
  return twin;
}

/// What `hold` does for all types, compiled once: `run` is attention over the scene.
inline void hold_runs(const any_scene& s, const expectation& e, const char* variant,
                      const std::function<outcome(cpu_isa, unsigned threads, query_type)>& run) {
  for (const cpu_isa isa : isas()) {
    INFO(text(s.form(), isa) << " " << name(s.view().k_dtype) << " " << name(s.view().v_dtype) << " variant "
                             << variant);
    CHECK(distance(run(isa, 1, query_type::usual), e) < 1);
    CHECK(distance(run(isa, 5, query_type::as_f32), e) < 1);
    if (isa != isas().back()) continue;
    CHECK(distance(run(isa, 1, query_type::as_f16), e) < 1);
    CHECK(distance(run(isa, 1, query_type::as_bf16), e) < 1);
  }
}

/// Holds a scene against the reference on every instruction set, with queries of every type, whole and cut for threads.
template <class Variant, class K, class V, class Tail>
void hold(const scene<K, V, Tail>& s, const variant_values& values = {}) {
  hold_runs(s, expected<Variant>(s, values), Variant::name, [&](cpu_isa isa, unsigned threads, query_type type) {
    return attend<Variant>(s, values, isa, threads, type);
  });
}

/// A pair of types over block sizes, head sizes and groups. Each combination of block size and head size falls to a
/// third of the pairs, so that all of them together see all.
template <class K, class V>
void sweep_shapes() {
  constexpr std::uint32_t groups[] = {1, 4, 8, 16};
  auto turn = static_cast<std::uint32_t>(dtype_traits<K>::id) + 2 * static_cast<std::uint32_t>(dtype_traits<V>::id);
  for (const std::uint32_t dim : {64u, 80u, 96u, 128u, 192u, 256u}) {
    for (const std::uint32_t block_size : {1u, 7u, 16u, 64u}) {
      if (++turn % (thorough ? 3 : 7) != 0) continue;
      const std::uint32_t n = turn / 3;
      const shape form{.block_size = block_size,
                       .kv_heads = 1 + n % 2,
                       .group = groups[n % 4],
                       .head_dim = dim,
                       .head_dim_v = n % 5 == 0 ? 96u : 0u,
                       .heads_outside = n / 2 % 2 == 1,
                       .tails = n / 4 % 2 == 1,
                       .tails_alike = n % 3 == 0};
      hold<causal>(scene<K, V>(form, {{1, 130}, {9, 40}, {1, 1}, {3, 17}, {1, 64}, {1, 0}}, turn));
    }
  }
}

}  // namespace kvcache_test
