// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/bit_cast.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>

#include <cstdint>
#include <type_traits>

// The 8-bit types of Micikevicius et al., "FP8 formats for deep learning" (2022). What is beyond the range becomes the
// largest number, infinity included, since a key that is a little too large is still a key.

namespace kvcache {

/// 4 bits of exponent, 3 of mantissa, as bits: up to 448, no infinity.
struct fp8_e4m3 {
  std::uint8_t bits;
  friend constexpr bool operator==(fp8_e4m3, fp8_e4m3) = default;  ///< compares bits
};

/// 5 bits of exponent, 2 of mantissa, as bits: up to 57,344. Reads infinity, never makes it.
struct fp8_e5m2 {
  std::uint8_t bits;
  friend constexpr bool operator==(fp8_e5m2, fp8_e5m2) = default;  ///< compares bits
};

template <>
struct dtype_traits<fp8_e4m3> {
  static constexpr dtype_id id = dtype_id::float8_e4m3;
  static constexpr const char* name = "fp8_e4m3";
  static constexpr unsigned bits = 8;
};
template <>
struct dtype_traits<fp8_e5m2> {
  static constexpr dtype_id id = dtype_id::float8_e5m2;
  static constexpr const char* name = "fp8_e5m2";
  static constexpr unsigned bits = 8;
};

/// Exact.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr float to_float(fp8_e4m3 x) noexcept {
  const std::uint32_t sign = (x.bits & 0x80u) << 24;
  const std::uint32_t rest = x.bits & 0x7fu;
  if (rest == 0x7fu) return detail::bit_cast<float>(sign | 0x7fc0'0000u);
  if (rest >= 0x08u) return detail::bit_cast<float>(sign | ((rest << 20) + 0x3c00'0000u));
  const float magnitude = static_cast<float>(rest) * 0x1p-9f;  // subnormal
  return detail::bit_cast<float>(sign | detail::bit_cast<std::uint32_t>(magnitude));
}

/// Exact: it is the upper half of an f16.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr float to_float(fp8_e5m2 x) noexcept {
  return to_float(f16{static_cast<std::uint16_t>(x.bits << 8)});
}

namespace detail {

/// How a type of 8 bits holds numbers.
struct fp8_range {
  unsigned mantissa;      ///< bits
  int bias;               ///< of the exponent
  std::uint32_t largest;  ///< code of the largest number

  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr std::uint32_t first_normal() const noexcept {  // as f32 bits
    return static_cast<std::uint32_t>(128 - bias) << 23;
  }
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr std::uint32_t rebias() const noexcept {
    return static_cast<std::uint32_t>(127 - bias) << 23;
  }
  /// The exponent of the step between subnormals.
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr int step() const noexcept {
    return 1 - bias - static_cast<int>(mantissa);
  }
};
inline constexpr fp8_range e4m3_range{3, 7, 0x7e};
inline constexpr fp8_range e5m2_range{2, 15, 0x7b};

/// Rounds to nearest, ties to even, by bits.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr std::uint8_t to_fp8(float x, fp8_range range) noexcept {
  const std::uint32_t b = detail::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (b >> 24) & 0x80u;
  const std::uint32_t a = b & 0x7fff'ffffu;
  std::uint32_t out = 0;
  if (a > 0x7f80'0000u) {
    out = 0x7fu;
  } else if (a >= range.first_normal()) {
    const std::uint32_t r = a - range.rebias();
    const unsigned dropped = 23 - range.mantissa;
    out = (r + ((1u << (dropped - 1)) - 1u) + ((r >> dropped) & 1u)) >> dropped;
    if (out > range.largest) out = range.largest;
  } else {
    const std::uint32_t shift = static_cast<std::uint32_t>(150 + range.step()) - (a >> 23);
    if (shift <= 24u) {
      const std::uint32_t mantissa = (a & 0x007f'ffffu) | 0x0080'0000u;
      const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
      const std::uint32_t half = 1u << (shift - 1u);
      out = mantissa >> shift;
      if (rest > half || (rest == half && (out & 1u) != 0)) ++out;
    }
  }
  return static_cast<std::uint8_t>(sign | out);
}

}  // namespace detail

/// Rounds to nearest, ties to even; beyond the range, and infinite, to the largest number; a NaN stays a NaN.
template <>
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr fp8_e4m3 from_float<fp8_e4m3>(float x) noexcept {
  return {detail::to_fp8(x, detail::e4m3_range)};
}
template <>
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr fp8_e5m2 from_float<fp8_e5m2>(float x) noexcept {
  return {detail::to_fp8(x, detail::e5m2_range)};
}

static_assert(std::is_trivially_copyable_v<fp8_e4m3> && std::is_trivially_copyable_v<fp8_e5m2>);
static_assert(sizeof(fp8_e4m3) == 1 && sizeof(fp8_e5m2) == 1);
static_assert(element<fp8_e4m3> && element<fp8_e5m2>);

}  // namespace kvcache
