// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/cpu/vector_avx512.hpp>
#include <kvcache/detail/config.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

#if KVCACHE_X86
KVCACHE_AVX512_DOT_BEGIN
/// Dot products of pairs of bf16, beside the vector interface over AVX-512.
namespace kvcache::detail::isa_avx512 {

/// 16 pairs of bf16.
using pair_vec = __m512i;

KVCACHE_ALWAYS_INLINE pair_vec load_pairs(const void* from) noexcept { return _mm512_loadu_si512(from); }
KVCACHE_ALWAYS_INLINE void store_pairs(void* to, pair_vec x) noexcept { _mm512_storeu_si512(to, x); }
/// The first 8 pairs; the others are zero.
KVCACHE_ALWAYS_INLINE pair_vec load_half(const void* from) noexcept {
  return _mm512_zextsi256_si512(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
/// One pair in every lane.
KVCACHE_ALWAYS_INLINE pair_vec set1_pair(const void* from) noexcept {
  std::int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return _mm512_set1_epi32(pair);
}
/// sum + the products of both halves of a lane, exact before they are added. Said by ourselves where the compiler is
/// clang: clang 16 does not get to the end of a pair in every lane that becomes a vector of bf16.
KVCACHE_ALWAYS_INLINE vec dot(vec sum, pair_vec a, pair_vec b) noexcept {
#if defined(__clang__)
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
#else
  return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
#endif
}
/// Elements of two tokens side by side, [place][token]: of 32 elements each, the places 0-3, 8-11, 16-19 and 24-27,
/// then the others. See pair_place.
KVCACHE_ALWAYS_INLINE pair_vec interleave_low(pair_vec a, pair_vec b) noexcept { return _mm512_unpacklo_epi16(a, b); }
KVCACHE_ALWAYS_INLINE pair_vec interleave_high(pair_vec a, pair_vec b) noexcept { return _mm512_unpackhi_epi16(a, b); }
/// Sums over what the two gave become those of the first 16 elements and of the others.
KVCACHE_ALWAYS_INLINE void separate(vec& low, vec& high) noexcept {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  const vec before = low;
  low = _mm512_permutex2var_ps(before, first, high);
  high = _mm512_permutex2var_ps(before, second, high);
}
/// The same of 16 elements each, in their order.
KVCACHE_ALWAYS_INLINE pair_vec interleave_half(pair_vec a, pair_vec b) noexcept {
  const __m512i low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(a));
  const __m512i high = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(b));
  return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}
/// Two floats a lane as a pair, rounded as round_to_bf16 does.
KVCACHE_ALWAYS_INLINE pair_vec pair_of_bf16(vec first, vec second) noexcept {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(round_to_bf16(first)), 16),
                         _mm512_castps_si512(round_to_bf16(second)));
}
/// Whether one of the elements is infinite or no number, by bits.
KVCACHE_ALWAYS_INLINE bool not_finite(pair_vec x) noexcept {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  return _mm512_cmpeq_epi16_mask(_mm512_and_si512(x, exponent), exponent) != 0;
}

}  // namespace kvcache::detail::isa_avx512
KVCACHE_ISA_END
#endif
