// SPDX-License-Identifier: Apache-2.0
// An oracle for rounding that knows only what the codes of a 16-bit format are worth: the code nearest to a magnitude,
// of two equally near the even one. It shares no step with the library's conversion.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvcache_test {

/// The worth of code `code`, sign bit 0, in a format with `mantissa_bits` of its 15 bits after the exponent. The code
/// of infinity is worth what a number with that exponent would be: there the range ends half a step lower.
inline double worth(std::uint32_t code, int mantissa_bits) {
  const int exponent_bits = 15 - mantissa_bits;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(code >> mantissa_bits);
  const std::uint32_t fraction = code & ((1u << mantissa_bits) - 1u);
  const bool subnormal = exponent == 0;
  const double significand = (subnormal ? 0.0 : 1.0) + std::ldexp(static_cast<double>(fraction), -mantissa_bits);
  return std::ldexp(significand, (subnormal ? 1 : exponent) - bias);
}

/// Walks upwards through magnitudes and tells the nearest code of each.
class nearest_code {
 public:
  explicit nearest_code(int mantissa_bits) {
    infinity_ = ((1u << (15 - mantissa_bits)) - 1u) << mantissa_bits;
    for (std::uint32_t code = 0; code < infinity_; ++code)
      middle_.push_back((worth(code, mantissa_bits) + worth(code + 1, mantissa_bits)) / 2);
    middle_.push_back(std::numeric_limits<double>::max());
  }

  [[nodiscard]] std::uint32_t infinity() const { return infinity_; }
  /// Between code and code + 1.
  [[nodiscard]] double middle(std::uint32_t code) const { return middle_[code]; }

  /// `magnitude` is at least that of the call before.
  [[nodiscard]] std::uint32_t of(double magnitude) {
    while (magnitude > middle_[code_] || (magnitude == middle_[code_] && code_ % 2 == 1)) ++code_;
    return code_;
  }

 private:
  std::vector<double> middle_;
  std::uint32_t infinity_ = 0;
  std::uint32_t code_ = 0;
};

}  // namespace kvcache_test
