// SPDX-License-Identifier: Apache-2.0
// Queries over codes of K: see codes.inl.

/// Where a prepared query lies.
struct prepared_query {
  std::byte* bytes;      // [piece][vector][part: high, low] of 64 bytes each
  float* sums;           // [scale]: of its floats, in units of its whole numbers; looked at where a zero point is
  std::int32_t* starts;  // [scale][part]: what products begin with, so that codes without a zero point are signed
};

/// A query as whole numbers; `from` are floats in code order, `largest` their largest magnitude. Returns what the whole
/// numbers are to be multiplied with. `Rest`: what numbers of one byte have lost, in whole numbers of their own. Lanes
/// of `sum` add up to all whole numbers.
template <unsigned Bits, bool Rest = false>
KVCACHE_ALWAYS_INLINE float prepare_query(const code_form& form, const float* from, float largest,
                                          const prepared_query& to, vec& sum) noexcept {
  constexpr std::size_t parts = parts_of(Bits);
  constexpr float most = parts == 2 ? 127.0f * 256 + 127 : 127.0f;
  // The inverse of the smallest numbers would be infinite: then they become less than `most`.
  constexpr float least = most * 0x1p-126f;
  const float unit = (largest > least ? largest : least) * (1.0f / most);
  const vec inverse = set1(1.0f / unit);
  // Bytes 1 of 16 lanes, then bytes 0.
  const __m512i gather =
      _mm512_castsi256_si512(_mm256_setr_epi8(1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61, 0, 4, 8, 12,
                                              16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60));
  const __m256i sign = _mm256_setr_epi64x(0, 0, static_cast<long long>(0x8080'8080'8080'8080u),
                                          static_cast<long long>(0x8080'8080'8080'8080u));
  __m512i all = _mm512_setzero_si512();
  for (std::size_t at = 0; at < form.size(); at += lanes) {
    const vec exact = mul(load(from + at), inverse);
    const __m512i x = _mm512_cvtps_epi32(Rest ? rest_of(exact) : exact);
    all = _mm512_add_epi32(all, x);
    std::byte* const bytes = to.bytes + at / 64 * parts * 64 + at % 64;
    if constexpr (parts == 1) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm512_cvtepi32_epi8(x));
    } else {
      // The low byte shall be signed, so the high one is rounded.
      const __m512i raised = _mm512_add_epi32(x, _mm512_set1_epi32(0x80));
      const __m256i both_bytes =
          _mm256_xor_si256(_mm512_castsi512_si256(_mm512_permutexvar_epi8(gather, raised)), sign);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), _mm256_castsi256_si128(both_bytes));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes + 64), _mm256_extracti128_si256(both_bytes, 1));
    }
  }
  sum = _mm512_cvtepi32_ps(all);
  return Rest ? unit / rest_parts : unit;
}
template <unsigned Bits, bool Rest = false>
float prepare_query(const code_form& form, const float* from, float largest, const prepared_query& to) noexcept {
  vec sum;
  return prepare_query<Bits, Rest>(form, from, largest, to, sum);
}

[[nodiscard]] inline float largest_of(const code_form& form, const float* x) noexcept {
  vec largest = set1(0.0f);
  for (std::size_t i = 0; i < form.size(); i += lanes) largest = larger(magnitude(load(x + i)), largest);
  return _mm512_reduce_max_ps(largest);
}
/// Whether so large an element would blind whole numbers of one byte to the others. Those may be all that matters:
/// where keys are 0, a format has lost nothing of them.
[[nodiscard]] inline bool is_uneven(const code_form& form, const float* x, float largest) noexcept {
  vec sum = set1(0.0f);
  for (std::size_t i = 0; i < form.size(); i += lanes) sum = add(sum, magnitude(load(x + i)));
  return largest * static_cast<float>(form.dim) > most_uneven * sum_of(sum);
}

/// `starts` and, where asked for, `sums` of a query that prepare_query has made of `from`, in units of `unit`. A scale
/// is of `bytes_of_scale` bytes of codes. A zero point holds what its keys have in common, which may be large, so it
/// meets the query as it was before it was rounded.
template <unsigned Bits>
inline void sum_query(const code_form& form, const float* from, float unit, const prepared_query& query,
                      std::size_t bytes_of_scale, bool sums = true) noexcept {
  constexpr std::size_t parts = parts_of(Bits);
  constexpr std::size_t vectors = Bits == 8 ? 1 : 2;
  for (std::size_t first = 0, scale = 0; first < form.bytes(); first += bytes_of_scale, ++scale) {
    std::int32_t sum[2] = {};
    for (std::size_t part = 0; part < parts; ++part) {
      __m512i all = _mm512_setzero_si512();
      for (std::size_t p = first / 64; p * 64 < first + bytes_of_scale && p < form.pieces(); ++p) {
        const __mmask64 begun = first > p * 64 ? ~__mmask64{0} << (first - p * 64) : ~__mmask64{0};
        const std::size_t left = first + bytes_of_scale - p * 64;
        const __mmask64 there = begun & (left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1);
        for (std::size_t v = 0; v < vectors; ++v)
          all = _mm512_dpbusd_epi32(all, _mm512_maskz_set1_epi8(there, 1),
                                    _mm512_loadu_si512(query.bytes + ((p * vectors + v) * parts + part) * 64));
      }
      sum[part] = _mm512_reduce_add_epi32(all);
    }
    for (std::size_t part = 0; part < parts; ++part)
      query.starts[scale * parts + part] = sum[part] * (Bits == 8 ? -128 : -8);
    if (!sums) continue;
    float total = 0;
    for (std::size_t b = first; form.q.zero_points && b < first + bytes_of_scale && b < form.bytes(); ++b)
      for (std::size_t v = 0; v < vectors; ++v) total += from[(b / 64 * vectors + v) * 64 + b % 64];
    query.sums[scale] = unit > 0 ? total / unit : 0;
  }
}

/// A query of a run, prepared.
struct code_query {
  prepared_query at;
  float unit;
  float bias;          // of logits, before the factor
  bool joins = false;  // what is there, instead of the bias
};

/// Four bytes in every lane.
KVCACHE_ALWAYS_INLINE __m512i set1_four(const std::byte* from) noexcept {
  std::int32_t four;
  std::memcpy(&four, from, sizeof four);
  return _mm512_set1_epi32(four);
}

/// 16 bytes of 16 tokens: x[j], lane i: the bytes [4 j, 4 j + 4) of token i. Of the last 8 bytes of a head, x[2] and
/// x[3] are 0.
template <bool Whole>
KVCACHE_ALWAYS_INLINE void transposed_codes(const code_stream& k, std::size_t t, std::size_t at,
                                            __m512i (&x)[4]) noexcept {
  const auto load_bytes = [&](std::size_t token) noexcept {
    const auto* const from = reinterpret_cast<const __m128i*>(k.codes_of(t + token) + at);
    return Whole ? _mm_loadu_si128(from) : _mm_loadl_epi64(from);
  };
  __m512i a[4];  // tokens i, 4 + i, 8 + i, 12 + i
  KVCACHE_UNROLL
  for (std::size_t i = 0; i < 4; ++i) {
    a[i] = _mm512_castsi128_si512(load_bytes(i));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x00f0, load_bytes(4 + i));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0x0f00, load_bytes(8 + i));
    a[i] = _mm512_mask_broadcast_i32x4(a[i], 0xf000, load_bytes(12 + i));
  }
  const __m512i ab_low = _mm512_unpacklo_epi32(a[0], a[1]);
  const __m512i ab_high = _mm512_unpackhi_epi32(a[0], a[1]);
  const __m512i cd_low = _mm512_unpacklo_epi32(a[2], a[3]);
  const __m512i cd_high = _mm512_unpackhi_epi32(a[2], a[3]);
  x[0] = _mm512_unpacklo_epi64(ab_low, cd_low);
  x[1] = _mm512_unpackhi_epi64(ab_low, cd_low);
  x[2] = _mm512_unpacklo_epi64(ab_high, cd_high);
  x[3] = _mm512_unpackhi_epi64(ab_high, cd_high);
}

/// acc[row][part][] += query . codes over 16 bytes of 16 tokens. Sums in several places do not wait for each other.
template <unsigned Bits, std::size_t Rows, std::size_t Places>
KVCACHE_ALWAYS_INLINE void add_keys(const code_query (&queries)[Rows], const __m512i (&x)[4], std::size_t at,
                                    __m512i (&acc)[Rows][parts_of(Bits)][Places]) noexcept {
  constexpr std::size_t parts = parts_of(Bits);
  constexpr std::size_t vectors = Bits == 8 ? 1 : 2;
  const std::size_t first = at / 64 * vectors * parts * 64 + at % 64;
  each<4>([&](auto j) noexcept KVCACHE_INLINED {
    each<vectors>([&](auto v) noexcept KVCACHE_INLINED {
      const __m512i half = _mm512_set1_epi8(0x0f);
      const __m512i codes = Bits == 8 ? _mm512_xor_si512(x[j], _mm512_set1_epi8(static_cast<char>(0x80)))
                            : v == 0  ? _mm512_and_si512(x[j], half)
                                      : _mm512_and_si512(_mm512_srli_epi16(x[j], 4), half);
      each<Rows>([&](auto r) noexcept KVCACHE_INLINED {
        const std::byte* const q = queries[r].at.bytes + first + v * parts * 64 + 4 * j;
        each<parts>(
            [&](auto part) noexcept KVCACHE_INLINED { add_products(acc[r][part][j % Places], codes, q + part * 64); });
      });
    });
  });
}

/// Where the logits of a run's row lie.
inline constexpr std::size_t code_logits_step = cpu::decode_chunk + lanes;

/// What the products of a query are added to.
KVCACHE_ALWAYS_INLINE vec before(const code_query& query, float factor, const float* logits) noexcept {
  return query.joins ? load(logits) : set1(query.bias * factor);
}

/// logits[row][token] = q . k * factor for the tokens of a segment; up to 15 behind them are written too. `Scales`:
/// tokens have scales; else they have joined the query.
template <unsigned Bits, bool Scales, std::size_t Rows>
KVCACHE_NOINLINE void code_logits(const code_form& form, const code_query (&queries)[Rows], const code_stream& k,
                                  std::size_t count, float factor, float* logits, chunk_lines& lines) noexcept {
  constexpr std::size_t parts = parts_of(Bits);
  constexpr std::size_t places = Rows * parts >= 4 ? 1 : 4 / (Rows * parts);
  constexpr std::size_t most_scales = Bits == 8 ? 1 : 4;  // at a time
  const std::size_t bytes = form.bytes();
  const std::size_t quarters = (bytes + 15) / 16;
  const std::size_t group = Scales && form.q.group != 0 ? std::size_t{form.q.group} * Bits / 8 : 16 * quarters;
  for (std::size_t t = 0; t < count; t += lanes) {
    vec sum[Rows];
    each<Rows>([&](auto r) noexcept KVCACHE_INLINED { sum[r] = set1(0.0f); });
    [[maybe_unused]] vec scale[most_scales];
    [[maybe_unused]] vec zero[most_scales];
    std::size_t asked = 0;
    for (std::size_t at = 0, g = 0; at < bytes; ++g) {
      if constexpr (Scales) {
        if (g % most_scales == 0) {
          const std::size_t all = form.scales();
          load_scales(k, t, 2 * g, all - g, scale);
          if (form.q.zero_points) {
            load_scales(k, t, 2 * quantization::zero_point(g, all), all - g, zero);
            each<most_scales>([&](auto i) noexcept KVCACHE_INLINED { zero[i] = fma(scale[i], set1(8.0f), zero[i]); });
          }
        }
      }
      __m512i acc[Rows][parts][places];
      each<Rows>([&](auto r) noexcept KVCACHE_INLINED {
        each<parts>([&](auto part) noexcept KVCACHE_INLINED {
          acc[r][part][0] = _mm512_set1_epi32(queries[r].at.starts[g * parts + part]);
          each<places - 1>([&](auto i) noexcept KVCACHE_INLINED { acc[r][part][i + 1] = _mm512_setzero_si512(); });
        });
      });
      const std::size_t end = at + group < bytes ? at + group : bytes;
      for (; at + 16 <= end; at += 16) {
        const std::size_t due = (at + 16) / quarters;
        lines.ask(due - asked);
        asked = due;
        __m512i x[4];
        transposed_codes<true>(k, t, at, x);
        add_keys<Bits>(queries, x, at, acc);
      }
      if (at < end) {
        __m512i x[4];
        transposed_codes<false>(k, t, at, x);
        add_keys<Bits>(queries, x, at, acc);
        at = end;
      }
      each<Rows>([&](auto r) noexcept KVCACHE_INLINED {
        vec products[parts];
        each<parts>([&](auto part) noexcept KVCACHE_INLINED {
          __m512i all = acc[r][part][0];
          each<places - 1>([&](auto i) noexcept KVCACHE_INLINED { all = _mm512_add_epi32(all, acc[r][part][i + 1]); });
          products[part] = _mm512_cvtepi32_ps(all);
        });
        if constexpr (parts == 2) products[0] = fma(products[0], set1(256.0f), products[1]);
        if constexpr (Scales) {
          sum[r] = fma(products[0], scale[g % most_scales], sum[r]);
          if (form.q.zero_points) sum[r] = fma(zero[g % most_scales], set1(queries[r].at.sums[g]), sum[r]);
        } else {
          sum[r] = products[0];
        }
      });
    }
    each<Rows>([&](auto r) noexcept KVCACHE_INLINED {
      float* const to = logits + r * code_logits_step + t;
      store(to, fma(sum[r], set1(queries[r].unit * factor), before(queries[r], factor, to)));
    });
  }
}

/// The same of one query where a token has one scale or none and its codes take one or two pieces: sums over lanes are
/// cheaper than bringing the codes of 16 tokens together.
template <unsigned Bits, bool Scales, std::size_t Pieces>
KVCACHE_NOINLINE void single_logits(const code_form& form, const code_query& query, const code_stream& k,
                                    std::size_t count, float factor, float* logits, chunk_lines& lines) noexcept {
  constexpr std::size_t vectors = Bits == 8 ? 1 : 2;
  constexpr std::size_t parts = parts_of(Bits);
  __m512i q[Pieces * vectors * parts];
  KVCACHE_UNROLL
  for (std::size_t i = 0; i < Pieces * vectors * parts; ++i) q[i] = _mm512_loadu_si512(query.at.bytes + i * 64);
  const std::int32_t first = parts == 2 ? 256 * query.at.starts[0] + query.at.starts[1] : query.at.starts[0];
  const __m512i start = _mm512_maskz_set1_epi32(1, first);
  const __mmask64 there = form.there(Pieces - 1);
  for (std::size_t t = 0; t < count; t += lanes) {
    vec sum[lanes];
    KVCACHE_UNROLL
    for (std::size_t i = 0; i < lanes; ++i) {
      lines.ask(1);
      const std::byte* const from = k.codes_of(t + i);
      __m512i x[Pieces * vectors];
      KVCACHE_UNROLL
      for (std::size_t p = 0; p < Pieces; ++p) {
        const __m512i codes = _mm512_maskz_loadu_epi8(p + 1 < Pieces ? ~__mmask64{0} : there, from + 64 * p);
        if constexpr (vectors == 1) {
          x[p] = _mm512_xor_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80)));
        } else {
          const __m512i half = _mm512_set1_epi8(0x0f);
          x[2 * p] = _mm512_and_si512(codes, half);
          x[2 * p + 1] = _mm512_and_si512(_mm512_srli_epi16(codes, 4), half);
        }
      }
      __m512i acc = parts == 2 ? _mm512_setzero_si512() : start;
      KVCACHE_UNROLL
      for (std::size_t j = 0; j < Pieces * vectors; ++j) acc = _mm512_dpbusd_epi32(acc, x[j], q[j * parts]);
      if constexpr (parts == 2) {
        acc = _mm512_add_epi32(_mm512_slli_epi32(acc, 8), start);
        KVCACHE_UNROLL
        for (std::size_t j = 0; j < Pieces * vectors; ++j) acc = _mm512_dpbusd_epi32(acc, x[j], q[j * parts + 1]);
      }
      sum[i] = _mm512_cvtepi32_ps(acc);
    }
    vec all = sums(sum);
    if constexpr (Scales) {
      vec scale[1];
      load_scales(k, t, 0, 1, scale);
      all = mul(all, scale[0]);
    }
    store(logits + t, fma(all, set1(query.unit * factor), before(query, factor, logits + t)));
  }
}

/// Whichever of the two is meant for it.
template <unsigned Bits, bool Scales, std::size_t Rows>
KVCACHE_ALWAYS_INLINE void any_logits(const code_form& form, const code_query (&queries)[Rows], const code_stream& k,
                                      std::size_t count, float factor, float* logits, chunk_lines& lines) noexcept {
  if constexpr (Rows == 1) {
    if (!Scales || (form.scales() == 1 && !form.q.zero_points)) {
      if (form.pieces() == 1) return single_logits<Bits, Scales, 1>(form, queries[0], k, count, factor, logits, lines);
      if (form.pieces() == 2) return single_logits<Bits, Scales, 2>(form, queries[0], k, count, factor, logits, lines);
    }
  }
  code_logits<Bits, Scales>(form, queries, k, count, factor, logits, lines);
}
