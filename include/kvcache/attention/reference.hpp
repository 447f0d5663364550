// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/plan.hpp>
#include <kvcache/attention/state.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/views.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace kvcache {

namespace detail {

[[nodiscard]] inline double load_double(const std::byte* from, dtype_id id) noexcept {
  if (id == dtype_id::float32) {
    float x;
    std::memcpy(&x, from, sizeof x);
    return static_cast<double>(x);
  }
  std::uint16_t bits16;
  std::memcpy(&bits16, from, sizeof bits16);
  return static_cast<double>(id == dtype_id::float16 ? to_float(f16{bits16}) : to_float(bf16{bits16}));
}

template <class T>
[[nodiscard]] T from_double(double x) noexcept {
  if constexpr (std::floating_point<T>)
    return static_cast<T>(x);
  else
    return from_float<T>(static_cast<float>(x));
}

}  // namespace detail

/// Attention as its definition reads, in double precision, token by token: what kernels are held against. Reads only
/// what a query sees. `out` and `lse` may be of double; `lse` without data is not written. Raises invalid_argument as
/// plan and run do for batches and values that contradict themselves. O(rows * heads * kv length * head_dim), on the
/// calling thread.
template <attention_variant Variant, class Q, class Out, class Lse = double>
  requires element<std::remove_const_t<Q>> &&
      (element<Out> || std::same_as<Out, double>)void reference_attention(const batch_view& batch, const kv_view& kv,
                                                                          rows_view<Q> q, rows_view<Out> out,
                                                                          const variant_values& values = {},
                                                                          lse_view<Lse> lse = {}) {
    constexpr variant_features features = Variant::features;
    detail::check_batch(batch);
    std::uint32_t longest = 0;
    for (std::uint32_t r = 0; r < batch.rows(); ++r) longest = (std::max)(longest, batch.kv_lengths[r]);
    validate(features, values, q.heads, batch.tokens(), longest);
    if (kv.kv_heads == 0 || q.heads % kv.kv_heads != 0)
      detail::raise<invalid_argument>("reference_attention: " + std::to_string(q.heads) +
                                      " query heads are no multiple of " + std::to_string(kv.kv_heads) +
                                      " kv heads; give every kv head the same group");

    const std::uint32_t group = q.heads / kv.kv_heads;
    const std::int64_t k_bytes = bits(kv.k_dtype) / 8;
    const std::int64_t v_bytes = bits(kv.v_dtype) / 8;
    const double scale =
        values.scale != 0 ? static_cast<double>(values.scale) : 1 / std::sqrt(static_cast<double>(q.head_dim));
    constexpr double log2e = 1.4426950408889634074;

    std::vector<double> logits;
    std::vector<std::uint32_t> tokens;
    std::vector<double> sum(kv.head_dim_v);
    for (std::uint32_t r = 0; r < batch.rows(); ++r) {
      const auto table = batch.tables.row(r);
      const std::uint32_t length = batch.kv_lengths[r];
      const std::uint32_t queries = batch.query_offsets[r + 1] - batch.query_offsets[r];
      for (std::uint32_t i = 0; i < queries; ++i) {
        const std::uint32_t row = batch.query_offsets[r] + i;
        const std::int64_t position = std::int64_t{length} - queries + i;
        const visible_range range = visible(features, values.window, position, length);
        for (std::uint32_t head = 0; head < q.heads; ++head) {
          const std::uint32_t kv_head = head / group;
          logits.clear();
          tokens.clear();
          for (std::uint32_t t = range.begin; t < range.end; ++t) {
            if (features.mask && !values.mask.sees(row, t)) continue;
            const std::byte* const k = kv.k_at(table[t / batch.block_size], t % batch.block_size, kv_head);
            double dot = 0;
            for (std::uint32_t d = 0; d < q.head_dim; ++d)
              dot +=
                  static_cast<double>(to_float(q.at(row, head)[d])) * detail::load_double(k + d * k_bytes, kv.k_dtype);
            double logit = dot * scale;
            if (features.soft_cap) {
              const double cap = static_cast<double>(values.soft_cap);
              logit = cap * std::tanh(logit / cap);
            }
            if (features.alibi)
              logit -= static_cast<double>(values.alibi_slopes[head]) * std::fabs(static_cast<double>(position - t));
            logits.push_back(logit);
            tokens.push_back(t);
          }

          const bool sink = features.sinks && !is_empty(values.sinks[head]);
          double top = sink ? static_cast<double>(values.sinks[head]) : 0;
          bool any = sink;
          for (const double x : logits) {
            if (!any || x > top) top = x;
            any = true;
          }
          double total = sink ? std::exp(static_cast<double>(values.sinks[head]) - top) : 0;
          for (double& s : sum) s = 0;
          for (std::size_t n = 0; n < logits.size(); ++n) {
            const double weight = std::exp(logits[n] - top);
            total += weight;
            const std::byte* const v =
                kv.v_at(table[tokens[n] / batch.block_size], tokens[n] % batch.block_size, kv_head);
            for (std::uint32_t d = 0; d < kv.head_dim_v; ++d)
              sum[d] += weight * detail::load_double(v + d * v_bytes, kv.v_dtype);
          }
          for (std::uint32_t d = 0; d < kv.head_dim_v; ++d)
            out.at(row, head)[d] = detail::from_double<Out>(any ? sum[d] / total : 0);
          if (lse.data != nullptr) {
            if (any) {
              const double natural = top + std::log(total);
              *lse.at(row, head) = static_cast<Lse>(lse.base == lse_base::natural ? natural : natural * log2e);
            } else if constexpr (sizeof(Lse) == sizeof(double)) {
              *lse.at(row, head) = std::bit_cast<Lse>(0xfff0'0000'0000'0000u);
            } else {
              *lse.at(row, head) = empty_lse();
            }
          }
        }
      }
    }
  }

}  // namespace kvcache
