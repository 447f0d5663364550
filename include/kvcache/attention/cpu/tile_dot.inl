// SPDX-License-Identifier: Apache-2.0
// A tile over one unit of work where queries, K and V are bf16: see tile.inl for the order of things and vector_dot.hpp
// for the products. Keys are read where they lie in the pool; values are laid in pairs of tokens, and so are weights,
// which are rounded to bf16 first. A row's total is the sum of what they were rounded to.

/// c[Tokens, Vectors * lanes] = factor * (keys . queries). Queries lie as [pair, row].
template <std::size_t Tokens, std::size_t Vectors>
KVCACHE_ALWAYS_INLINE void multiply_keys(float* c, std::size_t rows, const std::byte* const* keys, const float* queries,
                                         std::size_t dim, float factor) noexcept {
  vec sum[Tokens][Vectors];
  KVCACHE_UNROLL
  for (std::size_t t = 0; t < Tokens; ++t) {
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) sum[t][v] = set1(0.0f);
  }
  for (std::size_t at = 0; at < 2 * dim; at += 4, queries += rows) {
    pair_vec query[Vectors];
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) query[v] = load_pairs(queries + v * lanes);
    KVCACHE_UNROLL
    for (std::size_t t = 0; t < Tokens; ++t) {
      const pair_vec key = set1_pair(keys[t] + at);
      KVCACHE_UNROLL
      for (std::size_t v = 0; v < Vectors; ++v) sum[t][v] = dot(sum[t][v], key, query[v]);
    }
  }
  KVCACHE_UNROLL
  for (std::size_t t = 0; t < Tokens; ++t) {
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) store(c + t * rows + v * lanes, mul(sum[t][v], set1(factor)));
  }
}

/// output[row_block, Vectors * lanes] += weights . values. Weights lie as [pair, row], values as [pair, place].
template <std::size_t Vectors>
KVCACHE_ALWAYS_INLINE void multiply_values(float* output, std::size_t dim, const float* weights, std::size_t rows,
                                           const float* values, std::size_t count) noexcept {
  vec sum[row_block][Vectors];
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < row_block; ++r) {
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) sum[r][v] = load(output + r * dim + v * lanes);
  }
  for (std::size_t p = 0; p < count; ++p, weights += rows, values += dim) {
    pair_vec value[Vectors];
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) value[v] = load_pairs(values + v * lanes);
    KVCACHE_UNROLL
    for (std::size_t r = 0; r < row_block; ++r) {
      const pair_vec weight = set1_pair(weights + r);
      KVCACHE_UNROLL
      for (std::size_t v = 0; v < Vectors; ++v) sum[r][v] = dot(sum[r][v], weight, value[v]);
    }
  }
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < row_block; ++r) {
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) store(output + r * dim + v * lanes, sum[r][v]);
  }
}

/// What multiply_keys and multiply_values have no room for in registers goes by in pieces of three vectors and less.
template <class F>
KVCACHE_ALWAYS_INLINE void in_pieces(std::size_t columns, const F& f) noexcept {
  for (std::size_t column = 0; column < columns;) {
    const std::size_t vectors = (columns - column) / lanes;
    if (vectors == 2 || vectors == 4)
      f(column, std::integral_constant<std::size_t, 2>{});
    else if (vectors >= 3)
      f(column, std::integral_constant<std::size_t, 3>{});
    else
      f(column, std::integral_constant<std::size_t, 1>{});
    column += (vectors == 2 || vectors == 4 ? 2 : vectors >= 3 ? 3 : 1) * lanes;
  }
}

/// Rows of one tile and kv head as tile_rows has them, but queries are pairs, [pair, row], outputs lie in the order
/// that interleaving leaves, and `values` are pairs, [pair of tokens, place].
struct tile_pairs : tile_rows {
  static constexpr std::uint32_t together = 8;  // tokens

  explicit tile_pairs(const tile_rows& r) noexcept : tile_rows(r) {}

  /// The tokens of a chunk of `tokens` that at least one of the rows [r, r + width) sees, masks apart, by whole pairs.
  [[nodiscard]] visible_range seen_by(std::size_t r, std::size_t width, std::size_t tokens,
                                      bool all_visible) const noexcept {
    if (all_visible) return {0, static_cast<std::uint32_t>(tokens)};
    const auto begin = static_cast<std::uint32_t>(first_token[r] + 0.5f);
    const auto end = static_cast<std::uint32_t>(end_token[r + width - 1] + 0.5f);
    return {begin & ~1u, end + (end & 1u)};
  }

  void start_pairs(std::uint32_t kv_head) noexcept {
    start_rows(kv_head);
    std::memset(queries, 0, dim / 2 * rows * sizeof(float));
    for (std::size_t r = 0; r < count; ++r) {
      const std::uint32_t row = tile.query_begin + static_cast<std::uint32_t>(r / group);
      const std::uint32_t head = kv_head * group + static_cast<std::uint32_t>(r % group);
      const std::byte* const from =
          call.q.data + (row * call.q.row_stride + head * call.q.head_stride) * std::int64_t{2};
      for (std::size_t d = 0; d < dim / 2; ++d) std::memcpy(queries + d * rows + r, from + 4 * d, 4);
    }
  }

  /// Logits of the tokens [begin, end), and pairs of their values. Where `begin` is odd, or `end`, there is a token of
  /// zeros beside it, so that the pairs are those of every other tile. Logits that no row sees may be left out. Asks
  /// for [end, next), which is read next.
  void read_pairs(std::uint32_t kv_head, std::uint32_t begin, std::uint32_t end, std::uint32_t next,
                  bool all_visible) noexcept {
    const std::uint32_t block_size = call.kv.block_size;
    const float of_logits = call.features.soft_cap ? call.scale : call.scale * log2_e;
    const std::uint32_t from = begin & ~1u;
    const auto* const nothing = reinterpret_cast<const std::byte*>(keys);  // a chunk of zeros, see start_pairs
    const std::byte* key[kv_chunk];
    const std::byte* value[kv_chunk];
    const std::size_t tokens = end - from;
    const std::size_t whole = (tokens + together - 1) / together * together;
    for (std::size_t i = 0; i < whole; ++i) {
      const std::uint32_t t = from + static_cast<std::uint32_t>(i);
      const bool there = begin <= t && t < end;
      key[i] = there ? call.kv.k_at(table[t / block_size], t % block_size, kv_head) : nothing;
      value[i] = there ? call.kv.v_at(table[t / block_size], t % block_size, kv_head) : nothing;
    }
    for (std::size_t i = 0; i < whole; i += together) {
      const auto ahead = static_cast<std::uint32_t>(end + i);
      prefetch(kv_head, ahead, next < ahead + together ? next : ahead + together);
      in_pieces(rows, [&](std::size_t r, auto vectors) {
        const visible_range seen = seen_by(r, vectors * lanes, tokens, all_visible);
        if (seen.begin < i + together && i < seen.end)
          multiply_keys<together, vectors>(logits + i * rows + r, rows, key + i, queries + r, dim, of_logits);
      });
    }
    for (std::size_t i = 0; i < tokens; i += 2) {
      float* to = values + i / 2 * dim_v;
      std::size_t d = 0;
      for (; d + 2 * lanes <= dim_v; d += 2 * lanes, to += 2 * lanes) {
        const pair_vec a = load_pairs(value[i] + 2 * d);
        const pair_vec b = load_pairs(value[i + 1] + 2 * d);
        store_pairs(to, interleave_low(a, b));
        store_pairs(to + lanes, interleave_high(a, b));
      }
      if (d < dim_v) store_pairs(to, interleave_half(load_half(value[i] + 2 * d), load_half(value[i + 1] + 2 * d)));
    }
  }

  /// As tile_rows::weigh; weights take the place of logits as pairs, [pair of tokens, row].
  bool weigh_pairs(std::size_t tokens, bool all_visible) noexcept {
    const pair_vec ones = _mm512_set1_epi32(0x3f80'3f80);
    bool scaled = false;
    for (std::size_t r = 0; r < rows; r += lanes) {
      const visible_range seen = seen_by(r, lanes, tokens, all_visible);
      const vec now = follow(r, admit(r, seen.begin, seen.end, all_visible), scaled);
      const auto weight = [&](std::size_t t) noexcept {
        const vec x = load(logits + t * rows + r);
        const vec w = exp2(sub(x, now));
        return all_visible ? w : select(less(x, set1(masked_below)), set1(0.0f), w);
      };
      vec sum = load(total + r);
      for (std::size_t t = seen.begin; t < seen.end; t += 2) {
        const vec first = weight(t);
        const vec second = t + 1 < tokens ? weight(t + 1) : set1(0.0f);
        const pair_vec both = pair_of_bf16(first, second);
        sum = dot(sum, ones, both);
        store_pairs(logits + t / 2 * rows + r, both);
      }
      store(total + r, sum);
    }
    return scaled;
  }

  /// As tile_rows::add_values.
  void add_pairs(std::size_t tokens, bool all_visible) noexcept {
    const std::size_t pairs = (tokens + 1) / 2;
    bool finite = true;
    for (std::size_t i = 0; !all_visible && i < pairs * dim_v; i += lanes)
      finite = finite && !not_finite(load_pairs(values + i));
    if (finite) {
      const std::size_t whole = (count + row_block - 1) / row_block * row_block;
      in_pieces(dim_v, [&](std::size_t d, auto vectors) {
        for (std::size_t r = 0; r < whole; r += row_block) {
          const visible_range seen = seen_by(r, row_block, tokens, all_visible);
          const std::size_t first = seen.begin / 2;
          const std::size_t end = (seen.end + std::size_t{1}) / 2;
          if (first < end)
            multiply_values<vectors>(output + r * dim_v + d, dim_v, logits + first * rows + r, rows,
                                     values + first * dim_v + d, end - first);
        }
      });
      return;
    }
    for (std::size_t r = 0; r < count; ++r) {
      const auto seen = [&](std::size_t t) noexcept {
        const auto at = static_cast<float>(t);
        return first_token[r] < at && at < end_token[r] && !(call.features.mask && allowed[t * rows + r] < 0.5f);
      };
      for (std::size_t p = 0; p < pairs; ++p) {
        const std::uint32_t kept = (seen(2 * p) ? 0xffffu : 0u) | (seen(2 * p + 1) ? 0xffff'0000u : 0u);
        if (kept == 0) continue;
        const pair_vec keep = _mm512_set1_epi32(static_cast<int>(kept));
        const pair_vec weight = set1_pair(logits + p * rows + r);
        for (std::size_t d = 0; d < dim_v; d += lanes) {
          const pair_vec value = _mm512_and_si512(load_pairs(values + p * dim_v + d), keep);
          store(output + r * dim_v + d, dot(load(output + r * dim_v + d), weight, value));
        }
      }
    }
  }

  void finish_pairs(std::uint32_t kv_head) noexcept {
    for (std::size_t r = 0; r < count; ++r) {
      float* const o = output + r * dim_v;
      for (std::size_t d = 0; d + 2 * lanes <= dim_v; d += 2 * lanes) {
        vec first = load(o + d);
        vec second = load(o + d + lanes);
        separate(first, second);
        store(o + d, first);
        store(o + d + lanes, second);
      }
    }
    finish(kv_head);
  }
};

/// The rows of a tile, kv head by kv head, over the unit's tokens.
inline void run_tile_of_pairs(const attention_call& call, const work_unit& unit, float* scratch) noexcept {
  tile_pairs rows(tile_rows_of(call, unit, scratch));
  std::memset(rows.keys, 0, kv_chunk * rows.dim * sizeof(float));
  const visible_range seen = rows.visible_to_all();
  for (std::uint32_t kv_head = 0; kv_head < call.kv.kv_heads; ++kv_head) {
    rows.start_pairs(kv_head);
    for (std::uint32_t from = seen.begin; from < seen.end;) {
      const std::uint32_t to = chunk_end(from, seen.end);
      const std::uint32_t begin = from & ~1u;
      const bool all_visible = rows.bound(begin, to);
      rows.read_pairs(kv_head, from, to, chunk_end(to, seen.end), all_visible);
      if (rows.weigh_pairs(to - begin, all_visible)) rows.rescale(0, rows.count);
      rows.add_pairs(to - begin, all_visible);
      from = to;
    }
    rows.finish_pairs(kv_head);
  }
}

/// A unit where queries, K and V are bf16.
inline void run_unit_of_pairs(const attention_call& call, const work_unit& unit, float* scratch) noexcept {
  if (call.kv.head_dim % 16 != 0 || call.kv.head_dim_v % 16 != 0)
    run_tile(call, unit, scratch);
  else if (can_decode(call, call.plan->tiles()[unit.tile]))
    run_decode(call, unit, scratch, dot_products, dot_products);
  else
    run_tile_of_pairs(call, unit, scratch);
}
