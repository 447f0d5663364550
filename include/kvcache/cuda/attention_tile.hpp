// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/plan.hpp>
#include <kvcache/attention/state.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/cuda/attention_params.hpp>
#include <kvcache/cuda/chunks.hpp>
#include <kvcache/cuda/context.hpp>
#include <kvcache/cuda/finish_row.hpp>
#include <kvcache/cuda/operands.hpp>
#include <kvcache/cuda/tile_rows.hpp>
#include <kvcache/detail/bit_cast.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvcache::device {

/// Attention by products of matrices: the first half, which leaves outputs, or states where a tile is cut into parts. A
/// block of threads takes the rows of a tile that belong to one kv head, 16 to a product, through the unit's tokens.
/// With few rows, each warp takes other tokens of a chunk and their states are merged at the end; with `ManyRows`, each
/// warp takes other rows through all of them. Online softmax: Milakov and Gimelshein (2018); tiles in registers and
/// shared memory: Dao et al., "FlashAttention" (2022).
///
/// Queries become f16 or bf16, whatever keys are multiplied as; those of f16 are divided by a power of two first, so
/// that none overflows. Sums are f32. Weights become what values are multiplied as.
template <class K, class V, class Tail, unsigned DimK, unsigned DimV, variant_features Features, bool ManyRows>
struct attention_tile {
  static_assert(DimK % 16 == 0 && DimV % 16 == 0, "heads of whole sixteens");
  static constexpr unsigned warps = DimK + DimV > 256 ? 2 : 4;
  static constexpr unsigned threads = warps * warp_lanes;
  static constexpr unsigned min_blocks = 1;
  static constexpr unsigned chunk = 16 * warps;
  static constexpr unsigned row_warps = ManyRows ? warps : 1;
  static constexpr unsigned token_warps = warps / row_warps;
  static constexpr unsigned rows = 16 * row_warps;
  static constexpr unsigned slice = chunk / token_warps;  ///< tokens of a chunk that a warp meets
  using loads = chunks<K, V, Tail, DimK, DimV, chunk, threads>;
  using staged = typename loads::staged;
  using params = attention_params;

  static constexpr unsigned q_stride = DimK + 8;
  static constexpr unsigned o_stride = state_stride<DimV>;
  static constexpr unsigned stages_bytes = loads::stages * loads::stage_bytes;
  static constexpr unsigned states_bytes = token_warps * rows * (o_stride + 1) * 4;

  struct shared {
    alignas(16) std::byte bytes[stages_bytes > states_bytes ? stages_bytes : states_bytes];  // stages, then states
    alignas(16) std::uint16_t q[loads::mixed ? 2 : 1][rows * q_stride];
    float unit[loads::mixed ? 2 : 1][rows];  ///< what a product is to be multiplied by
    float shift[rows];                       ///< and what is added: keys were stored less this
    typename loads::shared loading;
  };

  template <context C>
  KVCACHE_DEVICE_INLINE static void run(C& c, shared& s, const params& p) {
    const std::uint32_t items = c.load(p.work.unit_count) * p.kv.kv_heads;
    for (std::uint32_t i = c.block(); i < items; i += c.blocks())
      meet_unit(c, s, p, p.work.units[i / p.kv.kv_heads], i % p.kv.kv_heads);
  }

 private:
  /// A lane's part of a warp's 16 rows: rows lane / 4 and 8 more, two of every 8 columns.
  struct state {
    float o[DimV / 8][4];
    float top[2];
    float sum[2];
  };
  /// The lane's two rows.
  struct sight {
    tile_row of[2];
    bool all;  ///< every row of the warp sees all of the unit's tokens
  };

  template <context C>
  KVCACHE_DEVICE_INLINE static void meet_unit(C& c, shared& s, const params& p, const work_unit& unit,
                                              std::uint32_t kv_head) {
    const query_tile tile = p.work.tiles[unit.tile];
    const planned_sequence sequence = known_sequence(c, p, tile.sequence);
    const std::uint32_t tile_rows = (tile.query_end - tile.query_begin) * p.group;
    for (std::uint32_t first = 0; first < tile_rows; first += rows)
      meet_rows(c, s, p, unit, tile, sequence, kv_head, first, tile_rows);
  }

  template <context C>
  KVCACHE_DEVICE_INLINE static void meet_rows(C& c, shared& s, const params& p, const work_unit& unit,
                                              const query_tile& tile, const planned_sequence& sequence,
                                              std::uint32_t kv_head, std::uint32_t first, std::uint32_t tile_rows) {
    const unsigned row_warp = c.warp() % row_warps;
    const unsigned token_warp = c.warp() / row_warps;
    const std::uint32_t end = unit.kv_end < sequence.kv_length ? unit.kv_end : sequence.kv_length;
    c.sync();  // what was there before has been read
    load_queries(c, s, p, tile, kv_head, first, tile_rows);

    sight seen;
    bool all = !Features.mask;
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 2; ++i) {
      seen.of[i] = tile_row::of<Features>(p, tile, sequence, kv_head, first + 16 * row_warp + c.lane() / 4 + 8 * i);
      all = all && seen.of[i].range.begin <= unit.kv_begin && seen.of[i].range.end >= end;
    }
    seen.all = !c.any(!all);

    state mine;
    KVCACHE_UNROLL
    for (auto& tile_of : mine.o) KVCACHE_UNROLL
    for (float& x : tile_of) x = 0;
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 2; ++i) {
      mine.top[i] = empty_lse();
      mine.sum[i] = 0;
    }

    loads load{p.work.blocks + sequence.first_block, p.kv.block_size, unit.kv_begin, end, kv_head};
    load.pass(c, p.kv, p.copy_bytes, s.loading, s.bytes, [&](const staged& from) {
      if (token_warp * slice < from.tokens.count) meet_chunk(c, s, p, seen, mine, from, row_warp, token_warp * slice);
    });
    finish(c, s, p, unit, tile, mine, kv_head, first, tile_rows, row_warp, token_warp);
  }

  /// Queries of `rows` rows as the operand of products, in the order of elements that keys are read in. The scratch is
  /// the stages', and both are others' after the next sync.
  template <context C>
  KVCACHE_DEVICE_INLINE static void load_queries(C& c, shared& s, const params& p, const query_tile& tile,
                                                 std::uint32_t kv_head, std::uint32_t first, std::uint32_t tile_rows) {
    float* const x = reinterpret_cast<float*>(s.bytes) + c.warp() * DimK;
    for (unsigned r = c.warp(); r < rows; r += warps) {
      const float shift = load_query<DimK>(c, p, tile, kv_head, first + r, tile_rows, x);
      if constexpr (stored_as<K>::rotated) rotate_row(c, x, DimK);
      write_query<K>(c, s.q[0] + r * q_stride, x, p.scale, s.unit[0] + r);
      if constexpr (loads::mixed) write_query<waiting_as<K, Tail>>(c, s.q[1] + r * q_stride, x, p.scale, s.unit[1] + r);
      if (c.lane() == 0) s.shift[r] = shift * p.scale;
    }
  }

  /// A row of queries as the operand that keys stored as `Stored` are multiplied with.
  template <class Stored, context C>
  KVCACHE_DEVICE_INLINE static void write_query(C& c, std::uint16_t* to, const float* x, float scale, float* unit) {
    using as = stored_as<Stored>;
    using operand = typename as::key_operand;
    float by = 1;
    if constexpr (std::is_same_v<operand, f16>) {
      // The power of two in the largest element; the products are exact.
      std::uint32_t largest = 0;
      for (unsigned d = c.lane(); d < DimK; d += warp_lanes) {
        const std::uint32_t b = detail::bit_cast<std::uint32_t>(x[d]) & 0x7f80'0000u;
        if (b != 0x7f80'0000u && b > largest) largest = b;
      }
      KVCACHE_UNROLL
      for (unsigned mask = 16; mask > 0; mask /= 2) {
        const std::uint32_t other = c.shuffle_xor(largest, mask);
        largest = other > largest ? other : largest;
      }
      // Between 2^-120 and 2^120, so that its inverse is a normal number too.
      constexpr std::uint32_t least = 7u << 23;
      constexpr std::uint32_t most = 247u << 23;
      largest = largest < least ? least : largest > most ? most : largest;
      by = detail::bit_cast<float>((254u << 23) - largest);
      scale *= detail::bit_cast<float>(largest);
    }
    for (unsigned d = c.lane(); d < DimK; d += warp_lanes)
      to[place_of<as::key_form>(d)] = from_float<operand>(x[d] * by).bits;
    if (c.lane() == 0) *unit = scale;
  }

  /// Where element d of a query stands: as keys do in memory, or, where a lane reads four codes at once, so that these
  /// are the four elements of its fragment.
  template <operand_form Form>
  KVCACHE_DEVICE_INLINE static constexpr unsigned place_of(unsigned d) {
    if constexpr (Form == operand_form::elements) {
      return d;
    } else {
      const unsigned in = d % 16;
      return d - in + in / 4 * 2 + in % 2 + in % 4 / 2 * 8;
    }
  }

  template <context C>
  KVCACHE_DEVICE_INLINE static void meet_chunk(C& c, const shared& s, const params& p, const sight& seen, state& mine,
                                               const staged& from, unsigned row_warp, unsigned first) {
    if constexpr (loads::mixed) {
      if (from.tokens.waiting) {
        meet<waiting_as<K, Tail>, waiting_as<V, Tail>, 1>(c, s, p, seen, mine, from, row_warp, first);
        return;
      }
    }
    meet<K, V, 0>(c, s, p, seen, mine, from, row_warp, first);
  }

  /// A warp's rows and the `slice` tokens of the chunk from `first` on.
  template <class StoredK, class StoredV, unsigned Query, context C>
  KVCACHE_DEVICE_INLINE static void meet(C& c, const shared& s, const params& p, const sight& seen, state& mine,
                                         const staged& from, unsigned row_warp, unsigned first) {
    float logits[slice / 8][4];
    multiply_keys<StoredK>(c, s.q[Query] + 16 * row_warp * q_stride, from, first, logits);

    // Logits in base 2, and nothing where a row does not see.
    const bool whole = first + slice <= from.tokens.count && seen.all;
    KVCACHE_UNROLL
    for (unsigned r = 0; r < 2; ++r) {
      const unsigned row = 16 * row_warp + c.lane() / 4 + 8 * r;
      const float unit = s.unit[Query][row];
      const float shift = s.shift[row];
      float slope = 0;
      if constexpr (Features.alibi) slope = c.load(p.alibi_slopes + seen.of[r].head);
      KVCACHE_UNROLL
      for (unsigned t = 0; t < slice / 8; ++t) {
        KVCACHE_UNROLL
        for (unsigned i = 0; i < 2; ++i) {
          const unsigned at = first + 8 * t + c.lane() % 4 * 2 + i;
          const std::uint32_t token = from.tokens.begin + at;
          float& x = logits[t][2 * r + i];
          x = seen.of[r].template logit<Features>(c, p, slope, token, x * unit + shift);
          if (!whole && (at >= from.tokens.count || !seen.of[r].template sees<Features>(c, p, token))) x = empty_lse();
        }
      }
    }

    float weights[slice / 8][4];
    KVCACHE_UNROLL
    for (unsigned r = 0; r < 2; ++r) {
      float top = mine.top[r];
      KVCACHE_UNROLL
      for (unsigned t = 0; t < slice / 8; ++t) KVCACHE_UNROLL
      for (unsigned i = 0; i < 2; ++i) top = logits[t][2 * r + i] > top ? logits[t][2 * r + i] : top;
      KVCACHE_UNROLL
      for (unsigned mask = 1; mask < 4; mask *= 2) {
        const float other = c.shuffle_xor(top, mask);
        top = other > top ? other : top;
      }
      const float base = is_empty(top) ? 0.0f : top;
      const float keep = is_empty(mine.top[r]) ? 0.0f : c.exp2(mine.top[r] - base);
      mine.top[r] = top;
      float sum = mine.sum[r] * keep;
      KVCACHE_UNROLL
      for (unsigned t = 0; t < slice / 8; ++t) {
        KVCACHE_UNROLL
        for (unsigned i = 0; i < 2; ++i) {
          const float w = c.exp2(logits[t][2 * r + i] - base);
          weights[t][2 * r + i] = w;
          sum += w;
        }
      }
      mine.sum[r] = sum;
      KVCACHE_UNROLL
      for (auto& o : mine.o) {
        o[2 * r] *= keep;
        o[2 * r + 1] *= keep;
      }
    }
    multiply_values<StoredV>(c, p, from, first, weights, whole, seen, mine);
  }

  /// Products of a warp's queries, 16 rows at `queries`, with the keys of `slice` tokens.
  template <class StoredK, context C>
  KVCACHE_DEVICE_INLINE static void multiply_keys(C& c, const std::uint16_t* queries, const staged& from,
                                                  unsigned first, float (&logits)[slice / 8][4]) {
    using as = stored_as<StoredK>;
    using operand = typename as::key_operand;
    constexpr unsigned stride = loads::k_plane::stride;
    KVCACHE_UNROLL
    for (auto& tile : logits) KVCACHE_UNROLL
    for (float& x : tile) x = 0;
    const unsigned lane = c.lane();
    const std::uint16_t* const query = queries + lane % 16 * q_stride + lane / 16 * 8;
    KVCACHE_DEVICE_UNROLL_BY((as::key_form == operand_form::elements ? 2 : 1))
    for (unsigned k = 0; k < DimK / 16; ++k) {
      std::uint32_t a[4];
      c.load_matrices(query + 16 * k, a);
      if constexpr (as::key_form == operand_form::elements) {
        KVCACHE_UNROLL
        for (unsigned t = 0; t < slice / 16; ++t) {
          std::uint32_t b[4];
          c.load_matrices(
              from.keys + (first + 16 * t + lane / 16 * 8 + lane % 8) * stride + 32 * k + lane % 16 / 8 * 16, b);
          c.multiply_add(operand{}, logits[2 * t], a, {b[0], b[1]});
          c.multiply_add(operand{}, logits[2 * t + 1], a, {b[2], b[3]});
        }
      } else {
        const unsigned element = 16 * k + lane % 4 * 4;
        KVCACHE_UNROLL
        for (unsigned t = 0; t < slice / 8; ++t) {
          const unsigned token = first + 8 * t + lane / 4;
          const std::byte* const codes = from.keys + token * stride + element * as::bits / 8;
          std::uint32_t b[2];
          if constexpr (as::key_form == operand_form::units) {
            four_units<StoredK>(c, codes, b);
          } else {
            float x[4];
            four_numbers<StoredK, DimK>(codes, from.k_scales(token), element, x);
            b[0] = c.pack(operand{}, x[0], x[1]);
            b[1] = c.pack(operand{}, x[2], x[3]);
          }
          c.multiply_add(operand{}, logits[t], a, b);
        }
      }
    }
    if constexpr (as::scale_per_token) {
      KVCACHE_UNROLL
      for (unsigned t = 0; t < slice / 8; ++t) KVCACHE_UNROLL
      for (unsigned i = 0; i < 2; ++i) {
        const float scale = scale_at(from.k_scales(first + 8 * t + lane % 4 * 2 + i), 0);
        logits[t][i] *= scale;
        logits[t][2 + i] *= scale;
      }
    }
  }

  /// Adds the values of `slice` tokens, each times its weight.
  template <class StoredV, context C>
  KVCACHE_DEVICE_INLINE static void multiply_values(C& c, const params& p, const staged& from, unsigned first,
                                                    const float (&weights)[slice / 8][4], bool whole, const sight& seen,
                                                    state& mine) {
    using operand = typename stored_as<StoredV>::value_operand;
    KVCACHE_UNROLL
    for (unsigned t = 0; t < slice / 16; ++t) {
      const unsigned token = first + 16 * t;
      if (token >= from.tokens.count) break;
      std::uint32_t a[4];
      a[0] = c.pack(operand{}, weights[2 * t][0], weights[2 * t][1]);
      a[1] = c.pack(operand{}, weights[2 * t][2], weights[2 * t][3]);
      a[2] = c.pack(operand{}, weights[2 * t + 1][0], weights[2 * t + 1][1]);
      a[3] = c.pack(operand{}, weights[2 * t + 1][2], weights[2 * t + 1][3]);
      bool odd = false;  // a value is infinite or no number, and not every row sees it
      KVCACHE_UNROLL
      for (unsigned n = 0; n < DimV / (8 * wide); ++n) {
        std::uint32_t b[wide][2];
        read_values<StoredV>(c, from, token, n, b);
        if (!whole) KVCACHE_UNROLL
        for (auto& pair : b) KVCACHE_UNROLL
        for (std::uint32_t& two : pair) odd = settle<operand>(two) || odd;
        KVCACHE_UNROLL
        for (unsigned j = 0; j < wide; ++j) c.multiply_add(operand{}, mine.o[n * wide + j], a, b[j]);
      }
      if (!whole && c.any(odd)) add_odd_values<StoredV>(c, p, from, token, seen, mine);
    }
  }

  /// Whether values are read as matrices, so that columns of the output lie in order. Else `wide` tiles of 8 columns
  /// are read at once, and column i of each of them is a neighbour of the others', so that a lane reads one code for
  /// each. What waits in the tail pool is read in the same order.
  static constexpr bool as_matrices = stored_as<V>::value_form == operand_form::elements;
  static constexpr unsigned wide = as_matrices || DimV % 32 != 0 ? 2 : 4;

  /// The element that column `column` of tile `tile` of the output stands for.
  KVCACHE_DEVICE_INLINE static constexpr unsigned element_of(unsigned tile, unsigned column) {
    return as_matrices ? 8 * tile + column : tile / wide * wide * 8 + column * wide + tile % wide;
  }

  /// Tiles n * wide and on, of 16 tokens of values: a lane has tokens 2 (lane % 4), the next, and both 8 later.
  template <class StoredV, context C>
  KVCACHE_DEVICE_INLINE static void read_values(C& c, const staged& from, unsigned token, unsigned n,
                                                std::uint32_t (&b)[wide][2]) {
    if constexpr (as_matrices) {
      const unsigned lane = c.lane();
      std::uint32_t four[4];
      c.load_matrices_transposed(
          from.values + (token + lane % 16) * loads::v_plane::stride + (16 * n + lane / 16 * 8) * 2, four);
      b[0][0] = four[0];
      b[0][1] = four[1];
      b[1][0] = four[2];
      b[1][1] = four[3];
      return;
    }
    using operand = typename stored_as<StoredV>::value_operand;
    const unsigned element = n * wide * 8 + c.lane() / 4 * wide;
    KVCACHE_UNROLL
    for (unsigned half = 0; half < 2; ++half) {
      float x[2][wide];
      KVCACHE_UNROLL
      for (unsigned i = 0; i < 2; ++i) {
        const unsigned at = token + c.lane() % 4 * 2 + 8 * half + i;
        float four[4];
        four_stored<StoredV, DimV>(c, from.values + at * loads::v_plane::stride, from.v_scales(at), element / 4 * 4,
                                   four);
        KVCACHE_UNROLL
        for (unsigned j = 0; j < wide; ++j) x[i][j] = wide == 4 || element % 4 == 0 ? four[j] : four[j + 4 - wide];
      }
      KVCACHE_UNROLL
      for (unsigned j = 0; j < wide; ++j) b[j][half] = c.pack(operand{}, x[0][j], x[1][j]);
    }
  }

  /// Makes infinities and NaNs of two elements 0, and says whether there were any.
  template <class Operand>
  KVCACHE_DEVICE_INLINE static bool settle(std::uint32_t& two) {
    constexpr std::uint32_t exponent = std::is_same_v<Operand, f16> ? 0x7c00u : 0x7f80u;
    const bool low = (two & exponent) == exponent;
    const bool high = (two >> 16 & exponent) == exponent;
    if (low) two &= 0xffff'0000u;
    if (high) two &= 0x0000'ffffu;
    return low || high;
  }
  /// What settle leaves, the other way round: 1 for an infinity, 64 for a negative one, 4096 for a NaN, else 0.
  template <class Operand>
  KVCACHE_DEVICE_INLINE static std::uint32_t kind_of(std::uint32_t element) {
    constexpr bool half = std::is_same_v<Operand, f16>;
    constexpr std::uint32_t infinity = half ? 0x7c00u : 0x7f80u;
    if ((element & infinity) != infinity) return 0;
    if ((element & 0x7fffu) != infinity) return half ? 0x6c00u : 0x4580u;
    return (element & 0x8000u) != 0 ? (half ? 0x5400u : 0x4280u) : (half ? 0x3c00u : 0x3f80u);
  }

  /// Adds what `settle` left out of 16 tokens to the rows that see it: a product counts, for each of a row's elements,
  /// the tokens of each kind.
  template <class StoredV, context C>
  KVCACHE_DEVICE_INLINE static void add_odd_values(C& c, const params& p, const staged& from, unsigned token,
                                                   const sight& seen, state& mine) {
    using operand = typename stored_as<StoredV>::value_operand;
    std::uint32_t a[4];
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      float one[2];
      KVCACHE_UNROLL
      for (unsigned j = 0; j < 2; ++j) {
        const unsigned at = token + c.lane() % 4 * 2 + i / 2 * 8 + j;
        one[j] = at < from.tokens.count && seen.of[i % 2].template sees<Features>(c, p, from.tokens.begin + at) ? 1.0f
                                                                                                                : 0.0f;
      }
      a[i] = c.pack(operand{}, one[0], one[1]);
    }
    KVCACHE_UNROLL
    for (unsigned n = 0; n < DimV / (8 * wide); ++n) {
      std::uint32_t b[wide][2];
      read_values<StoredV>(c, from, token, n, b);
      KVCACHE_UNROLL
      for (unsigned j = 0; j < wide; ++j) {
        KVCACHE_UNROLL
        for (std::uint32_t& two : b[j]) two = kind_of<operand>(two & 0xffffu) | kind_of<operand>(two >> 16) << 16;
        float counts[4] = {};
        c.multiply_add(operand{}, counts, a, b[j]);
        KVCACHE_UNROLL
        for (unsigned i = 0; i < 4; ++i) {
          const auto count = static_cast<std::uint32_t>(counts[i]);
          if (count == 0) continue;
          const bool negative = count / 64 % 64 != 0;
          const bool none = count >= 4096 || (negative && count % 64 != 0);
          mine.o[n * wide + j][i] += detail::bit_cast<float>(none       ? 0x7fc0'0000u
                                                             : negative ? 0xff80'0000u
                                                                        : 0x7f80'0000u);
        }
      }
    }
  }

  /// Merges what the warps have, and writes it out or leaves it as a state.
  template <context C>
  KVCACHE_DEVICE_INLINE static void finish(C& c, shared& s, const params& p, const work_unit& unit,
                                           const query_tile& tile, state& mine, std::uint32_t kv_head,
                                           std::uint32_t first, std::uint32_t tile_rows, unsigned row_warp,
                                           unsigned token_warp) {
    float* const outputs = reinterpret_cast<float*>(s.bytes);
    float* const lses = outputs + token_warps * rows * o_stride;
    KVCACHE_UNROLL
    for (unsigned r = 0; r < 2; ++r) {
      KVCACHE_UNROLL
      for (unsigned mask = 1; mask < 4; mask *= 2) mine.sum[r] += c.shuffle_xor(mine.sum[r], mask);
      const float sum = mine.sum[r];
      const bool empty = is_empty(mine.top[r]) && sum == 0;
      const float lse = empty ? empty_lse() : (is_empty(mine.top[r]) ? 0.0f : mine.top[r]) + c.log2(sum);
      const float part = empty ? 0.0f : c.reciprocal(sum);
      const unsigned row = token_warp * rows + 16 * row_warp + c.lane() / 4 + 8 * r;
      KVCACHE_UNROLL
      for (unsigned n = 0; n < DimV / 8; ++n) KVCACHE_UNROLL
      for (unsigned i = 0; i < 2; ++i)
        outputs[row * o_stride + element_of(n, c.lane() % 4 * 2 + i)] = mine.o[n][2 * r + i] * part;
      if (c.lane() % 4 == 0) lses[row] = lse;
    }
    c.sync();
    finish_tile<V, DimV, Features, token_warps, rows>(c, p, unit, tile, kv_head, first, tile_rows, outputs, lses);
  }
};

}  // namespace kvcache::device
