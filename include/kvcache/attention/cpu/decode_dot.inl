// SPDX-License-Identifier: Apache-2.0
// What decoding does with K and V of bf16 where queries are bf16 too: dot products of pairs, see vector_dot.hpp. Beside
// decode_products.inl, and called as that is.

/// sum[token, row] += query . key over one vector of pairs, or over half a one, `at` bytes behind the first.
template <std::size_t Rows, bool Half = false>
KVCACHE_ALWAYS_INLINE void add_keys(vec (&sum)[lanes], const float* query, const decode_stream& k, std::size_t t,
                                    std::size_t at) noexcept {
  constexpr std::size_t together = lanes / Rows;  // tokens
  pair_vec key[together];
  KVCACHE_UNROLL
  for (std::size_t i = 0; i < together; ++i)
    key[i] = Half ? load_half(k.token(t + i) + at) : load_pairs(k.token(t + i) + at);
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    const pair_vec left = load_pairs(query + r * lanes);
    KVCACHE_UNROLL
    for (std::size_t i = 0; i < together; ++i) sum[i * Rows + r] = dot(sum[i * Rows + r], left, key[i]);
  }
}

/// logits[token, row] = q . k * factor. Queries lie as [vector of pairs, row, place], padded with zeros. The lanes of a
/// vector of logits are summed while the next one's products are on their way: behind them, the adding would fill the
/// processor's queue and keep the next products out.
template <std::size_t Rows>
KVCACHE_NOINLINE void dot_logits(const float* q, std::size_t dim, const decode_stream& k, std::size_t tokens,
                                 float factor, float* logits) noexcept {
  constexpr std::size_t together = lanes / Rows;
  constexpr std::size_t bytes = 4 * lanes;
  decode_lines<times_asked(Rows)> lines(k, 2 * dim);
  float* to = logits;  // of `half`, whose place is written twice where nothing is in it yet
  vec half[lanes / 2];
  KVCACHE_UNROLL
  for (std::size_t i = 0; i < lanes / 2; ++i) half[i] = set1(0.0f);
  for (std::size_t t = 0; t < tokens; t += together) {
    vec sum[lanes];
    KVCACHE_UNROLL
    for (std::size_t i = 0; i < lanes; ++i) sum[i] = set1(0.0f);
    const float* query = q;
    std::size_t at = 0;
    for (; at + bytes <= 2 * dim; at += bytes, query += Rows * lanes) {
      lines.ask(bytes * together);
      add_keys<Rows>(sum, query, k, t, at);
      if (at == 0) store(to, mul(sums_of_halves(half), set1(factor)));
    }
    if (at < 2 * dim) {  // head_dim is a multiple of 16
      lines.ask(bytes / 2 * together);
      add_keys<Rows, true>(sum, query, k, t, at);
      if (at == 0) store(to, mul(sums_of_halves(half), set1(factor)));
    }
    halve(sum, half);
    to = logits + t * Rows;
  }
  store(to, mul(sums_of_halves(half), set1(factor)));
}

/// Where the words of a vector of weights, [token, row], go to lie as [pair of tokens, row, token of the pair].
template <std::size_t Rows>
struct pair_order {
  std::uint16_t from[lanes];
  constexpr pair_order() : from() {
    for (std::size_t i = 0; i < lanes; ++i)
      from[i] = static_cast<std::uint16_t>((i / (2 * Rows) * 2 + i % 2) * Rows + i / 2 % Rows);
  }
};

/// Weights [token, row] as pairs of bf16, [pair of tokens, row]; total[lane] += the rounded weights of its row.
template <std::size_t Rows>
KVCACHE_ALWAYS_INLINE void pair_weights(const float* weights, std::size_t tokens, std::uint32_t* to,
                                        float* total) noexcept {
  static constexpr pair_order<Rows> order;
  const __m256i places = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(order.from));
  vec sum = load(total);
  for (std::size_t i = 0; i < tokens * Rows; i += lanes) {
    const vec weight = round_to_bf16(load(weights + i));
    sum = add(sum, weight);
    const __m256i words = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(weight), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i / 2), _mm256_permutexvar_epi16(places, words));
  }
  store(total, sum);
}

/// sum[row, vector] += weight * value, of two tokens whose values are at `first` and `second`.
template <std::size_t Rows, std::size_t Pairs, std::size_t Vectors>
KVCACHE_ALWAYS_INLINE void add_two(vec (&sum)[Rows][Vectors], const std::uint32_t* weights, const std::byte* first,
                                   const std::byte* second) noexcept {
  pair_vec x[Vectors];
  if constexpr (Pairs == 0) {
    x[0] = interleave_half(load_half(first), load_half(second));
  } else {
    KVCACHE_UNROLL
    for (std::size_t c = 0; c < Pairs; ++c) {
      const pair_vec a = load_pairs(first + c * 4 * lanes);
      const pair_vec b = load_pairs(second + c * 4 * lanes);
      x[2 * c] = interleave_low(a, b);
      x[2 * c + 1] = interleave_high(a, b);
    }
  }
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    const pair_vec weight = set1_pair(weights + r);
    KVCACHE_UNROLL
    for (std::size_t c = 0; c < Vectors; ++c) sum[r][c] = dot(sum[r][c], weight, x[c]);
  }
}

/// output[row] += weight * v for a run of Rows rows, over Pairs pairs of vectors from dim `d` on, or over the one
/// vector that is left where Pairs is 0. `output` begins with `d`.
template <std::size_t Rows, std::size_t Pairs>
KVCACHE_ALWAYS_INLINE void dot_columns(const std::uint32_t* weights, std::size_t d, const decode_stream& v,
                                       std::size_t tokens, decode_lines<times_asked(Rows)>& lines,
                                       float* output) noexcept {
  constexpr std::size_t vectors = Pairs == 0 ? 1 : 2 * Pairs;
  constexpr std::size_t per_row = Pairs == 0 ? lanes : 2 * lanes;
  constexpr std::size_t bytes = vectors * lanes * 2;
  static constexpr std::byte nothing[bytes]{};
  const auto place = [](std::size_t r, std::size_t c) noexcept {
    return c / 2 * (Rows * per_row) + r * per_row + c % 2 * lanes;
  };
  vec sum[Rows][vectors];
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    KVCACHE_UNROLL
    for (std::size_t c = 0; c < vectors; ++c) sum[r][c] = load(output + place(r, c));
  }
  std::size_t t = 0;
  for (; t + 2 <= tokens; t += 2, weights += Rows) {
    lines.ask(2 * bytes);
    add_two<Rows, Pairs>(sum, weights, v.token(t) + d * 2, v.token(t + 1) + d * 2);
  }
  if (t < tokens) add_two<Rows, Pairs>(sum, weights, v.token(t) + d * 2, nothing);
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    KVCACHE_UNROLL
    for (std::size_t c = 0; c < vectors; ++c) store(output + place(r, c), sum[r][c]);
  }
}

/// output[row] += weight * v for a run of rows, and total[lane] += the weights of the row that the lane is of, both
/// with weights rounded to bf16.
template <std::size_t Rows>
KVCACHE_NOINLINE void dot_values(const float* weights, const decode_stream& v, std::size_t tokens, float* output,
                                 std::size_t dim, float* total) noexcept {
  constexpr std::size_t pair = 2 * lanes;
  constexpr std::size_t most = Rows == 8 ? 1 : Rows == 4 ? 2 : 4;
  std::uint32_t paired[cpu::decode_chunk / 2 * Rows];
  pair_weights<Rows>(weights, tokens, paired, total);
  decode_lines<times_asked(Rows)> lines(v, 2 * dim);
  std::size_t d = 0;
  for (; d + most * pair <= dim; d += most * pair)
    dot_columns<Rows, most>(paired, d, v, tokens, lines, output + d * Rows);
  if constexpr (most > 2)
    for (; d + 2 * pair <= dim; d += 2 * pair) dot_columns<Rows, 2>(paired, d, v, tokens, lines, output + d * Rows);
  if constexpr (most > 1)
    for (; d + pair <= dim; d += pair) dot_columns<Rows, 1>(paired, d, v, tokens, lines, output + d * Rows);
  if (d < dim) dot_columns<Rows, 0>(paired, d, v, tokens, lines, output + d * Rows);
}

inline constexpr decode_products dot_products{{dot_logits<1>, dot_logits<2>, dot_logits<4>, dot_logits<8>},
                                              {dot_values<1>, dot_values<2>, dot_values<4>, dot_values<8>},
                                              decode_order::pairs};
