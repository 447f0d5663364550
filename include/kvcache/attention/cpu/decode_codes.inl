// SPDX-License-Identifier: Apache-2.0
// Decoding over codes of 8 and 4 bits as they lie in the pool, by the processor's dot products of bytes (VNNI). Codes
// are unsigned there; queries, and weights on their way to V, are whole numbers: of 15 bits in two bytes, 128 * high +
// low, where codes have 8 bits, and of 8 bits where codes have 4. So they lose a small part of what the format has
// lost. Scales join after the products.
//
// Codes of a head go by in pieces of 64 bytes: 64 codes of 8 bits, or 128 of 4 bits, of which the low halves of the
// bytes (elements 0, 2, 4, ...) and the high ones make a vector each. "Code order" is that of these vectors' bytes.

/// How a dtype lies in pieces.
struct code_form {
  quantization q;
  std::uint32_t dim;
  /// For spread_scales, by piece: which scale each lane of K's sums and each 16 bytes of V's codes have.
  const std::uint16_t (*lane_index)[32];
  const std::uint16_t (*part_index)[32];

  [[nodiscard]] std::size_t bytes() const noexcept { return dim * std::size_t{q.bits} / 8; }
  [[nodiscard]] std::size_t pieces() const noexcept { return (bytes() + 63) / 64; }
  [[nodiscard]] std::size_t vectors() const noexcept { return q.bits == 8 ? 1 : 2; }  // of a piece
  [[nodiscard]] __mmask64 there(std::size_t piece) const noexcept {
    const std::size_t left = bytes() - 64 * piece;
    return left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
  }
  /// What is taken from a code without a zero point.
  [[nodiscard]] float offset() const noexcept { return q.bits == 8 ? -128.0f : -8.0f; }
  /// Elements of a piece.
  [[nodiscard]] std::uint32_t width() const noexcept { return q.bits == 8 ? 64 : 128; }
  [[nodiscard]] std::uint32_t scales() const noexcept { return q.scales(dim); }

  [[nodiscard]] __mmask16 scales_there() const noexcept {
    return static_cast<__mmask16>(scales() >= 16 ? 0xffffu : (1u << scales()) - 1u);
  }
  /// Floats that the codes of all pieces take.
  [[nodiscard]] std::size_t size() const noexcept { return pieces() * vectors() * 64; }

  /// Whether the functions below take it. Groups of 16 of 4 bits share 16 bytes with others.
  [[nodiscard]] static bool possible(dtype_id id, std::uint32_t dim) noexcept {
    const quantization q = quantization_of(id);
    return (q.bits == 8 || q.bits == 4) && dim >= 64 && dim % 16 == 0 && dim <= 1024 &&
           (q.per_channel || (q.scales(dim) <= 16 && (q.group == 0 || q.group >= 32)));
  }
};

/// The codes of one piece, unsigned.
struct code_piece {
  __m512i low;
  __m512i high;  // of 4 bits
};
template <unsigned Bits>
KVCACHE_ALWAYS_INLINE code_piece load_codes(const std::byte* from, __mmask64 there) noexcept {
  const __m512i x = _mm512_maskz_loadu_epi8(there, from);
  if constexpr (Bits == 8) return {_mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x80))), x};
  const __m512i half = _mm512_set1_epi8(0x0f);
  return {_mm512_and_si512(x, half), _mm512_and_si512(_mm512_srli_epi16(x, 4), half)};
}

/// Scales or zero points of a token as floats, one for each of 16 places; `index` says which.
KVCACHE_ALWAYS_INLINE vec spread_scales(const std::byte* from, __mmask16 there, __m512i index) noexcept {
  const __m256i all = _mm256_maskz_loadu_epi16(there, from);
  return _mm512_castsi512_ps(_mm512_maskz_permutexvar_epi16(0xaaaa'aaaau, index, _mm512_castsi256_si512(all)));
}
KVCACHE_ALWAYS_INLINE float read_bf16(const std::byte* from) noexcept {
  bf16 x;
  std::memcpy(&x, from, sizeof x);
  return to_float(x);
}
/// Place i takes scale (first + i * step) / group, and those beyond the last the last one.
inline void write_index(const code_form& form, std::uint32_t first, std::uint32_t step, std::uint16_t* index) noexcept {
  const std::uint32_t last = form.scales() - 1;
  for (std::uint32_t i = 0; i < 16; ++i) {
    const std::uint32_t group = form.q.group == 0 ? 0 : (first + i * step) / form.q.group;
    index[2 * i] = 0;
    index[2 * i + 1] = static_cast<std::uint16_t>(group < last ? group : last);
  }
}

/// How many bytes a whole number has that meets codes of so many bits.
[[nodiscard]] constexpr std::size_t parts_of(unsigned bits) noexcept { return bits == 8 ? 2 : 1; }
[[nodiscard]] constexpr float most_of(std::size_t parts) noexcept { return parts == 2 ? 127 * 128 + 63 : 127; }

/// 16 whole numbers as bytes, in the lowest bytes of their lanes.
struct whole_bytes {
  __m512i high;
  __m512i low;  // where there are two parts
};
template <std::size_t Parts>
KVCACHE_ALWAYS_INLINE whole_bytes split(__m512i x) noexcept {
  if constexpr (Parts == 1) return {x, x};
  const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(64)), 7);
  return {high, _mm512_sub_epi32(x, _mm512_slli_epi32(high, 7))};
}

KVCACHE_ALWAYS_INLINE float sum_of(vec x) noexcept { return _mm512_reduce_add_ps(x); }

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

/// Tokens of one chunk that share what is to be known of them: scales per channel, or that they lie in the tail pool.
struct code_segment {
  std::uint32_t first = 0;
  std::uint32_t count = 0;
  bool tail = false;
};

/// K or V of one head over the tokens of a chunk, from one of them on. There are tokens behind the last to be read.
struct code_stream {
  const std::byte* const* codes;
  const std::byte* const* scales;
};

/// A query of a run, prepared.
struct code_query {
  prepared_query at;
  float unit;
  float bias;  // of logits, before the factor
};

/// The same where one number scales a token, or none, and codes take one or two pieces: sums stay whole to the end.
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

/// logits[token, row] = q . k * factor for the tokens of a segment; up to 15 behind them are written too.
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

/// Where things go on their way to V: lanes are [token of four, 16 bytes of a piece] and become bytes [16 bytes, 4
/// times the same, token].
struct quad_places {
  std::uint8_t bytes[64];
  std::int32_t parts[16];  // i / 4
  constexpr quad_places() : bytes(), parts() {
    for (unsigned i = 0; i < 64; ++i) bytes[i] = static_cast<std::uint8_t>(4 * (4 * (i % 4) + i / 16));
    for (int i = 0; i < 16; ++i) parts[i] = i / 4;
  }
};
/// Four times four floats, those of f(0) first.
template <class F>
KVCACHE_ALWAYS_INLINE vec quad_of(const F& f) noexcept {
  vec x = _mm512_castps128_ps512(f(0));
  x = _mm512_insertf32x4(x, f(1), 1);
  x = _mm512_insertf32x4(x, f(2), 2);
  return _mm512_insertf32x4(x, f(3), 3);
}
/// Exchanges place i of 16 bytes of vector j and place j of vector i.
KVCACHE_ALWAYS_INLINE void transpose_parts(vec (&x)[4]) noexcept {
  const vec a = _mm512_shuffle_f32x4(x[0], x[1], 0x44);
  const vec b = _mm512_shuffle_f32x4(x[2], x[3], 0x44);
  const vec c = _mm512_shuffle_f32x4(x[0], x[1], 0xee);
  const vec d = _mm512_shuffle_f32x4(x[2], x[3], 0xee);
  x[0] = _mm512_shuffle_f32x4(a, b, 0x88);
  x[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
  x[2] = _mm512_shuffle_f32x4(c, d, 0x88);
  x[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}

/// Scales and zero points of a block's channels, for 16 bytes of a piece's low or high halves.
struct channel_scales {
  vec scale;
  vec zero;
};
template <unsigned Bits>
KVCACHE_ALWAYS_INLINE channel_scales load_channel_scales(const code_form& form, const std::byte* from,
                                                         std::size_t piece, std::size_t half,
                                                         std::size_t part) noexcept {
  constexpr std::size_t width = Bits == 8 ? 16 : 32;  // elements
  const std::size_t first = piece * (4 * width) + part * width;
  const std::size_t left = first < form.dim ? form.dim - first : 0;
  const auto there = static_cast<__mmask32>(left >= width ? ~std::uint64_t{0} >> (64 - width) : (1u << left) - 1u);
  const auto load_bf16 = [&](const std::byte* at) noexcept {
    if constexpr (Bits == 8) {
      const __m256i words = _mm256_maskz_loadu_epi16(static_cast<__mmask16>(there), at + 2 * first);
      return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
    } else {
      const __m512i words = _mm512_maskz_loadu_epi16(there, at + 2 * first);
      return _mm512_castsi512_ps(half == 0
                                     ? _mm512_slli_epi32(words, 16)
                                     : _mm512_and_si512(words, _mm512_set1_epi32(static_cast<int>(0xffff'0000u))));
    }
  };
  const vec scale = load_bf16(from);
  return {scale, form.q.zero_points ? load_bf16(from + 2 * std::size_t{form.dim}) : mul(scale, set1(form.offset()))};
}

/// Rows that have room in registers together.
[[nodiscard]] constexpr std::size_t rows_to_v(unsigned bits, std::size_t run) noexcept {
  return bits == 8 && run > 2 ? 2 : run;
}

/// output[row] += weight * v over the tokens of a segment, outputs in code order, [piece][vector][64].
/// Weights lie as [token, row of Run], of which these are `row` and the next.
template <unsigned Bits, bool PerChannel, std::size_t Run>
KVCACHE_NOINLINE void code_values(const code_form& form, const float* weights, std::size_t row, const code_stream& v,
                                  std::size_t count, float* output, std::size_t output_step) noexcept {
  constexpr std::size_t Rows = rows_to_v(Bits, Run);
  constexpr std::size_t parts = parts_of(Bits);
  constexpr float most_whole = most_of(parts);
  constexpr std::size_t vectors = Bits == 8 ? 1 : 2;
  constexpr std::size_t most_quads = cpu::decode_chunk / 4;
  static constexpr quad_places places;
  const __m512i gather = _mm512_loadu_si512(places.bytes);
  const __m512i spread = _mm512_loadu_si512(places.parts);
  const std::size_t quads = (count + 3) / 4;
  const __mmask16 scales_there = form.scales_there();
  __m512i from[Rows];  // which weights of four tokens
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < Rows; ++r)
    from[r] = _mm512_add_epi32(
        _mm512_set1_epi32(static_cast<int>(row + r)),
        _mm512_mullo_epi32(_mm512_loadu_si512(places.parts), _mm512_set1_epi32(static_cast<int>(Run))));
  // Weights as whole numbers, [quad][row][part], 16 lanes of four tokens: 4 lanes for each 16 bytes of codes.
  alignas(64) std::byte whole[most_quads][Rows][parts * 64];
  vec unit[Rows];
  vec zero[Rows];
  for (std::size_t p = 0; p < form.pieces(); ++p) {
    const __mmask64 there = form.there(p);
    if (p == 0 || (!PerChannel && form.scales() > 1)) {
      vec scaled[Rows][most_quads];
      vec largest[Rows];
      const __m512i of_parts = PerChannel ? _mm512_setzero_si512() : _mm512_loadu_si512(form.part_index[p]);
      KVCACHE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r) {
        largest[r] = set1(0.0f);
        zero[r] = set1(0.0f);
      }
      for (std::size_t n = 0; n < quads; ++n) {
        const std::size_t left = count - 4 * n;
        const auto used = static_cast<__mmask16>(left >= 4 ? 0xffffu : (1u << 4 * left) - 1u);
        [[maybe_unused]] vec scale;
        [[maybe_unused]] vec zeros;
        if constexpr (!PerChannel) {
          scale = quad_of([&](std::size_t i) {
            return _mm512_castps512_ps128(spread_scales(v.scales[4 * n + i], scales_there, of_parts));
          });
          zeros = form.q.zero_points ? quad_of([&](std::size_t i) {
            return _mm512_castps512_ps128(
                spread_scales(v.scales[4 * n + i] + 2 * form.scales(), scales_there, of_parts));
          })
                                     : mul(scale, set1(form.offset()));
        }
        const vec some = load(weights + 4 * n * Run);
        KVCACHE_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
          const vec weight = _mm512_maskz_permutexvar_ps(used, from[r], some);
          scaled[r][n] = PerChannel ? weight : _mm512_maskz_mul_ps(used, weight, scale);
          largest[r] = larger(magnitude(scaled[r][n]), largest[r]);
          // A token that is not there has a weight of 0, and any zero point.
          zero[r] = PerChannel ? add(zero[r], weight) : _mm512_mask3_fmadd_ps(weight, zeros, zero[r], used);
        }
      }
      KVCACHE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r) {
        const vec most = fold_rows<4>(largest[r], fold_larger{});
        zero[r] = fold_rows<4>(zero[r], fold_sum{});
        unit[r] = mul(most, set1(1.0f / most_whole));
        const vec inverse = select(less(set1(0.0f), most), div(set1(most_whole), most), set1(0.0f));
        for (std::size_t n = 0; n < quads; ++n) {
          const whole_bytes x = split<parts>(_mm512_cvtps_epi32(mul(scaled[r][n], inverse)));
          _mm512_store_si512(whole[n][r], _mm512_permutexvar_epi8(gather, x.high));
          if constexpr (parts == 2) _mm512_store_si512(whole[n][r] + 64, _mm512_permutexvar_epi8(gather, x.low));
        }
        unit[r] = _mm512_permutexvar_ps(spread, unit[r]);
        zero[r] = _mm512_permutexvar_ps(spread, zero[r]);
      }
    }
    for (std::size_t half = 0; half < vectors; ++half) {
      __m512i high[Rows][4];
      [[maybe_unused]] __m512i low[Rows][4];
      KVCACHE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r) {
        KVCACHE_UNROLL
        for (std::size_t i = 0; i < 4; ++i) {
          high[r][i] = _mm512_setzero_si512();
          if constexpr (parts == 2) low[r][i] = _mm512_setzero_si512();
        }
      }
      for (std::size_t n = 0; n < quads; ++n) {
        __m512i x[4];
        KVCACHE_UNROLL
        for (std::size_t i = 0; i < 4; ++i) {
          const code_piece piece = load_codes<Bits>(v.codes[4 * n + i] + 64 * p, there);
          x[i] = half == 0 ? piece.low : piece.high;
        }
        const __m512i ab_low = _mm512_unpacklo_epi8(x[0], x[1]);
        const __m512i ab_high = _mm512_unpackhi_epi8(x[0], x[1]);
        const __m512i cd_low = _mm512_unpacklo_epi8(x[2], x[3]);
        const __m512i cd_high = _mm512_unpackhi_epi8(x[2], x[3]);
        const __m512i quad[4] = {_mm512_unpacklo_epi16(ab_low, cd_low), _mm512_unpackhi_epi16(ab_low, cd_low),
                                 _mm512_unpacklo_epi16(ab_high, cd_high), _mm512_unpackhi_epi16(ab_high, cd_high)};
        KVCACHE_UNROLL
        for (std::size_t r = 0; r < Rows; ++r) {
          const __m512i of_high = _mm512_load_si512(whole[n][r]);
          KVCACHE_UNROLL
          for (std::size_t i = 0; i < 4; ++i) high[r][i] = _mm512_dpbusd_epi32(high[r][i], quad[i], of_high);
          if constexpr (parts == 2) {
            const __m512i of_low = _mm512_load_si512(whole[n][r] + 64);
            KVCACHE_UNROLL
            for (std::size_t i = 0; i < 4; ++i) low[r][i] = _mm512_dpbusd_epi32(low[r][i], quad[i], of_low);
          }
        }
      }
      KVCACHE_UNROLL
      for (std::size_t r = 0; r < Rows; ++r) {
        vec part[4];
        KVCACHE_UNROLL
        for (std::size_t i = 0; i < 4; ++i) {
          __m512i products = high[r][i];
          if constexpr (parts == 2) products = _mm512_add_epi32(_mm512_slli_epi32(products, 7), low[r][i]);
          part[i] = fma(_mm512_cvtepi32_ps(products), unit[r], PerChannel ? set1(0.0f) : zero[r]);
        }
        transpose_parts(part);
        float* const to = output + r * output_step + (p * vectors + half) * 64;
        KVCACHE_UNROLL
        for (std::size_t i = 0; i < 4; ++i) {
          if constexpr (PerChannel) {
            const channel_scales of = load_channel_scales<Bits>(form, v.scales[0], p, half, i);
            store(to + i * lanes, fma(part[i], of.scale, fma(of.zero, zero[r], load(to + i * lanes))));
          } else {
            store(to + i * lanes, add(load(to + i * lanes), part[i]));
          }
        }
      }
    }
  }
}

/// Floats in the order of codes, zeros where there is no element.
inline void to_code_order(const code_form& form, const float* natural, float* to) noexcept {
  std::memset(to, 0, form.size() * sizeof(float));
  for (std::uint32_t d = 0; d < form.dim; ++d) {
    const std::size_t place = form.q.bits == 8 ? d : std::size_t{d / 128} * 128 + d % 2 * 64 + std::size_t{d % 128} / 2;
    to[place] = natural[d];
  }
}
inline void from_code_order(const code_form& form, const float* from, float by, float* natural) noexcept {
  for (std::uint32_t d = 0; d < form.dim; ++d) {
    const std::size_t place = form.q.bits == 8 ? d : std::size_t{d / 128} * 128 + d % 2 * 64 + std::size_t{d % 128} / 2;
    natural[d] = from[place] / by;
  }
}

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
      c.k[t] = c.tokens.k[from];
      c.v[t] = c.tokens.v[from];
      // What lies in the tail pool has no scales; something is there to be read.
      c.k_scales[t] = tail ? c.k[t] : call.kv.k_scales.at(entry, c.tokens.offset[from], 0);
      c.v_scales[t] = tail ? c.v[t] : call.kv.v_scales.at(entry, c.tokens.offset[from], 0);
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
    for (std::size_t r = 0; r < Rows; ++r) queries[r] = {prepared(head + r), units()[head + r], 0};
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
      queries[r] = {to, prepare_query<Bits>(k_form, scaled, to), sum_of(zero)};
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
        common.logits[t * Rows + r] = sum_of(sum) * factor;
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
