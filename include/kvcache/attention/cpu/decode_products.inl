// SPDX-License-Identifier: Apache-2.0
// What decoding does with K and V where memory is the limit: straight from the pool, once for the whole group, while
// the lines of the next head are on their way. For vectors of 8 lanes or more.
//
// A group is worked on in runs of Rows = 8, 4, 2 or 1 query heads. Logits lie as [token, row], so a vector holds
// lanes / Rows tokens of each row. Queries and outputs lie as [pair of vectors, row, place in the pair], what is left
// as [row, place in the vector], so that one pointer leads through all rows.

/// Tokens on their way through all heads: where the K and V of head 0 begin. Those behind `count` repeat the first.
struct decode_tokens {
  const std::byte* k[cpu::decode_chunk];
  const std::byte* v[cpu::decode_chunk];
  std::uint32_t position[cpu::decode_chunk];
  block_id entry[cpu::decode_chunk];        // of the table
  std::uint32_t offset[cpu::decode_chunk];  // within the block
  std::size_t count = 0;
};

/// Takes the next visible tokens from [at, end); masked ones are never looked at.
inline void take_tokens(const attention_call& call, const block_id* table, std::uint32_t row, std::uint32_t& at,
                        std::uint32_t end, decode_tokens& to) noexcept {
  const std::uint32_t block_size = call.kv.block_size;
  to.count = 0;
  while (at < end && to.count < cpu::decode_chunk) {
    const block_id entry = table[at / block_size];
    const bool tail = (entry & tail_bit) != 0;
    const plane_view& k_plane = tail ? call.kv.k_tail : call.kv.k;
    const plane_view& v_plane = tail ? call.kv.v_tail : call.kv.v;
    std::uint32_t offset = at % block_size;
    const std::byte* k = k_plane.at(entry & ~tail_bit, offset, 0);
    const std::byte* v = v_plane.at(entry & ~tail_bit, offset, 0);
    for (; offset < block_size && at < end && to.count < cpu::decode_chunk; ++offset, ++at) {
      if (!call.features.mask || call.values.mask.sees(row, at)) {
        to.k[to.count] = k;
        to.v[to.count] = v;
        to.position[to.count] = at;
        to.entry[to.count] = entry;
        to.offset[to.count] = offset;
        ++to.count;
      }
      k += k_plane.token_stride;
      v += v_plane.token_stride;
    }
  }
  for (std::size_t i = to.count; to.count != 0 && i < cpu::decode_chunk; ++i) {
    to.k[i] = to.k[0];
    to.v[i] = to.v[0];
    to.position[i] = to.position[0];
  }
}

/// K or V of one head over a chunk of tokens.
struct decode_head {
  const std::byte* const* tokens;
  std::int64_t head;

  [[nodiscard]] KVCACHE_ALWAYS_INLINE const std::byte* token(std::size_t t) const noexcept { return tokens[t] + head; }
};

/// What is read now, and what is read later: one head, a chunk, and two heads ahead.
struct decode_stream : decode_head {
  decode_head ahead[3];
  bool again = false;  // whether to ask more than once
};

/// How often a line is asked for, at most, that `products` vectors are multiplied with: the fewer, the faster memory is
/// wanted.
[[nodiscard]] constexpr std::size_t times_asked(std::size_t products) noexcept {
  return products < 8 ? 3 : products == 8 ? 2 : 1;
}

/// Asks for what comes after a stream, token by token, whatever order the products are made in. Where the
/// processor drops hints that it has no room for, a line is asked for several times, which costs little where it has
/// come.
template <std::size_t Times>
class decode_lines {
 public:
  KVCACHE_ALWAYS_INLINE decode_lines(const decode_stream& s, std::size_t bytes_of_token) noexcept
      : soon_(s.ahead[0]), later_(s.ahead[1]), then_(s.ahead[2]), size_(bytes_of_token), again_(s.again) {}

  /// The caller has gone `bytes` further. Never beyond the stream's end.
  KVCACHE_ALWAYS_INLINE void ask(std::size_t bytes) noexcept {
    for (owed_ += bytes; owed_ >= size_; owed_ -= size_, ++t_) {
      const std::byte* const soon = soon_.token(t_);
      const std::byte* const later = later_.token(t_);
      const std::byte* const then = then_.token(t_);
      if (!again_) {
        for (std::size_t at = 0; at < size_; at += 64) KVCACHE_PREFETCH(soon + at);
        continue;
      }
      for (std::size_t at = 0; at < size_; at += 64) {
        KVCACHE_PREFETCH(soon + at);
        if constexpr (Times > 1) KVCACHE_PREFETCH(later + at);
        if constexpr (Times > 2) KVCACHE_PREFETCH(then + at);
      }
    }
  }
  /// Everything has been asked for: the caller goes through the stream once more.
  KVCACHE_ALWAYS_INLINE void stop() noexcept { size_ = ~std::size_t{0}; }

 private:
  decode_head soon_;
  decode_head later_;
  decode_head then_;
  std::size_t size_;
  std::size_t owed_ = 0;
  std::size_t t_ = 0;
  bool again_;
};

/// logits[token, row] = q . k * factor
template <class K, std::size_t Rows>
KVCACHE_NOINLINE void decode_logits(const float* q, std::size_t dim, const decode_stream& k, std::size_t tokens,
                                    float factor, float* logits) noexcept {
  constexpr std::size_t together = lanes / Rows;  // tokens
  constexpr std::size_t pair = 2 * lanes;
  decode_lines<times_asked(Rows * 64 / (lanes * sizeof(K)))> lines(k, dim * sizeof(K));
  for (std::size_t t = 0; t < tokens; t += together) {
    vec sum[lanes];
    KVCACHE_UNROLL
    for (std::size_t i = 0; i < lanes; ++i) sum[i] = set1(0.0f);
    const float* query = q;
    std::size_t d = 0;
    for (; d + pair <= dim; d += pair, query += Rows * pair) {
      lines.ask(together * pair * sizeof(K));
      // Whatever is fewer stays in registers: the keys of a few tokens, or the queries of a few rows.
      if constexpr (Rows >= 4) {
        vec a[together];
        vec b[together];
        KVCACHE_UNROLL
        for (std::size_t i = 0; i < together; ++i) widen_pair<K>(k.token(t + i) + d * sizeof(K), a[i], b[i]);
        KVCACHE_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
          const vec left = load(query + r * pair);
          KVCACHE_UNROLL
          for (std::size_t i = 0; i < together; ++i) sum[i * Rows + r] = fma(a[i], left, sum[i * Rows + r]);
        }
        KVCACHE_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
          const vec right = load(query + r * pair + lanes);
          KVCACHE_UNROLL
          for (std::size_t i = 0; i < together; ++i) sum[i * Rows + r] = fma(b[i], right, sum[i * Rows + r]);
        }
      } else {
        KVCACHE_UNROLL
        for (std::size_t i = 0; i < together; ++i) {
          vec a;
          vec b;
          widen_pair<K>(k.token(t + i) + d * sizeof(K), a, b);
          KVCACHE_UNROLL
          for (std::size_t r = 0; r < Rows; ++r)
            sum[i * Rows + r] =
                fma(b, load(query + r * pair + lanes), fma(a, load(query + r * pair), sum[i * Rows + r]));
        }
      }
    }
    if (d < dim) {  // head_dim is a multiple of 16, so this is one vector
      lines.ask(together * lanes * sizeof(K));
      KVCACHE_UNROLL
      for (std::size_t i = 0; i < together; ++i) {
        const vec a = widen<K>(k.token(t + i) + d * sizeof(K));
        KVCACHE_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) sum[i * Rows + r] = fma(a, load(query + r * lanes), sum[i * Rows + r]);
      }
    }
    store(logits + t * Rows, mul(sums(sum), set1(factor)));
  }
}

/// output[row] += weight * v for `Part` rows of a run of `Rows`, over `Pairs` pairs of vectors from dim `d` on, or over
/// the one vector that is left where Pairs is 0. `weights` and `output` begin with the first of the rows and with `d`.
template <class V, std::size_t Rows, std::size_t Part, std::size_t Pairs, class Lines>
KVCACHE_ALWAYS_INLINE void decode_columns(const float* weights, std::size_t d, const decode_stream& v,
                                          std::size_t tokens, Lines& lines, float* output) noexcept {
  constexpr std::size_t vectors = Pairs == 0 ? 1 : 2 * Pairs;
  constexpr std::size_t per_row = Pairs == 0 ? lanes : 2 * lanes;
  const auto place = [](std::size_t r, std::size_t c) noexcept {
    return c / 2 * (Rows * per_row) + r * per_row + c % 2 * lanes;
  };
  vec sum[Part][vectors];
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < Part; ++r) {
    KVCACHE_UNROLL
    for (std::size_t c = 0; c < vectors; ++c) sum[r][c] = load(output + place(r, c));
  }
  for (std::size_t t = 0; t < tokens; ++t, weights += Rows) {
    lines.ask(vectors * lanes * sizeof(V));
    const std::byte* const from = v.token(t) + d * sizeof(V);
    vec x[vectors];
    if constexpr (Pairs == 0) {
      x[0] = widen<V>(from);
    } else {
      KVCACHE_UNROLL
      for (std::size_t c = 0; c < Pairs; ++c) widen_pair<V>(from + c * 2 * lanes * sizeof(V), x[2 * c], x[2 * c + 1]);
    }
    KVCACHE_UNROLL
    for (std::size_t r = 0; r < Part; ++r) {
      const vec weight = set1(weights[r]);
      KVCACHE_UNROLL
      for (std::size_t c = 0; c < vectors; ++c) sum[r][c] = fma(weight, x[c], sum[r][c]);
    }
  }
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < Part; ++r) {
    KVCACHE_UNROLL
    for (std::size_t c = 0; c < vectors; ++c) store(output + place(r, c), sum[r][c]);
  }
}

/// output[row] += weight * v for a run of rows, and total[lane] += the weights of the row that the lane is of.
template <class V, std::size_t Rows>
KVCACHE_NOINLINE void decode_values(const float* weights, const decode_stream& v, std::size_t tokens, float* output,
                                    std::size_t dim, float* total) noexcept {
  vec sum = load(total);
  for (std::size_t i = 0; i < tokens * Rows; i += lanes) sum = add(sum, load(weights + i));
  store(total, sum);
  constexpr std::size_t pair = 2 * lanes;
  constexpr std::size_t part = Rows < head_block ? Rows : head_block;
  constexpr std::size_t pairs = head_block / part < 4 ? head_block / part : 4;
  decode_lines<times_asked(Rows * 64 / (lanes * sizeof(V)))> lines(v, dim * sizeof(V));
  for (std::size_t r = 0; r < Rows; r += part) {
    if (r != 0) lines.stop();
    std::size_t d = 0;
    for (; d + pairs * pair <= dim; d += pairs * pair)
      decode_columns<V, Rows, part, pairs>(weights + r, d, v, tokens, lines, output + d * Rows + r * pair);
    if constexpr (pairs > 1)
      for (; d + pair <= dim; d += pair)
        decode_columns<V, Rows, part, 1>(weights + r, d, v, tokens, lines, output + d * Rows + r * pair);
    if (d < dim) decode_columns<V, Rows, part, 0>(weights + r, d, v, tokens, lines, output + d * Rows + r * lanes);
  }
}

/// How the elements of a pair of vectors lie in queries and outputs.
enum class decode_order { natural, even_odd, pairs };

/// The products of one element type, for runs of 1, 2, 4 and 8 rows. All else of decoding is compiled once, whatever
/// the types of K and V.
struct decode_products {
  void (*logits[4])(const float*, std::size_t, const decode_stream&, std::size_t, float, float*) noexcept;
  void (*values[4])(const float*, const decode_stream&, std::size_t, float*, std::size_t, float*) noexcept;
  decode_order order;  // where it is `pairs`, queries are bf16 in their natural order
};
template <class T>
inline constexpr decode_products products_of{
    {decode_logits<T, 1>, decode_logits<T, 2>, decode_logits<T, 4>, decode_logits<T, 8>},
    {decode_values<T, 1>, decode_values<T, 2>, decode_values<T, 4>, decode_values<T, 8>},
    sorted_pairs<T> ? decode_order::even_odd : decode_order::natural};
