// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/context.hpp>
#include <kvcache/detail/bit_cast.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/quantization.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

// How stored numbers become the operands of products of matrices. Codes are made numbers in registers, four of a token
// at a time.

namespace kvcache::device {

/// What is stored, rotated or not.
template <class Stored>
struct turned {
  using type = Stored;
  static constexpr bool rotated = false;
};
template <class Stored>
struct turned<kvcache::rotated<Stored>> {
  using type = Stored;
  static constexpr bool rotated = true;
};

/// How a product meets what is stored.
enum class operand_form : std::uint8_t {
  elements,  ///< 16 bits, read as matrices
  units,     ///< f16 of codes as they are; the scale of a token, if there is one, multiplies what comes out
  numbers,   ///< bf16 of codes times their scales
};

/// What lies at `from`, in shared memory, aligned to its size.
template <class T>
KVCACHE_DEVICE_INLINE T read_shared(const std::byte* from) {
  T x;
  std::memcpy(&x, __builtin_assume_aligned(from, sizeof(T)), sizeof x);
  return x;
}

template <class Stored>
struct stored_as {
  using type = typename turned<Stored>::type;
  static constexpr dtype_id id = dtype_traits<type>::id;
  static constexpr quantization codes = quantization_of(id);
  static constexpr bool rotated = turned<Stored>::rotated;
  static constexpr unsigned bits = dtype_traits<type>::bits;
  static constexpr bool is_fp8 = id == dtype_id::float8_e4m3 || id == dtype_id::float8_e5m2;
  static constexpr bool scale_per_token = id == dtype_id::int8_per_token;

  /// Of keys, whose products can be scaled token by token, and of values, which are summed over tokens.
  static constexpr operand_form key_form = bits == 16                  ? operand_form::elements
                                           : is_fp8 || scale_per_token ? operand_form::units
                                                                       : operand_form::numbers;
  static constexpr operand_form value_form = bits == 16 ? operand_form::elements
                                             : is_fp8   ? operand_form::units
                                                        : operand_form::numbers;
  template <operand_form Form>
  using operand = std::conditional_t<Form == operand_form::elements, type,
                                     std::conditional_t<Form == operand_form::units, f16, bf16>>;
  using key_operand = operand<key_form>;
  using value_operand = operand<value_form>;

  KVCACHE_HOST_DEVICE static constexpr unsigned row_bytes(unsigned dim) { return dim * bits / 8; }
  KVCACHE_HOST_DEVICE static constexpr unsigned scales_of(unsigned dim) {
    return codes.bits == 0 ? 0 : codes.per_channel ? dim : codes.group == 0 ? 1 : (dim + codes.group - 1) / codes.group;
  }
  KVCACHE_HOST_DEVICE static constexpr unsigned scale_bytes(unsigned dim) {
    return scales_of(dim) * (codes.zero_points ? 4 : 2);
  }
};

/// u as a number, less `offset`, for u below 2^23: its bits behind those of 2^23.
KVCACHE_DEVICE_INLINE float small_number(std::uint32_t u, float offset) {
  return detail::bit_cast<float>(0x4b00'0000u | u) - (0x1p23f + offset);
}

/// The four codes of a token at `from`, in shared memory, less the format's offset: elements 4i to 4i + 3 of a head.
template <class Stored>
KVCACHE_DEVICE_INLINE void four_codes(const std::byte* from, float (&x)[4]) {
  using as = stored_as<Stored>;
  if constexpr (as::bits == 8) {
    const std::uint32_t word = read_shared<std::uint32_t>(from) ^ 0x8080'8080u;
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i) x[i] = small_number(word >> (8 * i) & 0xffu, 128.0f);
  } else if constexpr (as::bits == 4) {
    const std::uint32_t word = read_shared<std::uint16_t>(from);
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i) x[i] = small_number(word >> (4 * i) & 0xfu, as::codes.zero_points ? 0.0f : 8.0f);
  } else {
    static_assert(as::bits == 2);
    const auto byte = static_cast<std::uint32_t>(*from);
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i) x[i] = small_number(byte >> (2 * i) & 0x3u, 0.0f);
  }
}

/// Four elements of a token in two registers of f16, without scales.
template <class Stored, context C>
KVCACHE_DEVICE_INLINE void four_units(const C& c, const std::byte* from, std::uint32_t (&out)[2]) {
  using as = stored_as<Stored>;
  if constexpr (as::is_fp8) {
    const auto word = read_shared<std::uint32_t>(from);
    out[0] = c.widen(typename as::type{}, static_cast<std::uint16_t>(word));
    out[1] = c.widen(typename as::type{}, static_cast<std::uint16_t>(word >> 16));
  } else {
    float x[4];
    four_codes<Stored>(from, x);
    out[0] = c.pack(f16{}, x[0], x[1]);
    out[1] = c.pack(f16{}, x[2], x[3]);
  }
}

/// Scale `i` at `scales`, in shared memory.
KVCACHE_DEVICE_INLINE float scale_at(const std::byte* scales, unsigned i) {
  return to_float(read_shared<bf16>(scales + 2 * i));
}

/// Four elements of a token, from element `first` of a head of `Dim` on, scales and zero points applied.
template <class Stored, unsigned Dim>
KVCACHE_DEVICE_INLINE void four_numbers(const std::byte* codes, const std::byte* scales, unsigned first,
                                        float (&x)[4]) {
  using as = stored_as<Stored>;
  constexpr unsigned count = as::scales_of(Dim);
  four_codes<Stored>(codes, x);
  if constexpr (as::codes.per_channel) {
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      x[i] *= scale_at(scales, first + i);
      if constexpr (as::codes.zero_points) x[i] += scale_at(scales, count + first + i);
    }
  } else {
    const unsigned group = as::codes.group == 0 ? 0 : first / (as::codes.group == 0 ? 1 : as::codes.group);
    const float scale = scale_at(scales, group);
    const float zero = as::codes.zero_points ? scale_at(scales, count + group) : 0.0f;
    KVCACHE_UNROLL
    for (float& y : x) y = as::codes.zero_points ? y * scale + zero : y * scale;
  }
}

/// Elements d to d + 3 of the head of a token at `row`, whatever it is stored as.
template <class Stored, unsigned Dim, context C>
KVCACHE_DEVICE_INLINE void four_stored(const C& c, const std::byte* row, const std::byte* scales, unsigned d,
                                       float (&x)[4]) {
  using as = stored_as<Stored>;
  const std::byte* const from = row + d * as::bits / 8;
  if constexpr (as::codes.bits != 0) {
    four_numbers<Stored, Dim>(from, scales, d, x);
  } else if constexpr (as::bits == 32) {
    const auto four = read_shared<words4>(from);
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i) x[i] = detail::bit_cast<float>(four.w[i]);
  } else {
    using element = std::conditional_t<as::bits == 16, typename as::type, f16>;
    std::uint32_t pairs[2];
    if constexpr (as::is_fp8) {
      four_units<Stored>(c, from, pairs);
    } else {
      const auto four = read_shared<words2>(from);
      pairs[0] = four.w[0];
      pairs[1] = four.w[1];
    }
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i)
      x[i] = to_float(element{static_cast<std::uint16_t>(pairs[i / 2] >> (16 * (i % 2)))});
  }
}
template <class Stored, unsigned Dim, context C>
KVCACHE_DEVICE_INLINE void eight_numbers(const C& c, const std::byte* row, const std::byte* scales, unsigned d,
                                         float (&x)[8]) {
  float low[4];
  float high[4];
  four_stored<Stored, Dim>(c, row, scales, d, low);
  four_stored<Stored, Dim>(c, row, scales, d + 4, high);
  KVCACHE_UNROLL
  for (unsigned i = 0; i < 4; ++i) {
    x[i] = low[i];
    x[4 + i] = high[i];
  }
}

}  // namespace kvcache::device
