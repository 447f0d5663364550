// SPDX-License-Identifier: Apache-2.0
// Weights over codes of V: see codes.inl.
//
// Of four tokens' codes the bytes of one place are brought side by side, and their products with the four weights are
// added at once. So the weights of a row lie as whole numbers in fours of bytes. Codes of 8 bits are signed and their
// weights are not; codes of 4 bits are not and their weights are, as their scales are.

/// Tokens of a segment, and whole fours of them.
inline constexpr std::size_t most_fours = cpu::decode_chunk / 4;

/// A row's weights as whole numbers. `Grouped`: the scales of a token are several, and the 16 bytes of a piece have
/// each their own.
template <unsigned Bits, bool Grouped>
struct whole_weights {
  /// [four of tokens][part: high, low][token]; where grouped [four of tokens][16 bytes of a piece][token]
  alignas(64) std::byte bytes[most_fours * (Grouped ? 16 : 4 * parts_of(Bits))];
  vec unit;  // what products are to be multiplied with
  vec zero;  // what is to be added to every element, or with its channel's zero point
};

/// A quiet NaN where one of the lanes is infinite or no number, else `x`. By bits, so that -ffast-math cannot lose it.
KVCACHE_ALWAYS_INLINE vec keep_nan(vec x, vec lanes_of_it) noexcept {
  constexpr int infinite_or_nan = 0x99;
  const bool lost = _mm512_fpclass_ps_mask(lanes_of_it, infinite_or_nan) != 0;
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(x), _mm512_set1_epi32(lost ? 0x7fc0'0000 : 0)));
}

/// What to multiply with so that `largest` becomes `most`; 0 for 0.
KVCACHE_ALWAYS_INLINE vec inverse_of(vec largest, float most) noexcept {
  return select(less(set1(0.0f), largest), div(set1(most), largest), set1(0.0f));
}

/// One scale for a token, or none: `scales` are of 16 tokens each.
template <unsigned Bits, bool Scales>
KVCACHE_ALWAYS_INLINE void weigh_uniform(const float* weights, std::size_t count, const vec* scales,
                                         whole_weights<Bits, false>& to) noexcept {
  constexpr std::size_t parts = parts_of(Bits);
  constexpr float most = parts == 2 ? 65535.0f : 127.0f;
  const auto scaled = [&](std::size_t t) noexcept {
    const __mmask16 there = lanes_there(count, t);
    const vec weight = _mm512_maskz_loadu_ps(there, weights + t);
    return Scales ? _mm512_maskz_mul_ps(there, weight, scales[t / lanes]) : weight;
  };
  vec largest = set1(0.0f);
  vec sum = set1(0.0f);
  for (std::size_t t = 0; t < count; t += lanes) {
    const vec weight = scaled(t);
    largest = larger(weight, largest);
    sum = add(sum, weight);
  }
  const vec all = set1(_mm512_reduce_max_ps(largest));
  const vec inverse = inverse_of(all, most);
  to.unit = keep_nan(mul(all, set1(1.0f / most)), sum);
  if constexpr (!Scales) to.zero = set1(sum_of(sum));
  for (std::size_t t = 0; t < count; t += lanes) {
    const __m512i whole = _mm512_cvtps_epi32(mul(scaled(t), inverse));
    std::byte* const at = to.bytes + t * parts;
    if constexpr (parts == 1) {
      _mm_store_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(whole));
    } else {
      // Of four tokens the bytes 1, then the bytes 0.
      const __m512i gather =
          _mm512_castsi256_si512(_mm256_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 17, 21, 25, 29, 16, 20, 24, 28, 33, 37, 41,
                                                  45, 32, 36, 40, 44, 49, 53, 57, 61, 48, 52, 56, 60));
      _mm256_store_si256(reinterpret_cast<__m256i*>(at),
                         _mm512_castsi512_si256(_mm512_permutexvar_epi8(gather, whole)));
    }
  }
}

/// The largest, or the sum, of the lanes of each of four vectors, in every four lanes.
template <class Fold>
KVCACHE_ALWAYS_INLINE vec fold_four(const vec (&x)[4], const Fold& fold) noexcept {
  const vec ab = fold(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const vec cd = fold(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  vec all = fold(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
  all = fold(all, swap_lanes<8>(all));
  return fold(all, swap_lanes<4>(all));
}

/// Scales of the four 16 bytes of a piece, and zero points where there are any, by 16 tokens.
struct piece_scales {
  vec scale[cpu::decode_chunk / lanes][4];
  vec zero[cpu::decode_chunk / lanes][4];
};
inline void load_piece_scales(const code_form& form, const code_stream& v, std::size_t piece, std::size_t count,
                              piece_scales& to) noexcept {
  const std::size_t all = form.scales();
  const std::size_t of_piece = form.q.group < 128 ? 128 / form.q.group : 1;  // a group is 32, 64 or 128, or more
  const std::size_t first = piece * 128 / form.q.group;
  const std::size_t there = all - first < of_piece ? all - first : of_piece;
  const auto load = [&](std::size_t t, std::size_t behind, vec(&spread)[4]) noexcept {
    vec x[4];
    load_scales(v, t, behind, there, x);
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t from = i * of_piece / 4;
      spread[i] = x[from < there ? from : 0];
    }
  };
  for (std::size_t t = 0; t < count; t += lanes) {
    load(t, 2 * first, to.scale[t / lanes]);
    if (form.q.zero_points) load(t, 2 * quantization::zero_point(first, all), to.zero[t / lanes]);
  }
}

/// Lane i of the first four in all of the i-th four lanes.
KVCACHE_ALWAYS_INLINE vec spread_parts(vec x) noexcept {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), x);
}

template <unsigned Bits>
KVCACHE_ALWAYS_INLINE void weigh_grouped(const float* weights, std::size_t count, const piece_scales& scales,
                                         bool zero_points, whole_weights<Bits, true>& to) noexcept {
  static_assert(parts_of(Bits) == 1);
  constexpr float most = 127.0f;
  vec largest[4];
  vec zero[4];
  each<4>([&](auto i) noexcept KVCACHE_INLINED { largest[i] = zero[i] = set1(0.0f); });
  for (std::size_t t = 0; t < count; t += lanes) {
    const __mmask16 there = lanes_there(count, t);
    const vec weight = _mm512_maskz_loadu_ps(there, weights + t);
    each<4>([&](auto i) noexcept KVCACHE_INLINED {
      const vec scaled = _mm512_maskz_mul_ps(there, weight, scales.scale[t / lanes][i]);
      largest[i] = larger(magnitude(scaled), largest[i]);
      zero[i] =
          zero_points ? _mm512_mask3_fmadd_ps(weight, scales.zero[t / lanes][i], zero[i], there) : add(scaled, zero[i]);
    });
  }
  const vec all = fold_four(largest, fold_larger{});
  to.unit = spread_parts(mul(all, set1(1.0f / most)));
  // Without zero points, codes are 8 too large.
  to.zero = mul(spread_parts(fold_four(zero, fold_sum{})), set1(zero_points ? 1.0f : -8.0f));
  const vec inverse = inverse_of(all, most);
  const vec by[4] = {_mm512_permute_ps(inverse, 0x00), _mm512_permute_ps(inverse, 0x55),
                     _mm512_permute_ps(inverse, 0xaa), _mm512_permute_ps(inverse, 0xff)};
  for (std::size_t t = 0; t < count; t += lanes) {
    // Cheaper than keeping what was multiplied above.
    const __mmask16 there = lanes_there(count, t);
    const vec weight = _mm512_maskz_loadu_ps(there, weights + t);
    __m512i whole[4];
    each<4>([&](auto i) noexcept KVCACHE_INLINED {
      const vec scaled = _mm512_maskz_mul_ps(there, weight, scales.scale[t / lanes][i]);
      whole[i] = _mm512_cvtps_epi32(mul(scaled, by[i]));
    });
    // In every 16 bytes four tokens of four scales.
    _mm512_store_si512(to.bytes + t * 4, _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]),
                                                            _mm512_packs_epi32(whole[2], whole[3])));
  }
}

/// A piece's scales per channel in the order of V.
struct piece_channels {
  vec scale[2][4];
  vec zero[2][4];
};
template <unsigned Bits>
KVCACHE_ALWAYS_INLINE void load_piece_channels(const code_form& form, const std::byte* from, std::size_t piece,
                                               piece_channels& to) noexcept {
  for (std::size_t half = 0; half < (Bits == 8 ? 1 : 2); ++half) {
    KVCACHE_UNROLL
    for (std::size_t i = 0; i < 4; ++i) {
      const channel_scales of = load_channel_scales<Bits>(form, from, piece, half, i);
      to.scale[half][i] = of.scale;
      to.zero[half][i] = of.zero;
    }
    transpose_parts(to.scale[half]);
    transpose_parts(to.zero[half]);
  }
}

/// The i-th four of 16 bytes in all of the i-th four lanes.
KVCACHE_ALWAYS_INLINE __m512i spread_fours(const std::byte* from) noexcept {
  const __m128i fours = _mm_load_si128(reinterpret_cast<const __m128i*>(from));
  return _mm512_castps_si512(spread_parts(_mm512_castps128_ps512(_mm_castsi128_ps(fours))));
}

/// Products of a piece for the places of four bytes [First, First + Places), whose outputs `write` takes:
/// write(row, half, place, products).
template <unsigned Bits, bool Grouped, std::size_t Rows, std::size_t First, std::size_t Places, class Write>
KVCACHE_ALWAYS_INLINE void multiply_values(const whole_weights<Bits, Grouped> (&weights)[Rows], const code_stream& v,
                                           std::size_t count, std::size_t at, __mmask64 there, std::size_t asks,
                                           chunk_lines& lines, const Write& write) noexcept {
  constexpr std::size_t parts = parts_of(Bits);
  __m512i acc[Rows][Places][2];  // parts, or halves
  each<Rows>([&](auto r) noexcept KVCACHE_INLINED {
    each<Places>([&](auto i) noexcept KVCACHE_INLINED { acc[r][i][0] = acc[r][i][1] = _mm512_setzero_si512(); });
  });
  for (std::size_t n = 0; 4 * n < count; ++n) {
    lines.ask(asks);
    __m512i x[4];
    each<4>(
        [&](auto i) noexcept KVCACHE_INLINED { x[i] = _mm512_maskz_loadu_epi8(there, v.codes_of(4 * n + i) + at); });
    __m512i codes[4];
    if constexpr (First == 0) {
      const __m512i ab = _mm512_unpacklo_epi8(x[0], x[1]);
      const __m512i cd = _mm512_unpacklo_epi8(x[2], x[3]);
      codes[0] = _mm512_unpacklo_epi16(ab, cd);
      codes[1] = _mm512_unpackhi_epi16(ab, cd);
    }
    if constexpr (First + Places == 4) {
      const __m512i ab = _mm512_unpackhi_epi8(x[0], x[1]);
      const __m512i cd = _mm512_unpackhi_epi8(x[2], x[3]);
      codes[2] = _mm512_unpacklo_epi16(ab, cd);
      codes[3] = _mm512_unpackhi_epi16(ab, cd);
    }
    if constexpr (Bits == 8) {
      each<Rows>([&](auto r) noexcept KVCACHE_INLINED {
        each<parts>([&](auto part) noexcept KVCACHE_INLINED {
          const __m512i weight = set1_four(weights[r].bytes + (n * parts + part) * 4);
          each<Places>(
              [&](auto i) noexcept KVCACHE_INLINED { add_products(acc[r][i][part], weight, codes[First + i]); });
        });
      });
    } else {
      const __m512i half = _mm512_set1_epi8(0x0f);
      __m512i nibbles[Places][2];
      each<Places>([&](auto i) noexcept KVCACHE_INLINED {
        nibbles[i][0] = _mm512_and_si512(codes[First + i], half);
        nibbles[i][1] = _mm512_and_si512(_mm512_srli_epi16(codes[First + i], 4), half);
      });
      each<Rows>([&](auto r) noexcept KVCACHE_INLINED {
        const __m512i weight = Grouped ? spread_fours(weights[r].bytes + n * 16) : set1_four(weights[r].bytes + n * 4);
        each<Places>([&](auto i) noexcept KVCACHE_INLINED {
          add_products(acc[r][i][0], nibbles[i][0], weight);
          add_products(acc[r][i][1], nibbles[i][1], weight);
        });
      });
    }
  }
  each<Rows>([&](auto r) noexcept KVCACHE_INLINED {
    each<Places>([&](auto i) noexcept KVCACHE_INLINED {
      const vec first = _mm512_cvtepi32_ps(acc[r][i][0]);
      const vec second = _mm512_cvtepi32_ps(acc[r][i][1]);
      if constexpr (Bits == 8) {
        write(r, 0, First + i, fma(first, set1(256.0f), second));
      } else {
        write(r, 0, First + i, first);
        write(r, 1, First + i, second);
      }
    });
  });
}

/// Where scales of V are: one of a token, several of a token, or those of a block's channels.
enum class value_scales { token, groups, channels };

/// output[row] += weights . v over the tokens of a segment. Weights lie as logits do, outputs in the order of V.
template <unsigned Bits, value_scales Scales, std::size_t Rows>
KVCACHE_NOINLINE void code_values(const code_form& form, const float* weights, const code_stream& v, std::size_t count,
                                  float* output, std::size_t output_step, chunk_lines& lines) noexcept {
  constexpr bool grouped = Scales == value_scales::groups;
  constexpr std::size_t halves = Bits == 8 ? 1 : 2;
  constexpr std::size_t places = Rows <= 2 ? 4 : 2;  // that have room in registers
  whole_weights<Bits, grouped> whole[Rows];
  if constexpr (!grouped) {
    vec scales[cpu::decode_chunk / lanes];
    if constexpr (Scales == value_scales::token) {
      for (std::size_t t = 0; t < count; t += lanes) {
        vec scale[1];
        load_scales(v, t, 0, 1, scale);
        scales[t / lanes] = scale[0];
      }
    }
    for (std::size_t r = 0; r < Rows; ++r)
      weigh_uniform<Bits, Scales == value_scales::token>(weights + r * code_logits_step, count, scales, whole[r]);
  }
  for (std::size_t p = 0; p < form.pieces(); ++p) {
    if constexpr (grouped) {
      if (p == 0 || form.scales() > 1) {
        piece_scales scales;
        load_piece_scales(form, v, p, count, scales);
        for (std::size_t r = 0; r < Rows; ++r)
          weigh_grouped(weights + r * code_logits_step, count, scales, form.q.zero_points, whole[r]);
      }
    }
    [[maybe_unused]] piece_channels channels;
    if constexpr (Scales == value_scales::channels) load_piece_channels<Bits>(form, v.scales_of(0), p, channels);
    const auto write = [&](std::size_t r, std::size_t half, std::size_t place, vec products) noexcept {
      float* const to = output + r * output_step + (p * halves + half) * 64 + place * lanes;
      if constexpr (Scales == value_scales::channels)
        store(to, fma(mul(products, whole[r].unit), channels.scale[half][place],
                      fma(channels.zero[half][place], whole[r].zero, load(to))));
      else if constexpr (grouped)
        store(to, add(load(to), fma(products, whole[r].unit, whole[r].zero)));
      else
        store(to, fma(products, whole[r].unit, load(to)));
    };
    // The tokens' lines are asked for over all passes.
    const std::size_t passes = form.pieces() * (4 / places);
    const auto asks = [&](std::size_t pass) noexcept { return 4 * (pass + 1) / passes - 4 * pass / passes; };
    const std::size_t pass = p * (4 / places);
    multiply_values<Bits, grouped, Rows, 0, places>(whole, v, count, 64 * p, form.there(p), asks(pass), lines, write);
    if constexpr (places == 2)
      multiply_values<Bits, grouped, Rows, 2, 2>(whole, v, count, 64 * p, form.there(p), asks(pass + 1), lines, write);
  }
}
