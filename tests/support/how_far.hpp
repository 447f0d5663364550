// SPDX-License-Identifier: Apache-2.0
// Distances for tests: what is no number is far from everything, on either side of a comparison.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace kvcache_test {

/// By bits, so that it holds under -ffast-math. An object, so that it can be handed to algorithms.
inline constexpr struct {
  [[nodiscard]] bool operator()(float x) const {
    return (std::bit_cast<std::uint32_t>(x) & 0x7f80'0000u) != 0x7f80'0000u;
  }
  [[nodiscard]] bool operator()(double x) const {
    constexpr std::uint64_t exponent = 0x7ff0'0000'0000'0000u;
    return (std::bit_cast<std::uint64_t>(x) & exponent) != exponent;
  }
} is_number;
inline bool is_minus_infinity(float x) { return std::bit_cast<std::uint32_t>(x) == 0xff80'0000u; }
inline bool is_minus_infinity(double x) { return std::bit_cast<std::uint64_t>(x) == 0xfff0'0000'0000'0000u; }

/// More than any test allows.
inline constexpr double too_far = 1e9;

/// |found - wanted| in units of `allowed`; too far where one of the three, or what comes of them, is no finite number.
/// Always a number, so a maximum over many keeps the worst.
inline double how_far(double found, double wanted, double allowed = 1) {
  if (!is_number(found) || !is_number(wanted) || !is_number(allowed)) return too_far;
  const double units = std::fabs(found - wanted) / allowed;
  return is_number(units) ? units : too_far;
}
inline double how_far(float found, double wanted, double allowed = 1) {
  return is_number(found) ? how_far(static_cast<double>(found), wanted, allowed) : too_far;
}

}  // namespace kvcache_test
