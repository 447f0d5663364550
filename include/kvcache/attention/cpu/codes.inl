// SPDX-License-Identifier: Apache-2.0
// Decoding over codes of 8 and 4 bits as they lie in the pool, by the processor's dot products of bytes (VNNI).
// Queries, and weights on their way to V, are whole numbers: of 16 bits in two bytes, 256 * high + low, where codes
// have 8 bits, and of 8 bits where codes have 4. Scales join behind the products of K, and before those of V.
//
// Whole numbers of 8 bits are in units of 1/127 of the largest. What they round off meets codes less 8, their middle,
// so that it has either sign; what all codes have in common, zero points and 8 scales, meets what was not rounded.
// Where one element is so large that others are lost beside it, of a query or among the weights of a segment,
// what was rounded off goes by once more, in units of 1/254 of those: the rest.
//
// Codes of a head go by in pieces of 64 bytes: 64 codes of 8 bits, or 128 of 4 bits, of which the low halves of the
// bytes (elements 0, 2, 4, ...) and the high ones make a vector each. "Code order" is that of these vectors' bytes.

/// How a dtype lies in pieces.
struct code_form {
  quantization q;
  std::uint32_t dim;

  [[nodiscard]] std::size_t bytes() const noexcept { return dim * std::size_t{q.bits} / 8; }
  [[nodiscard]] std::size_t pieces() const noexcept { return (bytes() + 63) / 64; }
  [[nodiscard]] std::size_t vectors() const noexcept { return q.bits == 8 ? 1 : 2; }  // of a piece
  [[nodiscard]] __mmask64 there(std::size_t piece) const noexcept {
    const std::size_t left = bytes() - 64 * piece;
    return left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
  }
  [[nodiscard]] std::uint32_t scales() const noexcept { return q.scales(dim); }

  /// Floats that the codes of all pieces take.
  [[nodiscard]] std::size_t size() const noexcept { return pieces() * vectors() * 64; }

  /// Whether the functions below take it. Groups of 16 of 4 bits share 16 bytes with others.
  [[nodiscard]] static bool possible(dtype_id id, std::uint32_t dim) noexcept {
    const quantization q = quantization_of(id);
    return (q.bits == 8 || q.bits == 4) && dim >= 64 && dim % 16 == 0 && dim <= 1024 &&
           (q.per_channel || (q.scales(dim) <= 16 && (q.group == 0 || q.group >= 32)));
  }
};

/// K or V of one head over the tokens of a chunk, from one of them on. There are tokens behind the last to be read.
struct code_stream {
  const std::byte* const* codes;
  const std::byte* const* scales;
  std::int64_t codes_step;  // bytes, to the head
  std::int64_t scales_step;

  [[nodiscard]] KVCACHE_ALWAYS_INLINE const std::byte* codes_of(std::size_t t) const noexcept {
    return codes[t] + codes_step;
  }
  [[nodiscard]] KVCACHE_ALWAYS_INLINE const std::byte* scales_of(std::size_t t) const noexcept {
    return scales[t] + scales_step;
  }
  [[nodiscard]] code_stream from(std::size_t t) const noexcept {
    return {codes + t, scales + t, codes_step, scales_step};
  }
};

/// Asks for the next chunk, evenly while this one is worked on, head by head and token by token as they lie in most
/// pools: memory likes that better than the order in which they are read. A processor drops hints that it has no room
/// for, so what comes next is asked for once more.
class chunk_lines {
 public:
  chunk_lines() = default;
  chunk_lines(const std::byte* const* tokens, std::size_t count, std::uint32_t heads, std::int64_t head_step,
              std::size_t bytes) noexcept
      : tokens_(tokens), end_(tokens + count), head_step_(head_step), end_of_heads_(heads * head_step), bytes_(bytes) {}

  /// A head is begun: `soon` are the `count` tokens that will be read after it, which have been asked for once.
  void begin_head(const std::byte* const* soon, std::size_t count, std::int64_t offset) noexcept {
    soon_ = soon;
    soon_end_ = soon + count;
    soon_offset_ = offset;
  }
  KVCACHE_ALWAYS_INLINE void ask(std::size_t heads_of_tokens) noexcept {
    for (; heads_of_tokens != 0 && tokens_ != end_ && soon_ != soon_end_; --heads_of_tokens) {
      const std::byte* const at = *tokens_ + offset_;
      const std::byte* const soon = *soon_++ + soon_offset_;
      for (std::size_t b = 0; b < bytes_; b += 64) {
        KVCACHE_PREFETCH(at + b);
        if (again_) KVCACHE_PREFETCH(soon + b);
      }
      offset_ += head_step_;
      if (offset_ == end_of_heads_) {
        offset_ = 0;
        ++tokens_;
      }
    }
  }

 private:
  const std::byte* const* tokens_ = nullptr;
  const std::byte* const* end_ = nullptr;
  const std::byte* const* soon_ = nullptr;
  const std::byte* const* soon_end_ = nullptr;
  std::int64_t soon_offset_ = 0;
  std::int64_t offset_ = 0;
  std::int64_t head_step_ = 0;
  std::int64_t end_of_heads_ = 0;
  std::size_t bytes_ = 0;
  bool again_ = asks_again();
};

/// `Count` of the scales, or of what lies `behind` bytes behind the first, of 16 tokens as floats, [scale][token].
template <std::size_t Count>
KVCACHE_ALWAYS_INLINE void load_scales(const code_stream& from, std::size_t t, std::size_t behind, std::size_t there,
                                       vec (&to)[Count]) noexcept {
  static_assert(Count == 1 || Count == 4);
  alignas(64) std::uint16_t words[lanes * Count];
  const auto copy = [&]<std::size_t First, std::size_t Scales>() noexcept KVCACHE_INLINED {
    each<lanes>([&](auto i) noexcept KVCACHE_INLINED {
      std::memcpy(words + i * Count + First, from.scales_of(t + i) + behind + 2 * First, 2 * Scales);
    });
  };
  if (Count == 1 || there >= Count) {
    copy.template operator()<0, Count>();
  } else if constexpr (Count == 4) {
    std::memset(words, 0, sizeof words);
    if (there >= 2) copy.template operator()<0, 2>();
    if (there == 3) copy.template operator()<2, 1>();
    if (there == 1) copy.template operator()<0, 1>();
  }
  if constexpr (Count == 1) {
    const __m256i all = _mm256_load_si256(reinterpret_cast<const __m256i*>(words));
    to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(all), 16));
  } else {
    const __m512i step =
        _mm512_setr_epi32(0, 4 << 16, 8 << 16, 12 << 16, 16 << 16, 20 << 16, 24 << 16, 28 << 16, 32 << 16, 36 << 16,
                          40 << 16, 44 << 16, 48 << 16, 52 << 16, 56 << 16, 60 << 16);
    const __m512i first = _mm512_load_si512(words);
    const __m512i second = _mm512_load_si512(words + 32);
    KVCACHE_UNROLL
    for (std::size_t g = 0; g < Count; ++g) {
      const __m512i which = _mm512_add_epi32(step, _mm512_set1_epi32(static_cast<int>(g << 16)));
      to[g] = _mm512_castsi512_ps(_mm512_maskz_permutex2var_epi16(0xaaaa'aaaau, first, which, second));
    }
  }
}

/// f(0), f(1), ..., each with a constant: arrays that are written so stay in registers, where g++ 12 puts those of
/// loops that it unrolls into memory.
template <std::size_t Count, class F>
KVCACHE_ALWAYS_INLINE void each(const F& f) noexcept {
  [&]<std::size_t... Places>(std::index_sequence<Places...>) noexcept KVCACHE_INLINED {
    (f(std::integral_constant<std::size_t, Places>{}), ...);
  }
  (std::make_index_sequence<Count>{});
}

/// How many bytes a whole number has that meets codes of so many bits.
[[nodiscard]] constexpr std::size_t parts_of(unsigned bits) noexcept { return bits == 8 ? 2 : 1; }

/// acc += the products of four unsigned and four signed bytes of every lane. Said by hand, since g++ 12 copies sums
/// from register to register instead of adding in place.
KVCACHE_ALWAYS_INLINE void add_products(__m512i& acc, __m512i unsigned_bytes, __m512i signed_bytes) noexcept {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(unsigned_bytes), "v"(signed_bytes));
}
/// The same four signed bytes in every lane.
KVCACHE_ALWAYS_INLINE void add_products(__m512i& acc, __m512i unsigned_bytes, const std::byte* four) noexcept {
  __asm__("vpdpbusd %2%{1to16%}, %1, %0"
          : "+v"(acc)
          : "v"(unsigned_bytes), "m"(*reinterpret_cast<const std::byte(*)[4]>(four)));
}

/// Numbers below this are multiplied with that before they become whole, since the inverse of the smallest would be
/// infinite. Scales are 0, or 2^-109 at least, and weights may be far smaller.
inline constexpr float lifted_below = 0x1p-60f;
inline constexpr float lifted_by = 0x1p100f;

/// Parts of a unit of one byte that are the units of the rest.
inline constexpr float rest_parts = 254.0f;
/// A query's largest magnitude over their mean: beyond that, the rest goes by too. Of normal ones it is 3 to 4. Not
/// asked where the scales of channels have joined it: what is large then loses as much by its own codes.
inline constexpr float most_uneven = 8.0f;
/// What may be missing of a row's weights, or too much: in a segment, of all that the row has met so far, and of the
/// segment's own, since segments may be alike.
inline constexpr float most_missing = 0x1p-6f;
inline constexpr float most_missing_of_segment = 0.02f;

/// What x loses as a whole number, in units of the rest.
KVCACHE_ALWAYS_INLINE vec rest_of(vec x) noexcept { return mul(sub(x, round(x)), set1(rest_parts)); }

/// The last of `tokens` tokens' lanes from token `t` on.
[[nodiscard]] KVCACHE_ALWAYS_INLINE __mmask16 lanes_there(std::size_t tokens, std::size_t t) noexcept {
  return static_cast<__mmask16>(tokens - t >= lanes ? 0xffffu : (1u << (tokens - t)) - 1u);
}

KVCACHE_ALWAYS_INLINE float sum_of(vec x) noexcept { return _mm512_reduce_add_ps(x); }
/// The sums of the lanes of two vectors.
KVCACHE_ALWAYS_INLINE void sums_of(vec a, vec b, float& of_a, float& of_b) noexcept {
  vec all = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  all = add(all, swap_lanes<8>(all));
  all = add(all, swap_lanes<4>(all));
  all = add(all, swap_lanes<2>(all));
  of_a = _mm512_cvtss_f32(all);
  of_b = _mm512_cvtss_f32(swap_lanes<1>(all));
}

/// Scales of a block's channels, for 16 bytes of a piece's low or high halves, and what the middle of their codes is.
struct channel_scales {
  vec scale;
  vec middle;  // 0 where there are no zero points
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
  // Only codes of 4 bits have zero points.
  return {scale, form.q.zero_points
                     ? fma(scale, set1(8.0f), load_bf16(from + 2 * quantization::zero_point<std::size_t>(0, form.dim)))
                     : set1(0.0f)};
}

/// Floats in the order of codes, zeros where there is no element. `natural` is padded to whole vectors.
inline void to_code_order(const code_form& form, const float* natural, float* to) noexcept {
  const std::size_t padded = cpu::padded(form.dim);
  const auto load_padded = [&](std::size_t d) noexcept { return d < padded ? load(natural + d) : set1(0.0f); };
  const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  if (form.q.bits == 8) {
    for (std::size_t d = 0; d < form.size(); d += lanes) store(to + d, load_padded(d));
    return;
  }
  for (std::size_t d = 0; d < form.size(); d += 2 * lanes) {
    const vec first = load_padded(d);
    const vec second = load_padded(d + lanes);
    float* const at = to + d / 128 * 128 + d % 128 / 2;
    store(at, _mm512_permutex2var_ps(first, even, second));
    store(at + 64, _mm512_permutex2var_ps(first, odd, second));
  }
}
/// The other way, and divided by `by`.
inline void from_code_order(const code_form& form, const float* from, float by, float* natural) noexcept {
  const vec divisor = set1(by);
  const std::size_t padded = cpu::padded(form.dim);
  if (form.q.bits == 8) {
    for (std::size_t d = 0; d < padded; d += lanes) store(natural + d, div(load(from + d), divisor));
    return;
  }
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  for (std::size_t d = 0; d < padded; d += 2 * lanes) {
    const float* const at = from + d / 128 * 128 + d % 128 / 2;
    const vec even = div(load(at), divisor);
    const vec odd = div(load(at + 64), divisor);
    store(natural + d, _mm512_permutex2var_ps(even, low, odd));
    if (d + lanes < padded) store(natural + d + lanes, _mm512_permutex2var_ps(even, high, odd));
  }
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
/// Of each 64 floats [16 bytes of a piece][place of four bytes][4] become [place][16 bytes][4], the order of V, or the
/// other way.
inline void turn_places(const code_form& form, float* x) noexcept {
  for (std::size_t at = 0; at < form.size(); at += 64) {
    vec four[4] = {load(x + at), load(x + at + lanes), load(x + at + 2 * lanes), load(x + at + 3 * lanes)};
    transpose_parts(four);
    for (std::size_t i = 0; i < 4; ++i) store(x + at + i * lanes, four[i]);
  }
}
