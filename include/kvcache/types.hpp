// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>

#include <cstdint>
#include <type_traits>

namespace kvcache {

/// Names one block of a pool. 0 is the null block; ids from 1 to the pool's capacity hold tokens.
using block_id = std::uint32_t;

/// Padding of tables and holes behind a window point here; it is never counted, keyed, freed or handed out.
inline constexpr block_id null_block = 0;

/// Set in a block table's entry when the block lies in the tail pool (16-bit blocks that are not sealed yet)
/// and not in the pool proper. A pool therefore has at most 2^31 - 1 blocks.
inline constexpr block_id tail_bit = 0x8000'0000u;
inline constexpr block_id max_blocks = tail_bit - 1;

/// The place of one token: block_id * block_size + offset, so it needs 64 bits.
using slot_id = std::int64_t;

/// A slot that is not written.
inline constexpr slot_id no_slot = -1;

/// The slot of token `offset` of a block. Precondition: offset < block_size.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr slot_id make_slot(block_id block, std::uint32_t offset,
                                                              std::uint32_t block_size) noexcept {
  return static_cast<slot_id>(block) * block_size + offset;
}

/// A policy value that is known only at run time.
inline constexpr unsigned dynamic = ~0u;

/// Names a sequence. The generation tells a closed sequence from a later one that took its place.
struct sequence_id {
  std::uint32_t index = ~0u;
  std::uint32_t generation = 0;

  friend constexpr bool operator==(sequence_id, sequence_id) = default;
};

/// One unit of content: a token id, or a fingerprint that the caller made of content without token ids.
using content_unit = std::uint64_t;

inline constexpr content_unit fingerprint_tag = content_unit{1} << 63;

/// A unit that stands for an image patch, an audio frame or an embedding. Tagged, so it never equals a token id.
/// `value` should come from a hash of at least 63 good bits: two contents with one fingerprint are one content.
[[nodiscard]] constexpr content_unit fingerprint(std::uint64_t value) noexcept { return value | fingerprint_tag; }

/// The committed content of a block has a serial; serials are never reused. 0 names no content.
using serial = std::uint64_t;

/// Retention: what cached content is worth, where the caller says nothing and at most.
inline constexpr std::uint8_t default_priority = 35;
inline constexpr std::uint8_t highest_priority = 100;

enum class block_state : std::uint8_t {
  free,        ///< unreferenced, no key
  evictable,   ///< unreferenced, may be found by its content until it is needed
  referenced,  ///< in at least one sequence's table
  held,        ///< released, but a step or transfer in flight may still touch it, or a cached successor is in use
};

/// How many blocks are in each state; the null block apart, they add up to the capacity at every moment.
struct block_counts {
  std::uint32_t free = 0;
  std::uint32_t evictable = 0;
  std::uint32_t referenced = 0;
  std::uint32_t held = 0;

  /// What an allocation can draw on.
  [[nodiscard]] constexpr std::uint32_t available() const noexcept { return free + evictable; }
  [[nodiscard]] constexpr std::uint32_t capacity() const noexcept { return free + evictable + referenced + held; }
  friend constexpr bool operator==(const block_counts&, const block_counts&) = default;
};

/// Where an allocator's memory can be touched.
enum class memory_space : std::uint8_t {
  host,    ///< ordinary memory
  pinned,  ///< host memory that a device can copy from and to asynchronously
  device,  ///< only kernels may touch it
};

static_assert(std::is_trivially_copyable_v<sequence_id> && std::is_trivially_copyable_v<block_counts>);

}  // namespace kvcache
