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
  // What is asked for while a chunk is worked on: the next one.
  chunk_lines k_lines;
  chunk_lines v_lines;

  static constexpr std::size_t most_scales = 16;

  [[nodiscard]] float* query(std::size_t head) const noexcept { return scratch + at.queries() + head * at.dim; }
  [[nodiscard]] prepared_query prepared(std::size_t head) const noexcept {
    float* const sums = scratch + at.sums() + head * at.dim / 2;
    return {reinterpret_cast<std::byte*>(scratch + at.prepared() + head * at.dim / 2), sums,
            reinterpret_cast<std::int32_t*>(sums + most_scales)};
  }
  /// What whole numbers miss of a query, where that goes by too.
  [[nodiscard]] prepared_query rest(std::size_t head) const noexcept {
    const prepared_query whole = prepared(head);
    return {whole.bytes + k_form.size(), nullptr, whole.starts + most_scales};
  }
  [[nodiscard]] float* units() const noexcept { return scratch + at.units(); }
  /// 0 where nothing more goes by.
  [[nodiscard]] float* rest_units() const noexcept { return scratch + at.rest_units(); }
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
    for (std::uint32_t head = 0; head < call.q.heads; ++head) {
      read_query(call, row, head, common.natural);
      to_code_order(k_form, common.natural, query(head));
      // Whole numbers do not know what is infinite or no number; the rows shall.
      const bool lost = not_finite(common.natural, k_form.dim);
      excess()[head] = lost              ? std::bit_cast<float>(0x7fc0'0000u)
                       : common.shifts() ? cpu::key_shift(call, row, head)
                                         : 0.0f;
      rest_units()[head] = 0;
      if (k_form.q.per_channel) continue;
      const std::size_t bytes_of_scale =
          k_form.q.group != 0 ? std::size_t{k_form.q.group} * k_form.q.bits / 8 : k_form.bytes();
      units()[head] = k_form.q.bits == 8 ? start_query<8>(head, bytes_of_scale) : start_query<4>(head, bytes_of_scale);
    }
    std::memset(output(0), 0, call.q.heads * at.dim_v * sizeof(float));
    for (std::size_t i = 0; i < call.q.heads * cpu::padding; ++i) {
      common.top[i] = masked_logit;
      common.total[i] = 0;
    }
    if (!call.features.alibi) return;
    for (std::size_t i = 0; i < call.q.heads * cpu::padding; ++i)
      common.slope[i] = call.values.alibi_slopes[i / cpu::padding] * log2_e;
  }

  template <unsigned Bits>
  float start_query(std::uint32_t head, std::size_t bytes_of_scale) const noexcept {
    const float largest = largest_of(k_form, query(head));
    const float unit = prepare_query<Bits>(k_form, query(head), largest, prepared(head));
    sum_query<Bits>(k_form, query(head), unit, prepared(head), bytes_of_scale);
    if constexpr (parts_of(Bits) == 1) {
      if (is_uneven(k_form, query(head), largest)) {
        rest_units()[head] = prepare_query<Bits, true>(k_form, query(head), largest, rest(head));
        sum_query<Bits>(k_form, query(head), unit, rest(head), bytes_of_scale, false);
      }
    }
    return unit;
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

  [[nodiscard]] code_stream keys_of(const chunk& c, std::uint32_t kv_head) const noexcept {
    return {c.k, c.k_scales, kv_head * call.kv.k.head_stride, kv_head * call.kv.k_scales.head_stride};
  }
  [[nodiscard]] code_stream values_of(const chunk& c, std::uint32_t kv_head) const noexcept {
    return {c.v, c.v_scales, kv_head * call.kv.v.head_stride, kv_head * call.kv.v_scales.head_stride};
  }

  void go_through(const chunk& now, const chunk& next) noexcept {
    const kv_view& kv = call.kv;
    const std::uint32_t group = call.q.heads / kv.kv_heads;
    k_lines = {next.k, next.tokens.count, kv.kv_heads, kv.k.head_stride, k_form.bytes()};
    v_lines = {next.v, next.tokens.count, kv.kv_heads, kv.v.head_stride, v_form.bytes()};
    each_run([&](std::uint32_t head, std::uint32_t rows) {
      const std::uint32_t kv_head = head / group;
      if (head % group == 0) {
        const chunk& then = kv_head + 1 < kv.kv_heads ? now : next;
        const std::int64_t then_head = (kv_head + 1) % kv.kv_heads;
        k_lines.begin_head(then.k, then.tokens.count, then_head * kv.k.head_stride);
        v_lines.begin_head(then.v, then.tokens.count, then_head * kv.v.head_stride);
        for (std::size_t t = kv_head; t < next.tokens.count; t += kv.kv_heads) {
          KVCACHE_PREFETCH(next.k_scales[t]);
          KVCACHE_PREFETCH(next.v_scales[t]);
        }
      }
      if (rows == 4) run<4>(now, head, kv_head);
      if (rows == 2) run<2>(now, head, kv_head);
      if (rows == 1) run<1>(now, head, kv_head);
    });
  }

  template <std::size_t Rows>
  KVCACHE_NOINLINE void run(const chunk& c, std::uint32_t head, std::uint32_t kv_head) noexcept {
    float* const logits = common.logits;
    // The first run of a group asks.
    chunk_lines none;
    const bool first = head % (call.q.heads / call.kv.kv_heads) == 0;
    const code_stream k = keys_of(c, kv_head);
    for (std::size_t i = 0; i < c.segment_count; ++i) {
      const code_segment& s = c.segments[i];
      chunk_lines& lines = first ? k_lines : none;
      if (s.tail)
        tail_logits<Rows>(c, s, head, kv_head);
      else if (k_form.q.bits == 8)
        segment_logits<8, Rows>(k.from(s.first), s, head, lines);
      else
        segment_logits<4, Rows>(k.from(s.first), s, head, lines);
    }
    for (std::size_t r = 0; r < Rows; ++r) weigh(c.tokens.count, head + r, logits + r * code_logits_step);
    const code_stream v = values_of(c, kv_head);
    for (std::size_t i = 0; i < c.segment_count; ++i) {
      code_segment s = c.segments[i];
      if (s.tail) {
        tail_values<Rows>(c, s, head, kv_head);
        continue;
      }
      for (; !v_form.q.per_channel && i + 1 < c.segment_count && !c.segments[i + 1].tail; ++i)
        s.count += c.segments[i + 1].count;
      chunk_lines& lines = first ? v_lines : none;
      const auto add_values = [&](auto values) noexcept {
        values(v_form, logits + s.first, common.total + head * cpu::padding, v.from(s.first), s.count, output(head),
               at.dim_v, lines);
      };
      if (v_form.q.bits == 8)
        v_form.q.per_channel ? add_values(code_values<8, value_scales::channels, Rows>)
                             : add_values(code_values<8, value_scales::token, Rows>);
      else
        v_form.q.per_channel ? add_values(code_values<4, value_scales::channels, Rows>)
                             : add_values(code_values<4, value_scales::groups, Rows>);
    }
  }

  /// One row's logits become weights; its output is scaled where its maximum has grown.
  void weigh(std::size_t tokens, std::size_t head, float* logits) const noexcept {
    float* const top = common.top + head * cpu::padding;
    float* const total = common.total + head * cpu::padding;
    const float before = top[0];
    decode_rows row_of{call, logits, common.distance, common.slope + head * cpu::padding, top, total, logits, 0};
    row_of.template weigh<1>(tokens);
    if (std::bit_cast<std::uint32_t>(top[0]) != std::bit_cast<std::uint32_t>(before)) {
      const vec shrink = exp2(set1(before - top[0]));
      float* const to = output(head);
      for (std::size_t d = 0; d < v_form.size(); d += lanes) store(to + d, mul(load(to + d), shrink));
    }
    vec sum = load(total);
    for (std::size_t t = 0; t < tokens; t += lanes) sum = add(sum, load(logits + t));
    store(total, sum);
  }

  template <unsigned Bits, std::size_t Rows>
  void segment_logits(const code_stream& k, const code_segment& s, std::uint32_t head, chunk_lines& lines) noexcept {
    if (k_form.q.per_channel) return channel_logits<Bits, Rows>(k, s, head, lines);
    code_query queries[Rows];
    for (std::size_t r = 0; r < Rows; ++r) queries[r] = {prepared(head + r), units()[head + r], excess()[head + r]};
    any_logits<Bits, true>(k_form, queries, k, s.count, factor, common.logits + s.first, lines);
    if constexpr (parts_of(Bits) == 1)
      for (std::size_t r = 0; r < Rows; ++r)
        if (rest_units()[head + r] != 0) rest_logits({rest(head + r), rest_units()[head + r], 0, true}, k, s, r);
  }
  /// What whole numbers have missed joins the logits of one row.
  void rest_logits(const code_query& query, const code_stream& k, const code_segment& s, std::size_t r) noexcept {
    static constexpr float no_sums[most_scales] = {};
    chunk_lines none;
    code_query queries[1] = {query};
    queries[0].at.sums = const_cast<float*>(no_sums);
    any_logits<4, true>(k_form, queries, k, s.count, factor, common.logits + r * code_logits_step + s.first, none);
  }

  /// Scales of a block's channels join the queries first, zero points become one number for each row.
  template <unsigned Bits, std::size_t Rows>
  KVCACHE_NOINLINE void channel_logits(const code_stream& k, const code_segment& s, std::uint32_t head,
                                       chunk_lines& lines) noexcept {
    constexpr std::size_t vectors = Bits == 8 ? 1 : 2;
    alignas(64) std::byte bytes[Rows][2048];
    alignas(64) float scaled[Rows][1024];
    std::int32_t starts[Rows][2];
    vec largest[Rows];
    vec bias[Rows];
    KVCACHE_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) largest[r] = bias[r] = set1(0.0f);
    for (std::size_t p = 0; p < k_form.pieces(); ++p) {
      KVCACHE_UNROLL
      for (std::size_t half = 0; half < vectors; ++half) {
        KVCACHE_UNROLL
        for (std::size_t part = 0; part < 4; ++part) {
          const channel_scales of = load_channel_scales<Bits>(k_form, k.scales_of(0), p, half, part);
          const std::size_t place = (p * vectors + half) * 64 + part * lanes;
          KVCACHE_UNROLL
          for (std::size_t r = 0; r < Rows; ++r) {
            const vec x = load(query(head + r) + place);
            const vec product = mul(x, of.scale);
            store(scaled[r] + place, product);
            largest[r] = larger(magnitude(product), largest[r]);
            if (k_form.q.zero_points) bias[r] = fma(x, of.middle, bias[r]);
          }
        }
      }
    }
    code_query queries[Rows];
    for (std::size_t r = 0; r < Rows; ++r) {
      const prepared_query to{bytes[r], nullptr, starts[r]};
      vec sum;
      const float unit = prepare_query<Bits>(k_form, scaled[r], _mm512_reduce_max_ps(largest[r]), to, sum);
      start_channels<Bits>(to);
      // Zero points are of the middle of the codes, which the query met before it was rounded.
      if (k_form.q.zero_points) bias[r] = fma(sum, set1(-8.0f * unit), bias[r]);
      queries[r] = {to, unit, sum_of(bias[r]) + excess()[head + r]};
    }
    any_logits<Bits, false>(k_form, queries, k, s.count, factor, common.logits + s.first, lines);
  }

  /// As sum_query, for one scale. Where there are zero points, the middle of the codes is in the bias.
  template <unsigned Bits>
  void start_channels(const prepared_query& query) const noexcept {
    constexpr std::size_t parts = parts_of(Bits);
    for (std::size_t part = 0; part < parts; ++part) {
      __m512i sum = _mm512_setzero_si512();
      if (!k_form.q.zero_points) {
        for (std::size_t i = 0; i < k_form.size() / 64; ++i)
          sum =
              _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(1), _mm512_loadu_si512(query.bytes + (i * parts + part) * 64));
      }
      query.starts[part] = _mm512_reduce_add_epi32(sum) * (Bits == 8 ? -128 : -8);
    }
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
        common.logits[r * code_logits_step + t] = (sum_of(sum) + excess()[head + r]) * factor;
      }
    }
  }
  template <std::size_t Rows>
  void tail_values(const chunk& c, const code_segment& s, std::uint32_t head, std::uint32_t kv_head) noexcept {
    for (std::uint32_t t = s.first; t < s.first + s.count; ++t) {
      widen_head(call.kv.v_head(c.tokens.entry[t], c.tokens.offset[t], kv_head), v_form.dim, common.natural);
      to_code_order(v_form, common.natural, common.values);
      turn_places(v_form, common.values);
      for (std::size_t r = 0; r < Rows; ++r) {
        const vec weight = set1(common.logits[r * code_logits_step + t]);
        float* const to = output(head + r);
        for (std::size_t d = 0; d < v_form.size(); d += lanes)
          store(to + d, fma(weight, load(common.values + d), load(to + d)));
      }
    }
  }

  void finish(const query_tile& tile, const work_unit& unit) noexcept {
    for (std::uint32_t head = 0; head < call.q.heads; ++head) {
      const float sum = sum_of(load(common.total + head * cpu::padding));
      float lse = empty_lse();
      if (std::bit_cast<std::uint32_t>(sum) == 0) {
        std::memset(common.natural, 0, v_form.dim * sizeof(float));
      } else {
        turn_places(v_form, output(head));
        from_code_order(v_form, output(head), sum, common.natural);
        lse = common.top[head * cpu::padding] + std::log2(sum);
      }
      cpu::leave_row(call, tile, unit, row, head, common.natural, lse);
    }
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
                 {quantization_of(call.kv.k_dtype), call.kv.head_dim},
                 {quantization_of(call.kv.v_dtype), call.kv.head_dim_v},
                 tile.query_begin,
                 common.factor,
                 at,
                 scratch + cpu::padded(cpu::decode_scratch(shape).size()),
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
