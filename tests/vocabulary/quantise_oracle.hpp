// SPDX-License-Identifier: Apache-2.0
// What a format has to store, worked out in double precision from the format's documentation alone.
#pragma once

#include <kvcache/quantization.hpp>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kvcache_test {

// By bits, since -ffast-math takes a NaN for impossible.
inline bool no_number(float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7fff'ffffu) > 0x7f80'0000u; }
inline bool finite(float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7f80'0000u) != 0x7f80'0000u; }

/// The step between neighbouring bf16 around a magnitude.
inline double bf16_step(double x) { return std::ldexp(1.0, std::ilogb(x) - 7); }

/// A group of elements that share a scale: what is to be stored for them.
struct expected_group {
  kvcache::quantization q;
  double scale = 0;
  double zero = 0;
  bool nan = false;
  std::vector<double> encoded;  ///< the elements, those that are not finite replaced

  expected_group(kvcache::quantization format, const std::vector<float>& x) : q(format) {
    double low = 0;
    double high = 0;
    bool any = false;
    for (const float y : x) {
      nan = nan || no_number(y);
      if (!finite(y)) continue;
      const double number = limited(static_cast<double>(y));
      low = any && low < number ? low : number;
      high = any && high > number ? high : number;
      any = true;
    }
    for (const float y : x) {
      const double sign = std::signbit(y) ? low : high;
      const double number = finite(y) ? limited(static_cast<double>(y)) : no_number(y) ? 0.0 : sign;
      encoded.push_back(number < low ? low : number > high ? high : number);
    }
    choose(low, high);
  }

  [[nodiscard]] int lowest() const { return q.bits == 8 ? -127 : 0; }
  [[nodiscard]] int highest() const { return q.bits == 8 ? 127 : (1 << q.bits) - 1; }
  /// What a code stands for.
  [[nodiscard]] double worth(int code) const { return zero + scale * (q.bits == 8 || q.zero_points ? code : code - 8); }
  /// Whether `code` is the nearest to element i, or as near as makes no difference.
  [[nodiscard]] bool nearest(std::size_t i, int code) const {
    if (code < lowest() || code > highest()) return false;
    if (scale == 0) return code == (q.bits == 8 || q.zero_points ? 0 : 8);
    const double away = std::abs(encoded[i] - worth(code)) - std::abs(scale) * 0x1p-14;
    return (code == lowest() || away <= std::abs(encoded[i] - worth(code - 1))) &&
           (code == highest() || away <= std::abs(encoded[i] - worth(code + 1)));
  }

 private:
  static double limited(double x) { return x > 0x1p126 ? 0x1p126 : x < -0x1p126 ? -0x1p126 : x; }

  void choose(double low, double high) {
    if (q.zero_points && std::abs(low) >= 0x1p-126) zero = std::floor(low / bf16_step(low)) * bf16_step(low);
    // The library subtracts floats; what is above a double's rounding is the same here.
    const double largest = -low > high ? low : high;
    const double span = q.zero_points ? static_cast<double>(static_cast<float>(high - zero)) : std::abs(largest);
    if (span < 0x1p-126) return;
    const double steps = q.zero_points ? (1 << q.bits) - 1 : q.bits == 8 ? 127 : 8;
    const double step = bf16_step(span / steps);
    scale = std::ceil(span / (steps * step)) * step;
    if (scale < 0x1p-109) scale = 0;
    if (q.bits == 4 && !q.zero_points && largest > 0) scale = -scale;
  }
};

inline double bf16_at(const std::byte* scales, std::size_t index) {
  std::uint16_t b;
  std::memcpy(&b, scales + index * 2, 2);
  return static_cast<double>(std::bit_cast<float>(std::uint32_t{b} << 16));
}
inline std::uint16_t bits_at(const std::byte* scales, std::size_t index) {
  std::uint16_t b;
  std::memcpy(&b, scales + index * 2, 2);
  return b;
}
/// The code of element d: the lowest bits of a byte are the first element's.
inline int code_at(unsigned bits, const std::byte* codes, std::size_t d) {
  const auto byte = std::to_integer<int>(codes[d * bits / 8]);
  if (bits == 8) return byte < 128 ? byte : byte - 256;
  return byte >> (d * bits % 8) & ((1 << bits) - 1);
}

}  // namespace kvcache_test
