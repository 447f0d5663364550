// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>

#include <bit>
#include <concepts>
#include <cstdint>
#include <type_traits>

namespace kvcache {

using f32 = float;

/// IEEE 754 binary16, as bits: the same type on host and device, no arithmetic of its own.
struct f16 {
  std::uint16_t bits;
  friend constexpr bool operator==(f16, f16) = default;  ///< compares bits: -0 differs from +0, a NaN equals itself
};

/// The upper half of an f32, as bits.
struct bf16 {
  std::uint16_t bits;
  friend constexpr bool operator==(bf16, bf16) = default;  ///< compares bits
};

/// Run-time name of an element type.
enum class dtype_id : std::uint8_t { float32, float16, bfloat16 };

/// What the library knows of an element type: `id`, `name`, `bits` per element.
template <class T>
struct dtype_traits;

template <>
struct dtype_traits<f32> {
  static constexpr dtype_id id = dtype_id::float32;
  static constexpr const char* name = "f32";
  static constexpr unsigned bits = 32;
};
template <>
struct dtype_traits<f16> {
  static constexpr dtype_id id = dtype_id::float16;
  static constexpr const char* name = "f16";
  static constexpr unsigned bits = 16;
};
template <>
struct dtype_traits<bf16> {
  static constexpr dtype_id id = dtype_id::bfloat16;
  static constexpr const char* name = "bf16";
  static constexpr unsigned bits = 16;
};

[[nodiscard]] constexpr const char* name(dtype_id id) noexcept {
  switch (id) {
    case dtype_id::float32: return dtype_traits<f32>::name;
    case dtype_id::float16: return dtype_traits<f16>::name;
    case dtype_id::bfloat16: return dtype_traits<bf16>::name;
  }
  return "unknown";
}

/// Bits of one stored element.
[[nodiscard]] constexpr unsigned bits(dtype_id id) noexcept {
  switch (id) {
    case dtype_id::float32: return dtype_traits<f32>::bits;
    case dtype_id::float16: return dtype_traits<f16>::bits;
    case dtype_id::bfloat16: return dtype_traits<bf16>::bits;
  }
  return 0;
}

/// An element type that a cache can store.
template <class T>
concept element = requires {
  { dtype_traits<T>::id } -> std::convertible_to<dtype_id>;
  { dtype_traits<T>::bits } -> std::convertible_to<unsigned>;
  { dtype_traits<T>::name } -> std::convertible_to<const char*>;
};

/// The dtype policy: element types of K and of V, chosen independently.
template <class K, class V = K>
struct kv_dtype {
  using k = K;
  using v = V;
};

/// Exact: every f16 is an f32. A signalling NaN becomes quiet, as the hardware does it.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr float to_float(f16 x) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) {  // infinity or NaN
    const std::uint32_t quiet = rest > 0x7c00u ? 0x0040'0000u : 0u;
    return std::bit_cast<float>(sign | 0x7f80'0000u | quiet | ((rest & 0x3ffu) << 13));
  }
  if (rest >= 0x0400u) return std::bit_cast<float>(sign | ((rest << 13) + 0x3800'0000u));
  // Subnormal: rest * 2^-24, which is a normal f32.
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(magnitude));
}

/// Exact.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr float to_float(bf16 x) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

[[nodiscard]] KVCACHE_HOST_DEVICE constexpr float to_float(float x) noexcept { return x; }

/// Rounds to nearest, ties to even; beyond the range to infinity; a NaN stays a NaN. Works on bits, so neither
/// -ffast-math nor the rounding mode changes it.
template <class T>
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr T from_float(float x) noexcept = delete;

template <>
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr float from_float<float>(float x) noexcept {
  return x;
}

template <>
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr bf16 from_float<bf16>(float x) noexcept {
  const std::uint32_t b = std::bit_cast<std::uint32_t>(x);
  if ((b & 0x7fff'ffffu) > 0x7f80'0000u) return {static_cast<std::uint16_t>((b >> 16) | 0x0040u)};
  return {static_cast<std::uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16)};
}

template <>
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr f16 from_float<f16>(float x) noexcept {
  const std::uint32_t b = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (b >> 16) & 0x8000u;
  const std::uint32_t a = b & 0x7fff'ffffu;
  std::uint32_t out = 0;
  if (a > 0x7f80'0000u) {
    out = 0x7e00u | ((a >> 13) & 0x3ffu);
  } else if (a >= 0x477f'f000u) {  // 65520 and above round to infinity
    out = 0x7c00u;
  } else if (a >= 0x3880'0000u) {  // 2^-14 and above: normal
    const std::uint32_t r = a - 0x3800'0000u;
    out = (r + 0x0fffu + ((r >> 13) & 1u)) >> 13;
  } else {  // subnormal: units of 2^-24
    const std::uint32_t shift = 126u - (a >> 23);
    if (shift <= 24u) {
      const std::uint32_t mantissa = (a & 0x007f'ffffu) | 0x0080'0000u;
      const std::uint32_t rest = mantissa & ((1u << shift) - 1u);
      const std::uint32_t half = 1u << (shift - 1u);
      out = mantissa >> shift;
      if (rest > half || (rest == half && (out & 1u) != 0)) ++out;
    }
  }
  return {static_cast<std::uint16_t>(sign | out)};
}

static_assert(std::is_trivially_copyable_v<f16> && std::is_trivially_copyable_v<bf16>);
static_assert(sizeof(f16) == 2 && sizeof(bf16) == 2);

}  // namespace kvcache
