// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/fp8.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvcache {

namespace detail {

/// Elements converted at once: a fixed count lets the compiler use whatever vectors the build allows.
inline constexpr std::size_t convert_width = 16;

template <class From, class To>
KVCACHE_ALWAYS_INLINE void convert_each(const From* in, std::size_t count, To* out) noexcept {
  for (std::size_t i = 0; i < count; ++i) out[i] = from_float<To>(to_float(in[i]));
}

/// f16 from f32 is a few operations for normal results and zero. Where the run holds another value (an f16 subnormal,
/// an overflow, a NaN) it is done again one by one.
KVCACHE_ALWAYS_INLINE void convert_run(const float* in, f16* out) noexcept {
  constexpr std::uint32_t first_normal = 0x3880'0000u;  // 2^-14
  constexpr std::uint32_t first_above = 0x477f'f000u;   // 65520, which rounds to infinity
  std::uint32_t others = 0;
  for (std::size_t i = 0; i < convert_width; ++i) {
    const std::uint32_t b = std::bit_cast<std::uint32_t>(in[i]);
    const std::uint32_t a = b & 0x7fff'ffffu;
    others |=
        static_cast<std::uint32_t>(a - first_normal >= first_above - first_normal) & static_cast<std::uint32_t>(a != 0);
    const std::uint32_t r = a - 0x3800'0000u;
    const std::uint32_t normal = (r + 0x0fffu + ((r >> 13) & 1u)) >> 13;
    out[i].bits = static_cast<std::uint16_t>(((b >> 16) & 0x8000u) | (a != 0 ? normal : 0u));
  }
  if (others != 0) convert_each(in, convert_width, out);
}

/// f32 from f16, in the same way.
KVCACHE_ALWAYS_INLINE void convert_run(const f16* in, float* out) noexcept {
  std::uint32_t others = 0;
  for (std::size_t i = 0; i < convert_width; ++i) {
    const std::uint32_t b = in[i].bits;
    const std::uint32_t a = b & 0x7fffu;
    others |= static_cast<std::uint32_t>(a - 0x0400u >= 0x7c00u - 0x0400u) & static_cast<std::uint32_t>(a != 0);
    const std::uint32_t normal = (a << 13) + 0x3800'0000u;
    out[i] = std::bit_cast<float>(((b & 0x8000u) << 16) | (a != 0 ? normal : 0u));
  }
  if (others != 0) convert_each(in, convert_width, out);
}

/// bf16 from and to f32 are a shift and a rounding, which compilers turn into vectors by themselves.
KVCACHE_ALWAYS_INLINE void convert_run(const float* in, bf16* out) noexcept { convert_each(in, convert_width, out); }
KVCACHE_ALWAYS_INLINE void convert_run(const bf16* in, float* out) noexcept { convert_each(in, convert_width, out); }

/// a < b ? x : y, both below 2^31, in a way that leaves g++ no branch to make of it.
[[nodiscard]] KVCACHE_ALWAYS_INLINE constexpr std::uint32_t less(std::uint32_t a, std::uint32_t b, std::uint32_t x,
                                                                 std::uint32_t y) noexcept {
  const auto mask = static_cast<std::uint32_t>(static_cast<std::int32_t>(a - b) >> 31);
  return (x & mask) | (y & ~mask);
}

/// fp8 from f32. Adding 2^23 steps leaves a subnormal's code in the lowest bits of the sum, rounded as additions are.
template <class To>
KVCACHE_ALWAYS_INLINE void convert_run_to_fp8(const float* in, To* out, fp8_range range) noexcept {
  const std::uint32_t steps = static_cast<std::uint32_t>(150 + range.step()) << 23;
  const unsigned dropped = 23 - range.mantissa;
  std::uint8_t codes[convert_width];
  std::uint32_t others[convert_width];
  std::uint32_t other = 0;
  for (std::size_t i = 0; i < convert_width; ++i) {
    const std::uint32_t b = std::bit_cast<std::uint32_t>(in[i]);
    const std::uint32_t a = b & 0x7fff'ffffu;
    others[i] = 0x7f80'0000u - a;  // the sign's bit is set where it is no number
    const std::uint32_t r = a - range.rebias();
    const std::uint32_t normal = (r + ((1u << (dropped - 1)) - 1u) + ((r >> dropped) & 1u)) >> dropped;
    const std::uint32_t tiny =
        std::bit_cast<std::uint32_t>(std::bit_cast<float>(a) + std::bit_cast<float>(steps)) - steps;
    const std::uint32_t number = less(range.largest, normal, range.largest, normal);
    const std::uint32_t code = less(a, range.first_normal(), tiny, number);
    codes[i] = static_cast<std::uint8_t>(((b >> 24) & 0x80u) | code);
  }
  for (std::size_t i = 0; i < convert_width; ++i) other |= others[i];
  if ((other >> 31) != 0)
    convert_each(in, convert_width, out);
  else
    std::memcpy(out, codes, convert_width);
}
KVCACHE_ALWAYS_INLINE void convert_run(const float* in, fp8_e4m3* out) noexcept {
  convert_run_to_fp8(in, out, e4m3_range);
}
KVCACHE_ALWAYS_INLINE void convert_run(const float* in, fp8_e5m2* out) noexcept {
  convert_run_to_fp8(in, out, e5m2_range);
}
/// f32 from fp8. A subnormal is a number of steps; `first_other` is the least code that is no number.
template <class From>
KVCACHE_ALWAYS_INLINE void convert_run_from_fp8(const From* in, float* out, fp8_range range,
                                                std::uint32_t first_other) noexcept {
  const unsigned shift = 23 - range.mantissa;
  const float step = std::bit_cast<float>(static_cast<std::uint32_t>(127 + range.step()) << 23);
  std::uint8_t codes[convert_width];  // of their own: bytes elsewhere might be those of `out`
  std::memcpy(codes, in, convert_width);
  std::uint32_t other = 0;
  for (std::size_t i = 0; i < convert_width; ++i) {
    const std::uint32_t b = codes[i];
    const std::uint32_t rest = b & 0x7fu;
    other |= first_other - 1 - rest;  // the sign's bit is set where it is no number
    const std::uint32_t normal = (rest << shift) + range.rebias();
    const auto tiny = std::bit_cast<std::uint32_t>(static_cast<float>(static_cast<std::int32_t>(rest)) * step);
    out[i] = std::bit_cast<float>(less(rest, 1u << range.mantissa, tiny, normal) | (b & 0x80u) << 24);
  }
  if ((other >> 31) != 0) convert_each(in, convert_width, out);
}
KVCACHE_ALWAYS_INLINE void convert_run(const fp8_e4m3* in, float* out) noexcept {
  convert_run_from_fp8(in, out, e4m3_range, 0x7fu);
}
KVCACHE_ALWAYS_INLINE void convert_run(const fp8_e5m2* in, float* out) noexcept {
  convert_run_from_fp8(in, out, e5m2_range, 0x7cu);
}

/// Between two types that are not f32, by way of it.
template <class From, class To>
KVCACHE_ALWAYS_INLINE void convert_run(const From* in, To* out) noexcept {
  float wide[convert_width];
  convert_run(in, wide);
  convert_run(wide, out);
}

}  // namespace detail

/// Converts `count` elements by way of f32: widening is exact, narrowing rounds to nearest, ties to even. The same type
/// is a copy, bit for bit. The ranges do not overlap. O(count). The thread's floating-point rounding mode has to be the
/// usual one, to nearest, where what is written is fp8: elements below its normal numbers are rounded as it says. All
/// other results are the same in every mode.
template <element From, element To>
void convert(const From* in, std::size_t count, To* out) noexcept {
  if constexpr (std::is_same_v<From, To>) {
    if (count > 0) std::memcpy(out, in, count * sizeof(To));
  } else {
    std::size_t done = 0;
    for (; count - done >= detail::convert_width; done += detail::convert_width)
      detail::convert_run(in + done, out + done);
    detail::convert_each(in + done, count - done, out + done);
  }
}

/// The same where one of the types is known at run time only. Precondition: it is an element type.
inline void convert(const std::byte* in, dtype_id from, std::size_t count, float* out) noexcept {
  switch (from) {
    case dtype_id::float32: return convert(reinterpret_cast<const f32*>(in), count, out);
    case dtype_id::float16: return convert(reinterpret_cast<const f16*>(in), count, out);
    case dtype_id::bfloat16: return convert(reinterpret_cast<const bf16*>(in), count, out);
    case dtype_id::float8_e4m3: return convert(reinterpret_cast<const fp8_e4m3*>(in), count, out);
    case dtype_id::float8_e5m2: return convert(reinterpret_cast<const fp8_e5m2*>(in), count, out);
    default: KVCACHE_ASSERT(false, "convert reads element types; formats are read by read_head");
  }
}
inline void convert(const float* in, std::size_t count, std::byte* out, dtype_id to) noexcept {
  switch (to) {
    case dtype_id::float32: return convert(in, count, reinterpret_cast<f32*>(out));
    case dtype_id::float16: return convert(in, count, reinterpret_cast<f16*>(out));
    case dtype_id::bfloat16: return convert(in, count, reinterpret_cast<bf16*>(out));
    case dtype_id::float8_e4m3: return convert(in, count, reinterpret_cast<fp8_e4m3*>(out));
    case dtype_id::float8_e5m2: return convert(in, count, reinterpret_cast<fp8_e5m2*>(out));
    default: KVCACHE_ASSERT(false, "convert writes element types; formats are written by quantise_head");
  }
}

}  // namespace kvcache
