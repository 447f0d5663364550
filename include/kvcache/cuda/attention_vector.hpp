// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/plan.hpp>
#include <kvcache/attention/state.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/cuda/attention_params.hpp>
#include <kvcache/cuda/chunks.hpp>
#include <kvcache/cuda/context.hpp>
#include <kvcache/cuda/operands.hpp>
#include <kvcache/cuda/tile_rows.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>

#include <cstddef>
#include <cstdint>

namespace kvcache::device {

/// Attention row by row in f32: the first half, as attention_tile, for a group of 1 and for what is stored as f32. A
/// block of threads takes `Rows` rows of a tile at a time through the unit's tokens; each warp takes 16 tokens of a
/// chunk, two lanes a key, then all lanes share the elements of the values. Nothing is rounded but what is stored.
template <class K, class V, class Tail, unsigned DimK, unsigned DimV, variant_features Features, unsigned Rows>
struct attention_vector {
  static_assert(DimK % 16 == 0 && DimV % 16 == 0, "heads of whole sixteens");
  static constexpr unsigned warps = 4;
  static constexpr unsigned threads = warps * warp_lanes;
  static constexpr unsigned min_blocks = 1;
  static constexpr unsigned slice = 16;
  static constexpr unsigned rows = Rows;
  using loads = chunks<K, V, Tail, DimK, DimV, warps * slice, threads>;
  using staged = typename loads::staged;
  using params = attention_params;

  static constexpr unsigned stages_bytes = loads::stages * loads::stage_bytes;
  static constexpr unsigned states_bytes = warps * Rows * (state_stride<DimV> + 1) * 4;

  struct shared {
    alignas(16) std::byte bytes[stages_bytes > states_bytes ? stages_bytes : states_bytes];  // stages, then states
    alignas(16) float q[Rows][DimK];
    float shift[Rows];
    typename loads::shared loading;
  };

  template <context C>
  KVCACHE_DEVICE_INLINE static void run(C& c, shared& s, const params& p) {
    const std::uint32_t items = c.load(p.work.unit_count) * p.kv.kv_heads;
    for (std::uint32_t i = c.block(); i < items; i += c.blocks()) {
      const work_unit unit = p.work.units[i / p.kv.kv_heads];
      const query_tile tile = p.work.tiles[unit.tile];
      const planned_sequence sequence = known_sequence(c, p, tile.sequence);
      const std::uint32_t tile_rows = (tile.query_end - tile.query_begin) * p.group;
      for (std::uint32_t first = 0; first < tile_rows; first += Rows)
        meet_rows(c, s, p, unit, tile, sequence, i % p.kv.kv_heads, first, tile_rows);
    }
  }

 private:
  /// A lane has elements 4 (lane + 32 i) to 3 more.
  static constexpr unsigned quads = (DimV / 4 + warp_lanes - 1) / warp_lanes;
  struct state {
    float o[Rows][quads][4];
    float top[Rows];
    float sum[Rows];  ///< of the lane's token, of two lanes that have the same
  };

  template <context C>
  KVCACHE_DEVICE_INLINE static void meet_rows(C& c, shared& s, const params& p, const work_unit& unit,
                                              const query_tile& tile, const planned_sequence& sequence,
                                              std::uint32_t kv_head, std::uint32_t first, std::uint32_t tile_rows) {
    for (unsigned r = c.warp(); r < Rows; r += warps) {
      float* const x = s.q[r];
      const float shift = load_query<DimK>(c, p, tile, kv_head, first + r, tile_rows, x);
      if (c.lane() == 0) s.shift[r] = shift;
      if constexpr (stored_as<K>::rotated) rotate_row(c, x, DimK);
    }
    tile_row seen[Rows];
    float slope[Rows];
    state mine;
    KVCACHE_UNROLL
    for (unsigned r = 0; r < Rows; ++r) {
      seen[r] = tile_row::of<Features>(p, tile, sequence, kv_head, first + r);
      slope[r] = 0;
      if constexpr (Features.alibi) slope[r] = c.load(p.alibi_slopes + seen[r].head);
      mine.top[r] = empty_lse();
      mine.sum[r] = 0;
      KVCACHE_UNROLL
      for (auto& quad : mine.o[r]) KVCACHE_UNROLL
      for (float& x : quad) x = 0;
    }

    const std::uint32_t end = unit.kv_end < sequence.kv_length ? unit.kv_end : sequence.kv_length;
    loads load{p.work.blocks + sequence.first_block, p.kv.block_size, unit.kv_begin, end, kv_head};
    load.pass(c, p.kv, p.copy_bytes, s.loading, s.bytes, [&](const staged& from) {
      if (c.warp() * slice >= from.tokens.count) return;
      if constexpr (loads::mixed) {
        if (from.tokens.waiting) {
          meet<waiting_as<K, Tail>, waiting_as<V, Tail>>(c, s, p, from, seen, slope, mine);
          return;
        }
      }
      meet<K, V>(c, s, p, from, seen, slope, mine);
    });

    float* const outputs = reinterpret_cast<float*>(s.bytes);
    float* const lses = outputs + warps * Rows * state_stride<DimV>;
    KVCACHE_UNROLL
    for (unsigned r = 0; r < Rows; ++r) {
      float sum = mine.sum[r];
      KVCACHE_UNROLL
      for (unsigned mask = 1; mask < slice; mask *= 2) sum += c.shuffle_xor(sum, mask);
      const bool empty = is_empty(mine.top[r]) && sum == 0;
      const float part = empty ? 0.0f : c.reciprocal(sum);
      const unsigned row = c.warp() * Rows + r;
      KVCACHE_UNROLL
      for (unsigned i = 0; i < quads; ++i) KVCACHE_UNROLL
      for (unsigned j = 0; j < 4; ++j) {
        const unsigned d = 4 * (c.lane() + warp_lanes * i) + j;
        if (d < DimV) outputs[row * state_stride<DimV> + d] = mine.o[r][i][j] * part;
      }
      if (c.lane() == 0) lses[row] = empty ? empty_lse() : (is_empty(mine.top[r]) ? 0.0f : mine.top[r]) + c.log2(sum);
    }
    c.sync();
    finish_tile<V, DimV, Features, warps, Rows>(c, p, unit, tile, kv_head, first, tile_rows, outputs, lses);
  }

  template <class StoredK, class StoredV, context C>
  KVCACHE_DEVICE_INLINE static void meet(C& c, shared& s, const params& p, const staged& from,
                                         const tile_row (&seen)[Rows], const float (&slope)[Rows], state& mine) {
    const unsigned first = c.warp() * slice;
    const unsigned at = first + c.lane() % slice;
    const std::uint32_t token = from.tokens.begin + at;

    // Each of two lanes has half a key.
    constexpr unsigned half = DimK / 2;
    const unsigned begin = c.lane() / slice * half;
    const std::byte* const key = from.keys + at * loads::k_plane::stride;
    float dots[Rows] = {};
    float weights[Rows];  // of the lane's token
    for (unsigned d = begin; d < begin + half; d += 8) {
      float x[8];
      eight_numbers<StoredK, DimK>(c, key, from.k_scales(at), d, x);
      KVCACHE_UNROLL
      for (unsigned r = 0; r < Rows; ++r) KVCACHE_UNROLL
      for (unsigned j = 0; j < 8; ++j) dots[r] += s.q[r][d + j] * x[j];
    }
    KVCACHE_UNROLL
    for (unsigned r = 0; r < Rows; ++r) {
      const float dot = dots[r] + c.shuffle_xor(dots[r], slice) + s.shift[r];
      const bool sees = at < from.tokens.count && seen[r].template sees<Features>(c, p, token);
      float x = empty_lse();
      if (sees) x = seen[r].template logit<Features>(c, p, slope[r], token, dot * p.scale);
      float top = mine.top[r];
      top = x > top ? x : top;
      KVCACHE_UNROLL
      for (unsigned mask = 1; mask < slice; mask *= 2) {
        const float other = c.shuffle_xor(top, mask);
        top = other > top ? other : top;
      }
      const float base = is_empty(top) ? 0.0f : top;
      const float keep = is_empty(mine.top[r]) ? 0.0f : c.exp2(mine.top[r] - base);
      mine.top[r] = top;
      const float weight = c.exp2(x - base);
      mine.sum[r] = mine.sum[r] * keep + weight;
      weights[r] = sees ? weight : unseen;
      KVCACHE_UNROLL
      for (auto& quad : mine.o[r]) KVCACHE_UNROLL
      for (float& o : quad) o *= keep;
    }
    const unsigned left = from.tokens.count - first;
    const unsigned tokens = left < slice ? left : slice;
    for (unsigned t = 0; t < tokens; ++t) {
      float weight[Rows];
      KVCACHE_UNROLL
      for (unsigned r = 0; r < Rows; ++r) weight[r] = c.shuffle(weights[r], t);
      const std::byte* const value = from.values + (first + t) * loads::v_plane::stride;
      const std::byte* const scales = from.v_scales(first + t);
      KVCACHE_UNROLL
      for (unsigned i = 0; i < quads; ++i) {
        const unsigned d = 4 * (c.lane() + warp_lanes * i);
        if (d >= DimV) break;
        float x[4];
        four_stored<StoredV, DimV>(c, value, scales, d, x);
        KVCACHE_UNROLL
        for (unsigned r = 0; r < Rows; ++r) {
          if (weight[r] == unseen) continue;
          KVCACHE_UNROLL
          for (unsigned j = 0; j < 4; ++j) mine.o[r][i][j] += weight[r] * x[j];
        }
      }
    }
  }

  /// Instead of the weight of a token that a row does not see, so that its values are not read as numbers.
  static constexpr float unseen = -1;
};

}  // namespace kvcache::device
