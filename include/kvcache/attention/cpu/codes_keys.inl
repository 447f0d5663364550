// SPDX-License-Identifier: Apache-2.0
// Queries over codes of K: see codes.inl.

/// Where a prepared query lies.
struct prepared_query {
  std::byte* bytes;      // [piece][vector][part] of 64 bytes each
  float* sums;           // [piece][lane]: its whole numbers
  std::int32_t* starts;  // [piece][lane]: what products begin with, so that codes without a zero point are signed
};

/// A query as whole numbers; `from` are floats in code order. Returns what the whole numbers are to be multiplied with.
template <unsigned Bits>
KVCACHE_NOINLINE float prepare_query(const code_form& form, const float* from, const prepared_query& to) noexcept {
  constexpr std::size_t parts = parts_of(Bits);
  constexpr std::size_t vectors = Bits == 8 ? 1 : 2;
  constexpr float most = most_of(parts);
  vec magnitudes = set1(0.0f);
  for (std::size_t i = 0; i < form.size(); i += lanes) magnitudes = larger(magnitude(load(from + i)), magnitudes);
  const float largest = _mm512_reduce_max_ps(magnitudes);
  const vec inverse = set1(largest > 0 ? most / largest : 0.0f);
  const __m512i ones = _mm512_set1_epi8(1);
  for (std::size_t p = 0; p < form.pieces(); ++p) {
    __m512i high = _mm512_setzero_si512();
    __m512i low = _mm512_setzero_si512();
    for (std::size_t v = 0; v < vectors; ++v) {
      std::byte* const at = to.bytes + (p * vectors + v) * parts * 64;
      for (std::size_t i = 0; i < 4; ++i) {
        const whole_bytes x =
            split<parts>(_mm512_cvtps_epi32(mul(load(from + (p * vectors + v) * 64 + i * lanes), inverse)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(at + 16 * i), _mm512_cvtepi32_epi8(x.high));
        if constexpr (parts == 2)
          _mm_storeu_si128(reinterpret_cast<__m128i*>(at + 64 + 16 * i), _mm512_cvtepi32_epi8(x.low));
      }
      high = _mm512_dpbusd_epi32(high, ones, _mm512_loadu_si512(at));
      if constexpr (parts == 2) low = _mm512_dpbusd_epi32(low, ones, _mm512_loadu_si512(at + 64));
    }
    const __m512i sum = parts == 2 ? _mm512_add_epi32(_mm512_slli_epi32(high, 7), low) : high;
    store(to.sums + p * lanes, _mm512_cvtepi32_ps(sum));
    // Of 8 bits, 128 has to be taken from every code, and the products with high bytes are multiplied by that later.
    const __m512i start = _mm512_sub_epi32(_mm512_setzero_si512(), Bits == 8 ? sum : _mm512_slli_epi32(sum, 3));
    _mm512_storeu_si512(to.starts + p * lanes,
                        form.q.zero_points || form.q.per_channel ? _mm512_setzero_si512() : start);
  }
  return largest / most;
}

/// A query of a run, prepared.
struct code_query {
  prepared_query at;
  float unit;
  float bias;  // of logits, before the factor
};

/// logits[token, row] = q . k * factor for the tokens of a segment; up to 15 behind them are written too. Here one
/// number scales a token, or none, and codes take one or two pieces: sums stay whole to the end.
template <unsigned Bits, bool PerChannel, std::size_t Pieces, std::size_t Rows>
KVCACHE_NOINLINE void whole_logits(const code_form& form, const code_query (&queries)[Rows], const code_stream& k,
                                   std::size_t count, float factor, float* logits) noexcept {
  constexpr std::size_t together = lanes / Rows;
  constexpr std::size_t vectors = Bits == 8 ? 1 : 2;
  constexpr std::size_t parts = parts_of(Bits);
  alignas(64) float units[lanes];
  alignas(64) float biases[lanes];
  __m512i starts[Rows];
  for (std::size_t i = 0; i < lanes; ++i) {
    units[i] = queries[i % Rows].unit * factor;
    biases[i] = queries[i % Rows].bias * factor;
  }
  for (std::size_t r = 0; r < Rows; ++r) {
    starts[r] = PerChannel ? _mm512_setzero_si512() : _mm512_loadu_si512(queries[r].at.starts);
    for (std::size_t p = 1; !PerChannel && p < Pieces; ++p)
      starts[r] = _mm512_add_epi32(starts[r], _mm512_loadu_si512(queries[r].at.starts + p * lanes));
  }
  const __mmask64 there = form.there(Pieces - 1);
  for (std::size_t t = 0; t < count; t += together) {
    vec sum[lanes];
    alignas(64) float scales[lanes];
    KVCACHE_UNROLL
    for (std::size_t i = 0; i < together; ++i) {
      __m512i x[Pieces * vectors];
      KVCACHE_UNROLL
      for (std::size_t p = 0; p < Pieces; ++p) {
        const code_piece piece = load_codes<Bits>(k.codes[t + i] + 64 * p, p + 1 < Pieces ? ~__mmask64{0} : there);
        x[p * vectors] = piece.low;
        if constexpr (vectors == 2) x[p * vectors + 1] = piece.high;
      }
      if constexpr (!PerChannel) {
        const float scale = read_bf16(k.scales[t + i]);
        KVCACHE_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) scales[i * Rows + r] = scale;
      }
      KVCACHE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r) {
        __m512i acc = starts[r];
        KVCACHE_UNROLL
        for (std::size_t j = 0; j < Pieces * vectors; ++j)
          acc = _mm512_dpbusd_epi32(acc, x[j], _mm512_loadu_si512(queries[r].at.bytes + j * parts * 64));
        if constexpr (parts == 2) {
          acc = _mm512_slli_epi32(acc, 7);
          KVCACHE_UNROLL
          for (std::size_t j = 0; j < Pieces * vectors; ++j)
            acc = _mm512_dpbusd_epi32(acc, x[j], _mm512_loadu_si512(queries[r].at.bytes + j * parts * 64 + 64));
        }
        sum[i * Rows + r] = _mm512_cvtepi32_ps(acc);
      }
    }
    vec all = sums(sum);
    if constexpr (!PerChannel) all = mul(all, load(scales));
    store(logits + t * Rows, fma(all, load(units), load(biases)));
  }
}

/// The same of any format.
template <unsigned Bits, bool PerChannel, bool Zeros, std::size_t Rows>
KVCACHE_NOINLINE void code_logits(const code_form& form, const code_query (&queries)[Rows], const code_stream& k,
                                  std::size_t count, float factor, float* logits) noexcept {
  constexpr std::size_t together = lanes / Rows;
  constexpr std::size_t vectors = Bits == 8 ? 1 : 2;
  constexpr std::size_t parts = parts_of(Bits);
  if constexpr (!Zeros) {
    if (PerChannel || form.scales() == 1) {
      if (form.pieces() == 1) return whole_logits<Bits, PerChannel, 1>(form, queries, k, count, factor, logits);
      if (form.pieces() == 2) return whole_logits<Bits, PerChannel, 2>(form, queries, k, count, factor, logits);
    }
  }
  alignas(64) float units[lanes];
  alignas(64) float biases[lanes];
  for (std::size_t i = 0; i < lanes; ++i) {
    units[i] = queries[i % Rows].unit * factor;
    biases[i] = queries[i % Rows].bias * factor;
  }
  const __mmask16 scales_there = form.scales_there();
  for (std::size_t t = 0; t < count; t += together) {
    vec sum[lanes];
    KVCACHE_UNROLL
    for (std::size_t i = 0; i < lanes; ++i) sum[i] = set1(0.0f);
    for (std::size_t p = 0; p < form.pieces(); ++p) {
      const __mmask64 there = form.there(p);
      [[maybe_unused]] __m512i index;
      if constexpr (!PerChannel) index = _mm512_loadu_si512(form.lane_index[p]);
      KVCACHE_UNROLL
      for (std::size_t i = 0; i < together; ++i) {
        const code_piece x = load_codes<Bits>(k.codes[t + i] + 64 * p, there);
        [[maybe_unused]] vec scale;
        [[maybe_unused]] vec zero;
        if constexpr (!PerChannel) {
          scale = spread_scales(k.scales[t + i], scales_there, index);
          if constexpr (Zeros) zero = spread_scales(k.scales[t + i] + 2 * form.scales(), scales_there, index);
        }
        KVCACHE_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
          const std::byte* const q = queries[r].at.bytes + p * vectors * parts * 64;
          __m512i acc = PerChannel ? _mm512_setzero_si512() : _mm512_loadu_si512(queries[r].at.starts + p * lanes);
          acc = _mm512_dpbusd_epi32(acc, x.low, _mm512_loadu_si512(q));
          if constexpr (vectors == 2) acc = _mm512_dpbusd_epi32(acc, x.high, _mm512_loadu_si512(q + parts * 64));
          if constexpr (parts == 2) {
            acc = _mm512_slli_epi32(acc, 7);
            acc = _mm512_dpbusd_epi32(acc, x.low, _mm512_loadu_si512(q + 64));
            if constexpr (vectors == 2) acc = _mm512_dpbusd_epi32(acc, x.high, _mm512_loadu_si512(q + 192));
          }
          vec& to = sum[i * Rows + r];
          if constexpr (PerChannel) {
            to = add(to, _mm512_cvtepi32_ps(acc));
          } else {
            to = fma(_mm512_cvtepi32_ps(acc), scale, to);
            if constexpr (Zeros) to = fma(zero, load(queries[r].at.sums + p * lanes), to);
          }
        }
      }
    }
    store(logits + t * Rows, fma(sums(sum), load(units), load(biases)));
  }
}
