// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>

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

/// Between the two 16-bit types, by way of f32.
template <class From, class To>
KVCACHE_ALWAYS_INLINE void convert_run(const From* in, To* out) noexcept {
  float wide[convert_width];
  convert_run(in, wide);
  convert_run(wide, out);
}

}  // namespace detail

/// Converts `count` elements by way of f32: widening is exact, narrowing rounds to nearest, ties to even. The same type
/// is a copy, bit for bit. The ranges do not overlap. O(count).
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

}  // namespace kvcache
