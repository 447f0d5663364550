// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/bit_cast.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/quantise/runs.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvcache::detail {

/// How the codes of a format lie: code = (x - origin) / scale + offset.
struct code_grid {
  bool zero_points;
  bool signed_scale;  ///< the scale has the sign that brings the element of largest magnitude to the lowest code
  float steps;        ///< scales from the origin to the element that is farthest from it
  float per_step;     ///< 1 / steps
  float offset;

  KVCACHE_HOST_DEVICE constexpr code_grid(unsigned bits, bool has_zero_points) noexcept
      : zero_points(has_zero_points),
        signed_scale(!zero_points && bits == 4),
        steps(zero_points ? static_cast<float>((1 << bits) - 1)
              : bits == 8 ? 127.0f
                          : 8.0f),
        per_step(1.0f / steps),
        offset(signed_scale ? 8.0f : 0.0f) {}
};

/// Codes are worked out in parts of so many to a step, so that rounding is a matter of integers.
inline constexpr float code_parts = 65536.0f;

/// code_parts / (1 + m / 128), as f32 bits, by m, the fraction of a bf16: a quotient worked out by the program would be
/// another one under -ffast-math.
struct inverse_table {
  std::uint32_t bits[128] = {};
  constexpr inverse_table() noexcept {
    for (std::uint32_t m = 0; m < 128; ++m)
      bits[m] = bit_cast<std::uint32_t>(code_parts / (1.0f + static_cast<float>(m) / 128.0f));
  }
};
inline constexpr inverse_table inverses;

/// code_parts / scale, where the scale is the upper half of a normal f32 of magnitude 2^-109 to 2^126, and 0 for 0.
/// `inverse` is that of its fraction, as the table has it.
[[nodiscard]] KVCACHE_HOST_DEVICE KVCACHE_ALWAYS_INLINE constexpr float factor_from(std::uint32_t scale,
                                                                                    std::uint32_t inverse) noexcept {
  const std::uint32_t exponent = (scale & 0x7f80'0000u) - 0x3f80'0000u;
  const std::uint32_t magnitude = inverse - exponent;
  return bit_cast<float>(scale == 0 ? 0u : magnitude | (scale & 0x8000'0000u));
}
[[nodiscard]] KVCACHE_ALWAYS_INLINE constexpr float factor_for(std::uint32_t scale) noexcept {
  return factor_from(scale, inverses.bits[(scale >> 16) & 0x7fu]);
}

/// What turns the elements of one group into codes.
struct encoder {
  std::uint32_t scale;  ///< f32 bits, of which the upper half is stored; so are those of the zero point
  std::uint32_t zero;
};
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr bf16 upper_half(std::uint32_t bits) noexcept {
  return {static_cast<std::uint16_t>(bits >> 16)};
}

/// The scale is the least bf16 that reaches all elements, the zero point the greatest one that is not above them. A
/// scale below 2^-109, whose inverse would not fit, is 0. Without branches, so that a compiler can do some at once.
[[nodiscard]] KVCACHE_HOST_DEVICE KVCACHE_ALWAYS_INLINE constexpr encoder encoder_of(const code_grid& grid, float low,
                                                                                     float high) noexcept {
  constexpr std::uint32_t sign_bit = 0x8000'0000u;
  // Upper halves of an f32; those of a negative number have to be rounded up for the number to go down.
  const std::uint32_t l = bit_cast<std::uint32_t>(low);
  const std::uint32_t down = (l + ((l >> 31) != 0 ? 0xffffu : 0u)) & 0xffff'0000u;
  const std::uint32_t zero = grid.zero_points && (l & 0x7f80'0000u) != 0 ? down : 0u;
  const float origin = bit_cast<float>(zero);

  const float largest = -low > high ? low : high;  // by magnitude
  const std::uint32_t largest_bits = bit_cast<std::uint32_t>(largest);
  // Of subnormal elements below a zero point of 0 the span may have a sign, and is 0 then.
  const std::uint32_t above = bit_cast<std::uint32_t>(high - origin);
  const std::uint32_t positive = (above & sign_bit) != 0 ? 0u : above;
  const float span = bit_cast<float>(grid.zero_points ? positive : largest_bits & ~sign_bit);
  // At most one bf16 beside what is looked for. The products are exact.
  const std::uint32_t about = (bit_cast<std::uint32_t>(span * grid.per_step) + 0xffffu) & 0xffff'0000u;
  const std::uint32_t below = about < 0x0001'0000u ? 0u : about - 0x0001'0000u;
  std::uint32_t scale = bit_cast<float>(about) * grid.steps < span ? about + 0x0001'0000u : about;
  scale = bit_cast<float>(below) * grid.steps >= span ? below : scale;
  constexpr std::uint32_t least = 18u << 23;  // 2^-109
  const bool none = scale < least;
  const std::uint32_t sign = grid.signed_scale ? ~largest_bits & sign_bit : 0u;
  return {none ? 0u : scale | sign, zero};
}

/// The code nearest to (x - origin) / scale, of two the upper one, within 1 / code_parts of a step; `parts` are that
/// many times as large. Where the scale has a sign, the largest of the other sign may come out a step too far: as 16.
[[nodiscard]] KVCACHE_HOST_DEVICE KVCACHE_ALWAYS_INLINE constexpr std::int32_t nearest_code(const code_grid& grid,
                                                                                            float parts) noexcept {
  const auto offset = static_cast<std::int32_t>((grid.offset + 0.5f) * code_parts);
  return (static_cast<std::int32_t>(parts) + offset) >> 16;
}
/// The same of a run, with 15 for 16.
template <unsigned Bits, bool ZeroPoints>
KVCACHE_ALWAYS_INLINE void nearest_codes(const run_of<float>& parts, run_of<std::int32_t>& codes) noexcept {
  constexpr code_grid grid(Bits, ZeroPoints);
  for (std::uint32_t j = 0; j < quantise_width; ++j) codes[j] = nearest_code(grid, parts[j]);
  if constexpr (grid.signed_scale) {
    std::int16_t words[2 * quantise_width];
    std::memcpy(words, codes, sizeof words);
    for (std::int16_t& w : words) w = w < 15 ? w : std::int16_t{15};
    std::memcpy(codes, words, sizeof words);
  }
}

inline void write_scale(std::byte* scales, std::uint32_t index, bf16 x) noexcept {
  std::memcpy(scales + std::size_t{index} * sizeof x, &x, sizeof x);
}
[[nodiscard]] inline float read_scale(const std::byte* scales, std::uint32_t index) noexcept {
  bf16 x;
  std::memcpy(&x, scales + std::size_t{index} * sizeof x, sizeof x);
  return to_float(x);
}

}  // namespace kvcache::detail
