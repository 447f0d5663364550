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

inline constexpr int lanes = 16;
inline constexpr int row_block = 8;

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

}  // namespace kvcache::detail::isa_avx512
KVCACHE_ISA_END
#endif
