// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/detail/id_heap.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

/// Evicts by what the caller says a block is worth (retention): each has a level from 0 to 100, and the lowest goes
/// first, inside one level the one that has been evictable for longest. Content starts at `default_priority` and falls
/// back to it when its level expires, on the caller's time. A block with cached children goes after all that have none:
/// its children go before it, so its own level alone would send away a child that is worth more. O(log n) a call, 80
/// bytes a block. One thread at a time.
class priority {
 public:
  static constexpr const char* name = "priority";
  static constexpr std::uint64_t never = ~std::uint64_t{0};

  /// An empty order over the blocks 1 to `highest`.
  explicit priority(block_id highest) : uses_(std::size_t{highest} + 1), order_(highest), expiries_(highest) {}

  /// The content of the block, in use or evictable, is worth `level` (more than 100 counts as 100) until the time
  /// `expires`. To be called after the content's first `reference`.
  void set_priority(block_id block, unsigned level, std::uint64_t expires = never) noexcept {
    if (expires <= now_) {
      level = default_priority;
      expires = never;
    }
    uses_[block].level = static_cast<std::uint8_t>(level < highest_priority ? level : highest_priority);
    if (expiries_.contains(block)) expiries_.erase(block);
    if (expires != never) expiries_.insert(block, expires);
    rank(block);
  }
  /// The time is `now`: levels that expire by then fall back. An earlier `now` than before changes nothing. O(log n)
  /// for each that falls back.
  void advance(std::uint64_t now) noexcept {
    if (now > now_) now_ = now;
    for (block_id block = expiries_.least(); block != null_block && expiries_.key(block) <= now_;
         block = expiries_.least())
      set_priority(block, default_priority);
  }

  /// A request uses the block; content it has not held before is at the default level.
  void reference(block_id block, std::uint64_t fingerprint, block_id parent) noexcept {
    use& u = uses_[block];
    if (u.known && u.fingerprint == fingerprint && u.parent == parent && !orphan(block)) return;
    if (u.known) forget(block);
    u.fingerprint = fingerprint;
    u.known = true;
    u.parent = parent;
    u.parent_generation = uses_[parent].generation;
    if (parent != null_block && ++uses_[parent].children == 1) rank(parent);
  }
  /// Precondition: not in the order.
  void insert(block_id block) noexcept {
    uses_[block].released = ++released_;
    order_.insert(block, key(block));
  }
  /// Precondition: in the order.
  void erase(block_id block) noexcept { order_.erase(block); }
  /// Erases. Precondition: in the order.
  void evict(block_id block) noexcept {
    order_.erase(block);
    if (uses_[block].known) forget(block);
  }
  /// The block of least worth, or the null block where there is none.
  [[nodiscard]] block_id victim() const noexcept { return order_.least(); }

 private:
  struct use {
    std::uint64_t fingerprint = 0;
    std::uint64_t released = 0;
    block_id parent = null_block;
    std::uint32_t parent_generation = 0;
    std::uint32_t generation = 0;  // of the content in this block
    std::uint32_t children = 0;    // cached ones
    std::uint8_t level = default_priority;
    bool known = false;
  };

  /// Leaves first, by level and then by age; the others by age, in which no parent is before its children.
  [[nodiscard]] std::uint64_t key(block_id block) const noexcept {
    const use& u = uses_[block];
    return (u.children != 0 ? std::uint64_t{1} << 63 : std::uint64_t{u.level} << 56) | u.released;
  }
  /// Its parent's content is gone.
  [[nodiscard]] bool orphan(block_id block) const noexcept {
    return uses_[block].parent_generation != uses_[uses_[block].parent].generation;
  }
  void rank(block_id block) noexcept {
    if (order_.contains(block)) order_.change(block, key(block));
  }
  /// The block's content is gone.
  void forget(block_id block) noexcept {
    set_priority(block, default_priority);
    use& u = uses_[block];
    u.known = false;
    u.children = 0;
    ++u.generation;
    if (u.parent == null_block || orphan(block)) return;
    if (--uses_[u.parent].children == 0) rank(u.parent);
  }

  std::vector<use> uses_;  // by block
  detail::id_heap<std::uint64_t> order_;
  detail::id_heap<std::uint64_t> expiries_;
  std::uint64_t now_ = 0;
  std::uint64_t released_ = 0;
};

static_assert(eviction_policy<priority>);

}  // namespace kvcache
