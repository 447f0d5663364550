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

/// K or V of one head over the tokens of a chunk, from one of them on. There are tokens behind the last to be read.
struct code_stream {
  const std::byte* const* codes;
  const std::byte* const* scales;
};

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
