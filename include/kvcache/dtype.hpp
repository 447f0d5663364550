// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/bit_cast.hpp>
#include <kvcache/detail/config.hpp>

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

/// Run-time name of a type that K or V is stored in: of its elements, or of a format of codes that share scales (see
/// quantization.hpp). `rotated_bit` may be set beside each.
enum class dtype_id : std::uint8_t {
  float32,
  float16,
  bfloat16,
  float8_e4m3,
  float8_e5m2,
  int8_per_token,
  int8_per_channel,
  int4_grouped_16,
  int4_grouped_32,
  int4_grouped_64,
  int4_grouped_128,
  int4_grouped_asymmetric_16,
  int4_grouped_asymmetric_32,
  int4_grouped_asymmetric_64,
  int4_grouped_asymmetric_128,
  int4_per_channel,
  int4_per_channel_symmetric,
  int2_per_channel,
};

/// Set in a dtype_id whose vectors are rotated before they are stored; see kvcache::rotated.
inline constexpr std::uint8_t rotated_bit = 0x80;

/// Whether vectors are stored turned by a Hadamard matrix. O(1), pure.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr bool is_rotated(dtype_id id) noexcept {
  return (static_cast<std::uint8_t>(id) & rotated_bit) != 0;
}
/// What is stored of a vector, rotated or not.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr dtype_id without_rotation(dtype_id id) noexcept {
  return static_cast<dtype_id>(static_cast<std::uint8_t>(id) & ~rotated_bit);
}

/// What the library knows of an element type or a format: `id`, `name`, `bits` of what is stored for an element, scales
/// apart.
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

namespace detail {

struct dtype_row {
  const char* name;
  const char* rotated_name;
  unsigned bits;
};
/// By number of the dtype_id.
inline constexpr dtype_row dtype_rows[] = {
    {"f32", "rotated_f32", 32},
    {"f16", "rotated_f16", 16},
    {"bf16", "rotated_bf16", 16},
    {"fp8_e4m3", "rotated_fp8_e4m3", 8},
    {"fp8_e5m2", "rotated_fp8_e5m2", 8},
    {"int8_per_token", "rotated_int8_per_token", 8},
    {"int8_per_channel", "rotated_int8_per_channel", 8},
    {"int4_grouped_16", "rotated_int4_grouped_16", 4},
    {"int4_grouped_32", "rotated_int4_grouped_32", 4},
    {"int4_grouped_64", "rotated_int4_grouped_64", 4},
    {"int4_grouped_128", "rotated_int4_grouped_128", 4},
    {"int4_grouped_asymmetric_16", "rotated_int4_grouped_asymmetric_16", 4},
    {"int4_grouped_asymmetric_32", "rotated_int4_grouped_asymmetric_32", 4},
    {"int4_grouped_asymmetric_64", "rotated_int4_grouped_asymmetric_64", 4},
    {"int4_grouped_asymmetric_128", "rotated_int4_grouped_asymmetric_128", 4},
    {"int4_per_channel", "rotated_int4_per_channel", 4},
    {"int4_per_channel_symmetric", "rotated_int4_per_channel_symmetric", 4},
    {"int2_per_channel", "rotated_int2_per_channel", 2},
};
inline constexpr std::uint8_t dtype_count = sizeof dtype_rows / sizeof dtype_rows[0];

}  // namespace detail

/// "unknown" where the value is none of the enumerators.
[[nodiscard]] constexpr const char* name(dtype_id id) noexcept {
  const auto row = static_cast<std::uint8_t>(without_rotation(id));
  if (row >= detail::dtype_count) return "unknown";
  return is_rotated(id) ? detail::dtype_rows[row].rotated_name : detail::dtype_rows[row].name;
}

/// Bits of what is stored for one element, scales apart; 0 where the value is none of the enumerators.
[[nodiscard]] constexpr unsigned bits(dtype_id id) noexcept {
  const auto row = static_cast<std::uint8_t>(without_rotation(id));
  return row < detail::dtype_count ? detail::dtype_rows[row].bits : 0;
}

/// Exact: every f16 is an f32. A signalling NaN becomes quiet, as the hardware does it.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr float to_float(f16 x) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t rest = x.bits & 0x7fffu;
  if (rest >= 0x7c00u) {  // infinity or NaN
    const std::uint32_t quiet = rest > 0x7c00u ? 0x0040'0000u : 0u;
    return detail::bit_cast<float>(sign | 0x7f80'0000u | quiet | ((rest & 0x3ffu) << 13));
  }
  if (rest >= 0x0400u) return detail::bit_cast<float>(sign | ((rest << 13) + 0x3800'0000u));
  // Subnormal: rest * 2^-24, which is a normal f32.
  const float magnitude = static_cast<float>(rest) * 0x1p-24f;
  return detail::bit_cast<float>(sign | detail::bit_cast<std::uint32_t>(magnitude));
}

/// Exact.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr float to_float(bf16 x) noexcept {
  return detail::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

[[nodiscard]] KVCACHE_HOST_DEVICE constexpr float to_float(float x) noexcept { return x; }

/// A type whose elements are stored each by itself.
template <class T>
concept element = requires(T x) {
  { dtype_traits<T>::id } -> std::convertible_to<dtype_id>;
  { dtype_traits<T>::bits } -> std::convertible_to<unsigned>;
  { dtype_traits<T>::name } -> std::convertible_to<const char*>;
  { to_float(x) } -> std::same_as<float>;
};

/// What queries and outputs of attention can be: f32, f16 or bf16.
template <class T>
concept wide_element = element<T> && dtype_traits<T>::bits >= 16;

/// What K or V can be stored in: an element type, or a format of quantization.hpp.
template <class T>
concept stored_type = requires {
  { dtype_traits<T>::id } -> std::convertible_to<dtype_id>;
  { dtype_traits<T>::bits } -> std::convertible_to<unsigned>;
  { dtype_traits<T>::name } -> std::convertible_to<const char*>;
};

/// The dtype policy: what K and V are stored in, chosen independently.
template <class K, class V = K>
struct kv_dtype {
  using k = K;
  using v = V;
};

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
  const std::uint32_t b = detail::bit_cast<std::uint32_t>(x);
  if ((b & 0x7fff'ffffu) > 0x7f80'0000u) return {static_cast<std::uint16_t>((b >> 16) | 0x0040u)};
  return {static_cast<std::uint16_t>((b + 0x7fffu + ((b >> 16) & 1u)) >> 16)};
}

template <>
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr f16 from_float<f16>(float x) noexcept {
  const std::uint32_t b = detail::bit_cast<std::uint32_t>(x);
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
