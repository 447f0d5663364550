// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/extra_key.hpp>
#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/blocks/retention.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace kvcache {

/// What a pool is built from.
struct block_manager_options {
  std::uint32_t blocks = 0;  ///< blocks that tokens can use; the null block comes on top
  std::uint32_t block_size = 16;
  std::uint32_t tail_blocks = 0;  ///< as those of layer_group, where there is but one
  std::uint32_t wide_tokens = 0;
  std::span<const layer_group> layer_groups = {};  ///< none: one group of `block_size`, for a uniform model
  /// Tokens that a unit of content stands for. Only policies that weigh requests by their length look at it. For a
  /// caller who has one fingerprint for many tokens, and counts sizes and lengths in those.
  std::uint32_t unit_tokens = 1;
  /// Whether `open` may take the head of a cached block that is no prefix as a whole, by copy. For groups of one block
  /// size only.
  bool partial_reuse = false;
  /// Events that are kept for consumers that poll; 0: none are, and nothing is numbered.
  std::size_t events = 0;
  unsigned hash_bits = 64;  ///< bits of the content hash in use. Fewer force collisions: slower, never wrong
};

/// A request to open a sequence.
struct open_request {
  content_view content = {};             ///< the prompt; at least one unit
  std::span<const extra_key> keys = {};  ///< a set: order and repetition do not matter
  std::uint64_t reserve = 0;             ///< tokens for which blocks shall be held in all; 0: only what is cached
  /// Most tokens that a step will compute of it; 0: any number. Layer groups with a window then hold blocks for no more
  /// than the window and so many tokens at once.
  std::uint64_t chunk = 0;
  std::span<const retention_range> retention = {};  ///< ascending; none: as any other content
  bool counted = false;  ///< in the statistics already: the request is admitted again, after it lost its blocks
};

/// A sequence that was opened.
struct opened {
  sequence_id sequence;
  std::uint32_t reused_tokens = 0;  ///< cached tokens it starts with: its first query is the token after them
};

/// What `open` would do at this moment, in blocks over all layer groups.
struct admission {
  std::uint32_t reused_tokens = 0;
  std::uint64_t new_blocks = 0;      ///< to be allocated
  std::uint64_t revived_blocks = 0;  ///< cached, unreferenced until now
  std::uint64_t needs = 0;           ///< new + revived: what leaves `available`
  std::uint64_t available = 0;
  std::uint64_t total_blocks = 0;  ///< of the whole request, shared ones and the rest of the prompt included
  std::uint64_t capacity = 0;

  /// Whether `open` would succeed.
  [[nodiscard]] constexpr bool fits() const noexcept { return total_blocks <= capacity && needs <= available; }
  friend constexpr bool operator==(const admission&, const admission&) = default;
};

/// What is cached of some content.
struct prefix_match {
  std::uint32_t tokens = 0;
};

/// Cached content that is held for later. Closing the sequence gives it back.
struct pinned {
  sequence_id sequence;
  std::uint32_t tokens = 0;
};

/// What one sequence computes in a step.
struct want {
  sequence_id sequence;
  std::uint32_t tokens = 0;
};

/// Running sums since the pool was built.
struct block_statistics {
  std::uint64_t opened_sequences = 0;  ///< by `open`, each request once; refused ones are not counted
  std::uint64_t queried_tokens = 0;    ///< content of those
  std::uint64_t hit_tokens = 0;        ///< of these, reused
  std::uint64_t evicted_blocks = 0;    ///< cached blocks given up to make room

  friend constexpr bool operator==(const block_statistics&, const block_statistics&) = default;
};

static_assert(std::is_trivially_copyable_v<open_request> && std::is_trivially_copyable_v<admission> &&
              std::is_trivially_copyable_v<want> && std::is_trivially_copyable_v<block_statistics>);

}  // namespace kvcache
