// SPDX-License-Identifier: Apache-2.0
// Decoding: one query token of every head over the unit's tokens, where memory is the limit. Tokens outside, kv heads
// inside; while a head's tokens are worked on, those of the next head are on their way. K and V are read once for the
// whole group, straight from the pool. Included like tile.inl, after it, for vectors of 8 lanes or more.
//
// A group is worked on in runs of Rows = 8, 4, 2 or 1 query heads. Logits lie as [token, row], so a vector holds
// lanes / Rows tokens of each row, and a row's maximum and sum stand in every lane that is its own.

/// Tokens on their way through all heads: where the K and V of head 0 begin. Those behind `count` repeat the first.
struct decode_tokens {
  const std::byte* k[cpu::decode_chunk];
  const std::byte* v[cpu::decode_chunk];
  std::uint32_t position[cpu::decode_chunk];
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

/// Asks for the cache lines of `Bytes` bytes that are read `at` bytes behind `first` one head later.
template <std::size_t Bytes>
KVCACHE_ALWAYS_INLINE void prefetch_ahead(const std::byte* first, std::size_t at) noexcept {
  if constexpr (Bytes >= 64) {
    KVCACHE_UNROLL
    for (std::size_t b = 0; b < Bytes; b += 64) KVCACHE_PREFETCH(first + at + b);
  } else if (at % 64 == 0) {
    KVCACHE_PREFETCH(first + at);
  }
}

/// K or V of one head over the tokens, and what is to be read one head later (or the same, where it was asked for).
struct decode_stream {
  const std::byte* const* now;
  std::int64_t head;
  const std::byte* const* next;
  std::int64_t next_head;

  /// The bytes of token `t` from `at` on; asks for those that will be read there one head later.
  template <std::size_t Bytes>
  [[nodiscard]] KVCACHE_ALWAYS_INLINE const std::byte* read(std::size_t t, std::size_t at) const noexcept {
    prefetch_ahead<Bytes>(next[t] + next_head, at);
    return now[t] + head + at;
  }
};

/// A row's elements among the queries or outputs of a run of `rows` rows, which lie as [pair of vectors, row, place in
/// the pair], what is left as [row, place in the vector], so that one pointer leads through all rows. T is what
/// widen_pair reads: its order is kept. Calls f(pointer to the run's elements, pointer to the row's, step between the
/// row's), each for `lanes` elements.
template <class T, class F>
KVCACHE_ALWAYS_INLINE void each_vector(float* run, float* natural, std::size_t row, std::size_t rows, std::size_t dim,
                                       const F& f) noexcept {
  constexpr std::size_t pair = 2 * lanes;
  constexpr std::size_t step = sorted_pairs<T> ? 2 : 1;
  std::size_t d = 0;
  for (; d + pair <= dim; d += pair) {
    float* const at = run + d * rows + row * pair;
    f(at, natural + d, step);
    f(at + lanes, natural + d + (sorted_pairs<T> ? 1 : lanes), step);
  }
  if (d < dim) f(run + d * rows + row * lanes, natural + d, std::size_t{1});
}

/// logits[token, row] = q . k
template <class K, std::size_t Rows>
KVCACHE_ALWAYS_INLINE void decode_logits(const float* q, std::size_t dim, const decode_stream& k, std::size_t tokens,
                                         float* logits) noexcept {
  constexpr std::size_t together = lanes / Rows;  // tokens
  constexpr std::size_t pair = 2 * lanes;
  for (std::size_t t = 0; t < tokens; t += together) {
    vec sum[lanes];
    KVCACHE_UNROLL
    for (std::size_t i = 0; i < lanes; ++i) sum[i] = set1(0.0f);
    const float* query = q;
    std::size_t d = 0;
    for (; d + pair <= dim; d += pair, query += Rows * pair) {
      // Whatever is fewer stays in registers: the keys of a few tokens, or the queries of a few rows.
      if constexpr (Rows >= 4) {
        vec a[together];
        vec b[together];
        KVCACHE_UNROLL
        for (std::size_t i = 0; i < together; ++i)
          widen_pair<K>(k.read<pair * sizeof(K)>(t + i, d * sizeof(K)), a[i], b[i]);
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
          widen_pair<K>(k.read<pair * sizeof(K)>(t + i, d * sizeof(K)), a, b);
          KVCACHE_UNROLL
          for (std::size_t r = 0; r < Rows; ++r)
            sum[i * Rows + r] =
                fma(b, load(query + r * pair + lanes), fma(a, load(query + r * pair), sum[i * Rows + r]));
        }
      }
    }
    if (d < dim) {  // head_dim is a multiple of 16, so this is one vector
      KVCACHE_UNROLL
      for (std::size_t i = 0; i < together; ++i) {
        const vec a = widen<K>(k.read<lanes * sizeof(K)>(t + i, d * sizeof(K)));
        KVCACHE_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) sum[i * Rows + r] = fma(a, load(query + r * lanes), sum[i * Rows + r]);
      }
    }
    store(logits + t * Rows, sums(sum));
  }
}

/// output[row] += weight * v for `Part` rows of a run of `Rows`, over `Pairs` pairs of vectors from dim `d` on, or over
/// the one vector that is left where Pairs is 0. `weights` and `output` begin with the first of the rows and with `d`.
template <class V, std::size_t Rows, std::size_t Part, std::size_t Pairs>
KVCACHE_ALWAYS_INLINE void decode_columns(const float* weights, std::size_t d, const decode_stream& v,
                                          std::size_t tokens, float* output) noexcept {
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
    const std::byte* const from = v.read<vectors * lanes * sizeof(V)>(t, d * sizeof(V));
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

/// output[row] += weight * v for a run of rows.
template <class V, std::size_t Rows>
KVCACHE_ALWAYS_INLINE void decode_values(const float* weights, const decode_stream& v, std::size_t tokens,
                                         float* output, std::size_t dim) noexcept {
  constexpr std::size_t pair = 2 * lanes;
  constexpr std::size_t part = Rows < head_block ? Rows : head_block;
  constexpr std::size_t pairs = head_block / part < 4 ? head_block / part : 4;
  for (std::size_t r = 0; r < Rows; r += part) {
    std::size_t d = 0;
    for (; d + pairs * pair <= dim; d += pairs * pair)
      decode_columns<V, Rows, part, pairs>(weights + r, d, v, tokens, output + d * Rows + r * pair);
    if constexpr (pairs > 1)
      for (; d + pair <= dim; d += pair)
        decode_columns<V, Rows, part, 1>(weights + r, d, v, tokens, output + d * Rows + r * pair);
    if (d < dim) decode_columns<V, Rows, part, 0>(weights + r, d, v, tokens, output + d * Rows + r * lanes);
  }
}

/// f of each row, in all lanes that are the row's: folds lanes that are Rows, 2 Rows, ... apart.
template <std::size_t Rows, class Fold>
KVCACHE_ALWAYS_INLINE vec fold_rows(vec x, const Fold& f) noexcept {
  if constexpr (Rows <= 1) x = f(x, swap_lanes<1>(x));
  if constexpr (Rows <= 2) x = f(x, swap_lanes<2>(x));
  if constexpr (Rows <= 4) x = f(x, swap_lanes<4>(x));
  if constexpr (Rows <= 8 && lanes > 8) x = f(x, swap_lanes<8>(x));
  return x;
}
struct fold_larger {
  KVCACHE_ALWAYS_INLINE vec operator()(vec a, vec b) const noexcept { return larger(a, b); }
};
struct fold_sum {
  KVCACHE_ALWAYS_INLINE vec operator()(vec a, vec b) const noexcept { return add(a, b); }
};

/// The softmax of a run's rows, and what it needs.
struct decode_rows {
  const attention_call& call;
  float* logits;
  const float* distance;  // as the logits lie
  const float* slope;     // [lanes]
  float* top;             // [lanes]
  float* total;           // [lanes], to be summed over the lanes of a row
  float* output;          // [Rows, dim_v]
  std::size_t dim_v;

  /// Logits of `tokens` tokens become weights; maxima and sums follow, outputs are scaled where a maximum has grown.
  template <std::size_t Rows>
  KVCACHE_ALWAYS_INLINE void weigh(std::size_t tokens) noexcept {
    const std::size_t used = tokens * Rows;
    const std::size_t whole = (used + lanes - 1) / lanes * lanes;
    const variant_features f = call.features;
    for (std::size_t i = used; i < whole; ++i) logits[i] = masked_logit;
    vec largest = set1(masked_logit);
    if (f.soft_cap || f.alibi) {
      const vec cap = set1(call.values.soft_cap * log2_e);
      const vec per_cap = set1(f.soft_cap ? 1.0f / call.values.soft_cap : 0.0f);
      for (std::size_t i = 0; i < whole; i += lanes) {
        vec x = load(logits + i);
        if (f.soft_cap) x = mul(cap, tanh(mul(x, per_cap)));
        if (f.alibi) x = sub(x, mul(load(slope), load(distance + i)));
        store(logits + i, x);
      }
      for (std::size_t i = used; i < whole; ++i) logits[i] = masked_logit;
    }
    for (std::size_t i = 0; i < whole; i += lanes) largest = larger(load(logits + i), largest);
    largest = fold_rows<Rows>(largest, fold_larger{});

    const vec before = load(top);
    vec now = before;
    vec sum = load(total);
    const mask grown = less(add(before, set1(rescale_threshold)), largest);
    if (any(grown)) {
      now = select(grown, largest, before);
      const vec shrink = exp2(sub(before, now));
      store(top, now);
      sum = mul(sum, shrink);
      float factor[lanes];
      store(factor, shrink);
      for (std::size_t r = 0; r < Rows; ++r) {
        if (factor[r] == 1.0f) continue;
        const vec by = set1(factor[r]);
        each_vector<f32>(output, output, r, Rows, dim_v,
                         [&](float* at, const float*, std::size_t) { store(at, mul(load(at), by)); });
      }
    }
    for (std::size_t i = 0; i < whole; i += lanes) {
      const vec x = load(logits + i);
      const vec weight = select(less(x, set1(masked_below)), set1(0.0f), exp2(sub(x, now)));
      store(logits + i, weight);
      sum = add(sum, weight);
    }
    store(total, sum);
  }
};

template <class K, class V>
struct decoder {
  const attention_call& call;
  std::uint32_t row;  // of the step
  float* queries;     // [heads, dim], scaled; a run's heads lie as run_place says
  float* output;      // [heads, dim_v], the same
  float* top;         // [heads, padding] each; a run uses the place of its first head
  float* total;
  float* slope;
  float* logits;
  float* distance;  // [4, chunk * 8], for runs of 1, 2, 4 and 8 rows
  float* natural;   // one row

  template <class F>
  void each_run(const F& f) const noexcept {
    const std::uint32_t group = call.q.heads / call.kv.kv_heads;
    for (std::uint32_t kv_head = 0; kv_head < call.kv.kv_heads; ++kv_head) {
      for (std::uint32_t done = 0; done < group;) {
        const std::uint32_t left = group - done;
        const std::uint32_t rows = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        f(kv_head * group + done, rows);
        done += rows;
      }
    }
  }

  void start() noexcept {
    const std::size_t dim = call.kv.head_dim;
    const float factor = call.features.soft_cap ? call.scale : call.scale * log2_e;
    each_run([&](std::uint32_t head, std::uint32_t rows) {
      float* const run = queries + head * dim;
      for (std::uint32_t r = 0; r < rows; ++r) {
        read_query(call, row, head + r, natural);
        each_vector<K>(run, natural, r, rows, dim, [&](float* to, const float* from, std::size_t step) {
          for (std::size_t i = 0; i < lanes; ++i) to[i] = from[i * step] * factor;
        });
      }
    });
    std::memset(output, 0, call.q.heads * std::size_t{call.kv.head_dim_v} * sizeof(float));
    for (std::size_t i = 0; i < call.q.heads * cpu::padding; ++i) {
      top[i] = masked_logit;
      total[i] = 0;
    }
    if (!call.features.alibi) return;
    each_run([&](std::uint32_t head, std::uint32_t rows) {
      for (std::uint32_t i = 0; i < cpu::padding; ++i)
        slope[head * cpu::padding + i] = call.values.alibi_slopes[head + i % rows] * log2_e;
    });
  }

  void measure_distances(const decode_tokens& tokens, std::int64_t position) noexcept {
    for (std::size_t power = 0; power < 4; ++power) {
      float* const to = distance + power * cpu::decode_chunk * 8;
      for (std::size_t t = 0; t < cpu::decode_chunk; ++t) {
        const auto apart = static_cast<float>(position - tokens.position[t]);
        for (std::size_t r = 0; r < std::size_t{1} << power; ++r) to[(t << power) + r] = apart;
      }
    }
  }

  template <std::size_t Rows>
  KVCACHE_NOINLINE void run(std::uint32_t head, std::size_t tokens, const decode_stream& k,
                            const decode_stream& v) noexcept {
    constexpr std::size_t power = Rows == 8 ? 3 : Rows == 4 ? 2 : Rows == 2 ? 1 : 0;
    const std::size_t dim_v = call.kv.head_dim_v;
    float* const out = output + head * dim_v;
    decode_logits<K, Rows>(queries + head * std::size_t{call.kv.head_dim}, call.kv.head_dim, k, tokens, logits);
    decode_rows rows{call,
                     logits,
                     distance + power * cpu::decode_chunk * 8,
                     slope + head * cpu::padding,
                     top + head * cpu::padding,
                     total + head * cpu::padding,
                     out,
                     dim_v};
    rows.template weigh<Rows>(tokens);
    decode_values<V, Rows>(logits, v, tokens, out, dim_v);
  }

  /// All heads over `tokens`; `next` follow them.
  void go_through(const decode_tokens& tokens, const decode_tokens& next) noexcept {
    const std::uint32_t group = call.q.heads / call.kv.kv_heads;
    const std::int64_t k_step = call.kv.k.head_stride;
    const std::int64_t v_step = call.kv.v.head_stride;
    each_run([&](std::uint32_t head, std::uint32_t rows) {
      const std::int64_t at = head / group;
      const bool asked = head % group != 0;  // by the group's first run
      const bool last = at + 1 == std::int64_t{call.kv.kv_heads};
      const decode_tokens& ahead = last && !asked ? next : tokens;
      const std::int64_t then = asked ? at : last ? 0 : at + 1;
      const decode_stream k{tokens.k, at * k_step, ahead.k, then * k_step};
      const decode_stream v{tokens.v, at * v_step, ahead.v, then * v_step};
      if (rows == 8) run<8>(head, tokens.count, k, v);
      if (rows == 4) run<4>(head, tokens.count, k, v);
      if (rows == 2) run<2>(head, tokens.count, k, v);
      if (rows == 1) run<1>(head, tokens.count, k, v);
    });
  }

  void finish(const query_tile& tile, const work_unit& unit) noexcept {
    const std::size_t dim_v = call.kv.head_dim_v;
    each_run([&](std::uint32_t first, std::uint32_t rows) {
      float sum[8] = {};
      for (std::uint32_t i = 0; i < lanes; ++i) sum[i % rows] += total[first * cpu::padding + i];
      for (std::uint32_t r = 0; r < rows; ++r) {
        float lse = empty_lse();
        if (std::bit_cast<std::uint32_t>(sum[r]) == 0) {
          std::memset(natural, 0, dim_v * sizeof(float));
        } else {
          each_vector<V>(output + first * dim_v, natural, r, rows, dim_v,
                         [&](const float* from, float* to, std::size_t step) {
                           for (std::size_t i = 0; i < lanes; ++i) to[i * step] = from[i] / sum[r];
                         });
          lse = top[first * cpu::padding + r] + std::log2(sum[r]);
        }
        cpu::leave_row(call, tile, unit, row, first + r, natural, lse);
      }
    });
  }
};

/// Whether run_decode may take a tile.
inline bool can_decode(const attention_call& call, const query_tile& tile) noexcept {
  return !call.plan->options().batch_invariant && tile.query_end - tile.query_begin == 1 &&
         call.q.heads / call.kv.kv_heads < cpu::decode_group && call.kv.head_dim % 16 == 0 &&
         call.kv.head_dim_v % 16 == 0 &&
         (call.plan->tail_blocks_needed() == 0 ||
          (call.kv.k.head_stride == call.kv.k_tail.head_stride && call.kv.v.head_stride == call.kv.v_tail.head_stride));
}

template <class K, class V>
void run_decode(const attention_call& call, const work_unit& unit, float* scratch) noexcept {
  const query_tile& tile = call.plan->tiles()[unit.tile];
  const planned_sequence& sequence = call.plan->sequences()[tile.sequence];
  const cpu::decode_scratch at({call.q.heads, call.kv.kv_heads, call.kv.head_dim, call.kv.head_dim_v});
  decoder<K, V> d{call,
                  tile.query_begin,
                  scratch + at.queries(),
                  scratch + at.output(),
                  scratch + at.top(),
                  scratch + at.total(),
                  scratch + at.slope(),
                  scratch + at.logits(),
                  scratch + at.distance(),
                  scratch + at.row()};
  d.start();
  const block_id* const table = call.plan->blocks().data() + sequence.first_block;
  const std::int64_t position = sequence.position(tile.query_begin);
  const visible_range seen = visible_to_tile(call.features, call.values.window, sequence, tile);
  std::uint32_t from = seen.begin > unit.kv_begin ? seen.begin : unit.kv_begin;
  const std::uint32_t end = seen.end < unit.kv_end ? seen.end : unit.kv_end;

  decode_tokens buffers[2];
  decode_tokens* now = &buffers[0];
  decode_tokens* next = &buffers[1];
  take_tokens(call, table, tile.query_begin, from, end, *now);
  while (now->count != 0) {
    take_tokens(call, table, tile.query_begin, from, end, *next);
    if (call.features.alibi) d.measure_distances(*now, position);
    d.go_through(*now, next->count != 0 ? *next : *now);
    decode_tokens* const done = now;
    now = next;
    next = done;
  }
  d.finish(tile, unit);
}

template <class K, class V>
void run_unit(const attention_call& call, const work_unit& unit, float* scratch) noexcept {
  if (can_decode(call, call.plan->tiles()[unit.tile]))
    run_decode<K, V>(call, unit, scratch);
  else
    run_tile<K, V>(call, unit, scratch);
}
