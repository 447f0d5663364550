// SPDX-License-Identifier: Apache-2.0
// An oracle for rounding that knows only what the codes of a small float are worth: the code nearest to a magnitude, of
// two equally near the even one. It shares no step with the library's conversion.
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/fp8.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvcache_test {

/// What a type of 8 or 16 bits is like, its sign apart.
struct small_float {
  int exponent_bits;
  int mantissa_bits;
  std::uint32_t top;  ///< the code of what is beyond the range: of infinity, or of the largest number

  [[nodiscard]] constexpr std::uint32_t sign() const { return 1u << (exponent_bits + mantissa_bits); }
};

template <class T>
inline constexpr small_float format_of{};
template <>
inline constexpr small_float format_of<kvcache::f16>{5, 10, 0x7c00};
template <>
inline constexpr small_float format_of<kvcache::bf16>{8, 7, 0x7f80};
template <>
inline constexpr small_float format_of<kvcache::fp8_e4m3>{4, 3, 0x7e};
template <>
inline constexpr small_float format_of<kvcache::fp8_e5m2>{5, 2, 0x7b};

/// The worth of code `code`, sign bit 0. The code of infinity is worth what a number with that exponent would be: there
/// the range ends half a step lower.
inline double worth(std::uint32_t code, small_float f) {
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> f.mantissa_bits);
  const std::uint32_t fraction = code & ((1u << f.mantissa_bits) - 1u);
  const bool subnormal = exponent == 0;
  const double significand = (subnormal ? 0.0 : 1.0) + std::ldexp(static_cast<double>(fraction), -f.mantissa_bits);
  return std::ldexp(significand, (subnormal ? 1 : exponent) - bias);
}

/// Walks upwards through magnitudes and tells the nearest code of each.
class nearest_code {
 public:
  explicit nearest_code(small_float f) : top_(f.top) {
    for (std::uint32_t code = 0; code < top_; ++code) middle_.push_back((worth(code, f) + worth(code + 1, f)) / 2);
    middle_.push_back(std::numeric_limits<double>::max());
  }

  /// Of infinity, or of the largest number where nothing becomes infinity.
  [[nodiscard]] std::uint32_t top() const { return top_; }
  /// Between code and code + 1.
  [[nodiscard]] double middle(std::uint32_t code) const { return middle_[code]; }

  /// `magnitude` is at least that of the call before.
  [[nodiscard]] std::uint32_t of(double magnitude) {
    while (magnitude > middle_[code_] || (magnitude == middle_[code_] && code_ % 2 == 1)) ++code_;
    return code_;
  }

 private:
  std::vector<double> middle_;
  std::uint32_t top_ = 0;
  std::uint32_t code_ = 0;
};

}  // namespace kvcache_test
