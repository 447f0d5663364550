// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/plan.hpp>
#include <kvcache/attention/state.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/cuda/attention_params.hpp>
#include <kvcache/cuda/context.hpp>
#include <kvcache/cuda/finish_row.hpp>
#include <kvcache/cuda/operands.hpp>
#include <kvcache/detail/config.hpp>

#include <cstddef>
#include <cstdint>

// The rows of a tile that belong to one kv head: query tokens times the group. Row r is query r / group.

namespace kvcache::device {

/// A sequence as planned, or as long as the device knows it to be.
template <context C>
KVCACHE_DEVICE_INLINE planned_sequence known_sequence(const C& c, const attention_params& p, std::uint32_t index) {
  planned_sequence s = p.work.sequences[index];
  if (p.work.kv_lengths != nullptr) {
    const std::uint32_t known = c.load(p.work.kv_lengths + index);
    if (known < s.kv_length) s.kv_length = known;
  }
  return s;
}

/// One of the rows, and what it may see.
struct tile_row {
  std::uint32_t row;  ///< of the step
  std::uint32_t head;
  std::int64_t position;
  visible_range range;

  /// Rows behind the tile's last are that one again.
  template <variant_features Features>
  KVCACHE_DEVICE_INLINE static tile_row of(const attention_params& p, const query_tile& tile,
                                           const planned_sequence& sequence, std::uint32_t kv_head, std::uint32_t r) {
    const std::uint32_t rows = (tile.query_end - tile.query_begin) * p.group;
    const std::uint32_t at = r < rows ? r : rows - 1;
    tile_row t;
    t.row = tile.query_begin + at / p.group;
    t.head = kv_head * p.group + at % p.group;
    t.position = sequence.position(t.row);
    t.range = visible(Features, p.window, t.position, sequence.kv_length);
    return t;
  }
  template <variant_features Features, context C>
  KVCACHE_DEVICE_INLINE bool sees(const C& c, const attention_params& p, std::uint32_t token) const {
    if (token < range.begin || token >= range.end) return false;
    if constexpr (Features.mask)
      return ((c.load(p.mask.data + row * p.mask.row_stride + (token >> 3)) >> (token & 7u)) & 1u) != 0;
    return true;
  }
  /// A logit in base 2 of a product with a key that is scaled already.
  template <variant_features Features, context C>
  KVCACHE_DEVICE_INLINE float logit(const C& c, const attention_params& p, float slope, std::uint32_t token,
                                    float x) const {
    if constexpr (Features.soft_cap) x = p.soft_cap * c.tanh(x * c.reciprocal(p.soft_cap));
    if constexpr (Features.alibi) {
      const std::int64_t distance = position - std::int64_t{token};
      x -= slope * static_cast<float>(distance < 0 ? -distance : distance);
    }
    return x * log2_e;
  }
};

/// The query of row r in shared memory, as floats, by a warp; zeros behind the tile's last row. Returns the product
/// with what keys were stored less of, or 0.
template <unsigned DimK, context C>
KVCACHE_DEVICE_INLINE float load_query(C& c, const attention_params& p, const query_tile& tile, std::uint32_t kv_head,
                                       std::uint32_t r, std::uint32_t rows, float* x) {
  const bool there = r < rows;
  const std::uint32_t at = there ? r : 0;
  const std::uint32_t row = tile.query_begin + at / p.group;
  const std::uint32_t head = kv_head * p.group + at % p.group;
  const std::byte* const from = p.q.data + (row * p.q.row_stride + head * p.q.head_stride) * element_bytes(p.q_dtype);
  float shift = 0;
  for (unsigned d = c.lane(); d < DimK; d += warp_lanes) {
    x[d] = there ? load_element(c, from + d * element_bytes(p.q_dtype), p.q_dtype) : 0.0f;
    if (p.kv.key_offset != nullptr) shift += x[d] * c.load(p.kv.key_offset + std::size_t{kv_head} * DimK + d);
  }
  KVCACHE_UNROLL
  for (unsigned mask = 16; mask > 0; mask /= 2) shift += c.shuffle_xor(shift, mask);
  return shift;
}

/// From one row's output to the next, in floats: banks of eight rows differ.
template <unsigned DimV>
inline constexpr unsigned state_stride = DimV + 4;

/// Merges the states that the warps have left in shared memory, `Warps` for each of `Rows` rows: output w * Rows + r at
/// `outputs`, lse there at `lses`. Rows of a tile with one part are finished, of others the state is written.
template <class V, unsigned DimV, variant_features Features, unsigned Warps, unsigned Rows, context C>
KVCACHE_DEVICE_INLINE void finish_tile(C& c, const attention_params& p, const work_unit& unit, const query_tile& tile,
                                       std::uint32_t kv_head, std::uint32_t first, std::uint32_t tile_rows,
                                       float* outputs, const float* lses) {
  for (unsigned r = c.warp(); r < Rows && first + r < tile_rows; r += c.threads() / warp_lanes) {
    float* const x = outputs + r * state_stride<DimV>;
    float lse = lses[r];
    if constexpr (Warps > 1) {
      float top = 0;
      bool empty = true;
      KVCACHE_UNROLL
      for (unsigned w = 0; w < Warps; ++w) {
        const float own = lses[w * Rows + r];
        if (is_empty(own)) continue;
        if (empty || own > top) top = own;
        empty = false;
      }
      float share[Warps];
      float total = 0;
      KVCACHE_UNROLL
      for (unsigned w = 0; w < Warps; ++w) {
        const float own = lses[w * Rows + r];
        share[w] = is_empty(own) ? 0.0f : c.exp2(own - top);
        total += share[w];
      }
      const float inverse = c.reciprocal(total);
      for (unsigned d = c.lane(); d < DimV; d += warp_lanes) {
        float sum = 0;
        KVCACHE_UNROLL
        for (unsigned w = 0; w < Warps; ++w)
          if (!is_empty(lses[w * Rows + r])) sum += share[w] * outputs[(w * Rows + r) * state_stride<DimV> + d];
        x[d] = empty ? 0.0f : sum * inverse;
      }
      lse = empty ? empty_lse() : top + c.log2(total);
    }
    const std::uint32_t row = tile.query_begin + (first + r) / p.group;
    const std::uint32_t head = kv_head * p.group + (first + r) % p.group;
    if (tile.parts == 1) {
      finish_row<Features, stored_as<V>::rotated>(c, p, x, lse, DimV, row, head);
    } else {
      const std::uint32_t queries = tile.query_end - tile.query_begin;
      const std::uint64_t place =
          (tile.first_row + std::uint64_t{unit.part} * queries + (row - tile.query_begin)) * p.q.heads + head;
      for (unsigned d = c.lane(); d < DimV; d += warp_lanes) c.store(p.states + place * DimV + d, x[d]);
      if (c.lane() == 0) c.store(p.state_lses + place, lse);
    }
  }
}

}  // namespace kvcache::device
