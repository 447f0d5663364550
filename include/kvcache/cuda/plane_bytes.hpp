// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/context.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>

// Whole blocks as bytes: in runs as long as strides allow, and 16 bytes at a time where everything is aligned to that.

namespace kvcache::device {

/// Divides by a number again and again: a product instead of each division.
struct divisor {
  std::uint32_t number = 1;
  std::uint32_t inverse = ~0u;  ///< (2^32 - 1) / number

  divisor() = default;
  KVCACHE_DEVICE_INLINE explicit divisor(std::uint32_t n) : number(n), inverse(~0u / n) {}

  /// a / number.
  [[nodiscard]] KVCACHE_DEVICE_INLINE std::uint32_t into(std::uint32_t a) const {
    const auto about = static_cast<std::uint32_t>(std::uint64_t{a} * inverse >> 32);  // or one less
    return a - about * number >= number ? about + 1 : about;
  }
};

/// Bytes that lie together.
struct flat_bytes {
  std::byte* base;
  std::uint32_t size;

  [[nodiscard]] KVCACHE_DEVICE_INLINE std::uint32_t aligned_bits() const {
    return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(base)) | size;
  }
  [[nodiscard]] KVCACHE_DEVICE_INLINE std::byte* at(std::uint32_t offset) const { return base + offset; }
};

/// The bytes of some tokens of a block in one plane, one after another: in runs that lie together, `inner` of them to a
/// row.
struct plane_bytes {
  std::byte* base = nullptr;
  std::uint32_t size = 0;
  divisor run;
  divisor inner;
  std::int64_t inner_stride = 0;
  std::int64_t row_stride = 0;

  /// The lowest bit that is set says what everything is aligned to.
  [[nodiscard]] KVCACHE_DEVICE_INLINE std::uint32_t aligned_bits() const {
    return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(base)) | run.number |
           static_cast<std::uint32_t>(inner_stride) | static_cast<std::uint32_t>(row_stride);
  }
  [[nodiscard]] KVCACHE_DEVICE_INLINE std::byte* at(std::uint32_t offset) const {
    const std::uint32_t index = run.into(offset);
    const std::uint32_t row = inner.into(index);
    return base + row * row_stride + (index - row * inner.number) * inner_stride + (offset - index * run.number);
  }
};

/// The widest unit, at most 16 bytes, that what has such aligned_bits can be taken in.
KVCACHE_DEVICE_INLINE std::uint32_t widest_unit(std::uint32_t aligned_bits) {
  const std::uint32_t bits = aligned_bits | 16u;
  return bits & (~bits + 1);
}

/// The first `tokens` tokens of a block. In the order [token][head][bytes]; with `AnyOrder`, which is the same for all
/// blocks of the plane, [head][token][bytes] where that makes longer runs.
template <bool AnyOrder>
KVCACHE_DEVICE_INLINE plane_bytes bytes_of(const plane_view& plane, block_id block, std::uint32_t tokens,
                                           std::uint32_t heads, std::uint32_t head_bytes) {
  plane_bytes b;
  if (plane.base == nullptr || tokens * heads * head_bytes == 0) return b;
  b.base = plane.at(block, 0, 0);
  b.size = tokens * heads * head_bytes;
  const bool heads_adjoin = heads == 1 || plane.head_stride == std::int64_t{head_bytes};
  const bool tokens_adjoin = tokens == 1 || plane.token_stride == std::int64_t{head_bytes};
  std::uint32_t run = head_bytes;
  std::uint32_t inner = heads;
  b.inner_stride = plane.head_stride;
  if (heads_adjoin && (tokens == 1 || plane.token_stride == std::int64_t{head_bytes} * heads)) {
    run = b.size;
    inner = 1;
    b.inner_stride = 0;
  } else if (heads_adjoin) {
    run = head_bytes * heads;
    inner = tokens;
    b.inner_stride = plane.token_stride;
  } else if (AnyOrder && tokens_adjoin) {
    run = head_bytes * tokens;
  } else if (tokens != 1) {
    b.row_stride = plane.token_stride;
  }
  b.run = divisor(run);
  b.inner = divisor(inner);
  return b;
}

/// Which share of a piece of work a lane has: the units of 1 to 16 bytes first, first + step, ...
struct lane_share {
  std::uint32_t first;
  std::uint32_t step;
};

/// Units that a lane has loaded before it stores them, so that loads do not wait for each other.
inline constexpr unsigned units_at_once = 4;

template <class Unit, class From, class To, context C>
KVCACHE_DEVICE_INLINE void copy_units(const C& c, const From& from, const To& to, lane_share share) {
  const std::uint32_t units = from.size / sizeof(Unit);
  for (std::uint32_t u = share.first; u < units; u += units_at_once * share.step) {
    Unit some[units_at_once];
    KVCACHE_UNROLL
    for (unsigned i = 0; i < units_at_once; ++i) {
      const std::uint32_t index = u + i * share.step < units ? u + i * share.step : u;
      some[i] = c.load(reinterpret_cast<const Unit*>(from.at(index * sizeof(Unit))));
    }
    KVCACHE_UNROLL
    for (unsigned i = 0; i < units_at_once; ++i)
      if (u + i * share.step < units)
        c.store(reinterpret_cast<Unit*>(to.at((u + i * share.step) * sizeof(Unit))), some[i]);
  }
}

/// A lane's share of copying as many bytes from one place to another.
template <class From, class To, context C>
KVCACHE_DEVICE_INLINE void copy_bytes(const C& c, const From& from, const To& to, lane_share share) {
  if (from.size == 0) return;
  switch (widest_unit(from.aligned_bits() | to.aligned_bits())) {
    case 16: return copy_units<words4>(c, from, to, share);
    case 8: return copy_units<words2>(c, from, to, share);
    case 4: return copy_units<std::uint32_t>(c, from, to, share);
    case 2: return copy_units<std::uint16_t>(c, from, to, share);
    default: return copy_units<std::uint8_t>(c, from, to, share);
  }
}

/// Warps that work on one block together, so that a few blocks keep many of them busy.
KVCACHE_DEVICE_INLINE std::uint32_t warps_for(std::uint32_t block_bytes) {
  constexpr std::uint32_t bytes_at_once = warp_lanes * units_at_once * 16;
  const std::uint32_t warps = (block_bytes + bytes_at_once - 1) / bytes_at_once;
  return warps == 0 ? 1 : warps;
}

}  // namespace kvcache::device
