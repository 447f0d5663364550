// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>

#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvcache {

namespace detail {

template <class T>
using rotated_bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

/// x. The compiler does not know that `nothing` is 0, so -ffast-math cannot take the sum that x is apart.
template <class T>
[[nodiscard]] KVCACHE_ALWAYS_INLINE T settled(T x, rotated_bits<T> nothing) noexcept {
  return std::bit_cast<T>(static_cast<rotated_bits<T>>(std::bit_cast<rotated_bits<T>>(x) ^ nothing));
}

/// Two steps of a rotation: a, b, c and d become sums and differences of each other.
template <class T>
KVCACHE_ALWAYS_INLINE void rotate_four(T& a, T& b, T& c, T& d, rotated_bits<T> nothing) noexcept {
  const T sum = settled(a + b, nothing);
  const T difference = settled(a - b, nothing);
  const T other_sum = settled(c + d, nothing);
  const T other_difference = settled(c - d, nothing);
  a = sum + other_sum;
  b = difference + other_difference;
  c = sum - other_sum;
  d = difference - other_difference;
}

/// The first two steps for neighbours.
template <std::uint32_t Fours, class T>
KVCACHE_ALWAYS_INLINE void rotate_neighbours(T* x, rotated_bits<T> nothing) noexcept {
  T y[4 * Fours];
  std::memcpy(y, x, sizeof y);
  for (std::uint32_t i = 0; i < 4 * Fours; i += 4) rotate_four(y[i], y[i + 1], y[i + 2], y[i + 3], nothing);
  std::memcpy(x, y, sizeof y);
}

/// Two steps for what is `half`, two and three times as far apart.
template <std::uint32_t Width, class T>
KVCACHE_ALWAYS_INLINE void rotate_apart(T* x, std::uint32_t half, rotated_bits<T> nothing) noexcept {
  T y[4][Width];
  for (std::uint32_t k = 0; k < 4; ++k) std::memcpy(y[k], x + k * half, sizeof y[k]);
  for (std::uint32_t i = 0; i < Width; ++i) rotate_four(y[0][i], y[1][i], y[2][i], y[3][i], nothing);
  for (std::uint32_t k = 0; k < 4; ++k) std::memcpy(x + k * half, y[k], sizeof y[k]);
}

}  // namespace detail

/// Multiplies a vector of floats or doubles by an orthogonal, symmetric Hadamard matrix, in place; doing it twice gives
/// back the vector but for rounding. Where `dim` is no power of two, runs of its largest power of two are rotated each
/// by itself. O(dim log dim). Precondition: dim > 0 and below 2^31.
template <class T>
KVCACHE_NOINLINE void rotate(T* x, std::uint32_t dim) noexcept {
  const std::uint32_t run = dim & (~dim + 1);
  const int log2 = std::countr_zero(run);
  const T factor = static_cast<T>(log2 % 2 == 0 ? 1.0 : 0.70710678118654752) / static_cast<T>(1u << (log2 / 2));
  const detail::rotated_bits<T> nothing = dim >> 31;
  std::uint32_t half = 1;
  if (run >= 16) {
    std::uint32_t at = 0;
    for (; dim - at >= 64; at += 64) detail::rotate_neighbours<16>(x + at, nothing);
    for (; at < dim; at += 16) detail::rotate_neighbours<4>(x + at, nothing);
    for (at = 0; at < dim; at += 16) detail::rotate_apart<4>(x + at, 4, nothing);
    for (half = 16; 4 * half <= run; half *= 4)
      for (at = 0; at < dim; at += 4 * half)
        for (std::uint32_t i = at; i < at + half; i += 16) detail::rotate_apart<16>(x + i, half, nothing);
  }
  for (; half < run; half *= 2) {
    for (std::uint32_t at = 0; at < dim; at += 2 * half) {
      for (std::uint32_t i = at; i < at + half; ++i) {
        const T a = x[i];
        const T b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  for (std::uint32_t i = 0; i < dim; ++i) x[i] *= factor;
}

}  // namespace kvcache
