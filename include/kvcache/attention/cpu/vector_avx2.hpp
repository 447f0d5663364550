// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>

#include <cstddef>
#include <type_traits>

#if KVCACHE_X86
#include <immintrin.h>

KVCACHE_AVX2_BEGIN
/// The vector interface over AVX2, FMA and F16C; see vector_scalar.hpp for what each function does.
namespace kvcache::detail::isa_avx2 {

inline constexpr std::size_t lanes = 8;
inline constexpr std::size_t row_block = 4;
inline constexpr std::size_t column_block = 3;
inline constexpr std::size_t head_block = 4;

using vec = __m256;
struct mask {
  __m256 bits;
};

KVCACHE_ALWAYS_INLINE vec load(const float* from) noexcept { return _mm256_loadu_ps(from); }
KVCACHE_ALWAYS_INLINE void store(float* to, vec x) noexcept { _mm256_storeu_ps(to, x); }
KVCACHE_ALWAYS_INLINE vec set1(float x) noexcept { return _mm256_set1_ps(x); }
KVCACHE_ALWAYS_INLINE vec add(vec a, vec b) noexcept { return _mm256_add_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec sub(vec a, vec b) noexcept { return _mm256_sub_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec mul(vec a, vec b) noexcept { return _mm256_mul_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec div(vec a, vec b) noexcept { return _mm256_div_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec fma(vec a, vec b, vec c) noexcept { return _mm256_fmadd_ps(a, b, c); }
KVCACHE_ALWAYS_INLINE vec larger(vec a, vec b) noexcept { return _mm256_max_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec smaller(vec a, vec b) noexcept { return _mm256_min_ps(a, b); }
KVCACHE_ALWAYS_INLINE vec magnitude(vec a) noexcept {
  return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7fff'ffff)));
}
KVCACHE_ALWAYS_INLINE mask less(vec a, vec b) noexcept { return {_mm256_cmp_ps(a, b, _CMP_LT_OQ)}; }
KVCACHE_ALWAYS_INLINE mask both(mask a, mask b) noexcept { return {_mm256_and_ps(a.bits, b.bits)}; }
KVCACHE_ALWAYS_INLINE bool any(mask m) noexcept { return _mm256_movemask_ps(m.bits) != 0; }
KVCACHE_ALWAYS_INLINE vec select(mask m, vec yes, vec no) noexcept { return _mm256_blendv_ps(no, yes, m.bits); }
KVCACHE_ALWAYS_INLINE vec round(vec a) noexcept {
  return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
KVCACHE_ALWAYS_INLINE vec scale(vec a, vec n) noexcept {
  const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const vec product = _mm256_mul_ps(a, _mm256_castsi256_ps(exponent));
  return _mm256_andnot_ps(_mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), product);
}

template <class T>
KVCACHE_ALWAYS_INLINE vec widen(const std::byte* from) noexcept {
  if constexpr (std::is_same_v<T, f32>)
    return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
  else if constexpr (std::is_same_v<T, f16>)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  else
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))), 16));
}

template <class T>
inline constexpr bool sorted_pairs = std::is_same_v<T, bf16>;

template <class T>
KVCACHE_ALWAYS_INLINE void widen_pair(const std::byte* from, vec& a, vec& b) noexcept {
  if constexpr (sorted_pairs<T>) {
    const __m256i both_halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    a = _mm256_castsi256_ps(_mm256_slli_epi32(both_halves, 16));
    b = _mm256_castsi256_ps(_mm256_and_si256(both_halves, _mm256_set1_epi32(static_cast<int>(0xffff'0000u))));
  } else {
    a = widen<T>(from);
    b = widen<T>(from + lanes * sizeof(T));
  }
}

template <int Distance>
KVCACHE_ALWAYS_INLINE vec swap_lanes(vec x) noexcept {
  if constexpr (Distance == 4)
    return _mm256_permute2f128_ps(x, x, 0x01);
  else if constexpr (Distance == 2)
    return _mm256_permute_ps(x, 0x4e);
  else
    return _mm256_permute_ps(x, 0xb1);
}

KVCACHE_ALWAYS_INLINE vec sums(const vec (&x)[lanes]) noexcept {
  vec half[4];
  KVCACHE_UNROLL
  for (std::size_t i = 0; i < 4; ++i)
    half[i] = add(_mm256_permute2f128_ps(x[i], x[i + 4], 0x20), _mm256_permute2f128_ps(x[i], x[i + 4], 0x31));
  const vec ab = add(_mm256_shuffle_ps(half[0], half[1], 0x44), _mm256_shuffle_ps(half[0], half[1], 0xee));
  const vec cd = add(_mm256_shuffle_ps(half[2], half[3], 0x44), _mm256_shuffle_ps(half[2], half[3], 0xee));
  return add(_mm256_shuffle_ps(ab, cd, 0x88), _mm256_shuffle_ps(ab, cd, 0xdd));
}

}  // namespace kvcache::detail::isa_avx2
KVCACHE_ISA_END
#endif
