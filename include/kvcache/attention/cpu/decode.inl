// SPDX-License-Identifier: Apache-2.0
// Decoding: one query token of every head over the unit's tokens. Tokens outside, kv heads inside. A row's maximum and
// sum stand in every lane that is its own.

/// Element i of a vector is element natural_place<Order>(i) from where the vector begins among the row's.
template <decode_order Order>
[[nodiscard]] constexpr std::size_t natural_place(std::size_t i) noexcept {
  if constexpr (Order == decode_order::even_odd) return 2 * i;
  if constexpr (Order == decode_order::pairs) return i / 4 * 8 + i % 4;
  return i;
}
template <decode_order Order>
using order_constant = std::integral_constant<decode_order, Order>;

/// A row's elements among the queries or outputs of a run. Calls f(pointer to the run's elements, pointer to the row's,
/// order_constant), each for `lanes` elements.
template <decode_order Order, class F>
KVCACHE_ALWAYS_INLINE void each_vector(float* run, float* natural, std::size_t row, std::size_t rows, std::size_t dim,
                                       const F& f) noexcept {
  constexpr std::size_t pair = 2 * lanes;
  constexpr std::size_t second = Order == decode_order::natural ? lanes : Order == decode_order::even_odd ? 1 : 4;
  std::size_t d = 0;
  for (; d + pair <= dim; d += pair) {
    float* const at = run + d * rows + row * pair;
    f(at, natural + d, order_constant<Order>{});
    f(at + lanes, natural + d + second, order_constant<Order>{});
  }
  if (d < dim) f(run + d * rows + row * lanes, natural + d, order_constant<decode_order::natural>{});
}
template <class F>
KVCACHE_ALWAYS_INLINE void each_vector(decode_order order, float* run, float* natural, std::size_t row,
                                       std::size_t rows, std::size_t dim, const F& f) noexcept {
  if (order == decode_order::pairs) return each_vector<decode_order::pairs>(run, natural, row, rows, dim, f);
  if (order == decode_order::even_odd) return each_vector<decode_order::even_odd>(run, natural, row, rows, dim, f);
  each_vector<decode_order::natural>(run, natural, row, rows, dim, f);
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
  float* total;           // [lanes], to be summed over the lanes of a row; the products with V add to it
  float* output;          // [Rows, dim_v]
  std::size_t dim_v;

  /// Logits of `tokens` tokens become weights; maxima follow, totals and outputs are scaled where one has grown.
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
    const mask grown = less(add(before, set1(rescale_threshold)), largest);
    if (any(grown)) {
      now = select(grown, largest, before);
      const vec shrink = exp2(sub(before, now));
      store(top, now);
      store(total, mul(load(total), shrink));
      float factor[lanes];
      store(factor, shrink);
      for (std::size_t r = 0; r < Rows; ++r) {
        if (factor[r] == 1.0f) continue;
        const vec by = set1(factor[r]);
        each_vector<decode_order::natural>(output, output, r, Rows, dim_v,
                                           [&](float* at, const float*, auto) { store(at, mul(load(at), by)); });
      }
    }
    for (std::size_t i = 0; i < whole; i += lanes) {
      const vec x = load(logits + i);
      const vec weight = select(less(x, set1(masked_below)), set1(0.0f), exp2(sub(x, now)));
      store(logits + i, weight);
    }
  }
};

struct decoder {
  const attention_call& call;
  const decode_products& k_products;
  const decode_products& v_products;
  std::uint32_t row;  // of the step
  float factor;       // of the logits
  float* queries;     // [heads, dim], floats or bf16
  float* output;      // [heads, dim_v], the same
  float* top;         // [heads, padding] each; a run uses the place of its first head
  float* total;
  float* slope;
  float* logits;
  float* distance;  // [4, chunk * 8], for runs of 1, 2, 4 and 8 rows
  float* natural;   // one row
  float* keys;      // [chunk, dim] each, where K and V are not read where they lie
  float* values;
  float* shift;  // [heads], joins logits before the soft cap

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
    each_run([&](std::uint32_t head, std::uint32_t rows) {
      float* const run = queries + head * dim;
      for (std::uint32_t r = 0; r < rows; ++r) {
        if (k_products.order == decode_order::pairs) {
          copy_pairs(head + r, run, r, rows);
          continue;
        }
        read_query(call, row, head + r, natural);
        each_vector(k_products.order, run, natural, r, rows, dim, [&](float* to, const float* from, auto order) {
          for (std::size_t i = 0; i < lanes; ++i) to[i] = from[natural_place<order>(i)];
        });
      }
    });
    std::memset(output, 0, call.q.heads * std::size_t{call.kv.head_dim_v} * sizeof(float));
    for (std::size_t i = 0; i < call.q.heads * cpu::padding; ++i) {
      top[i] = masked_logit;
      total[i] = 0;
    }
    for (std::uint32_t head = 0; shifts() && head < call.q.heads; ++head)
      shift[head] = cpu::key_shift(call, row, head) * call.scale;
    if (!call.features.alibi) return;
    each_run([&](std::uint32_t head, std::uint32_t rows) {
      for (std::uint32_t i = 0; i < cpu::padding; ++i)
        slope[head * cpu::padding + i] = call.values.alibi_slopes[head + i % rows] * log2_e;
    });
  }

  /// Whether logits want what the keys' offset took from them.
  [[nodiscard]] bool shifts() const noexcept { return call.features.soft_cap && call.kv.key_offset != nullptr; }

  /// A query of bf16 as pairs, [vector of pairs, row, place], padded with zeros.
  void copy_pairs(std::uint32_t head, float* run, std::size_t r, std::size_t rows) const noexcept {
    constexpr std::size_t vector = lanes * sizeof(float);
    const std::byte* from = call.q.data + (row * call.q.row_stride + head * call.q.head_stride) * std::int64_t{2};
    auto* to = reinterpret_cast<std::byte*>(run + r * lanes);
    for (std::size_t left = call.kv.head_dim * std::size_t{2}; left != 0; to += rows * vector) {
      const std::size_t bytes = left < vector ? left : vector;
      std::memset(to, 0, vector);
      std::memcpy(to, from, bytes);
      from += bytes;
      left -= bytes;
    }
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
    k_products.logits[power](queries + head * std::size_t{call.kv.head_dim}, call.kv.head_dim, k, tokens, factor,
                             logits);
    if (shifts())
      for (std::size_t i = 0; i < tokens * Rows; ++i) logits[i] += shift[head + i % Rows];
    decode_rows rows{call,
                     logits,
                     distance + power * cpu::decode_chunk * 8,
                     slope + head * cpu::padding,
                     top + head * cpu::padding,
                     total + head * cpu::padding,
                     out,
                     dim_v};
    rows.template weigh<Rows>(tokens);
    v_products.values[power](logits, v, tokens, out, dim_v, rows.total);
  }

  /// All heads over `tokens`; `next` follow them.
  void go_through(const decode_tokens& tokens, const decode_tokens& next) noexcept {
    const bool again = asks_again();
    const std::uint32_t group = call.q.heads / call.kv.kv_heads;
    each_run([&](std::uint32_t head, std::uint32_t rows) {
      const std::int64_t at = head / group;
      const std::int64_t heads = call.kv.kv_heads;
      const bool asked = head % group != 0;  // by the group's first run
      const auto stream = [&](const std::byte* const* now, const std::byte* const* then, std::int64_t step) noexcept {
        const auto from = [&](std::int64_t which) noexcept {
          return which < heads ? decode_head{now, which * step} : decode_head{then, which % heads * step};
        };
        const decode_head here = from(at);
        return asked ? decode_stream{here, {here, here, here}}
                     : decode_stream{here, {from(at + 1), from(at + heads), from(at + 2)}, again};
      };
      const decode_stream k = stream(tokens.k, next.k, call.kv.k.head_stride);
      const decode_stream v = stream(tokens.v, next.v, call.kv.v.head_stride);
      if (rows == 8) run<8>(head, tokens.count, k, v);
      if (rows == 4) run<4>(head, tokens.count, k, v);
      if (rows == 2) run<2>(head, tokens.count, k, v);
      if (rows == 1) run<1>(head, tokens.count, k, v);
    });
  }

  /// The same by way of floats, for K and V of any dtype: each head of a token becomes floats once for its whole group.
  void go_through_floats(const decode_tokens& tokens, const decode_tokens& next) noexcept {
    const std::uint32_t group = call.q.heads / call.kv.kv_heads;
    const std::byte* k_rows[cpu::decode_chunk];
    const std::byte* v_rows[cpu::decode_chunk];
    for (std::size_t t = 0; t < cpu::decode_chunk; ++t) {
      const std::size_t row_of = t < tokens.count ? t : 0;
      k_rows[t] = reinterpret_cast<const std::byte*>(keys + row_of * call.kv.head_dim);
      v_rows[t] = reinterpret_cast<const std::byte*>(values + row_of * call.kv.head_dim_v);
    }
    const decode_head k_here{k_rows, 0};
    const decode_head v_here{v_rows, 0};
    const decode_stream k{k_here, {k_here, k_here, k_here}};
    const decode_stream v{v_here, {v_here, v_here, v_here}};
    each_run([&](std::uint32_t head, std::uint32_t rows) {
      if (head % group == 0) widen_tokens(tokens, next, head / group);
      if (rows == 8) run<8>(head, tokens.count, k, v);
      if (rows == 4) run<4>(head, tokens.count, k, v);
      if (rows == 2) run<2>(head, tokens.count, k, v);
      if (rows == 1) run<1>(head, tokens.count, k, v);
    });
  }

  /// One head of the tokens as floats. Asks for what is read one head later.
  void widen_tokens(const decode_tokens& tokens, const decode_tokens& next, std::uint32_t kv_head) noexcept {
    const bool last = kv_head + 1 == call.kv.kv_heads;
    const decode_tokens& ahead = last ? next : tokens;
    const std::uint32_t then = last ? 0 : kv_head + 1;
    const auto ask = [](const stored_head& from, std::uint32_t dim) noexcept {
      const std::size_t bytes = code_bytes(from.dtype, dim);
      for (std::size_t at = 0; at < bytes; at += 64) KVCACHE_PREFETCH(from.codes + at);
      if (from.scales != nullptr) KVCACHE_PREFETCH(from.scales);
    };
    for (std::size_t t = 0; t < tokens.count; ++t) {
      if (t < ahead.count) {
        ask(call.kv.k_head(ahead.entry[t], ahead.offset[t], then), call.kv.head_dim);
        ask(call.kv.v_head(ahead.entry[t], ahead.offset[t], then), call.kv.head_dim_v);
      }
      widen_head(call.kv.k_head(tokens.entry[t], tokens.offset[t], kv_head), call.kv.head_dim,
                 keys + t * call.kv.head_dim);
      widen_head(call.kv.v_head(tokens.entry[t], tokens.offset[t], kv_head), call.kv.head_dim_v,
                 values + t * call.kv.head_dim_v);
    }
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
          each_vector(v_products.order, output + first * dim_v, natural, r, rows, dim_v,
                      [&](const float* from, float* to, auto order) {
                        for (std::size_t i = 0; i < lanes; ++i) to[natural_place<order>(i)] = from[i] / sum[r];
                      });
          lse = top[first * cpu::padding + r] + std::log2(sum[r]);
        }
        cpu::leave_row(call, tile, unit, row, first + r, natural, lse);
      }
    });
  }
};

/// Whether run_decode may take a tile, by way of floats or, where tails allow, straight from the pool.
inline bool can_decode_floats(const attention_call& call, const query_tile& tile) noexcept {
  return !call.plan->options().batch_invariant && tile.query_end - tile.query_begin == 1 &&
         call.q.heads / call.kv.kv_heads < cpu::decode_group && call.kv.head_dim % 16 == 0 &&
         call.kv.head_dim_v % 16 == 0;
}
inline bool can_decode(const attention_call& call, const query_tile& tile) noexcept {
  return can_decode_floats(call, tile) &&
         (call.plan->tail_blocks_needed() == 0 ||
          (call.kv.k.head_stride == call.kv.k_tail.head_stride && call.kv.v.head_stride == call.kv.v_tail.head_stride));
}

[[nodiscard]] inline decoder make_decoder(const attention_call& call, const decode_products& k_products,
                                          const decode_products& v_products, std::uint32_t row,
                                          float* scratch) noexcept {
  const cpu::decode_scratch at({call.q.heads, call.kv.kv_heads, call.kv.head_dim, call.kv.head_dim_v});
  return {call,
          k_products,
          v_products,
          row,
          call.features.soft_cap ? call.scale : call.scale * log2_e,
          scratch + at.queries(),
          scratch + at.output(),
          scratch + at.top(),
          scratch + at.total(),
          scratch + at.slope(),
          scratch + at.logits(),
          scratch + at.distance(),
          scratch + at.row(),
          scratch + at.keys(),
          scratch + at.values(),
          scratch + at.shift()};
}

inline void run_decode(const attention_call& call, const work_unit& unit, float* scratch,
                       const decode_products& k_products, const decode_products& v_products,
                       bool by_floats = false) noexcept {
  const query_tile& tile = call.plan->tiles()[unit.tile];
  const planned_sequence& sequence = call.plan->sequences()[tile.sequence];
  decoder d = make_decoder(call, k_products, v_products, tile.query_begin, scratch);
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
    const decode_tokens& then = next->count != 0 ? *next : *now;
    if (by_floats)
      d.go_through_floats(*now, then);
    else
      d.go_through(*now, then);
    decode_tokens* const done = now;
    now = next;
    next = done;
  }
  d.finish(tile, unit);
}

template <class K, class V>
void run_unit(const attention_call& call, const work_unit& unit, float* scratch) noexcept {
  const query_tile& tile = call.plan->tiles()[unit.tile];
  if constexpr (wide_element<K> && wide_element<V>) {
    if (can_decode(call, tile)) return run_decode(call, unit, scratch, products_of<K>, products_of<V>);
  } else {
    if (can_decode_floats(call, tile)) return run_decode(call, unit, scratch, products_of<f32>, products_of<f32>, true);
  }
  run_tile(call, unit, scratch);
}
