// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/attention_params.hpp>
#include <kvcache/cuda/context.hpp>
#include <kvcache/cuda/finish_row.hpp>
#include <kvcache/cuda/operands.hpp>

#include <cstdint>

namespace kvcache::device {

/// The second half of attention: merges the states of rows whose tokens were cut into parts, and finishes them. A warp
/// takes a row of a head. Reads O(parts * head_dim) floats for each.
template <class V, unsigned DimV, variant_features Features>
struct attention_merge {
  static constexpr unsigned threads = 128;
  static constexpr unsigned min_blocks = 4;
  using params = attention_params;
  struct shared {
    float rows[threads / warp_lanes][DimV];
  };

  template <context C>
  KVCACHE_DEVICE_INLINE static void run(C& c, shared& s, const params& p) {
    const std::uint32_t tiles = c.load(p.work.tile_count);
    constexpr unsigned warps = threads / warp_lanes;
    float* const x = s.rows[c.warp()];
    for (std::uint32_t t = c.block(); t < tiles; t += c.blocks()) {
      const query_tile tile = p.work.tiles[t];
      if (tile.parts <= 1) continue;
      const std::uint32_t rows = tile.query_end - tile.query_begin;
      for (std::uint32_t i = c.warp(); i < rows * p.q.heads; i += warps) {
        const std::uint32_t row = i / p.q.heads;
        const std::uint32_t head = i % p.q.heads;
        const auto place = [&](std::uint32_t part) {
          return (tile.first_row + std::uint64_t{part} * rows + row) * p.q.heads + head;
        };
        float lse = empty_lse();
        bool empty = true;
        for (std::uint32_t part = 0; part < tile.parts; ++part) {
          const float own = c.load(p.state_lses + place(part));
          if (is_empty(own)) continue;
          if (empty || own > lse) lse = own;
          empty = false;
        }
        const float top = lse;
        float total = 0;
        for (std::uint32_t part = 0; part < tile.parts; ++part) {
          const float own = c.load(p.state_lses + place(part));
          if (!is_empty(own)) total += c.exp2(own - top);
        }
        const float inverse = c.reciprocal(total);
        for (unsigned d = c.lane(); d < DimV; d += warp_lanes) {
          float sum = 0;
          for (std::uint32_t part = 0; part < tile.parts; ++part) {
            const float own = c.load(p.state_lses + place(part));
            if (!is_empty(own)) sum += c.exp2(own - top) * c.load(p.states + place(part) * DimV + d);
          }
          x[d] = empty ? 0.0f : sum * inverse;
        }
        if (!empty) lse = top + c.log2(total);
        finish_row<Features, stored_as<V>::rotated>(c, p, x, lse, DimV, tile.query_begin + row, head);
        c.sync_warp();
      }
    }
  }
};

}  // namespace kvcache::device
