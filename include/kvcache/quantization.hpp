// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvcache {

// Formats of integer codes that share scales, named in kv_dtype as element types are. Scales and zero points are bf16,
// so a scale is never too small or too large for what it stands for. x is an element, c its code.

/// One scale for the head of a token, its largest magnitude / 127: x = scale * c. 1 + 2 / head_dim bytes an element.
struct int8_per_token;

/// One scale for each channel of a block, its largest magnitude / 127: x = scale * c. 1 + 2 / block_size bytes.
struct int8_per_channel;

/// Groups of `Group` (16, 32, 64 or 128) neighbouring elements of a token's head share a scale, the element of largest
/// magnitude / -8: x = scale * (c - 8). Half the codes are on its side, which beats the magnitude / 7 by a tenth.
/// 0.5 + 2 / Group bytes an element. What head_dim leaves over is a smaller group.
template <unsigned Group = 32>
struct int4_grouped;

/// Groups as above with the smallest element as zero point and a scale of range / 15: x = zero + scale * c. For values
/// that are not centred on 0. 0.5 + 4 / Group bytes an element.
template <unsigned Group = 32>
struct int4_grouped_asymmetric;

/// A zero point and a scale for each channel of a block, range / 15: x = zero + scale * c. 0.5 + 4 / block_size bytes.
/// Keys have channels that are far from 0 in every token, which this keeps (Liu et al., "KIVI", ICML 2024).
struct int4_per_channel;

/// A scale for each channel of a block, the element of largest magnitude / -8: x = scale * (c - 8). 0.5 + 2 /
/// block_size bytes an element.
struct int4_per_channel_symmetric;

/// As int4_per_channel with range / 3. 0.25 + 4 / block_size bytes an element.
struct int2_per_channel;

/// The vectors of a head are multiplied by an orthogonal Hadamard matrix before they are stored as `Stored`, so that
/// what is large in one channel is spread over all. Attention rotates queries instead of keys and turns its output back
/// instead of the values, which changes no result (Ashkboos et al., "QuaRot", NeurIPS 2024). With a head_dim that is no
/// power of two, as many neighbours are rotated together as its largest power of two.
template <class Stored>
struct rotated;

template <>
struct dtype_traits<int8_per_token> {
  static constexpr dtype_id id = dtype_id::int8_per_token;
  static constexpr const char* name = "int8_per_token";
  static constexpr unsigned bits = 8;
};
template <>
struct dtype_traits<int8_per_channel> {
  static constexpr dtype_id id = dtype_id::int8_per_channel;
  static constexpr const char* name = "int8_per_channel";
  static constexpr unsigned bits = 8;
};
template <unsigned Group>
struct dtype_traits<int4_grouped<Group>> {
  static_assert(Group == 16 || Group == 32 || Group == 64 || Group == 128,
                "int4_grouped<Group> needs a Group of 16, 32, 64 or 128 elements");
  static constexpr dtype_id id = Group == 16    ? dtype_id::int4_grouped_16
                                 : Group == 64  ? dtype_id::int4_grouped_64
                                 : Group == 128 ? dtype_id::int4_grouped_128
                                                : dtype_id::int4_grouped_32;
  static constexpr const char* name = kvcache::name(id);
  static constexpr unsigned bits = 4;
};
template <unsigned Group>
struct dtype_traits<int4_grouped_asymmetric<Group>> {
  static_assert(Group == 16 || Group == 32 || Group == 64 || Group == 128,
                "int4_grouped_asymmetric<Group> needs a Group of 16, 32, 64 or 128 elements");
  static constexpr dtype_id id = Group == 16    ? dtype_id::int4_grouped_asymmetric_16
                                 : Group == 64  ? dtype_id::int4_grouped_asymmetric_64
                                 : Group == 128 ? dtype_id::int4_grouped_asymmetric_128
                                                : dtype_id::int4_grouped_asymmetric_32;
  static constexpr const char* name = kvcache::name(id);
  static constexpr unsigned bits = 4;
};
template <>
struct dtype_traits<int4_per_channel> {
  static constexpr dtype_id id = dtype_id::int4_per_channel;
  static constexpr const char* name = "int4_per_channel";
  static constexpr unsigned bits = 4;
};
template <>
struct dtype_traits<int4_per_channel_symmetric> {
  static constexpr dtype_id id = dtype_id::int4_per_channel_symmetric;
  static constexpr const char* name = "int4_per_channel_symmetric";
  static constexpr unsigned bits = 4;
};
template <>
struct dtype_traits<int2_per_channel> {
  static constexpr dtype_id id = dtype_id::int2_per_channel;
  static constexpr const char* name = "int2_per_channel";
  static constexpr unsigned bits = 2;
};
template <class Stored>
struct dtype_traits<rotated<Stored>> {
  static constexpr auto id = static_cast<dtype_id>(static_cast<std::uint8_t>(dtype_traits<Stored>::id) | rotated_bit);
  static constexpr const char* name = kvcache::name(id);
  static constexpr unsigned bits = dtype_traits<Stored>::bits;
};

/// How a run-time dtype holds a vector: what a kernel needs to know of it.
struct quantization {
  unsigned bits = 0;         ///< of a code; 0: elements are stored as they are, there are no scales
  bool per_channel = false;  ///< scales are of a block's channels, and not of a token's elements
  bool zero_points = false;  ///< each scale has a zero point, else codes are signed or have an offset of 8
  unsigned group = 0;        ///< neighbouring elements of a token that share a scale; 0: all of a head

  /// Scales of one head: of a token, or of a block where they are per channel.
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr std::uint32_t scales(std::uint32_t dim) const noexcept {
    if (bits == 0) return 0;
    if (per_channel) return dim;
    return group == 0 ? 1 : dim / group + (dim % group != 0 ? 1 : 0);
  }
  /// Where the zero point of scale `i` lies, counted in scales from the first of a head's `scales` scales on. Zero
  /// points follow the scales in the same order.
  template <class Index>
  [[nodiscard]] KVCACHE_HOST_DEVICE static constexpr Index zero_point(Index i, Index scales) noexcept {
    return scales + i;
  }
  friend constexpr bool operator==(const quantization&, const quantization&) = default;
};

/// How a stored type makes codes of elements; bits 0 for element types, which have none. A rotation changes nothing of
/// it. O(1), pure.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr quantization quantization_of(dtype_id id) noexcept {
  switch (without_rotation(id)) {
    case dtype_id::float32:
    case dtype_id::float16:
    case dtype_id::bfloat16:
    case dtype_id::float8_e4m3:
    case dtype_id::float8_e5m2: return {};
    case dtype_id::int8_per_token: return {8, false, false, 0};
    case dtype_id::int8_per_channel: return {8, true, false, 0};
    case dtype_id::int4_grouped_16: return {4, false, false, 16};
    case dtype_id::int4_grouped_32: return {4, false, false, 32};
    case dtype_id::int4_grouped_64: return {4, false, false, 64};
    case dtype_id::int4_grouped_128: return {4, false, false, 128};
    case dtype_id::int4_grouped_asymmetric_16: return {4, false, true, 16};
    case dtype_id::int4_grouped_asymmetric_32: return {4, false, true, 32};
    case dtype_id::int4_grouped_asymmetric_64: return {4, false, true, 64};
    case dtype_id::int4_grouped_asymmetric_128: return {4, false, true, 128};
    case dtype_id::int4_per_channel: return {4, true, true, 0};
    case dtype_id::int4_per_channel_symmetric: return {4, true, false, 0};
    case dtype_id::int2_per_channel: return {2, true, true, 0};
  }
  return {};
}

/// Whether a block has to be whole before it can be stored so, and lies at 16 bits in the tail pool until then.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr bool seals(dtype_id id) noexcept { return quantization_of(id).per_channel; }

/// Bytes of one head of a token: its codes, or its elements. Codes of a byte lie from its lowest bits up.
[[nodiscard]] constexpr std::uint64_t code_bytes(dtype_id id, std::uint32_t dim) noexcept {
  return (std::uint64_t{dim} * bits(id) + 7) / 8;
}
/// Bytes of the scales of one head, of a token or of a block: all scales, then all zero points.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr std::uint64_t scale_bytes(dtype_id id, std::uint32_t dim) noexcept {
  const quantization q = quantization_of(id);
  return std::uint64_t{q.scales(dim)} * (q.zero_points ? 4u : 2u);
}

/// The longest vector that can be quantised or rotated.
inline constexpr std::uint32_t max_quantised_dim = 1024;

/// One head of K or V of a token, or of a whole block from its first token on, in memory.
struct stored_head {
  const std::byte* codes = nullptr;   ///< or elements
  const std::byte* scales = nullptr;  ///< all scales, then all zero points; see quantization_of(dtype)
  dtype_id dtype = dtype_id::bfloat16;
};

static_assert(std::is_trivially_copyable_v<quantization> && std::is_trivially_copyable_v<stored_head>);

}  // namespace kvcache
