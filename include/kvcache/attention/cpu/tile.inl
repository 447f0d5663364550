// SPDX-License-Identifier: Apache-2.0
// A tile over one unit of work.
//
// Rows (query tokens times group) stand in the lanes from the logits on, so the softmax of a row never leaves its lane:
// its result depends on its own query and tokens only, whatever rows are beside it. Tokens go by in chunks, counted
// from the sequence's first.

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
  float* shift;     // joins logits before the soft cap
  float* weights;   // [rows, chunk / 2] pairs of bf16, where products of matrices are

  /// What a row sees of the unit's tokens. Where that is nothing, an empty range on the side where the row's tokens
  /// are, so that from row to row neither begins nor ends go back.
  [[nodiscard]] visible_range visible_to(std::uint32_t row) const noexcept {
    const visible_range r = visible(call.features, call.values.window, sequence.position(row), sequence.kv_length);
    const auto within = [&](std::uint32_t token, std::uint32_t least) noexcept {
      return token < least ? least : token < unit.kv_end ? token : unit.kv_end;
    };
    const std::uint32_t begin = within(r.begin, unit.kv_begin);
    return {begin, within(r.end, begin)};
  }

  /// What at least one row sees of the unit's tokens.
  [[nodiscard]] visible_range visible_to_all() const noexcept {
    const visible_range seen = visible_to_tile(call.features, call.values.window, sequence, tile);
    return {seen.begin > unit.kv_begin ? seen.begin : unit.kv_begin, seen.end < unit.kv_end ? seen.end : unit.kv_end};
  }

  /// All but the queries.
  void start_rows(std::uint32_t kv_head) noexcept {
    std::memset(output, 0, rows * dim_v * sizeof(float));
    for (std::size_t r = 0; r < rows; ++r) {
      top[r] = masked_logit;
      total[r] = 0;
      slope[r] = call.features.alibi && r < count ? call.values.alibi_slopes[kv_head * group + r % group] * log2_e : 0;
      shift[r] = call.features.soft_cap && r < count
                     ? cpu::key_shift(call, tile.query_begin + static_cast<std::uint32_t>(r / group),
                                      kv_head * group + static_cast<std::uint32_t>(r % group)) *
                           call.scale
                     : 0;
    }
  }

  void start(std::uint32_t kv_head) noexcept {
    start_rows(kv_head);
    const float factor_of_q = call.features.soft_cap ? call.scale : call.scale * log2_e;
    std::memset(queries, 0, dim * rows * sizeof(float));
    for (std::size_t r = 0; r < count; ++r) {
      const std::uint32_t row = tile.query_begin + static_cast<std::uint32_t>(r / group);
      const std::uint32_t head = kv_head * group + static_cast<std::uint32_t>(r % group);
      read_query(call, row, head, keys);
      for (std::size_t d = 0; d < call.q.head_dim; ++d) queries[d * rows + r] = keys[d] * factor_of_q;
    }
  }

  /// Reads the chunk's tokens [begin, end).
  void read(std::uint32_t kv_head, std::uint32_t begin, std::uint32_t end) noexcept {
    const std::uint32_t block_size = call.kv.block_size;
    std::size_t n = 0;
    for (std::uint32_t t = begin; t < end; ++t, ++n) {
      const block_id entry = table[t / block_size];
      widen_head(call.kv.k_head(entry, t % block_size, kv_head), call.kv.head_dim, keys + n * dim);
      widen_head(call.kv.v_head(entry, t % block_size, kv_head), call.kv.head_dim_v, values + n * dim_v);
    }
    for (; n % row_block != 0; ++n) std::memset(keys + n * dim, 0, dim * sizeof(float));
  }

  /// Asks for the tokens [begin, end), to be read next.
  void prefetch(std::uint32_t kv_head, std::uint32_t begin, std::uint32_t end) const noexcept {
    const std::uint32_t block_size = call.kv.block_size;
    const std::size_t k_bytes = code_bytes(call.kv.k_dtype, call.kv.head_dim);
    const std::size_t v_bytes = code_bytes(call.kv.v_dtype, call.kv.head_dim_v);
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
    // What rows see moves on with them, so the first one and the last one say it for most chunks.
    if (!call.features.mask && !call.features.alibi && visible_to(tile.query_begin).end >= end) {
      const visible_range last = visible_to(tile.query_end - 1);
      if (last.begin <= begin && last.end >= end) return true;
    }
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

  /// Logits of the tokens [begin, end) become what variant and mask make of them, for one vector of rows from `r` on.
  /// Returns the largest.
  KVCACHE_ALWAYS_INLINE vec admit(std::size_t r, std::size_t begin, std::size_t end, bool all_visible) noexcept {
    const variant_features f = call.features;
    const vec cap = set1(call.values.soft_cap * log2_e);
    const vec per_cap = set1(f.soft_cap ? 1.0f / call.values.soft_cap : 0.0f);
    const vec none = set1(masked_logit);
    vec largest = none;
    for (std::size_t t = begin; t < end; ++t) {
      vec x = load(logits + t * rows + r);
      const vec at = set1(static_cast<float>(t));
      if (f.soft_cap) x = mul(cap, tanh(mul(add(x, load(shift + r)), per_cap)));
      if (f.alibi) x = sub(x, mul(load(slope + r), magnitude(sub(load(distance + r), at))));
      if (!all_visible) {
        mask seen = both(less(load(first_token + r), at), less(at, load(end_token + r)));
        if (f.mask) seen = both(seen, less(set1(0.5f), load(allowed + t * rows + r)));
        x = select(seen, x, none);
      }
      if (f.soft_cap || f.alibi || !all_visible) store(logits + t * rows + r, x);
      largest = larger(x, largest);
    }
    return largest;
  }

  /// The maximum to be taken from the logits of one vector of rows, of which `largest` is new; where it has grown,
  /// `factor` says by how much sums so far are to be scaled.
  KVCACHE_ALWAYS_INLINE vec follow(std::size_t r, vec largest, bool& scaled) noexcept {
    const vec before = load(top + r);
    const mask grown = less(add(before, set1(rescale_threshold)), largest);
    if (!any(grown)) {
      store(factor + r, set1(1.0f));
      return before;
    }
    const vec now = select(grown, largest, before);
    const vec shrink = exp2(sub(before, now));
    store(top + r, now);
    store(factor + r, shrink);
    store(total + r, mul(load(total + r), shrink));
    scaled = true;
    return now;
  }

  /// Logits of `tokens` tokens become weights; maxima and sums follow. Returns whether a row's sums have to be scaled.
  bool weigh(std::size_t tokens, bool all_visible) noexcept {
    bool scaled = false;
    for (std::size_t r = 0; r < rows; r += lanes) {
      const vec now = follow(r, admit(r, 0, tokens, all_visible), scaled);
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

  void rescale(std::size_t from, std::size_t end) noexcept {
    for (std::size_t r = from; r < end; ++r) {
      if (factor[r] == 1.0f) continue;
      const vec by = set1(factor[r]);
      for (std::size_t d = 0; d < dim_v; d += lanes)
        store(output + r * dim_v + d, mul(load(output + r * dim_v + d), by));
    }
  }

  /// Adds weight * value of every token that a row sees. Where values are not all finite, a row passes over those of
  /// tokens that it does not see, since a weight of 0 would turn an infinity into no number; what it does see it adds
  /// in the same order and with the same result either way.
  void add_values(std::size_t tokens, bool all_visible) noexcept {
    if (all_visible || !not_finite(values, tokens * dim_v)) {
      const std::size_t whole = (count + row_block - 1) / row_block * row_block;
      multiply(output, dim_v, whole, dim_v, logits, 1, rows, values, dim_v, tokens, true);
      return;
    }
    for (std::size_t r = 0; r < count; ++r) {
      for (std::size_t t = 0; t < tokens; ++t) {
        const auto at = static_cast<float>(t);
        if (!(first_token[r] < at && at < end_token[r])) continue;
        if (call.features.mask && allowed[t * rows + r] < 0.5f) continue;
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

[[nodiscard]] inline tile_rows tile_rows_of(const attention_call& call, const work_unit& unit,
                                            float* scratch) noexcept {
  const attention_plan& plan = *call.plan;
  const query_tile& tile = plan.tiles()[unit.tile];
  const planned_sequence& sequence = plan.sequences()[tile.sequence];
  const cpu::tile_scratch at(tile.query_end - tile.query_begin,
                             {call.q.heads, call.kv.kv_heads, call.kv.head_dim, call.kv.head_dim_v});
  const std::uint32_t group = call.q.heads / call.kv.kv_heads;
  float* const per_row = scratch + at.per_row();
  return {call,
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
          per_row + 6 * at.rows,
          per_row + 7 * at.rows,
          scratch + at.weights()};
}

/// Where the chunk that holds token `from` ends, or the tokens do.
[[nodiscard]] inline std::uint32_t chunk_end(std::uint32_t from, std::uint32_t end) noexcept {
  return end - from <= kv_chunk - from % kv_chunk ? end : from - from % kv_chunk + kv_chunk;
}

/// The rows of a tile, kv head by kv head, over the unit's tokens.
inline void run_tile(const attention_call& call, const work_unit& unit, float* scratch) noexcept {
  tile_rows rows = tile_rows_of(call, unit, scratch);
  const visible_range seen = rows.visible_to_all();
  for (std::uint32_t kv_head = 0; kv_head < call.kv.kv_heads; ++kv_head) {
    rows.start(kv_head);
    for (std::uint32_t from = seen.begin; from < seen.end;) {
      const std::uint32_t to = chunk_end(from, seen.end);
      rows.read(kv_head, from, to);
      rows.prefetch(kv_head, to, chunk_end(to, seen.end));
      const std::size_t tokens = to - from;
      const std::size_t whole = (tokens + row_block - 1) / row_block * row_block;
      multiply(rows.logits, rows.rows, whole, rows.rows, rows.keys, rows.dim, 1, rows.queries, rows.rows,
               call.kv.head_dim, false);
      const bool all_visible = rows.bound(from, to);
      if (rows.weigh(tokens, all_visible)) rows.rescale(0, rows.count);
      rows.add_values(tokens, all_visible);
      from = to;
    }
    rows.finish(kv_head);
  }
}
