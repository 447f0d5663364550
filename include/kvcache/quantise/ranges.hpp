// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/bit_cast.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/quantise/runs.hpp>

#include <cstdint>

namespace kvcache::detail {

[[nodiscard]] KVCACHE_HOST_DEVICE constexpr bool is_finite(float x) noexcept {
  return (bit_cast<std::uint32_t>(x) & 0x7f80'0000u) != 0x7f80'0000u;
}

/// The smallest and largest finite element of some, and whether one is no number. Magnitudes beyond 2^126 count as
/// that, so that a range fits an f32.
struct value_range {
  static constexpr float most = 0x1p126f;
  float low = most;
  float high = -most;
  bool nan = false;

  KVCACHE_HOST_DEVICE constexpr void add(float x) noexcept {
    if (!is_finite(x)) {
      nan = nan || (bit_cast<std::uint32_t>(x) & 0x007f'ffffu) != 0;
      return;
    }
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  /// Of at least one element: 0 to 0 where none was finite.
  KVCACHE_HOST_DEVICE constexpr void close() noexcept {
    if (low > high) low = high = 0;
    low = low < -most ? -most : low;
    high = high > most ? most : high;
  }
  /// An element as it is encoded: what is not finite, or beyond the range, becomes the nearer end of it, and a NaN what
  /// is nearest to 0.
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr float within(float x) const noexcept {
    const std::uint32_t b = bit_cast<std::uint32_t>(x);
    const float ends = (b >> 31) != 0 ? low : high;
    const float number = is_finite(x) ? x : (b & 0x007f'ffffu) != 0 ? 0.0f : ends;
    return number < low ? low : number > high ? high : number;
  }
};

/// The sign's bit is set where x is not finite, or 2^126 or more in magnitude: such elements are rare, and encoded as
/// `value_range::within` says.
[[nodiscard]] KVCACHE_ALWAYS_INLINE constexpr std::uint32_t unusual(float x) noexcept {
  return (bit_cast<std::uint32_t>(x) & 0x7fff'ffffu) + 0x0180'0000u;
}

/// Widens ranges, an element each, and says what is unusual.
KVCACHE_ALWAYS_INLINE void widen_run(const run_of<float>& x, run_of<float>& low, run_of<float>& high,
                                     run_of<std::uint32_t>& others) noexcept {
  for (std::uint32_t j = 0; j < quantise_width; ++j) {
    others[j] |= unusual(x[j]);
    low[j] = x[j] < low[j] ? x[j] : low[j];
    high[j] = x[j] > high[j] ? x[j] : high[j];
  }
}
[[nodiscard]] KVCACHE_ALWAYS_INLINE bool any_unusual(const run_of<std::uint32_t>& others) noexcept {
  std::uint32_t other = 0;
  for (const std::uint32_t o : others) other |= o;
  return (other >> 31) != 0;
}

/// The range of elements some of which are unusual, and the elements as they are encoded.
KVCACHE_NOINLINE inline value_range clean(const float* x, std::uint32_t count, float* encoded) noexcept {
  value_range r;
  for (std::uint32_t i = 0; i < count; ++i) r.add(x[i]);
  r.close();
  for (std::uint32_t i = 0; i < count; ++i) encoded[i] = r.within(x[i]);
  return r;
}

}  // namespace kvcache::detail
