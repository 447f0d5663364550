// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/detail/block_lists.hpp>
#include <kvcache/detail/ghost_list.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

/// Balances recency against frequency by its own misses (ARC; Megiddo and Modha, ARC: A Self-Tuning, Low Overhead
/// Replacement Cache, FAST 2003): blocks used once and blocks used more often are two LRU orders, each with ghosts of
/// what it lost, as many as the pool has blocks together; a ghost that comes back moves the target share towards the
/// order that lost it. Two differences: the share is of the blocks that can be evicted, since those in use cannot; and
/// a block used once that is also older than all others goes first, which keeps a parent no colder than its children.
/// O(1) a call, 58 to 66 bytes a block. One thread at a time.
class arc {
 public:
  static constexpr const char* name = "arc";

  /// An empty order over the blocks 1 to `highest`.
  explicit arc(block_id highest)
      : uses_(std::size_t{highest} + 1), order_(highest), ghosts_(highest), blocks_(highest) {}

  /// A request uses the block.
  void reference(block_id block, std::uint64_t fingerprint, block_id parent) noexcept {
    use& u = uses_[block];
    const std::uint8_t again = parent == null_block ? often : uses_[parent].list;
    if (u.known && u.fingerprint == fingerprint) {
      u.list = again;
      return;
    }
    u = {fingerprint, u.released, once, true};
    const detail::ghost_id ghost = ghosts_.find(fingerprint);
    if (ghost == 0) return;
    u.list = again;
    const std::uint64_t lost_once = ghosts_.size(once);
    const std::uint64_t lost_often = ghosts_.size(often);
    if (ghosts_.list(ghost) == once) {
      const std::uint64_t more = lost_often > lost_once ? lost_often / lost_once : 1;
      target_ = target_ + more < blocks_ ? target_ + more : blocks_;
    } else {
      const std::uint64_t less = lost_once > lost_often ? lost_once / lost_often : 1;
      target_ = target_ > less ? target_ - less : 0;
    }
    ghosts_.erase(ghost);
  }
  /// The newest of its list. Precondition: not in the order.
  void insert(block_id block) noexcept {
    uses_[block].released = ++released_;
    order_.push(uses_[block].list, block);
  }
  /// Precondition: in the order.
  void erase(block_id block) noexcept { order_.erase(block); }
  /// Erases, and keeps the fingerprint as a ghost. Precondition: in the order.
  void evict(block_id block) noexcept {
    const std::uint32_t list = order_.list(block);
    order_.erase(block);
    uses_[block].known = false;
    // Used once, whether cached or a ghost: no more than the pool has.
    if (list == once && ghosts_.size(once) != 0 && order_.size(once) + ghosts_.size(once) >= blocks_) ghosts_.pop(once);
    ghosts_.push(list, uses_[block].fingerprint);
  }
  /// The oldest of the list that is over its share, or the null block where there is none.
  [[nodiscard]] block_id victim() const noexcept {
    const block_id oldest_once = order_.oldest(once);
    const block_id oldest_often = order_.oldest(often);
    if (oldest_once == null_block) return oldest_often;
    if (oldest_often == null_block || uses_[oldest_once].released < uses_[oldest_often].released) return oldest_once;
    const std::uint64_t size = order_.size(once);
    return size * blocks_ > target_ * (size + order_.size(often)) ? oldest_once : oldest_often;
  }

 private:
  static constexpr std::uint8_t once = 0;
  static constexpr std::uint8_t often = 1;
  struct use {
    std::uint64_t fingerprint = 0;
    std::uint64_t released = 0;
    std::uint8_t list = once;
    bool known = false;
  };

  std::vector<use> uses_;  // by block
  detail::block_lists<2> order_;
  detail::ghost_list<2> ghosts_;
  std::uint64_t blocks_;
  std::uint64_t target_ = 0;  // for blocks used once, out of all
  std::uint64_t released_ = 0;
};

static_assert(eviction_policy<arc>);

}  // namespace kvcache
