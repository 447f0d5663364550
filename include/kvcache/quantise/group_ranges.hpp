// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/quantise/ranges.hpp>
#include <kvcache/quantise/runs.hpp>
#include <kvcache/quantization.hpp>

#include <bit>
#include <cstdint>
#include <cstring>

namespace kvcache::detail {

/// The smallest group. Ranges are those of half runs first, in lanes that a vector holds.
inline constexpr std::uint32_t half_run = quantise_width / 2;
inline constexpr std::uint32_t range_lanes = 4;
/// Groups whose scales are worked out together.
inline constexpr std::uint32_t groups_at_once = 4;

/// The groups of one head of a token.
struct head_groups {
  static constexpr std::uint32_t most = max_quantised_dim / half_run;
  float low[most][range_lanes];  ///< the smallest elements are the smallest of these
  float high[most][range_lanes];
  float origin[most];
  float factor[most];
  bool no_number[most];
};

/// The ranges of both halves of a run. `top` grows to what is largest in the upper halves of magnitudes: 16 bits are
/// what every x86 processor compares as integers.
KVCACHE_ALWAYS_INLINE void halves_of_run(const float* x, float (&low)[2][range_lanes], float (&high)[2][range_lanes],
                                         std::int16_t (&top)[quantise_width]) noexcept {
  run_of<std::uint32_t> bits;
  for (std::uint32_t j = 0; j < quantise_width; ++j) bits[j] = std::bit_cast<std::uint32_t>(x[j]) & 0x7fff'ffffu;
  std::int16_t words[2 * quantise_width];
  std::memcpy(words, bits, sizeof words);
  for (std::uint32_t j = 0; j < quantise_width; ++j) {
    const std::int16_t larger = words[j] > words[j + quantise_width] ? words[j] : words[j + quantise_width];
    top[j] = larger > top[j] ? larger : top[j];
  }
  for (std::uint32_t half = 0; half < 2; ++half) {
    const float* const y = x + half * half_run;
    float low_pairs[half_run / 2];
    float high_pairs[half_run / 2];
    KVCACHE_UNROLL_BY(4)
    for (std::uint32_t j = 0; j < half_run / 2; ++j) {
      low_pairs[j] = y[j] < y[j + half_run / 2] ? y[j] : y[j + half_run / 2];
      high_pairs[j] = y[j] > y[j + half_run / 2] ? y[j] : y[j + half_run / 2];
    }
    KVCACHE_UNROLL_BY(1)
    for (std::uint32_t j = 0; j < range_lanes; ++j) {
      const float other_low = low_pairs[j + range_lanes];
      const float other_high = high_pairs[j + range_lanes];
      low[half][j] = low_pairs[j] < other_low ? low_pairs[j] : other_low;
      high[half][j] = high_pairs[j] > other_high ? high_pairs[j] : other_high;
    }
  }
}

/// The ranges of all groups. False where an element is unusual; the ranges are then of no use.
KVCACHE_ALWAYS_INLINE bool usual_ranges(std::uint32_t group, const float* x, std::uint32_t dim,
                                        head_groups& groups) noexcept {
  run_of<std::int16_t> top;
  for (std::int16_t& t : top) t = 0;
  std::uint32_t g = 0;
  std::uint32_t first = 0;  // of group g
  for (std::uint32_t i = 0; i < dim; i += quantise_width) {
    float low[2][range_lanes];
    float high[2][range_lanes];
    if (dim - i >= quantise_width) {
      halves_of_run(x + i, low, high, top);
    } else {
      run_of<float> run;
      load_run(x + i, dim - i, run);
      halves_of_run(run, low, high, top);
    }
    if (group == half_run) {
      std::memcpy(groups.low[i / half_run], low, sizeof low);
      std::memcpy(groups.high[i / half_run], high, sizeof high);
      continue;
    }
    KVCACHE_UNROLL_BY(1)
    for (std::uint32_t j = 0; j < range_lanes; ++j) {
      low[0][j] = low[1][j] < low[0][j] ? low[1][j] : low[0][j];
      high[0][j] = high[1][j] > high[0][j] ? high[1][j] : high[0][j];
    }
    if (i - first == group) {
      first = i;
      ++g;
    }
    if (i != first) {
      KVCACHE_UNROLL_BY(1)
      for (std::uint32_t j = 0; j < range_lanes; ++j) {
        low[0][j] = groups.low[g][j] < low[0][j] ? groups.low[g][j] : low[0][j];
        high[0][j] = groups.high[g][j] > high[0][j] ? groups.high[g][j] : high[0][j];
      }
    }
    std::memcpy(groups.low[g], low[0], sizeof low[0]);
    std::memcpy(groups.high[g], high[0], sizeof high[0]);
  }
  std::uint32_t pairs[quantise_width / 2];
  std::memcpy(pairs, top, sizeof pairs);
  std::uint32_t others = 0;
  for (const std::uint32_t p : pairs) others |= unusual(std::bit_cast<float>(p));
  return (others >> 31) == 0;
}

/// The same of elements some of which are unusual, and the elements as they are encoded.
KVCACHE_NOINLINE inline void clean_groups(std::uint32_t group, const float* x, std::uint32_t dim, float* encoded,
                                          head_groups& groups) noexcept {
  std::uint32_t g = 0;
  for (std::uint32_t first = 0; first < dim; first += group, ++g) {
    const value_range range = clean(x + first, dim - first < group ? dim - first : group, encoded + first);
    for (std::uint32_t j = 0; j < range_lanes; ++j) {
      groups.low[g][j] = range.low;
      groups.high[g][j] = range.high;
    }
    groups.no_number[g] = range.nan;
  }
}

}  // namespace kvcache::detail
