// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/bit_cast.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/error.hpp>
#include <kvcache/views.hpp>

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kvcache {

// A row's attention over a part of its tokens is a state: the output, normalised over that part, and the log-sum-exp
// of the logits (lse). States over disjoint parts merge into the state over their union (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", 2018). The state over no token is (0, -inf). Infinities are told by
// their bits, so a program built with -ffast-math merges as well.

enum class lse_base : std::uint8_t {
  two,      ///< log2 of the sum of 2^(logit * log2 e): what kernels compute in
  natural,  ///< ln of the sum of e^logit
};

inline constexpr float log2_e = 1.4426950408889634f;
inline constexpr float ln_2 = 0.6931471805599453f;

/// The lse of no token.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr float empty_lse() noexcept { return detail::bit_cast<float>(0xff80'0000u); }

/// Whether `lse` is that of no token.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr bool is_empty(float lse) noexcept {
  return detail::bit_cast<std::uint32_t>(lse) == 0xff80'0000u;
}

/// One lse for each row and head. Strides count elements. Owns nothing; no data: not wanted.
template <class T>
struct lse_view {
  T* data = nullptr;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 1;
  lse_base base = lse_base::two;

  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr T* at(std::uint32_t row, std::uint32_t head) const noexcept {
    return data + row * row_stride + head * head_stride;
  }
};

namespace detail {

/// Merges `parts` states of one row: `lse_of(p)`, base 2, and `output_of(p)`. Writes the output and returns the lse.
template <class LseOf, class OutputOf>
float merge_row(std::size_t parts, const LseOf& lse_of, const OutputOf& output_of, std::uint32_t dim, float* output) {
  bool empty = true;
  float top = 0;
  for (std::size_t p = 0; p < parts; ++p) {
    const float x = lse_of(p);
    if (is_empty(x)) continue;
    if (empty || x > top) top = x;
    empty = false;
  }
  if (empty) {
    for (std::uint32_t d = 0; d < dim; ++d) output[d] = 0;
    return empty_lse();
  }
  float total = 0;
  for (std::size_t p = 0; p < parts; ++p) {
    const float x = lse_of(p);
    if (!is_empty(x)) total += std::exp2(x - top);
  }
  // In slices, so that the result may lie where a part lies.
  constexpr std::uint32_t slice = 64;
  float sum[slice];
  for (std::uint32_t first = 0; first < dim; first += slice) {
    const std::uint32_t count = dim - first < slice ? dim - first : slice;
    for (std::uint32_t d = 0; d < count; ++d) sum[d] = 0;
    for (std::size_t p = 0; p < parts; ++p) {
      const float x = lse_of(p);
      if (is_empty(x)) continue;
      const float weight = std::exp2(x - top);
      const float* const from = output_of(p) + first;
      for (std::uint32_t d = 0; d < count; ++d) sum[d] += weight * from[d];
    }
    for (std::uint32_t d = 0; d < count; ++d) output[first + d] = sum[d] / total;
  }
  return top + std::log2(total);
}

}  // namespace detail

/// Merges the states of `parts` disjoint parts of one row, base 2: output p at outputs + p * output_stride, `dim`
/// elements; lse p at lses[p * lse_stride]. The result may take the place of any part. Parts are summed in their
/// order, so equal parts give equal bits; a part that is alone in not being empty is the result. O(parts * dim).
inline void merge_states(std::uint32_t parts, const float* outputs, std::int64_t output_stride, const float* lses,
                         std::int64_t lse_stride, std::uint32_t dim, float* output, float* lse) noexcept {
  *lse = detail::merge_row(
      parts, [&](std::size_t p) { return lses[static_cast<std::int64_t>(p) * lse_stride]; },
      [&](std::size_t p) { return outputs + static_cast<std::int64_t>(p) * output_stride; }, dim, output);
}

/// Lets a sink of the given logit (natural scale) join a finished row's softmax: the state's weights shrink by the
/// sink's share, the lse grows by it. An empty state keeps its output of 0. -inf adds nothing. O(dim).
inline void apply_sink(float sink, std::uint32_t dim, float* output, float* lse) noexcept {
  if (is_empty(sink)) return;
  // Base 2 has less room above: beyond this a sink takes everything anyway, and infinity less infinity is no number.
  constexpr float most = 2.3e38f;
  const float logit = (sink > most ? most : sink) * log2_e;
  if (is_empty(*lse)) {
    *lse = logit;
    return;
  }
  const float top = logit > *lse ? logit : *lse;
  const float own = std::exp2(*lse - top);
  const float total = own + std::exp2(logit - top);
  const float keep = own / total;
  for (std::uint32_t d = 0; d < dim; ++d) output[d] *= keep;
  *lse = top + std::log2(total);
}

/// The states of many rows and heads: output [rows, heads, dim] and an lse for each row and head.
template <class T>
struct state_view {
  rows_view<T> output;
  lse_view<T> lse;

  constexpr state_view() noexcept = default;
  constexpr state_view(rows_view<T> o, lse_view<T> l) noexcept : output(o), lse(l) {}
  /// States to write through read as well.
  template <class U>
    requires std::same_as<const U, T>
  constexpr state_view(const state_view<U>& s) noexcept
      : output(s.output), lse{s.lse.data, s.lse.row_stride, s.lse.head_stride, s.lse.base} {}
};

/// Merges states over disjoint parts of the same rows, row by row and head by head: a shared prefix and each request's
/// own tokens, or parts from several ranks. `into` may be one of the parts. Every lse is in the base its view says.
/// Raises invalid_argument where shapes differ. O(parts * rows * heads * dim), on the calling thread, no allocation.
/// Any number of threads may merge into different states. Precondition: every lse is finite or that of an empty state.
inline void merge(std::span<const state_view<const float>> parts, state_view<float> into) {
  const auto& shape = into.output;
  for (const auto& p : parts)
    if (p.output.rows != shape.rows || p.output.heads != shape.heads || p.output.head_dim != shape.head_dim)
      detail::raise<invalid_argument>(
          "merge: a part has " + std::to_string(p.output.rows) + " rows of " + std::to_string(p.output.heads) +
          " heads of " + std::to_string(p.output.head_dim) + ", the result " + std::to_string(shape.rows) + " of " +
          std::to_string(shape.heads) + " of " + std::to_string(shape.head_dim) + "; give parts of one shape");

  for (std::uint32_t row = 0; row < shape.rows; ++row) {
    for (std::uint32_t head = 0; head < shape.heads; ++head) {
      const float lse = detail::merge_row(
          parts.size(),
          [&](std::size_t p) {
            const float x = *parts[p].lse.at(row, head);
            return parts[p].lse.base == lse_base::two || is_empty(x) ? x : x * log2_e;
          },
          [&](std::size_t p) { return parts[p].output.at(row, head); }, shape.head_dim, into.output.at(row, head));
      *into.lse.at(row, head) = into.lse.base == lse_base::two || is_empty(lse) ? lse : lse * ln_2;
    }
  }
}

/// Merges `other` into `into`: two states over disjoint parts of the same rows. As above, with two parts.
inline void merge(state_view<float> into, state_view<const float> other) {
  const state_view<const float> both[] = {into, other};
  merge(std::span(&both[0], 2), into);
}

}  // namespace kvcache
