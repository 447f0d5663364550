// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/convert.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/quantise/channels.hpp>
#include <kvcache/quantise/groups.hpp>
#include <kvcache/quantise/rotate.hpp>
#include <kvcache/quantization.hpp>

#include <cstddef>
#include <cstdint>

namespace kvcache {

/// Stores one head of a token in a format whose scales are per token. Infinities become the largest or the smallest of
/// the finite elements that share their scale; a NaN makes all of these a NaN. Needs code_bytes at `codes` and
/// scale_bytes at `scales`; of the last byte, what no element takes becomes 0. Each code is the nearest, but for 1 /
/// 65,536 of a step; all bytes are the same whatever the compiler and its options, -ffast-math included. O(dim).
/// Preconditions: the dtype is such a format, rotated or not (that is the caller's business), and dim is from 1 to
/// max_quantised_dim.
inline void quantise_head(dtype_id dtype, const float* x, std::uint32_t dim, std::byte* codes,
                          std::byte* scales) noexcept {
  const quantization q = quantization_of(dtype);
  KVCACHE_ASSERT(q.bits != 0 && !q.per_channel && dim > 0 && dim <= max_quantised_dim,
                 "quantise_head needs a format with scales per token, and a vector of 1 to 1024 elements");
  if (q.bits == 8)
    detail::quantise_groups<8, false>(q.group, x, dim, codes, scales);
  else if (q.zero_points)
    detail::quantise_groups<4, true>(q.group, x, dim, codes, scales);
  else
    detail::quantise_groups<4, false>(q.group, x, dim, codes, scales);
}

/// Seals one head of a block in a format whose scales are per channel: `read(token, x)` gives the head of a token as
/// dim floats, for each of `tokens` two times or more; codes of a token lie `token_stride` bytes behind those of the
/// one before. Infinities become the largest or the smallest finite element of their channel, a NaN what is nearest to
/// 0 in it: such a format has nothing that says "no number" of one token. Bytes as quantise_head says. O(tokens * dim).
/// Preconditions: as above, and tokens > 0.
template <class Read>
void seal_head(dtype_id dtype, std::uint32_t tokens, std::uint32_t dim, const Read& read, std::byte* codes,
               std::int64_t token_stride, std::byte* scales) noexcept {
  const quantization q = quantization_of(dtype);
  KVCACHE_ASSERT(q.per_channel && tokens > 0 && dim > 0 && dim <= max_quantised_dim,
                 "seal_head needs a format with scales per channel, a token, and vectors of 1 to 1024 elements");
  if (q.bits == 8)
    detail::seal_channels<8, false>(tokens, dim, read, codes, token_stride, scales);
  else if (q.bits == 2)
    detail::seal_channels<2, true>(tokens, dim, read, codes, token_stride, scales);
  else if (q.zero_points)
    detail::seal_channels<4, true>(tokens, dim, read, codes, token_stride, scales);
  else
    detail::seal_channels<4, false>(tokens, dim, read, codes, token_stride, scales);
}

/// The head of a token as floats, from its codes and from its scales or, per channel, those of its block. Each is the
/// number that the format says, correctly rounded, so it is the same on every processor. O(dim). Precondition: the
/// dtype is a format.
inline void dequantise_head(dtype_id dtype, const std::byte* codes, const std::byte* scales, std::uint32_t dim,
                            float* x) noexcept {
  const quantization q = quantization_of(dtype);
  if (q.per_channel) {
    if (q.bits == 8)
      detail::dequantise_channels<8>(q, codes, scales, dim, x);
    else if (q.bits == 4)
      detail::dequantise_channels<4>(q, codes, scales, dim, x);
    else
      detail::dequantise_channels<2>(q, codes, scales, dim, x);
  } else if (q.bits == 8) {
    detail::dequantise_groups<8>(q, codes, scales, dim, x);
  } else {
    detail::dequantise_groups<4>(q, codes, scales, dim, x);
  }
}

/// The head of a token as floats, whatever it is stored in; a rotated one stays rotated, a shifted one shifted. O(dim).
inline void read_head(const stored_head& from, std::uint32_t dim, float* x) noexcept {
  const dtype_id stored = without_rotation(from.dtype);
  if (quantization_of(stored).bits != 0)
    dequantise_head(stored, from.codes, from.scales, dim, x);
  else
    convert(from.codes, stored, dim, x);
}

}  // namespace kvcache
