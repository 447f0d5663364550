// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>

#include <cstddef>
#include <type_traits>

#if KVCACHE_NEON
#include <arm_neon.h>

/// The vector interface over NEON, as every ARMv8 processor has it; see vector_scalar.hpp for what each function does.
/// A vector is two registers: 32 of four lanes are what AVX2's 16 of eight are, so blocks and decoding are the same,
/// with as many sums on their way as a processor needs to be busy.
namespace kvcache::detail::isa_neon {

inline constexpr std::size_t lanes = 8;
inline constexpr std::size_t row_block = 4;
inline constexpr std::size_t column_block = 2;  // of 3, g++ 12 keeps two sums in memory
inline constexpr std::size_t head_block = 4;

struct vec {
  float32x4_t low;
  float32x4_t high;
};
struct mask {
  uint32x4_t low;
  uint32x4_t high;
};

KVCACHE_ALWAYS_INLINE vec load(const float* from) noexcept { return {vld1q_f32(from), vld1q_f32(from + 4)}; }
KVCACHE_ALWAYS_INLINE void store(float* to, vec x) noexcept {
  vst1q_f32(to, x.low);
  vst1q_f32(to + 4, x.high);
}
KVCACHE_ALWAYS_INLINE vec set1(float x) noexcept { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
KVCACHE_ALWAYS_INLINE vec add(vec a, vec b) noexcept { return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)}; }
KVCACHE_ALWAYS_INLINE vec sub(vec a, vec b) noexcept { return {vsubq_f32(a.low, b.low), vsubq_f32(a.high, b.high)}; }
KVCACHE_ALWAYS_INLINE vec mul(vec a, vec b) noexcept { return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)}; }
KVCACHE_ALWAYS_INLINE vec div(vec a, vec b) noexcept { return {vdivq_f32(a.low, b.low), vdivq_f32(a.high, b.high)}; }
KVCACHE_ALWAYS_INLINE vec fma(vec a, vec b, vec c) noexcept {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}
KVCACHE_ALWAYS_INLINE mask less(vec a, vec b) noexcept { return {vcltq_f32(a.low, b.low), vcltq_f32(a.high, b.high)}; }
KVCACHE_ALWAYS_INLINE mask both(mask a, mask b) noexcept {
  return {vandq_u32(a.low, b.low), vandq_u32(a.high, b.high)};
}
KVCACHE_ALWAYS_INLINE bool any(mask m) noexcept { return vmaxvq_u32(vorrq_u32(m.low, m.high)) != 0; }
KVCACHE_ALWAYS_INLINE vec select(mask m, vec yes, vec no) noexcept {
  return {vbslq_f32(m.low, yes.low, no.low), vbslq_f32(m.high, yes.high, no.high)};
}
// Not fmax, which gives no number where either is none.
KVCACHE_ALWAYS_INLINE vec larger(vec a, vec b) noexcept { return select(less(b, a), a, b); }
KVCACHE_ALWAYS_INLINE vec smaller(vec a, vec b) noexcept { return select(less(a, b), a, b); }
KVCACHE_ALWAYS_INLINE vec magnitude(vec a) noexcept { return {vabsq_f32(a.low), vabsq_f32(a.high)}; }
KVCACHE_ALWAYS_INLINE vec round(vec a) noexcept { return {vrndnq_f32(a.low), vrndnq_f32(a.high)}; }

KVCACHE_ALWAYS_INLINE float32x4_t scale(float32x4_t a, float32x4_t n) noexcept {
  const int32x4_t exponent = vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23);
  const float32x4_t product = vmulq_f32(a, vreinterpretq_f32_s32(exponent));
  const uint32x4_t too_small = vcltq_f32(n, vdupq_n_f32(-126.0f));
  return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(product), too_small));
}
KVCACHE_ALWAYS_INLINE vec scale(vec a, vec n) noexcept { return {scale(a.low, n.low), scale(a.high, n.high)}; }

/// By bytes, which may lie anywhere and be of any type.
KVCACHE_ALWAYS_INLINE uint8x16_t load_bytes(const std::byte* from) noexcept {
  return vld1q_u8(reinterpret_cast<const unsigned char*>(from));
}

template <class T>
KVCACHE_ALWAYS_INLINE vec widen(const std::byte* from) noexcept {
  const uint8x16_t bytes = load_bytes(from);
  if constexpr (std::is_same_v<T, f32>) {
    return {vreinterpretq_f32_u8(bytes), vreinterpretq_f32_u8(load_bytes(from + 16))};
  } else if constexpr (std::is_same_v<T, f16>) {
    const float16x8_t halves = vreinterpretq_f16_u8(bytes);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  } else {
    const uint16x8_t halves = vreinterpretq_u16_u8(bytes);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(halves), 16)),
            vreinterpretq_f32_u32(vshll_high_n_u16(halves, 16))};
  }
}

template <class T>
inline constexpr bool sorted_pairs = std::is_same_v<T, bf16>;

template <class T>
KVCACHE_ALWAYS_INLINE void widen_pair(const std::byte* from, vec& a, vec& b) noexcept {
  if constexpr (sorted_pairs<T>) {
    const uint32x4_t low = vreinterpretq_u32_u8(load_bytes(from));
    const uint32x4_t high = vreinterpretq_u32_u8(load_bytes(from + 16));
    const uint32x4_t upper_half = vdupq_n_u32(0xffff'0000u);
    a = {vreinterpretq_f32_u32(vshlq_n_u32(low, 16)), vreinterpretq_f32_u32(vshlq_n_u32(high, 16))};
    b = {vreinterpretq_f32_u32(vandq_u32(low, upper_half)), vreinterpretq_f32_u32(vandq_u32(high, upper_half))};
  } else {
    a = widen<T>(from);
    b = widen<T>(from + lanes * sizeof(T));
  }
}

template <int Distance>
KVCACHE_ALWAYS_INLINE vec swap_lanes(vec x) noexcept {
  if constexpr (Distance == 4)
    return {x.high, x.low};
  else if constexpr (Distance == 2)
    return {vextq_f32(x.low, x.low, 2), vextq_f32(x.high, x.high, 2)};
  else
    return {vrev64q_f32(x.low), vrev64q_f32(x.high)};
}

KVCACHE_ALWAYS_INLINE vec sums(const vec (&x)[lanes]) noexcept {
  float32x4_t half[lanes];
  KVCACHE_UNROLL
  for (std::size_t i = 0; i < lanes; ++i) half[i] = vaddq_f32(x[i].low, x[i].high);
  return {vpaddq_f32(vpaddq_f32(half[0], half[1]), vpaddq_f32(half[2], half[3])),
          vpaddq_f32(vpaddq_f32(half[4], half[5]), vpaddq_f32(half[6], half[7]))};
}

}  // namespace kvcache::detail::isa_neon
#endif
