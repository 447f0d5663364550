// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>

#include <cstddef>
#include <type_traits>

#if KVCACHE_X86
#include <immintrin.h>

KVCACHE_AVX512_BEGIN
/// The vector interface over AVX-512 F, BW, DQ and VL; see vector_scalar.hpp for what each function does.
namespace kvcache::detail::isa_avx512 {

inline constexpr std::size_t lanes = 16;
inline constexpr std::size_t row_block = 8;
inline constexpr std::size_t column_block = 3;
/// Query heads whose outputs are kept in registers together.
inline constexpr std::size_t head_block = 8;

using vec = __m512;
using mask = __mmask16;

KVCACHE_ALWAYS_INLINE vec load(const float* from) noexcept { return _mm512_loadu_ps(from); }
KVCACHE_ALWAYS_INLINE void store(float* to, vec x) noexcept { _mm512_storeu_ps(to, x); }
KVCACHE_ALWAYS_INLINE vec set1(float x) noexcept { return _mm512_set1_ps(x); }
KVCACHE_ALWAYS_INLINE vec add(vec a, vec b) noexcept { return _mm512_add_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec sub(vec a, vec b) noexcept { return _mm512_sub_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec mul(vec a, vec b) noexcept { return _mm512_mul_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec div(vec a, vec b) noexcept { return _mm512_div_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec fma(vec a, vec b, vec c) noexcept { return _mm512_fmadd_ps(a, b, c); }
KVCACHE_ALWAYS_INLINE vec larger(vec a, vec b) noexcept { return _mm512_max_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec smaller(vec a, vec b) noexcept { return _mm512_min_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec magnitude(vec a) noexcept {
  return _mm512_castsi512_ps(_mm512_and_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fff'ffff)));
}
KVCACHE_ALWAYS_INLINE mask less(vec a, vec b) noexcept { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
KVCACHE_ALWAYS_INLINE mask both(mask a, mask b) noexcept { return static_cast<mask>(a & b); }
KVCACHE_ALWAYS_INLINE bool any(mask m) noexcept { return m != 0; }
KVCACHE_ALWAYS_INLINE vec select(mask m, vec yes, vec no) noexcept {
  return _mm512_castsi512_ps(_mm512_mask_blend_epi32(m, _mm512_castps_si512(no), _mm512_castps_si512(yes)));
}
KVCACHE_ALWAYS_INLINE vec round(vec a) noexcept {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/// Rounded to what bf16 can hold, ties away from 0. Not for numbers near the largest.
KVCACHE_ALWAYS_INLINE vec round_to_bf16(vec a) noexcept {
  const __m512i raised = _mm512_add_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x8000));
  return _mm512_castsi512_ps(_mm512_and_epi32(raised, _mm512_set1_epi32(static_cast<int>(0xffff'0000u))));
}
KVCACHE_ALWAYS_INLINE vec scale(vec a, vec n) noexcept { return _mm512_scalef_ps(a, n); }

template <class T>
KVCACHE_ALWAYS_INLINE vec widen(const std::byte* from) noexcept {
  if constexpr (std::is_same_v<T, f32>)
    return _mm512_loadu_ps(reinterpret_cast<const float*>(from));
  else if constexpr (std::is_same_v<T, f16>)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  else
    return _mm512_castsi512_ps(
        _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16));
}

/// Whether widen_pair sorts its elements by even and odd places.
template <class T>
inline constexpr bool sorted_pairs = std::is_same_v<T, bf16>;

/// 2 * lanes elements, in the order that is cheapest: for bf16 the even places, then the odd ones.
template <class T>
KVCACHE_ALWAYS_INLINE void widen_pair(const std::byte* from, vec& a, vec& b) noexcept {
  if constexpr (sorted_pairs<T>) {
    const __m512i both_halves = _mm512_loadu_si512(from);
    a = _mm512_castsi512_ps(_mm512_slli_epi32(both_halves, 16));
    b = _mm512_castsi512_ps(_mm512_and_epi32(both_halves, _mm512_set1_epi32(static_cast<int>(0xffff'0000u))));
  } else {
    a = widen<T>(from);
    b = widen<T>(from + lanes * sizeof(T));
  }
}

/// x with the lanes i and i ^ Distance exchanged.
template <int Distance>
KVCACHE_ALWAYS_INLINE vec swap_lanes(vec x) noexcept {
  if constexpr (Distance == 8)
    return _mm512_shuffle_f32x4(x, x, 0x4e);
  else if constexpr (Distance == 4)
    return _mm512_shuffle_f32x4(x, x, 0xb1);
  else if constexpr (Distance == 2)
    return _mm512_permute_ps(x, 0x4e);
  else
    return _mm512_permute_ps(x, 0xb1);
}

/// First step of sums: vectors are added in pairs, the half of one beside the other's. Where the halves that stay in
/// place can be taken by a blend, that leaves one shuffle for two.
KVCACHE_ALWAYS_INLINE void halve(const vec (&x)[lanes], vec (&half)[lanes / 2]) noexcept {
  KVCACHE_UNROLL
  for (std::size_t i = 0; i < 8; ++i) {
    const vec a = x[i / 4 * 8 + i % 4];
    const vec b = x[i / 4 * 8 + i % 4 + 4];
    half[i] = add(select(0xff00, b, a), _mm512_shuffle_f32x4(a, b, 0x4e));
  }
}
/// The other steps.
KVCACHE_ALWAYS_INLINE vec sums_of_halves(const vec (&half)[lanes / 2]) noexcept {
  vec quarter[4];
  KVCACHE_UNROLL
  for (std::size_t i = 0; i < 4; ++i) {
    const vec a = half[2 * i];
    const vec b = half[2 * i + 1];
    quarter[i] = add(select(0xcccc, b, a), _mm512_shuffle_ps(a, b, 0x4e));
  }
  const vec ab =
      add(_mm512_shuffle_f32x4(quarter[0], quarter[2], 0x88), _mm512_shuffle_f32x4(quarter[0], quarter[2], 0xdd));
  const vec cd =
      add(_mm512_shuffle_f32x4(quarter[1], quarter[3], 0x88), _mm512_shuffle_f32x4(quarter[1], quarter[3], 0xdd));
  return add(_mm512_shuffle_ps(ab, cd, 0x88), _mm512_shuffle_ps(ab, cd, 0xdd));
}

/// Lane i: the sum of the lanes of x[i].
KVCACHE_ALWAYS_INLINE vec sums(const vec (&x)[lanes]) noexcept {
  vec half[lanes / 2];
  halve(x, half);
  return sums_of_halves(half);
}

}  // namespace kvcache::detail::isa_avx512
KVCACHE_ISA_END
#endif
