// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/call.hpp>
#include <kvcache/attention/plan.hpp>
#include <kvcache/attention/state.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>
#include <kvcache/quantise.hpp>
#include <kvcache/views.hpp>

#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
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

/// A head of a token as it was before it was rotated, whatever it is stored in.
inline void read_double(const stored_head& from, std::vector<float>& narrow, std::vector<double>& to) noexcept {
  const auto dim = static_cast<std::uint32_t>(to.size());
  read_head(from, dim, narrow.data());
  for (std::uint32_t d = 0; d < dim; ++d) to[d] = static_cast<double>(narrow[d]);
  if (is_rotated(from.dtype)) rotate(to.data(), dim);
}

template <class T>
concept element_or_double = element<T> || std::same_as<T, double>;

template <class T>
[[nodiscard]] T from_double(double x) noexcept {
  if constexpr (std::floating_point<T>)
    return static_cast<T>(x);
  else
    return from_float<T>(static_cast<float>(x));
}

/// Hands each row's output, and its lse in base e unless the row is empty, to `emit`.
KVCACHE_NOINLINE inline void reference_rows(
    const variant_features& features, const batch_view& batch, const kv_view& kv, const rows_view<const std::byte>& q,
    dtype_id q_dtype, const rows_view<std::byte>& out, const variant_values& values,
    void (*emit)(void* to, std::uint32_t row, std::uint32_t head, const double* output, const double* lse), void* to) {
  const attention_plan plan = plan_attention(batch, {.features = features});
  attention_call call;
  call.plan = &plan;
  call.kv = kv;
  call.kv.head_dim_v = kv.v_dim();
  call.q = q;
  call.out = out;
  call.features = features;
  call.values = values;
  check_call(call, {kv.k_dtype, kv.v_dtype}, kv.tail_dtype, false);
  if (batch.tokens() == 0) return;

  const std::uint32_t group = q.heads / kv.kv_heads;
  const std::int64_t q_bytes = bits(q_dtype) / 8;
  const double scale =
      values.scale != 0 ? static_cast<double>(values.scale) : 1 / std::sqrt(static_cast<double>(q.head_dim));

  std::vector<double> query(q.head_dim);
  std::vector<double> logits;
  std::vector<std::uint32_t> tokens;
  std::vector<double> sum(kv.v_dim());
  std::vector<double> key(kv.head_dim);
  std::vector<double> value(kv.v_dim());
  std::vector<float> narrow(kv.head_dim > kv.v_dim() ? kv.head_dim : kv.v_dim());
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
        const std::byte* const first = q.data + (row * q.row_stride + head * q.head_stride) * q_bytes;
        for (std::uint32_t d = 0; d < q.head_dim; ++d) query[d] = load_double(first + d * q_bytes, q_dtype);
        logits.clear();
        tokens.clear();
        for (std::uint32_t t = range.begin; t < range.end; ++t) {
          if (features.mask && !values.mask.sees(row, t)) continue;
          read_double(kv.k_head(table[t / batch.block_size], t % batch.block_size, kv_head), narrow, key);
          if (kv.key_offset != nullptr)
            for (std::uint32_t d = 0; d < q.head_dim; ++d)
              key[d] += static_cast<double>(kv.key_offset[std::size_t{kv_head} * q.head_dim + d]);
          double dot = 0;
          for (std::uint32_t d = 0; d < q.head_dim; ++d) dot += query[d] * key[d];
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
          read_double(kv.v_head(table[tokens[n] / batch.block_size], tokens[n] % batch.block_size, kv_head), narrow,
                      value);
          for (std::uint32_t d = 0; d < kv.v_dim(); ++d) sum[d] += weight * value[d];
        }
        if (any)
          for (double& s : sum) s /= total;
        const double lse = any ? top + std::log(total) : 0;
        emit(to, row, head, sum.data(), any ? &lse : nullptr);
      }
    }
  }
}

}  // namespace detail

/// Attention as its definition reads, in double precision, token by token: what kernels are held against. Reads only
/// what a query sees. `out` and `lse` may be of double; `lse` without data is not written. Raises invalid_argument as
/// plan and run do for batches, shapes and values that contradict themselves. O(rows * heads * kv length * head_dim),
/// on the calling thread.
template <attention_variant Variant, class Q, detail::element_or_double Out, class Lse = double>
  requires element<std::remove_const_t<Q>>
void reference_attention(const batch_view& batch, const kv_view& kv, rows_view<Q> q, rows_view<Out> out,
                         const variant_values& values = {}, lse_view<Lse> lse = {}) {
  struct target {
    rows_view<Out> out;
    lse_view<Lse> lse;
  } to{out, lse};
  detail::reference_rows(
      Variant::features, batch, kv,
      {reinterpret_cast<const std::byte*>(q.data), q.rows, q.heads, q.head_dim, q.row_stride, q.head_stride},
      dtype_traits<std::remove_const_t<Q>>::id, {nullptr, out.rows, out.heads, out.head_dim}, values,
      [](void* context, std::uint32_t row, std::uint32_t head, const double* output, const double* natural) {
        const target& t = *static_cast<const target*>(context);
        for (std::uint32_t d = 0; d < t.out.head_dim; ++d) t.out.at(row, head)[d] = detail::from_double<Out>(output[d]);
        if (t.lse.data == nullptr) return;
        if (natural != nullptr)
          *t.lse.at(row, head) =
              static_cast<Lse>(t.lse.base == lse_base::natural ? *natural : *natural * 1.4426950408889634074);
        else if constexpr (std::same_as<Lse, double>)
          *t.lse.at(row, head) = std::bit_cast<double>(0xfff0'0000'0000'0000u);
        else
          *t.lse.at(row, head) = empty_lse();
      },
      &to);
}

}  // namespace kvcache
