// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <vector>

namespace kvcache {

/// Evicts the block that has been evictable for longest. The order is a list threaded through an array indexed by
/// block id: every call is O(1) and allocates nothing, 8 bytes a block. One thread at a time.
class lru {
 public:
  static constexpr const char* name = "lru";

  /// An empty order over the blocks 1 to `highest`.
  explicit lru(block_id highest) : links_(std::size_t{highest} + 1) {}

  /// The newest of all. Precondition: not in the order.
  void insert(block_id block) noexcept {
    const block_id newest = links_[null_block].previous;
    links_[block] = {newest, null_block};
    links_[newest].next = block;
    links_[null_block].previous = block;
  }
  /// Precondition: in the order.
  void erase(block_id block) noexcept {
    const link gone = links_[block];
    links_[gone.previous].next = gone.next;
    links_[gone.next].previous = gone.previous;
  }
  /// The oldest, or the null block where there is none.
  [[nodiscard]] block_id victim() const noexcept { return links_[null_block].next; }

 private:
  struct link {
    block_id previous = null_block;
    block_id next = null_block;
  };
  // A ring; the null block stands between the newest and the oldest.
  std::vector<link> links_;
};

static_assert(eviction_policy<lru>);

}  // namespace kvcache
