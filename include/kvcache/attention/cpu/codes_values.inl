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
  __m512i start;  // what products begin with, so that codes without a sign are less 8
  vec unit;       // what products are to be multiplied with
  vec zero;       // what is to be added to every element, or with its channel's zero point
};

/// x, or a quiet NaN in the lanes where `lanes_of_it` is infinite or no number. By bits, so that -ffast-math cannot
/// lose it.
KVCACHE_ALWAYS_INLINE vec keep_nan(vec x, vec lanes_of_it) noexcept {
  constexpr int infinite_or_nan = 0x99;
  const __mmask16 lost = _mm512_fpclass_ps_mask(lanes_of_it, infinite_or_nan);
  return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_castps_si512(x), lost, _mm512_set1_epi32(0x7fc0'0000)));
}

/// What to multiply weights with so that the inverses of `largest` are finite, of those that scales make of them.
KVCACHE_ALWAYS_INLINE vec lift_of(vec largest) noexcept {
  const bool fits = !any(less(largest, set1(lifted_below))) || any(less(set1(1.0f), largest));
  return set1(fits ? 1.0f : lifted_by);
}
/// What to multiply with so that `largest` becomes `most`; 0 for 0. Of several scales, the smallest may be so far below
/// the others that they are not lifted: then it becomes less.
KVCACHE_ALWAYS_INLINE vec inverse_of(vec largest, float most) noexcept {
  return select(less(set1(0.0f), largest), smaller(div(set1(most), largest), set1(0x1p126f)), set1(0.0f));
}

/// Where the rest shall follow, since whole numbers miss `missing` of `sum`, both in units of their own, of a row's
/// weights of a segment.
KVCACHE_ALWAYS_INLINE mask much_is_missing(vec missing, vec sum, const float* weights, std::size_t count,
                                           const float* total) noexcept {
  missing = magnitude(missing);
  if (!any(less(mul(sum, set1(most_missing)), missing))) return 0;
  vec of_segment = set1(0.0f);
  for (std::size_t t = 0; t < count; t += lanes)
    of_segment = add(of_segment, _mm512_maskz_loadu_ps(lanes_there(count, t), weights + t));
  const float allowed = most_missing * sum_of(load(total));
  return static_cast<mask>(less(mul(sum, set1(allowed)), mul(missing, set1(sum_of(of_segment)))) |
                           less(mul(sum, set1(most_missing_of_segment)), missing));
}
/// A unit, larger by as much as whole numbers miss of their sum: a channel whose values are all the same keeps them.
KVCACHE_ALWAYS_INLINE vec with_missing(vec unit, vec missing, vec sum) noexcept {
  return fma(mul(unit, missing), _mm512_rcp14_ps(larger(sum, set1(1.0f))), unit);
}

/// One scale for a token, or none: `scales` are of 16 tokens each. Returns where the rest shall follow; `rest`: it is
/// asked for, where it `follows`.
template <unsigned Bits, bool Scales>
KVCACHE_ALWAYS_INLINE mask weigh_uniform(const float* weights, std::size_t count, const vec* scales, bool rest,
                                         mask follows, const float* total, whole_weights<Bits, false>& to) noexcept {
  constexpr std::size_t parts = parts_of(Bits);
  constexpr float most = parts == 2 ? 65535.0f : 127.0f;
  const auto scaled = [&](std::size_t t, vec lift) noexcept {
    const __mmask16 there = lanes_there(count, t);
    const vec weight = _mm512_maskz_loadu_ps(there, weights + t);
    return Scales ? _mm512_maskz_mul_ps(there, mul(weight, lift), scales[t / lanes]) : weight;
  };
  vec largest = set1(0.0f);
  vec sum = set1(0.0f);
  for (std::size_t t = 0; t < count; t += lanes) {
    const vec weight = scaled(t, set1(1.0f));
    largest = larger(weight, largest);
    sum = add(sum, weight);
  }
  const vec all = set1(_mm512_reduce_max_ps(largest));
  const vec lift = Scales ? lift_of(all) : set1(1.0f);
  const vec inverse = inverse_of(mul(all, lift), most);
  to.start = _mm512_setzero_si512();
  vec whole_sum = set1(0.0f);
  for (std::size_t t = 0; t < count; t += lanes) {
    const vec exact = mul(scaled(t, lift), inverse);
    std::byte* const at = to.bytes + t * parts;
    if constexpr (parts == 1) {
      const vec whole = round(rest ? rest_of(exact) : exact);
      whole_sum = add(whole_sum, whole);
      _mm_store_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole)));
    } else {
      const __m512i whole = _mm512_cvtps_epi32(exact);
      // Of four tokens the bytes 1, then the bytes 0.
      const __m512i gather =
          _mm512_castsi256_si512(_mm256_setr_epi8(1, 5, 9, 13, 0, 4, 8, 12, 17, 21, 25, 29, 16, 20, 24, 28, 33, 37, 41,
                                                  45, 32, 36, 40, 44, 49, 53, 57, 61, 48, 52, 56, 60));
      _mm256_store_si256(reinterpret_cast<__m256i*>(at),
                         _mm512_castsi512_si256(_mm512_permutexvar_epi8(gather, whole)));
    }
  }
  float exact = 0;
  float found = 0;
  if constexpr (parts == 1)
    sums_of(sum, whole_sum, exact, found);
  else
    exact = sum_of(sum);
  to.zero = set1(exact);
  to.unit = keep_nan(mul(all, set1((parts == 2 ? 65536.0f : 1.0f) / most)), to.zero);
  if constexpr (parts == 2) return 0;
  to.start = _mm512_cvtps_epi32(set1(-8.0f * found));
  if (rest) {
    to.unit = select(follows, mul(to.unit, set1(1.0f / rest_parts)), set1(0.0f));
    to.zero = set1(0.0f);
    return 0;
  }
  const vec whole = set1(found);
  const vec missing = sub(mul(to.zero, inverse), whole);
  const mask much = much_is_missing(missing, whole, weights, count, total);
  to.unit = select(much, to.unit, with_missing(to.unit, missing, whole));
  return much;
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

/// Scales of the four 16 bytes of a piece by 16 tokens, and what their codes have in common where there are zero
/// points.
struct piece_scales {
  vec scale[cpu::decode_chunk / lanes][4];
  vec middle[cpu::decode_chunk / lanes][4];
};
inline void load_piece_scales(const code_form& form, const code_stream& v, std::size_t piece, std::size_t count,
                              piece_scales& to) noexcept {
  const std::size_t all = form.scales();
  const std::size_t of_piece = form.q.group < 128 ? 128 / form.q.group : 1;  // a group is 32, 64 or 128, or more
  const std::size_t first = piece * 128 / form.q.group;
  const std::size_t there = all - first < of_piece ? all - first : of_piece;
  const auto spread = [&](const vec(&x)[4], vec(&parts)[4]) noexcept {
    for (std::size_t i = 0; i < 4; ++i) {
      const std::size_t from = i * of_piece / 4;
      parts[i] = x[from < there ? from : 0];
    }
  };
  for (std::size_t t = 0; t < count; t += lanes) {
    vec scale[4];
    load_scales(v, t, 2 * first, there, scale);
    spread(scale, to.scale[t / lanes]);
    if (!form.q.zero_points) continue;
    vec middle[4];
    load_scales(v, t, 2 * quantization::zero_point(first, all), there, middle);
    each<4>([&](auto i) noexcept KVCACHE_INLINED { middle[i] = fma(scale[i], set1(8.0f), middle[i]); });
    spread(middle, to.middle[t / lanes]);
  }
}

/// Lane i of the first four in all of the i-th four lanes.
KVCACHE_ALWAYS_INLINE vec spread_parts(vec x) noexcept {
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), x);
}
/// The sums of the four lanes i, 4 + i, 8 + i and 12 + i, in all of these.
KVCACHE_ALWAYS_INLINE __m512i sum_fours(__m512i x) noexcept {
  x = _mm512_add_epi32(x, _mm512_shuffle_i64x2(x, x, 0x4e));
  return _mm512_add_epi32(x, _mm512_shuffle_i64x2(x, x, 0xb1));
}

/// As weigh_uniform.
template <unsigned Bits>
KVCACHE_ALWAYS_INLINE mask weigh_grouped(const float* weights, std::size_t count, const piece_scales& scales,
                                         bool zero_points, bool rest, mask follows, const float* total,
                                         whole_weights<Bits, true>& to) noexcept {
  static_assert(parts_of(Bits) == 1);
  constexpr float most = 127.0f;
  vec largest[4];
  vec sum[4];  // of magnitudes: a scale has a sign
  vec zero[4];
  each<4>([&](auto i) noexcept KVCACHE_INLINED { largest[i] = sum[i] = zero[i] = set1(0.0f); });
  for (std::size_t t = 0; t < count; t += lanes) {
    const __mmask16 there = lanes_there(count, t);
    const vec weight = _mm512_maskz_loadu_ps(there, weights + t);
    each<4>([&](auto i) noexcept KVCACHE_INLINED {
      const vec size = magnitude(_mm512_maskz_mul_ps(there, weight, scales.scale[t / lanes][i]));
      largest[i] = larger(size, largest[i]);
      sum[i] = add(size, sum[i]);
      if (zero_points) zero[i] = _mm512_mask3_fmadd_ps(weight, scales.middle[t / lanes][i], zero[i], there);
    });
  }
  const vec all = fold_four(largest, fold_larger{});
  const vec sums = fold_four(sum, fold_sum{});
  to.zero = zero_points ? spread_parts(fold_four(zero, fold_sum{})) : set1(0.0f);
  const vec lift = lift_of(all);
  const vec inverse = inverse_of(mul(all, lift), most);
  const vec by[4] = {_mm512_permute_ps(inverse, 0x00), _mm512_permute_ps(inverse, 0x55),
                     _mm512_permute_ps(inverse, 0xaa), _mm512_permute_ps(inverse, 0xff)};
  const __m512i ones = _mm512_set1_epi8(1);
  __m512i whole_sum = _mm512_setzero_si512();
  __m512i magnitudes = _mm512_setzero_si512();
  const auto round_all = [&](auto plain) noexcept KVCACHE_INLINED {
    for (std::size_t t = 0; t < count; t += lanes) {
      // Cheaper than keeping what was multiplied above.
      const __mmask16 there = lanes_there(count, t);
      vec weight = _mm512_maskz_loadu_ps(there, weights + t);
      if constexpr (!plain) weight = mul(weight, lift);
      __m512i whole[4];
      each<4>([&](auto i) noexcept KVCACHE_INLINED {
        const vec scaled = _mm512_maskz_mul_ps(there, weight, scales.scale[t / lanes][i]);
        const vec exact = mul(scaled, by[i]);
        whole[i] = _mm512_cvtps_epi32(!plain && rest ? rest_of(exact) : exact);
      });
      // In every 16 bytes four tokens of four scales.
      const __m512i bytes =
          _mm512_packs_epi16(_mm512_packs_epi32(whole[0], whole[1]), _mm512_packs_epi32(whole[2], whole[3]));
      whole_sum = _mm512_dpbusd_epi32(whole_sum, ones, bytes);
      magnitudes = _mm512_dpbusd_epi32(magnitudes, _mm512_abs_epi8(bytes), ones);
      _mm512_store_si512(to.bytes + t * 4, bytes);
    }
  };
  if (rest || any(less(all, set1(lifted_below))))
    round_all(std::false_type{});
  else
    round_all(std::true_type{});
  const __m512i eight_times = _mm512_slli_epi32(sum_fours(whole_sum), 3);
  const vec total_start = _mm512_castsi512_ps(_mm512_sub_epi32(_mm512_setzero_si512(), eight_times));
  to.start = _mm512_castps_si512(spread_parts(total_start));
  const vec unit = keep_nan(mul(all, set1(1.0f / most)), sums);
  if (rest) {
    to.unit = spread_parts(select(follows, mul(unit, set1(1.0f / rest_parts)), set1(0.0f)));
    return 0;
  }
  const vec whole = _mm512_cvtepi32_ps(sum_fours(magnitudes));
  const vec missing = sub(mul(mul(sums, lift), inverse), whole);
  const mask much = much_is_missing(missing, whole, weights, count, total);
  to.unit = spread_parts(select(much, unit, with_missing(unit, missing, whole)));
  return much;
}

/// A piece's scales per channel in the order of V.
struct piece_channels {
  vec scale[2][4];
  vec middle[2][4];
};
template <unsigned Bits>
KVCACHE_ALWAYS_INLINE void load_piece_channels(const code_form& form, const std::byte* from, std::size_t piece,
                                               piece_channels& to) noexcept {
  for (std::size_t half = 0; half < (Bits == 8 ? 1 : 2); ++half) {
    KVCACHE_UNROLL
    for (std::size_t i = 0; i < 4; ++i) {
      const channel_scales of = load_channel_scales<Bits>(form, from, piece, half, i);
      to.scale[half][i] = of.scale;
      to.middle[half][i] = of.middle;
    }
    transpose_parts(to.scale[half]);
    transpose_parts(to.middle[half]);
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
    each<Places>([&](auto i) noexcept KVCACHE_INLINED { acc[r][i][0] = acc[r][i][1] = weights[r].start; });
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
        // 2^-16 of it, so that the smallest units need not be smaller.
        write(r, 0, First + i, fma(first, set1(0x1p-8f), mul(second, set1(0x1p-16f))));
      } else {
        write(r, 0, First + i, first);
        write(r, 1, First + i, second);
      }
    });
  });
}

/// Where scales of V are: one of a token, several of a token, or those of a block's channels.
enum class value_scales { token, groups, channels };

/// output[row] += weights . v over the tokens of a segment. Weights lie as logits do, outputs in the order of V; of
/// each row the lanes of `totals` add up to all weights that it has met.
template <unsigned Bits, value_scales Scales, std::size_t Rows>
KVCACHE_NOINLINE void code_values(const code_form& form, const float* weights, const float* totals,
                                  const code_stream& v, std::size_t count, float* output, std::size_t output_step,
                                  chunk_lines& lines) noexcept {
  constexpr bool grouped = Scales == value_scales::groups;
  constexpr std::size_t halves = Bits == 8 ? 1 : 2;
  constexpr std::size_t places = Rows <= 2 ? 4 : 2;  // that have room in registers
  const std::size_t passes = form.pieces() * (4 / places);
  whole_weights<Bits, grouped> whole[Rows];
  [[maybe_unused]] vec scales[cpu::decode_chunk / lanes];
  if constexpr (Scales == value_scales::token) {
    for (std::size_t t = 0; t < count; t += lanes) {
      vec scale[1];
      load_scales(v, t, 0, 1, scale);
      scales[t / lanes] = scale[0];
    }
  }
  mask follows[Rows][8];  // pieces
  for (bool rest = false;; rest = true) {
    bool rest_follows = false;
    const auto weigh = [&](std::size_t piece, const auto& f) noexcept {
      for (std::size_t r = 0; r < Rows; ++r) {
        const mask much =
            f(weights + r * code_logits_step, rest ? follows[r][piece] : mask{0}, totals + r * cpu::padding, whole[r]);
        if (rest) continue;
        follows[r][piece] = much;
        rest_follows |= any(much);
      }
    };
    if constexpr (!grouped) {
      weigh(0, [&](const float* from, mask there, const float* total, auto& to) noexcept {
        return weigh_uniform<Bits, Scales == value_scales::token>(from, count, scales, rest, there, total, to);
      });
    }
    for (std::size_t p = 0; p < form.pieces(); ++p) {
      if constexpr (grouped) {
        if (p == 0 || form.scales() > 1) {
          piece_scales of_piece;
          load_piece_scales(form, v, p, count, of_piece);
          weigh(p, [&](const float* from, mask there, const float* total, auto& to) noexcept {
            return weigh_grouped(from, count, of_piece, form.q.zero_points, rest, there, total, to);
          });
        }
      }
      [[maybe_unused]] piece_channels channels;
      if constexpr (Scales == value_scales::channels) load_piece_channels<Bits>(form, v.scales_of(0), p, channels);
      const auto write = [&](std::size_t r, std::size_t half, std::size_t place, vec products) noexcept {
        float* const to = output + r * output_step + (p * halves + half) * 64 + place * lanes;
        if constexpr (Scales == value_scales::channels)
          store(to, fma(mul(products, whole[r].unit), channels.scale[half][place],
                        fma(channels.middle[half][place], whole[r].zero, load(to))));
        else
          store(to, fma(products, whole[r].unit, load(to)));
      };
      // The tokens' lines are asked for over all passes.
      const auto asks = [&](std::size_t pass) noexcept {
        return rest ? 0 : 4 * (pass + 1) / passes - 4 * pass / passes;
      };
      const std::size_t pass = p * (4 / places);
      multiply_values<Bits, grouped, Rows, 0, places>(whole, v, count, 64 * p, form.there(p), asks(pass), lines, write);
      if constexpr (places == 2)
        multiply_values<Bits, grouped, Rows, 2, 2>(whole, v, count, 64 * p, form.there(p), asks(pass + 1), lines,
                                                   write);
      if constexpr (grouped) {
        if (!form.q.zero_points || rest) continue;
        for (std::size_t r = 0; r < Rows; ++r) {
          float* const to = output + r * output_step + p * 128;
          for (std::size_t i = 0; i < 128; i += lanes) store(to + i, add(load(to + i), whole[r].zero));
        }
      }
    }
    if (!rest_follows) return;
  }
}
