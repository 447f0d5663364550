// SPDX-License-Identifier: Apache-2.0
// Weights over codes of V: see codes.inl.

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
