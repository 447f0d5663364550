// SPDX-License-Identifier: Apache-2.0
// Attention over one unit of work, written against the vector interface of the namespace that it is included into.
// Included once for each instruction set, between that set's BEGIN and END, so that all of it is compiled for the set.
//
// Rows (query tokens times group) stand in the lanes from the logits on, so the softmax of a row never leaves its lane:
// its result depends on its own query and tokens only, whatever rows are beside it. Tokens go by in chunks, counted
// from the sequence's first.

/// 2^x, to 1.2 units in the last place for x in [-126, 128); 0 below. 2^x = 2^n * 2^f with n whole and |f| <= 1/2,
/// the latter by a polynomial fitted at Chebyshev nodes. Exactly 1 at 0. No number stays none.
KVCACHE_ALWAYS_INLINE vec exp2(vec x) noexcept {
  x = larger(set1(-1000.0f), x);
  const vec n = round(x);
  const vec f = sub(x, n);
  vec p = set1(0.00015453163359779865f);
  p = fma(p, f, set1(0.0013390863314270973f));
  p = fma(p, f, set1(0.009618083015084267f));
  p = fma(p, f, set1(0.055503569543361664f));
  p = fma(p, f, set1(0.24022650718688965f));
  p = fma(p, f, set1(0.6931471824645996f));
  p = fma(p, f, set1(1.0f));
  return scale(p, n);
}

/// tanh(x): near 0 an odd polynomial fitted at Chebyshev nodes, elsewhere 1 - 2 / (e^2x + 1).
KVCACHE_ALWAYS_INLINE vec tanh(vec x) noexcept {
  const vec square = mul(x, x);
  vec p = set1(-0.006096714176237583f);
  p = fma(p, square, set1(0.020997179672122f));
  p = fma(p, square, set1(-0.05385090783238411f));
  p = fma(p, square, set1(0.1333276927471161f));
  p = fma(p, square, set1(-0.333333283662796f));
  const vec small_x = fma(mul(p, square), x, x);
  const vec bounded = smaller(set1(10.0f), larger(set1(-10.0f), x));
  const vec power = exp2(mul(bounded, set1(2 * log2_e)));
  const vec large_x = sub(set1(1.0f), div(set1(2.0f), add(power, set1(1.0f))));
  return select(less(magnitude(x), set1(0.625f)), small_x, large_x);
}

/// A masked logit. Finite, so that no arithmetic needs infinities; told from the real ones by `masked_below`.
inline constexpr float masked_logit = -3.4e38f;
inline constexpr float masked_below = -3.3e38f;
/// A row's maximum is followed only when it grows by more than this, in base 2: then the sums so far are scaled.
/// Weights stay below 2^8, so nothing is lost (the lazy rescale of Dao et al.'s later FlashAttention kernels).
inline constexpr float rescale_threshold = 8.0f;

/// c[row_block, Vectors * lanes] (+)= a[row_block, depth] * b[depth, Vectors * lanes].
template <std::size_t Vectors>
KVCACHE_ALWAYS_INLINE void multiply_block(float* c, std::size_t c_row, const float* a, std::size_t a_row,
                                          std::size_t a_step, const float* b, std::size_t b_row, std::size_t depth,
                                          bool add_to) noexcept {
  vec sum[row_block][Vectors];
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < row_block; ++r) {
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) sum[r][v] = add_to ? load(c + r * c_row + v * lanes) : set1(0.0f);
  }
  for (std::size_t k = 0; k < depth; ++k) {
    vec right[Vectors];
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) right[v] = load(b + k * b_row + v * lanes);
    KVCACHE_UNROLL
    for (std::size_t r = 0; r < row_block; ++r) {
      const vec left = set1(a[r * a_row + k * a_step]);
      KVCACHE_UNROLL
      for (std::size_t v = 0; v < Vectors; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < row_block; ++r) {
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) store(c + r * c_row + v * lanes, sum[r][v]);
  }
}

/// c[rows, columns] (+)= a[rows, depth] * b[depth, columns]; rows a multiple of row_block, columns of lanes. Element
/// (r, k) of a lies at a[r * a_row + k * a_step].
KVCACHE_NOINLINE inline void multiply(float* c, std::size_t c_row, std::size_t rows, std::size_t columns,
                                      const float* a, std::size_t a_row, std::size_t a_step, const float* b,
                                      std::size_t b_row, std::size_t depth, bool add_to) noexcept {
  for (std::size_t column = 0; column < columns;) {
    const std::size_t vectors = (columns - column) / lanes;
    for (std::size_t row = 0; row < rows; row += row_block) {
      float* const to = c + row * c_row + column;
      const float* const left = a + row * a_row;
      if (vectors >= 3)
        multiply_block<3>(to, c_row, left, a_row, a_step, b + column, b_row, depth, add_to);
      else if (vectors == 2)
        multiply_block<2>(to, c_row, left, a_row, a_step, b + column, b_row, depth, add_to);
      else
        multiply_block<1>(to, c_row, left, a_row, a_step, b + column, b_row, depth, add_to);
    }
    column += (vectors < 3 ? vectors : 3) * lanes;
  }
}

/// One K or V vector as floats, padded with zeros to whole vectors.
template <class T>
KVCACHE_ALWAYS_INLINE void widen_row(const std::byte* from, std::size_t dim, float* to) noexcept {
  std::size_t d = 0;
  for (; d + lanes <= dim; d += lanes) store(to + d, widen<T>(from + d * sizeof(T)));
  if (d < cpu::padded(dim)) {
    T rest[cpu::padding] = {};
    std::memcpy(rest, from + d * sizeof(T), (dim - d) * sizeof(T));
    for (std::size_t i = 0; d + i < cpu::padded(dim); i += lanes)
      store(to + d + i, widen<T>(reinterpret_cast<const std::byte*>(rest + i)));
  }
}

/// One query of one head as floats, padded with zeros to whole vectors.
inline void read_query(const attention_call& call, std::uint32_t row, std::uint32_t head, float* to) noexcept {
  const std::int64_t first = row * call.q.row_stride + head * call.q.head_stride;
  if (call.q_dtype == dtype_id::float32)
    widen_row<f32>(call.q.data + first * 4, call.q.head_dim, to);
  else if (call.q_dtype == dtype_id::float16)
    widen_row<f16>(call.q.data + first * 2, call.q.head_dim, to);
  else
    widen_row<bf16>(call.q.data + first * 2, call.q.head_dim, to);
}

/// Whether any of `count` floats is infinite or no number, by bits.
inline bool not_finite(const float* x, std::size_t count) noexcept {
  bool found = false;
  for (std::size_t i = 0; i < count; ++i) found |= (std::bit_cast<std::uint32_t>(x[i]) & 0x7f80'0000u) == 0x7f80'0000u;
  return found;
}

/// The rows of one tile and kv head, on their way through the tokens of one unit.
struct tile_rows {
  const attention_call& call;
  const planned_sequence& sequence;
  const query_tile& tile;
  const work_unit& unit;
  const block_id* table;
  std::uint32_t group;
  std::size_t count;  // query tokens times group
  std::size_t rows;   // count, padded
  std::size_t dim;    // padded
  std::size_t dim_v;  // padded
  float* queries;     // [dim, rows], scaled
  float* output;      // [rows, dim_v]
  float* logits;      // [chunk, rows]
  float* allowed;     // [chunk, rows], 1 where the mask lets through
  float* keys;        // [chunk, dim]
  float* values;      // [chunk, dim_v]
  float* top;         // [rows] each, from here on
  float* total;
  float* factor;
  float* first_token;  // the row sees [first_token, end_token) of the chunk
  float* end_token;
  float* slope;
  float* distance;  // from the chunk's first token to the row's position

  [[nodiscard]] visible_range visible_to(std::uint32_t row) const noexcept {
    const visible_range r = visible(call.features, call.values.window, sequence.position(row), sequence.kv_length);
    const std::uint32_t begin = r.begin > unit.kv_begin ? r.begin : unit.kv_begin;
    const std::uint32_t end = r.end < unit.kv_end ? r.end : unit.kv_end;
    return begin < end ? visible_range{begin, end} : visible_range{};
  }

  void start(std::uint32_t kv_head) noexcept {
    const float factor_of_q = call.features.soft_cap ? call.scale : call.scale * log2_e;
    std::memset(queries, 0, dim * rows * sizeof(float));
    for (std::size_t r = 0; r < count; ++r) {
      const std::uint32_t row = tile.query_begin + static_cast<std::uint32_t>(r / group);
      const std::uint32_t head = kv_head * group + static_cast<std::uint32_t>(r % group);
      read_query(call, row, head, keys);
      for (std::size_t d = 0; d < call.q.head_dim; ++d) queries[d * rows + r] = keys[d] * factor_of_q;
    }
    std::memset(output, 0, rows * dim_v * sizeof(float));
    for (std::size_t r = 0; r < rows; ++r) {
      top[r] = masked_logit;
      total[r] = 0;
      slope[r] = call.features.alibi && r < count ? call.values.alibi_slopes[kv_head * group + r % group] * log2_e : 0;
    }
  }

  /// Reads the chunk's tokens [begin, end).
  template <class K, class V>
  void read(std::uint32_t kv_head, std::uint32_t begin, std::uint32_t end) noexcept {
    const std::uint32_t block_size = call.kv.block_size;
    std::size_t n = 0;
    for (std::uint32_t t = begin; t < end; ++t, ++n) {
      const block_id entry = table[t / block_size];
      widen_row<K>(call.kv.k_at(entry, t % block_size, kv_head), call.kv.head_dim, keys + n * dim);
      widen_row<V>(call.kv.v_at(entry, t % block_size, kv_head), call.kv.head_dim_v, values + n * dim_v);
    }
    for (; n % row_block != 0; ++n) std::memset(keys + n * dim, 0, dim * sizeof(float));
  }

  /// Asks for the tokens [begin, end), to be read next.
  void prefetch(std::uint32_t kv_head, std::uint32_t begin, std::uint32_t end) const noexcept {
    const std::uint32_t block_size = call.kv.block_size;
    const std::size_t k_bytes = call.kv.head_dim * std::size_t{bits(call.kv.k_dtype)} / 8;
    const std::size_t v_bytes = call.kv.head_dim_v * std::size_t{bits(call.kv.v_dtype)} / 8;
    for (std::uint32_t t = begin; t < end; ++t) {
      const block_id entry = table[t / block_size];
      const std::byte* const k = call.kv.k_at(entry, t % block_size, kv_head);
      const std::byte* const v = call.kv.v_at(entry, t % block_size, kv_head);
      for (std::size_t b = 0; b < k_bytes; b += 64) KVCACHE_PREFETCH(k + b);
      for (std::size_t b = 0; b < v_bytes; b += 64) KVCACHE_PREFETCH(v + b);
    }
  }

  /// What each row sees of the tokens [begin, end). Returns whether every row sees all of them.
  bool bound(std::uint32_t begin, std::uint32_t end) noexcept {
    bool all = !call.features.mask;
    for (std::size_t r = 0; r < rows; ++r) {
      const std::uint32_t row = tile.query_begin + static_cast<std::uint32_t>((r < count ? r : count - 1) / group);
      const visible_range range = visible_to(row);
      const std::uint32_t from = range.begin > begin ? (range.begin < end ? range.begin : end) : begin;
      const std::uint32_t to = range.end > begin ? (range.end < end ? range.end : end) : begin;
      all = all && from == begin && to == end;
      first_token[r] = static_cast<float>(from - begin) - 0.5f;
      end_token[r] = static_cast<float>(to - begin) - 0.5f;
      distance[r] = static_cast<float>(sequence.position(row) - begin);
      if (call.features.mask) {
        for (std::uint32_t t = begin; t < end; ++t)
          allowed[(t - begin) * rows + r] = call.values.mask.sees(row, t) ? 1.0f : 0.0f;
      }
    }
    return all;
  }

  /// Logits of `tokens` tokens become weights; maxima and sums follow. Returns whether a row's sums have to be scaled.
  bool weigh(std::size_t tokens, bool all_visible) noexcept {
    const variant_features f = call.features;
    const vec cap = set1(call.values.soft_cap * log2_e);
    const vec per_cap = set1(f.soft_cap ? 1.0f / call.values.soft_cap : 0.0f);
    const vec none = set1(masked_logit);
    bool scaled = false;
    for (std::size_t r = 0; r < rows; r += lanes) {
      vec largest = none;
      for (std::size_t t = 0; t < tokens; ++t) {
        vec x = load(logits + t * rows + r);
        const vec at = set1(static_cast<float>(t));
        if (f.soft_cap) x = mul(cap, tanh(mul(x, per_cap)));
        if (f.alibi) x = sub(x, mul(load(slope + r), magnitude(sub(load(distance + r), at))));
        if (!all_visible) {
          mask seen = both(less(load(first_token + r), at), less(at, load(end_token + r)));
          if (f.mask) seen = both(seen, less(set1(0.5f), load(allowed + t * rows + r)));
          x = select(seen, x, none);
        }
        if (f.soft_cap || f.alibi || !all_visible) store(logits + t * rows + r, x);
        largest = larger(x, largest);
      }
      const vec before = load(top + r);
      const mask grown = less(add(before, set1(rescale_threshold)), largest);
      vec now = before;
      if (any(grown)) {
        now = select(grown, largest, before);
        const vec shrink = exp2(sub(before, now));
        store(top + r, now);
        store(factor + r, shrink);
        store(total + r, mul(load(total + r), shrink));
        scaled = true;
      } else {
        store(factor + r, set1(1.0f));
      }
      vec sum = load(total + r);
      for (std::size_t t = 0; t < tokens; ++t) {
        const vec x = load(logits + t * rows + r);
        vec weight = exp2(sub(x, now));
        if (!all_visible) weight = select(less(x, set1(masked_below)), set1(0.0f), weight);
        store(logits + t * rows + r, weight);
        sum = add(sum, weight);
      }
      store(total + r, sum);
    }
    return scaled;
  }

  void rescale() noexcept {
    for (std::size_t r = 0; r < count; ++r) {
      if (factor[r] == 1.0f) continue;
      const vec by = set1(factor[r]);
      for (std::size_t d = 0; d < dim_v; d += lanes)
        store(output + r * dim_v + d, mul(load(output + r * dim_v + d), by));
    }
  }

  /// Adds weight * value of every token that a row sees. Values that no row may touch are not touched: a weight of 0
  /// would turn an infinity into no number.
  void add_values(std::size_t tokens, bool all_visible) noexcept {
    if (all_visible || !not_finite(values, tokens * dim_v)) {
      const std::size_t whole = (count + row_block - 1) / row_block * row_block;
      multiply(output, dim_v, whole, dim_v, logits, 1, rows, values, dim_v, tokens, true);
      return;
    }
    for (std::size_t r = 0; r < count; ++r) {
      for (std::size_t t = 0; t < tokens; ++t) {
        if (std::bit_cast<std::uint32_t>(logits[t * rows + r]) == 0) continue;
        const vec weight = set1(logits[t * rows + r]);
        for (std::size_t d = 0; d < dim_v; d += lanes)
          store(output + r * dim_v + d, fma(weight, load(values + t * dim_v + d), load(output + r * dim_v + d)));
      }
    }
  }

  void finish(std::uint32_t kv_head) noexcept {
    for (std::size_t r = 0; r < count; ++r) {
      float* const o = output + r * dim_v;
      float lse = empty_lse();
      if (std::bit_cast<std::uint32_t>(total[r]) == 0) {
        std::memset(o, 0, dim_v * sizeof(float));
      } else {
        const vec by = set1(total[r]);
        for (std::size_t d = 0; d < dim_v; d += lanes) store(o + d, div(load(o + d), by));
        lse = top[r] + std::log2(total[r]);
      }
      cpu::leave_row(call, tile, unit, tile.query_begin + static_cast<std::uint32_t>(r / group),
                     kv_head * group + static_cast<std::uint32_t>(r % group), o, lse);
    }
  }
};

/// The rows of a tile, kv head by kv head, over the unit's tokens.
template <class K, class V>
void run_tile(const attention_call& call, const work_unit& unit, float* scratch) noexcept {
  const attention_plan& plan = *call.plan;
  const query_tile& tile = plan.tiles()[unit.tile];
  const planned_sequence& sequence = plan.sequences()[tile.sequence];
  const cpu::tile_scratch at(tile.query_end - tile.query_begin,
                             {call.q.heads, call.kv.kv_heads, call.kv.head_dim, call.kv.head_dim_v});
  const std::uint32_t group = call.q.heads / call.kv.kv_heads;
  float* const per_row = scratch + at.per_row();
  tile_rows rows{call,
                 sequence,
                 tile,
                 unit,
                 plan.blocks().data() + sequence.first_block,
                 group,
                 (tile.query_end - tile.query_begin) * std::size_t{group},
                 at.rows,
                 at.dim,
                 at.dim_v,
                 scratch + at.queries(),
                 scratch + at.output(),
                 scratch + at.logits(),
                 scratch + at.allowed(),
                 scratch + at.keys(),
                 scratch + at.values(),
                 per_row,
                 per_row + at.rows,
                 per_row + 2 * at.rows,
                 per_row + 3 * at.rows,
                 per_row + 4 * at.rows,
                 per_row + 5 * at.rows,
                 per_row + 6 * at.rows};

  const visible_range seen = visible_to_tile(call.features, call.values.window, sequence, tile);
  const std::uint32_t begin = seen.begin > unit.kv_begin ? seen.begin : unit.kv_begin;
  const std::uint32_t end = seen.end < unit.kv_end ? seen.end : unit.kv_end;

  for (std::uint32_t kv_head = 0; kv_head < call.kv.kv_heads; ++kv_head) {
    rows.start(kv_head);
    for (std::uint32_t from = begin; from < end;) {
      const std::uint32_t to = end - from <= kv_chunk - from % kv_chunk ? end : from - from % kv_chunk + kv_chunk;
      rows.read<K, V>(kv_head, from, to);
      const std::uint32_t next = end - to < kv_chunk ? end : to + kv_chunk;
      rows.prefetch(kv_head, to, next);
      const std::size_t tokens = to - from;
      const std::size_t whole = (tokens + row_block - 1) / row_block * row_block;
      multiply(rows.logits, rows.rows, whole, rows.rows, rows.keys, rows.dim, 1, rows.queries, rows.rows,
               call.kv.head_dim, false);
      const bool all_visible = rows.bound(from, to);
      if (rows.weigh(tokens, all_visible)) rows.rescale();
      rows.add_values(tokens, all_visible);
      from = to;
    }
    rows.finish(kv_head);
  }
}
