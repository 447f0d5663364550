// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/quantise/codes.hpp>
#include <kvcache/quantise/ranges.hpp>
#include <kvcache/quantise/runs.hpp>
#include <kvcache/quantise/scales.hpp>
#include <kvcache/quantization.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Scales of a token's elements.

namespace kvcache::detail {

/// Elements in the group that begins at `first`.
[[nodiscard]] constexpr std::uint32_t group_size(quantization q, std::uint32_t dim, std::uint32_t first) noexcept {
  return q.group == 0 || dim - first < q.group ? dim - first : q.group;
}

/// The ranges of all groups, in what their scales and zero points are, and `x` itself or, where something is unusual,
/// a copy in `encoded` that is not. `origin` and `factor` are those of the groups' codes.
inline const float* choose_groups(quantization q, const float* x, std::uint32_t dim, std::byte* scales, float* encoded,
                                  float* origin, float* factor) noexcept {
  const code_grid grid(q);
  const std::uint32_t count = q.scales(dim);
  const float* from = x;
  std::uint32_t first = 0;
  for (std::uint32_t g = 0; g < count; ++g) {
    const std::uint32_t size = group_size(q, dim, first);
    value_range range;
    if (!usual_range(x + first, size, range)) {
      if (from == x) {
        std::memcpy(encoded, x, dim * sizeof(float));
        from = encoded;
      }
      range = clean(x + first, size, encoded + first);
    }
    const encoder e = encoder_of(grid, range.low, range.high);
    origin[g] = std::bit_cast<float>(e.zero);
    factor[g] = factor_for(e.scale);
    constexpr bf16 no_number{0x7fc0};
    write_scale(scales, g, range.nan && !q.zero_points ? no_number : upper_half(e.scale));
    if (q.zero_points) write_scale(scales, count + g, range.nan ? no_number : upper_half(e.zero));
    first += size;
  }
  return from;
}

template <unsigned Bits>
void quantise_groups(quantization q, const float* x, std::uint32_t dim, std::byte* codes, std::byte* scales) noexcept {
  constexpr std::uint32_t most_groups = max_quantised_dim / 16;
  float encoded[max_quantised_dim];
  float origin[most_groups + 1];
  float factor[most_groups + 1];
  const float* const from = choose_groups(q, x, dim, scales, encoded, origin, factor);
  const code_grid grid(q);
  const float top = top_parts(grid);
  const std::int32_t offset = offset_parts(grid);
  for (std::uint32_t i = 0; i < dim; i += quantise_width) {
    run_of<float> run;
    run_of<std::uint8_t> run_codes;
    load_run(from + i, dim - i, run);
    if (q.group == quantise_width / 2) {  // two groups to a run
      const std::uint32_t g = i / (quantise_width / 2);
      const std::uint32_t next = dim - i > quantise_width / 2 ? g + 1 : g;
      const float origins[] = {origin[g], origin[next]};
      const float factors[] = {factor[g], factor[next]};
      run_of<float> from_there;
      run_of<float> by;
      for (std::uint32_t j = 0; j < quantise_width; ++j) {
        from_there[j] = j < quantise_width / 2 ? origins[0] : origins[1];
        by[j] = j < quantise_width / 2 ? factors[0] : factors[1];
      }
      for (std::uint32_t j = 0; j < quantise_width; ++j)
        run_codes[j] = code_of(run[j], from_there[j], by[j], top, offset);
    } else {
      const std::uint32_t g = q.group == 0 ? 0 : i / q.group;
      const float from_there = origin[g];
      const float by = factor[g];
      for (std::uint32_t j = 0; j < quantise_width; ++j) run_codes[j] = code_of(run[j], from_there, by, top, offset);
    }
    store_codes<Bits>(run_codes, dim - i, codes + i * Bits / 8);
  }
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
      const float zero = read_scale(scales, count + g);
      const float next_zero = read_scale(scales, count + next);
      for (std::uint32_t j = 0; j < quantise_width; ++j) run[j] += j < quantise_width / 2 ? zero : next_zero;
    }
    if (size == quantise_width)
      std::memcpy(x + i, run, sizeof run);
    else
      std::memcpy(x + i, run, size * sizeof(float));
  }
}

}  // namespace kvcache::detail
