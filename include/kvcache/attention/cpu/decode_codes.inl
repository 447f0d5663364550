// SPDX-License-Identifier: Apache-2.0
// Decoding over codes as they lie in the pool: one query token of every head over the tokens of a unit, as decode.inl
// does it for elements.

/// Tokens of one chunk that share what is to be known of them: scales per channel, or that they lie in the tail pool.
struct code_segment {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  bool tail = false;
};

/// One query of every head over the tokens of a unit, as `decoder` does it.
struct code_decoder {
  const attention_call& call;
  decoder& common;  // maxima, totals, logits and distances lie where those of a decoder do
  code_form k_form;
  code_form v_form;
  std::uint32_t row;
  float factor;
  cpu::code_scratch at;
  float* scratch;

  static constexpr std::size_t most_pieces = 16;
  alignas(64) std::uint16_t lane_index[most_pieces][32];
  alignas(64) std::uint16_t part_index[most_pieces][32];

  // A chunk's tokens, and 16 more that may be read: head 0.
  static constexpr std::size_t room = cpu::decode_chunk + lanes;
  struct chunk {
    const std::byte* k[room];
    const std::byte* k_scales[room];
    const std::byte* v[room];
    const std::byte* v_scales[room];
    code_segment segments[cpu::decode_chunk];
    std::size_t segment_count = 0;
    decode_tokens tokens;
  };
  // The same of the head that is worked on.
  const std::byte* k[room];
  const std::byte* k_scales[room];
  const std::byte* v[room];
  const std::byte* v_scales[room];

  [[nodiscard]] float* query(std::size_t head) const noexcept { return scratch + at.queries() + head * at.dim; }
  [[nodiscard]] prepared_query prepared(std::size_t head) const noexcept {
    float* const sums = scratch + at.sums() + head * at.dim / 2;
    return {reinterpret_cast<std::byte*>(scratch + at.prepared() + head * at.dim / 2), sums,
            reinterpret_cast<std::int32_t*>(sums + at.dim / 4)};
  }
  [[nodiscard]] float* units() const noexcept { return scratch + at.units(); }
  /// Added to every q . k: 0, what the keys' offset took from it, or no number.
  [[nodiscard]] float* excess() const noexcept { return scratch + at.excess(); }
  [[nodiscard]] float* output(std::size_t head) const noexcept { return scratch + at.output() + head * at.dim_v; }

  template <class F>
  void each_run(const F& f) const noexcept {
    const std::uint32_t group = call.q.heads / call.kv.kv_heads;
    for (std::uint32_t kv_head = 0; kv_head < call.kv.kv_heads; ++kv_head) {
      for (std::uint32_t done = 0; done < group;) {
        const std::uint32_t left = group - done;
        const std::uint32_t rows = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        f(kv_head * group + done, rows);
        done += rows;
      }
    }
  }

  void start() noexcept {
    k_form.lane_index = lane_index;
    v_form.part_index = part_index;
    for (std::uint32_t p = 0; p < k_form.pieces() && !k_form.q.per_channel; ++p)
      write_index(k_form, p * k_form.width(), k_form.width() / 16, lane_index[p]);
    for (std::uint32_t p = 0; p < v_form.pieces() && !v_form.q.per_channel; ++p)
      write_index(v_form, p * v_form.width(), v_form.width() / 4, part_index[p]);
    for (std::uint32_t head = 0; head < call.q.heads; ++head) {
      read_query(call, row, head, common.natural);
      to_code_order(k_form, common.natural, query(head));
      // Whole numbers do not know what is infinite or no number; the rows shall.
      const bool lost = not_finite(common.natural, k_form.dim);
      excess()[head] = lost              ? std::bit_cast<float>(0x7fc0'0000u)
                       : common.shifts() ? cpu::key_shift(call, row, head)
                                         : 0.0f;
      if (k_form.q.per_channel) continue;
      units()[head] = k_form.q.bits == 8 ? prepare_query<8>(k_form, query(head), prepared(head))
                                         : prepare_query<4>(k_form, query(head), prepared(head));
    }
    std::memset(output(0), 0, call.q.heads * at.dim_v * sizeof(float));
    for (std::size_t i = 0; i < call.q.heads * cpu::padding; ++i) {
      common.top[i] = masked_logit;
      common.total[i] = 0;
    }
    if (!call.features.alibi) return;
    each_run([&](std::uint32_t head, std::uint32_t rows) {
      for (std::uint32_t i = 0; i < cpu::padding; ++i)
        common.slope[head * cpu::padding + i] = call.values.alibi_slopes[head + i % rows] * log2_e;
    });
  }

  /// Where the tokens' scales are, and what they share.
  void describe(chunk& c) const noexcept {
    c.segment_count = 0;
    const bool by_block = k_form.q.per_channel || v_form.q.per_channel;
    for (std::size_t t = 0; t < room; ++t) {
      const std::size_t from = t < c.tokens.count ? t : c.tokens.count == 0 ? 0 : c.tokens.count - 1;
      if (c.tokens.count == 0) return;
      const block_id entry = c.tokens.entry[from];
      const bool tail = (entry & tail_bit) != 0;
      // Products read on behind a segment; a token of the tail pool, which has other strides and no scales, is not
      // read so, and is the one before it there.
      if (tail && t > 0) {
        c.k[t] = c.k[t - 1];
        c.v[t] = c.v[t - 1];
        c.k_scales[t] = c.k_scales[t - 1];
        c.v_scales[t] = c.v_scales[t - 1];
      } else {
        c.k[t] = c.tokens.k[from];
        c.v[t] = c.tokens.v[from];
        c.k_scales[t] = tail ? c.k[t] : call.kv.k_scales.at(entry, c.tokens.offset[from], 0);
        c.v_scales[t] = tail ? c.v[t] : call.kv.v_scales.at(entry, c.tokens.offset[from], 0);
      }
      if (t >= c.tokens.count) continue;
      const bool goes_on = t > 0 && tail == c.segments[c.segment_count - 1].tail &&
                           (!by_block || tail || entry == c.tokens.entry[t - 1]);
      if (!goes_on) c.segments[c.segment_count++] = {static_cast<std::uint32_t>(t), 0, tail};
      ++c.segments[c.segment_count - 1].count;
    }
  }

  /// Asks for K or V of what is read later: one head, a chunk, and two heads ahead. A processor drops hints that it has
  /// no room for, so everything is asked for three times.
  void ask_ahead(const chunk& now, const chunk& next, std::uint32_t head, bool keys) const noexcept {
    const std::uint32_t heads = call.kv.kv_heads;
    const std::int64_t step = keys ? call.kv.k.head_stride : call.kv.v.head_stride;
    const std::size_t bytes = keys ? k_form.bytes() : v_form.bytes();
    const auto from = [&](std::uint32_t which) noexcept {
      const chunk& c = which < heads ? now : next;
      ask(keys ? c.k : c.v, c.tokens.count, which % heads * step, bytes);
    };
    from(head + 1);
    from(head + heads);
    from(head + 2);
  }
  static void ask(const std::byte* const* from, std::size_t count, std::int64_t offset, std::size_t bytes) noexcept {
    for (std::size_t t = 0; t < count; ++t) {
      const std::byte* const first = from[t] + offset;
      KVCACHE_PREFETCH(first);
      for (std::size_t b = 64; b < bytes; b += 64) KVCACHE_PREFETCH(first + b);
    }
  }

  /// The head that comes next, and asks for what comes after it.
  void turn_to(const chunk& now, const chunk& next, std::uint32_t head) noexcept {
    const auto by = [&](const std::byte* const* from, std::int64_t offset, const std::byte** to) noexcept {
      for (std::size_t t = 0; t < room; t += 8)
        _mm512_storeu_si512(to + t, _mm512_add_epi64(_mm512_loadu_si512(from + t), _mm512_set1_epi64(offset)));
    };
    const kv_view& kv = call.kv;
    by(now.k, head * kv.k.head_stride, k);
    by(now.v, head * kv.v.head_stride, v);
    by(now.k_scales, head * kv.k_scales.head_stride, k_scales);
    by(now.v_scales, head * kv.v_scales.head_stride, v_scales);
    for (std::size_t t = head; t < next.tokens.count; t += kv.kv_heads) {
      KVCACHE_PREFETCH(next.k_scales[t]);
      KVCACHE_PREFETCH(next.v_scales[t]);
    }
  }

  void go_through(const chunk& now, const chunk& next) noexcept {
    const std::uint32_t group = call.q.heads / call.kv.kv_heads;
    each_run([&](std::uint32_t head, std::uint32_t rows) {
      const std::uint32_t kv_head = head / group;
      const bool first = head % group == 0;
      if (first) {
        turn_to(now, next, kv_head);
        ask_ahead(now, next, kv_head, true);
      }
      const auto between = [&] {
        if (first) ask_ahead(now, next, kv_head, false);
      };
      if (rows == 4) run<4>(now, head, kv_head, between);
      if (rows == 2) run<2>(now, head, kv_head, between);
      if (rows == 1) run<1>(now, head, kv_head, between);
    });
  }

  template <std::size_t Rows, class Between>
  KVCACHE_NOINLINE void run(const chunk& c, std::uint32_t head, std::uint32_t kv_head,
                            const Between& between) noexcept {
    constexpr std::size_t power = Rows == 4 ? 2 : Rows == 2 ? 1 : 0;
    float* const logits = common.logits;
    for (std::size_t i = 0; i < c.segment_count; ++i) {
      const code_segment& s = c.segments[i];
      if (s.tail)
        tail_logits<Rows>(c, s, head, kv_head);
      else if (k_form.q.per_channel)
        k_form.q.bits == 8 ? channel_logits<8, Rows>(s, head) : channel_logits<4, Rows>(s, head);
      else
        token_logits<Rows>(s, head);
    }
    between();
    float* const top = common.top + head * cpu::padding;
    float* const total = common.total + head * cpu::padding;
    float before[Rows];
    for (std::size_t r = 0; r < Rows; ++r) before[r] = top[r];
    decode_rows rows{
        call,   logits, common.distance + power * cpu::decode_chunk * 8, common.slope + head * cpu::padding, top, total,
        logits, 0};
    rows.template weigh<Rows>(c.tokens.count);
    for (std::size_t r = 0; r < Rows; ++r) {
      if (std::bit_cast<std::uint32_t>(top[r]) == std::bit_cast<std::uint32_t>(before[r])) continue;
      const vec shrink = exp2(set1(before[r] - top[r]));
      float* const to = output(head + r);
      for (std::size_t d = 0; d < v_form.size(); d += lanes) store(to + d, mul(load(to + d), shrink));
    }
    vec sum = load(total);
    for (std::size_t i = 0; i < c.tokens.count * Rows; i += lanes) sum = add(sum, load(logits + i));
    store(total, sum);
    for (std::size_t i = 0; i < c.segment_count; ++i) {
      const code_segment& s = c.segments[i];
      const float* const weights = logits + s.first * Rows;
      if (s.tail) {
        tail_values<Rows>(c, s, head, kv_head);
        continue;
      }
      const code_stream from{v + s.first, v_scales + s.first};
      for (std::size_t r = 0; r < Rows; r += rows_to_v(v_form.q.bits, Rows)) {
        float* const to = output(head + r);
        const bool channels = v_form.q.per_channel;
        if (v_form.q.bits == 8)
          channels ? code_values<8, true, Rows>(v_form, weights, r, from, s.count, to, at.dim_v)
                   : code_values<8, false, Rows>(v_form, weights, r, from, s.count, to, at.dim_v);
        else
          channels ? code_values<4, true, Rows>(v_form, weights, r, from, s.count, to, at.dim_v)
                   : code_values<4, false, Rows>(v_form, weights, r, from, s.count, to, at.dim_v);
      }
    }
  }

  template <std::size_t Rows>
  void token_logits(const code_segment& s, std::uint32_t head) noexcept {
    code_query queries[Rows];
    for (std::size_t r = 0; r < Rows; ++r) queries[r] = {prepared(head + r), units()[head + r], excess()[head + r]};
    const code_stream from{k + s.first, k_scales + s.first};
    float* const to = common.logits + s.first * Rows;
    if (k_form.q.bits == 8)
      code_logits<8, false, false, Rows>(k_form, queries, from, s.count, factor, to);
    else if (k_form.q.zero_points)
      code_logits<4, false, true, Rows>(k_form, queries, from, s.count, factor, to);
    else
      code_logits<4, false, false, Rows>(k_form, queries, from, s.count, factor, to);
  }

  /// Scales of a block's channels join the queries first, zero points become one number for each row.
  template <unsigned Bits, std::size_t Rows>
  KVCACHE_NOINLINE void channel_logits(const code_segment& s, std::uint32_t head) noexcept {
    constexpr std::size_t vectors = Bits == 8 ? 1 : 2;
    alignas(64) std::byte bytes[Rows][2048];
    alignas(64) float scaled[1024];
    float lane_sums[lanes * most_pieces];  // not needed here
    std::int32_t starts[lanes * most_pieces];
    code_query queries[Rows];
    for (std::size_t r = 0; r < Rows; ++r) {
      const float* const q = query(head + r);
      vec zero = set1(0.0f);
      for (std::size_t p = 0; p < k_form.pieces(); ++p) {
        KVCACHE_UNROLL
        for (std::size_t half = 0; half < vectors; ++half) {
          KVCACHE_UNROLL
          for (std::size_t part = 0; part < 4; ++part) {
            const channel_scales of = load_channel_scales<Bits>(k_form, k_scales[s.first], p, half, part);
            const std::size_t place = (p * vectors + half) * 64 + part * lanes;
            const vec x = load(q + place);
            store(scaled + place, mul(x, of.scale));
            zero = fma(x, of.zero, zero);
          }
        }
      }
      const prepared_query to{bytes[r], lane_sums, starts};
      queries[r] = {to, prepare_query<Bits>(k_form, scaled, to), sum_of(zero) + excess()[head + r]};
    }
    const code_stream from{k + s.first, k_scales + s.first};
    code_logits<Bits, true, false, Rows>(k_form, queries, from, s.count, factor, common.logits + s.first * Rows);
  }

  /// Tokens of the tail pool, which are few.
  template <std::size_t Rows>
  void tail_logits(const chunk& c, const code_segment& s, std::uint32_t head, std::uint32_t kv_head) noexcept {
    for (std::uint32_t t = s.first; t < s.first + s.count; ++t) {
      widen_head(call.kv.k_head(c.tokens.entry[t], c.tokens.offset[t], kv_head), k_form.dim, common.natural);
      to_code_order(k_form, common.natural, common.keys);
      for (std::size_t r = 0; r < Rows; ++r) {
        vec sum = set1(0.0f);
        for (std::size_t d = 0; d < k_form.size(); d += lanes)
          sum = fma(load(query(head + r) + d), load(common.keys + d), sum);
        common.logits[t * Rows + r] = (sum_of(sum) + excess()[head + r]) * factor;
      }
    }
  }
  template <std::size_t Rows>
  void tail_values(const chunk& c, const code_segment& s, std::uint32_t head, std::uint32_t kv_head) noexcept {
    for (std::uint32_t t = s.first; t < s.first + s.count; ++t) {
      widen_head(call.kv.v_head(c.tokens.entry[t], c.tokens.offset[t], kv_head), v_form.dim, common.natural);
      to_code_order(v_form, common.natural, common.values);
      for (std::size_t r = 0; r < Rows; ++r) {
        const vec weight = set1(common.logits[t * Rows + r]);
        float* const to = output(head + r);
        for (std::size_t d = 0; d < v_form.size(); d += lanes)
          store(to + d, fma(weight, load(common.values + d), load(to + d)));
      }
    }
  }

  void finish(const query_tile& tile, const work_unit& unit) noexcept {
    each_run([&](std::uint32_t first, std::uint32_t rows) {
      float sum[4] = {};
      for (std::uint32_t i = 0; i < lanes; ++i) sum[i % rows] += common.total[first * cpu::padding + i];
      for (std::uint32_t r = 0; r < rows; ++r) {
        float lse = empty_lse();
        if (std::bit_cast<std::uint32_t>(sum[r]) == 0) {
          std::memset(common.natural, 0, v_form.dim * sizeof(float));
        } else {
          from_code_order(v_form, output(first + r), sum[r], common.natural);
          lse = common.top[first * cpu::padding + r] + std::log2(sum[r]);
        }
        cpu::leave_row(call, tile, unit, row, first + r, common.natural, lse);
      }
    });
  }
};

/// Whether run_codes takes a call's tiles.
inline bool can_decode_codes(const attention_call& call, const query_tile& tile) noexcept {
  return can_decode_floats(call, tile) && code_form::possible(call.kv.k_dtype, call.kv.head_dim) &&
         code_form::possible(call.kv.v_dtype, call.kv.head_dim_v);
}

inline void run_codes(const attention_call& call, const work_unit& unit, float* scratch) noexcept {
  const query_tile& tile = call.plan->tiles()[unit.tile];
  if (!can_decode_codes(call, tile)) {
    if (can_decode_floats(call, tile))
      run_decode(call, unit, scratch, products_of<f32>, products_of<f32>, true);
    else
      run_tile(call, unit, scratch);
    return;
  }
  const planned_sequence& sequence = call.plan->sequences()[tile.sequence];
  const attention_shape shape{call.q.heads, call.kv.kv_heads, call.kv.head_dim, call.kv.head_dim_v};
  decoder common = make_decoder(call, products_of<f32>, products_of<f32>, tile.query_begin, scratch);
  const cpu::code_scratch at(shape);
  code_decoder d{call,
                 common,
                 {quantization_of(call.kv.k_dtype), call.kv.head_dim, nullptr, nullptr},
                 {quantization_of(call.kv.v_dtype), call.kv.head_dim_v, nullptr, nullptr},
                 tile.query_begin,
                 common.factor,
                 at,
                 scratch + cpu::padded(cpu::decode_scratch(shape).size()),
                 {},
                 {},
                 {},
                 {},
                 {},
                 {}};
  d.start();
  const block_id* const table = call.plan->blocks().data() + sequence.first_block;
  const std::int64_t position = sequence.position(tile.query_begin);
  const visible_range seen = visible_to_tile(call.features, call.values.window, sequence, tile);
  std::uint32_t from = seen.begin > unit.kv_begin ? seen.begin : unit.kv_begin;
  const std::uint32_t end = seen.end < unit.kv_end ? seen.end : unit.kv_end;
  code_decoder::chunk buffers[2];
  code_decoder::chunk* now = &buffers[0];
  code_decoder::chunk* next = &buffers[1];
  const auto take = [&](code_decoder::chunk& to) {
    take_tokens(call, table, tile.query_begin, from, end, to.tokens);
    d.describe(to);
  };
  take(*now);
  while (now->tokens.count != 0) {
    take(*next);
    if (call.features.alibi) common.measure_distances(now->tokens, position);
    d.go_through(*now, next->tokens.count != 0 ? *next : *now);
    code_decoder::chunk* const done = now;
    now = next;
    next = done;
  }
  d.finish(tile, unit);
}
