// SPDX-License-Identifier: Apache-2.0
// A tile over one unit of work where queries, K and V are bf16 and the processor multiplies matrices: see tile_dot.inl
// for what is the same, and vector_amx.hpp for the products. Logits are [tokens, rows] = keys . queries, outputs
// [rows, places] = weights . values. Keys are copied from the pool, since blocks lie anywhere; the softmax leaves
// weights as [row, token].
//
// Matrices are of 32 tokens where they are summed over, counted from the sequence's first, so that a row's sums do not
// depend on where the tokens of other rows begin.

/// Tokens that one product sums over.
inline constexpr std::uint32_t matrix_tokens = 32;

/// c[tokens, rows] = keys . queries for 16 or 32 tokens and rows. `width`: bytes of a key, whole registers of it.
template <bool TwoTokens, bool TwoRows>
KVCACHE_ALWAYS_INLINE void multiply_key_matrices(float* c, std::size_t rows, const std::byte* keys, std::size_t width,
                                                 const float* queries) noexcept {
  zero_matrix<0>();
  if constexpr (TwoRows) zero_matrix<1>();
  if constexpr (TwoTokens) zero_matrix<2>();
  if constexpr (TwoTokens && TwoRows) zero_matrix<3>();
  const std::size_t row_bytes = rows * sizeof(float);
  for (std::size_t at = 0; at < width; at += matrix_bytes, queries += matrix_rows * rows) {
    load_matrix<4>(keys + at, width);
    load_matrix<6>(queries, row_bytes);
    multiply_matrices<0, 4, 6>();
    if constexpr (TwoRows) {
      load_matrix<7>(queries + lanes, row_bytes);
      multiply_matrices<1, 4, 7>();
    }
    if constexpr (TwoTokens) {
      load_matrix<5>(keys + matrix_rows * width + at, width);
      multiply_matrices<2, 5, 6>();
      if constexpr (TwoRows) multiply_matrices<3, 5, 7>();
    }
  }
  store_matrix<0>(c, row_bytes);
  if constexpr (TwoRows) store_matrix<1>(c + lanes, row_bytes);
  if constexpr (TwoTokens) store_matrix<2>(c + matrix_rows * rows, row_bytes);
  if constexpr (TwoTokens && TwoRows) store_matrix<3>(c + matrix_rows * rows + lanes, row_bytes);
}

/// output[rows, places] += weights . values for 16 or 32 rows and places, over `count` times 32 tokens. Weights lie as
/// [row, pair of tokens], `chunk` pairs from row to row; values as [pair of tokens, place].
template <bool TwoRows, bool TwoPlaces>
KVCACHE_ALWAYS_INLINE void multiply_value_matrices(float* output, std::size_t dim, const float* weights,
                                                   std::size_t chunk, const float* values, std::size_t count) noexcept {
  const std::size_t row_bytes = dim * sizeof(float);
  float* const second = output + matrix_rows * dim;
  load_matrix<0>(output, row_bytes);
  if constexpr (TwoPlaces) load_matrix<1>(output + lanes, row_bytes);
  if constexpr (TwoRows) load_matrix<2>(second, row_bytes);
  if constexpr (TwoRows && TwoPlaces) load_matrix<3>(second + lanes, row_bytes);
  for (std::size_t i = 0; i < count; ++i, weights += lanes, values += matrix_rows * dim) {
    load_matrix<4>(weights, chunk * sizeof(float));
    load_matrix<6>(values, row_bytes);
    multiply_matrices<0, 4, 6>();
    if constexpr (TwoPlaces) {
      load_matrix<7>(values + lanes, row_bytes);
      multiply_matrices<1, 4, 7>();
    }
    if constexpr (TwoRows) {
      load_matrix<5>(weights + matrix_rows * chunk, chunk * sizeof(float));
      multiply_matrices<2, 5, 6>();
      if constexpr (TwoPlaces) multiply_matrices<3, 5, 7>();
    }
  }
  store_matrix<0>(output, row_bytes);
  if constexpr (TwoPlaces) store_matrix<1>(output + lanes, row_bytes);
  if constexpr (TwoRows) store_matrix<2>(second, row_bytes);
  if constexpr (TwoRows && TwoPlaces) store_matrix<3>(second + lanes, row_bytes);
}

/// f(column, whether there are two vectors) for pieces of two vectors, and for the one that may be left.
template <class F>
KVCACHE_ALWAYS_INLINE void by_two(std::size_t columns, const F& f) noexcept {
  std::size_t column = 0;
  for (; column + 2 * lanes <= columns; column += 2 * lanes) f(column, std::true_type{});
  if (column < columns) f(column, std::false_type{});
}

/// Rows of one tile and kv head as tile_pairs has them, but keys are bf16, [token, element], and weights lie by rows.
struct tile_matrices : tile_pairs {
  static constexpr std::size_t chunk = kv_chunk / 2;  // pairs of weights from row to row

  explicit tile_matrices(const tile_rows& r) noexcept
      : tile_pairs(r), key_bytes((2 * r.dim + matrix_bytes - 1) / matrix_bytes * matrix_bytes) {}

  std::size_t key_bytes;    // of a key in `keys`: whole registers, what is beyond head_dim is zero
  std::uint32_t ahead = 0;  // the tokens [ahead, next) are read next and not asked for yet
  std::uint32_t next = 0;

  /// Asks for a few of them: a burst would fill the processor's queue for lines that are on their way.
  void ask(std::uint32_t kv_head) noexcept {
    constexpr std::uint32_t few = 4;
    if (ahead >= next) return;
    const std::uint32_t end = next - ahead < few ? next : ahead + few;
    prefetch(kv_head, ahead, end);
    ahead = end;
  }

  void start_matrices(std::uint32_t kv_head) noexcept {
    start_rows(kv_head);
    for (std::size_t r = 0; r < rows; r += lanes) {
      const std::byte* from[lanes];
      for (std::size_t i = 0; i < lanes; ++i) {
        const std::size_t which = r + i < count ? r + i : count - 1;
        const std::uint32_t row = tile.query_begin + static_cast<std::uint32_t>(which / group);
        const std::uint32_t head = kv_head * group + static_cast<std::uint32_t>(which % group);
        from[i] = call.q.data + (row * call.q.row_stride + head * call.q.head_stride) * std::int64_t{2};
      }
      for (std::size_t at = 0; at < key_bytes; at += matrix_bytes) {
        pair_vec x[lanes];
        if (at + matrix_bytes <= 2 * dim)
          for (std::size_t i = 0; i < lanes; ++i) x[i] = load_pairs(from[i] + at);
        else
          for (std::size_t i = 0; i < lanes; ++i) x[i] = load_half(from[i] + at);
        transpose(x);
        float* const to = queries + at / sizeof(float) * rows + r;
        for (std::size_t i = 0; i < lanes; ++i) store_pairs(to + i * rows, x[i]);
      }
    }
  }

  /// Keys and pairs of values of the tokens [begin, end), of which those below `first` are read as zeros, as are those
  /// that whole matrices want behind `end`.
  void read_matrices(std::uint32_t kv_head, std::uint32_t begin, std::uint32_t first, std::uint32_t end) noexcept {
    const std::uint32_t block_size = call.kv.block_size;
    auto* key = reinterpret_cast<std::byte*>(keys);
    float* pair = values;
    for (std::uint32_t t = begin; t < end || (t - begin) % matrix_tokens != 0; t += 2, pair += dim_v) {
      const std::byte* value[2] = {};
      for (std::uint32_t i = 0; i < 2; ++i, key += key_bytes) {
        const std::uint32_t at = t + i;
        if (at < first || at >= end) {
          std::memset(key, 0, key_bytes);
          continue;
        }
        const block_id entry = table[at / block_size];
        value[i] = call.kv.v_at(entry, at % block_size, kv_head);
        const std::byte* const from = call.kv.k_at(entry, at % block_size, kv_head);
        std::size_t b = 0;
        for (; b + matrix_bytes <= 2 * dim; b += matrix_bytes) store_pairs(key + b, load_pairs(from + b));
        if (b < key_bytes) store_pairs(key + b, load_half(from + b));
      }
      lay_pair(value[0], value[1], pair);
    }
  }

  /// The values of two tokens side by side; null is a token of zeros.
  void lay_pair(const std::byte* first, const std::byte* second, float* to) const noexcept {
    const pair_vec zero = _mm512_setzero_si512();
    std::size_t d = 0;
    for (; d + 2 * lanes <= dim_v; d += 2 * lanes, to += 2 * lanes) {
      const pair_vec a = first != nullptr ? load_pairs(first + 2 * d) : zero;
      const pair_vec b = second != nullptr ? load_pairs(second + 2 * d) : zero;
      store_pairs(to, interleave_low(a, b));
      store_pairs(to + lanes, interleave_high(a, b));
    }
    if (d == dim_v) return;
    const pair_vec a = first != nullptr ? load_half(first + 2 * d) : zero;
    const pair_vec b = second != nullptr ? load_half(second + 2 * d) : zero;
    store_pairs(to, interleave_half(a, b));
  }

  /// The chunk's `tokens` tokens for 32 rows from `r` on, or for the 16 that are left: logits, weights, outputs.
  template <class TwoRows>
  void go_through(std::uint32_t kv_head, std::size_t r, TwoRows two_rows, std::size_t tokens, bool all_visible,
                  bool finite) noexcept {
    const std::size_t width = two_rows ? 2 * lanes : lanes;
    const visible_range seen = seen_by(r, width, tokens, all_visible);
    if (seen.begin >= seen.end) return;
    multiply_keys_of<two_rows>(kv_head, r, seen);
    bool scaled = false;
    for (std::size_t i = 0; i < width; i += lanes) weigh_matrices(r + i, tokens, all_visible, scaled);
    if (scaled) rescale(r, r + width < count ? r + width : count);
    if (finite)
      multiply_values_of<two_rows>(kv_head, r, seen);
    else
      add_seen(r, r + width < count ? r + width : count, (tokens + matrix_tokens - 1) / matrix_tokens * lanes);
  }

  /// Logits without the factor. Those that no row sees may be left out.
  template <bool TwoRows>
  void multiply_keys_of(std::uint32_t kv_head, std::size_t r, visible_range seen) noexcept {
    const auto* const key = reinterpret_cast<const std::byte*>(keys);
    constexpr std::size_t step = 2 * matrix_rows;
    for (std::size_t t = seen.begin / step * step; t < seen.end; t += step) {
      ask(kv_head);
      float* const to = logits + t * rows + r;
      if (seen.end > t + matrix_rows)
        multiply_key_matrices<true, TwoRows>(to, rows, key + t * key_bytes, key_bytes, queries + r);
      else
        multiply_key_matrices<false, TwoRows>(to, rows, key + t * key_bytes, key_bytes, queries + r);
    }
  }

  /// As tile_rows::weigh; weights go to `weights`, those that a row does not see as 0. Where nothing but the factor
  /// comes between a product and its weight, it is applied together with the maximum.
  void weigh_matrices(std::size_t r, std::size_t tokens, bool all_visible, bool& scaled) noexcept {
    const bool factor_last = !call.features.soft_cap && !call.features.alibi && call.scale > 0;
    const vec by = set1(call.features.soft_cap ? call.scale : call.scale * log2_e);
    // Logits without the factor may come near a masked one.
    const vec none = set1(factor_last ? 0.99999f * masked_logit : masked_below);
    const visible_range seen = seen_by(r, lanes, tokens, all_visible);
    for (std::size_t t = seen.begin; !factor_last && t < seen.end; ++t)
      store(logits + t * rows + r, mul(load(logits + t * rows + r), by));
    const vec largest = admit(r, seen.begin, seen.end, all_visible);
    if (!factor_last) {
      const vec now = follow(r, largest, scaled);
      weigh_rows(r, seen, tokens, [&](const float* at) noexcept KVCACHE_INLINED {
        const vec x = load(at);
        return select(less(x, none), set1(0.0f), exp2(sub(x, now)));
      });
      return;
    }
    const vec now = follow(r, select(less(largest, none), set1(masked_logit), mul(largest, by)), scaled);
    const vec less_now = mul(now, set1(-1.0f));
    if (all_visible)
      weigh_rows(r, seen, tokens,
                 [&](const float* at) noexcept KVCACHE_INLINED { return exp2(fma(load(at), by, less_now)); });
    else
      weigh_rows(r, seen, tokens, [&](const float* at) noexcept KVCACHE_INLINED {
        const vec x = load(at);
        return select(less(x, none), set1(0.0f), exp2(fma(x, by, less_now)));
      });
  }

  template <class F>
  KVCACHE_ALWAYS_INLINE void weigh_rows(std::size_t r, visible_range seen, std::size_t tokens,
                                        const F& weight) noexcept {
    const pair_vec ones = _mm512_set1_epi32(0x3f80'3f80);
    vec sum = load(total + r);
    for (std::size_t t = 0; t < tokens; t += matrix_tokens) {
      pair_vec x[lanes];
      const float* const from = logits + t * rows + r;
      if (seen.begin <= t && t + matrix_tokens <= seen.end && t + matrix_tokens <= tokens) {
        KVCACHE_UNROLL
        for (std::size_t p = 0; p < lanes; ++p) {
          x[p] = pair_of_bf16(weight(from + 2 * p * rows), weight(from + (2 * p + 1) * rows));
          sum = dot(sum, ones, x[p]);
        }
      } else {
        for (std::size_t p = 0; p < lanes; ++p) {
          const std::size_t at = t + 2 * p;
          x[p] = _mm512_setzero_si512();
          if (at < seen.begin || at >= seen.end) continue;
          const vec second = at + 1 < tokens ? weight(from + (2 * p + 1) * rows) : set1(0.0f);
          x[p] = pair_of_bf16(weight(from + 2 * p * rows), second);
          sum = dot(sum, ones, x[p]);
        }
      }
      transpose(x);
      float* const to = weights + r * chunk + t / 2;
      KVCACHE_UNROLL
      for (std::size_t i = 0; i < lanes; ++i) store_pairs(to + i * chunk, x[i]);
    }
    store(total + r, sum);
  }

  /// Whether the chunk's values are all finite.
  [[nodiscard]] bool finite_values(std::size_t tokens) const noexcept {
    const std::size_t size = (tokens + matrix_tokens - 1) / matrix_tokens * lanes * dim_v;
    bool finite = true;
    for (std::size_t i = 0; i < size; i += lanes) finite = finite && !not_finite(load_pairs(values + i));
    return finite;
  }

  /// As tile_rows::add_values.
  template <bool TwoRows>
  void multiply_values_of(std::uint32_t kv_head, std::size_t r, visible_range seen) noexcept {
    const std::size_t first = seen.begin / matrix_tokens;
    const std::size_t steps = (seen.end + matrix_tokens - 1) / matrix_tokens - first;
    by_two(dim_v, [&](std::size_t d, auto two_places) noexcept {
      ask(kv_head);
      multiply_value_matrices<TwoRows, two_places>(output + r * dim_v + d, dim_v, weights + r * chunk + first * lanes,
                                                   chunk, values + first * lanes * dim_v + d, steps);
    });
  }

  /// The same where values are not all finite, for what each row sees: the sums that matrices make, one by one, but for
  /// subnormal numbers, which matrices take for 0.
  void add_seen(std::size_t from_row, std::size_t end_row, std::size_t pairs) noexcept {
    for (std::size_t r = from_row; r < end_row; ++r) {
      const auto seen = [&](std::size_t t) noexcept {
        const auto at = static_cast<float>(t);
        return first_token[r] < at && at < end_token[r] && !(call.features.mask && allowed[t * rows + r] < 0.5f);
      };
      const float* const weight = weights + r * chunk;
      for (std::size_t from = 0; from < pairs; from += lanes) {
        for (std::size_t d = 0; d < dim_v; d += lanes) {
          vec even = set1(0.0f);
          vec odd = set1(0.0f);
          for (std::size_t p = from; p < from + lanes; ++p) {
            const auto* const value = reinterpret_cast<const std::byte*>(values + p * dim_v + d);
            vec first;
            vec second;
            widen_pair<bf16>(value, first, second);
            std::uint32_t both_weights;
            std::memcpy(&both_weights, weight + p, sizeof both_weights);
            if (seen(2 * p)) even = fma(set1(std::bit_cast<float>(both_weights << 16)), first, even);
            if (seen(2 * p + 1)) odd = fma(set1(std::bit_cast<float>(both_weights & 0xffff'0000u)), second, odd);
          }
          store(output + r * dim_v + d, add(load(output + r * dim_v + d), add(even, odd)));
        }
      }
    }
  }
};

/// The rows of a tile, kv head by kv head, over the unit's tokens.
inline void run_tile_of_matrices(const attention_call& call, const work_unit& unit, float* scratch) noexcept {
  const matrix_registers taken;
  tile_matrices rows(tile_rows_of(call, unit, scratch));
  const visible_range seen = rows.visible_to_all();
  for (std::uint32_t kv_head = 0; kv_head < call.kv.kv_heads; ++kv_head) {
    rows.start_matrices(kv_head);
    for (std::uint32_t from = seen.begin; from < seen.end;) {
      const std::uint32_t to = chunk_end(from, seen.end);
      const std::uint32_t begin = from - from % matrix_tokens;
      const std::size_t tokens = to - begin;
      const bool all_visible = rows.bound(begin, to);
      rows.read_matrices(kv_head, begin, from, to);
      rows.ahead = to;
      rows.next = chunk_end(to, seen.end);
      const bool finite = all_visible || rows.finite_values(tokens);
      by_two((rows.count + lanes - 1) / lanes * lanes, [&](std::size_t r, auto two_rows) noexcept {
        rows.go_through(kv_head, r, two_rows, tokens, all_visible, finite);
      });
      from = to;
    }
    rows.finish_pairs(kv_head);
  }
}

/// A unit where queries, K and V are bf16.
inline void run_unit_of_matrices(const attention_call& call, const work_unit& unit, float* scratch) noexcept {
  if (call.kv.head_dim % 16 != 0 || call.kv.head_dim_v % 16 != 0)
    run_tile(call, unit, scratch);
  else if (can_decode(call, call.plan->tiles()[unit.tile]))
    run_decode(call, unit, scratch, products_of<bf16>, products_of<bf16>);
  else
    run_tile_of_matrices(call, unit, scratch);
}
