// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/quantise/codes.hpp>
#include <kvcache/quantise/group_ranges.hpp>
#include <kvcache/quantise/runs.hpp>
#include <kvcache/quantise/scales.hpp>
#include <kvcache/quantization.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Scales of a token's elements.

namespace kvcache::detail {

/// From ranges to scales and zero points, as they are stored and as what codes are made with.
template <unsigned Bits, bool ZeroPoints>
KVCACHE_ALWAYS_INLINE void choose_scales(std::uint32_t count, head_groups& groups, std::byte* scales) noexcept {
  for (std::uint32_t g = count; g % groups_at_once != 0; ++g) {
    std::memset(groups.low[g], 0, sizeof groups.low[g]);
    std::memset(groups.high[g], 0, sizeof groups.high[g]);
  }
  for (std::uint32_t g = 0; g < count; g += groups_at_once) {
    const std::uint32_t some = count - g < groups_at_once ? count - g : groups_at_once;
    const float(*const lows)[range_lanes] = groups.low + g;
    const float(*const highs)[range_lanes] = groups.high + g;
    float low[groups_at_once];
    float high[groups_at_once];
    KVCACHE_UNROLL_BY(1)
    for (std::uint32_t j = 0; j < groups_at_once; ++j) {
      const float a = lows[j][0] < lows[j][1] ? lows[j][0] : lows[j][1];
      const float b = lows[j][2] < lows[j][3] ? lows[j][2] : lows[j][3];
      low[j] = a < b ? a : b;
    }
    KVCACHE_UNROLL_BY(1)
    for (std::uint32_t j = 0; j < groups_at_once; ++j) {
      const float a = highs[j][0] > highs[j][1] ? highs[j][0] : highs[j][1];
      const float b = highs[j][2] > highs[j][3] ? highs[j][2] : highs[j][3];
      high[j] = a > b ? a : b;
    }
    constexpr code_grid grid(Bits, ZeroPoints);
    std::uint32_t scale[groups_at_once];
    std::uint32_t zero[groups_at_once];
    KVCACHE_UNROLL_BY(1)
    for (std::uint32_t j = 0; j < groups_at_once; ++j) {
      const encoder e = encoder_of(grid, low[j], high[j]);
      scale[j] = e.scale;
      zero[j] = e.zero;
    }
    for (std::uint32_t j = 0; j < some; ++j) {
      groups.origin[g + j] = std::bit_cast<float>(zero[j]);
      groups.factor[g + j] = factor_for(scale[j]);
      write_scale(scales, g + j, upper_half(scale[j]));
      if (ZeroPoints) write_scale(scales, quantization::zero_point(g, count) + j, upper_half(zero[j]));
    }
  }
}

/// Encodes a run or the first `count` elements of one, whose halves have an origin and a factor each or, without
/// `TwoGroups`, the first ones.
template <unsigned Bits, bool ZeroPoints, bool TwoGroups>
KVCACHE_ALWAYS_INLINE void encode_run(const float* x, const float (&origins)[2], const float (&factors)[2],
                                      std::uint32_t count, std::byte* to) noexcept {
  const float origin = origins[0];
  const float factor = factors[0];
  run_of<float> steps;
  if constexpr (TwoGroups) {
    const float next_origin = origins[1];
    const float next_factor = factors[1];
    run_of<float> from;
    run_of<float> by;
    for (std::uint32_t j = 0; j < quantise_width; ++j) {
      from[j] = j < half_run ? origin : next_origin;
      by[j] = j < half_run ? factor : next_factor;
    }
    for (std::uint32_t j = 0; j < quantise_width; ++j) steps[j] = (ZeroPoints ? x[j] - from[j] : x[j]) * by[j];
  } else {
    for (std::uint32_t j = 0; j < quantise_width; ++j) steps[j] = (ZeroPoints ? x[j] - origin : x[j]) * factor;
  }
  run_of<std::int32_t> codes;
  nearest_codes<Bits, ZeroPoints>(steps, codes);
  store_codes<Bits>(codes, count, to);
}

template <unsigned Bits, bool ZeroPoints, bool TwoGroups>
KVCACHE_ALWAYS_INLINE void encode_groups(std::uint32_t group, const float* x, std::uint32_t dim,
                                         const head_groups& groups, std::byte* codes) noexcept {
  std::uint32_t g = 0;
  std::uint32_t end = group;  // of group g
  for (std::uint32_t i = 0; i < dim; i += quantise_width) {
    for (; end <= i; end += group) ++g;
    const std::uint32_t next = TwoGroups && dim - i > half_run ? g + 1 : g;
    const float origins[] = {groups.origin[g], groups.origin[next]};
    const float factors[] = {groups.factor[g], groups.factor[next]};
    std::byte* const to = codes + i * Bits / 8;
    if (dim - i >= quantise_width) {
      encode_run<Bits, ZeroPoints, TwoGroups>(x + i, origins, factors, quantise_width, to);
    } else {
      run_of<float> run;
      load_run(x + i, dim - i, run);
      encode_run<Bits, ZeroPoints, TwoGroups>(run, origins, factors, dim - i, to);
    }
  }
}

/// Precondition: `group` is a power of two from 16 up, or 0: all elements are one.
template <unsigned Bits, bool ZeroPoints>
void quantise_groups(std::uint32_t group, const float* x, std::uint32_t dim, std::byte* codes,
                     std::byte* scales) noexcept {
  const std::uint32_t count = group == 0 ? 1 : (dim + group - 1) >> std::countr_zero(group);
  const std::uint32_t size = group == 0 ? (dim + half_run - 1) / half_run * half_run : group;
  float encoded[max_quantised_dim];
  head_groups groups;
  const bool usual = usual_ranges(size, x, dim, groups);
  if (!usual) clean_groups(size, x, dim, encoded, groups);
  choose_scales<Bits, ZeroPoints>(count, groups, scales);
  const float* const from = usual ? x : encoded;
  if (size == half_run)
    encode_groups<Bits, ZeroPoints, true>(size, from, dim, groups, codes);
  else
    encode_groups<Bits, ZeroPoints, false>(size, from, dim, groups, codes);
  constexpr bf16 no_number{0x7fc0};
  for (std::uint32_t g = 0; !usual && g < count; ++g)
    if (groups.no_number[g]) write_scale(scales, ZeroPoints ? quantization::zero_point(g, count) : g, no_number);
}

template <unsigned Bits>
void dequantise_groups(quantization q, const std::byte* codes, const std::byte* scales, std::uint32_t dim,
                       float* x) noexcept {
  const std::uint32_t count = q.scales(dim);
  const std::int32_t offset = q.zero_points ? 0 : 8;
  const std::uint32_t group = q.group == 0 ? dim : q.group;
  for (std::uint32_t i = 0; i < dim; i += quantise_width) {
    const std::uint32_t size = dim - i < quantise_width ? dim - i : quantise_width;
    run_of<float> run;
    load_codes<Bits>(codes + i * Bits / 8, size, offset, run);
    const std::uint32_t g = i / group;
    const std::uint32_t next = group == quantise_width / 2 && g + 1 < count ? g + 1 : g;  // of the second half
    const float scale = read_scale(scales, g);
    const float next_scale = read_scale(scales, next);
    for (std::uint32_t j = 0; j < quantise_width; ++j) run[j] *= j < quantise_width / 2 ? scale : next_scale;
    if (q.zero_points) {
      const float zero = read_scale(scales, quantization::zero_point(g, count));
      const float next_zero = read_scale(scales, quantization::zero_point(next, count));
      for (std::uint32_t j = 0; j < quantise_width; ++j) run[j] += j < quantise_width / 2 ? zero : next_zero;
    }
    if (size == quantise_width)
      std::memcpy(x + i, run, sizeof run);
    else
      std::memcpy(x + i, run, size * sizeof(float));
  }
}

}  // namespace kvcache::detail
