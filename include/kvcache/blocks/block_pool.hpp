// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/error.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvcache {

/// The blocks of a pool, 1 to capacity, with their reference counts, states and the order of the free ones; the null
/// block is none of them. An engine that shares no prefixes can use it alone, through allocate, reference and release;
/// block_manager moves blocks between all four states.
///
/// Free blocks are a stack: what was released last is handed out first, so a small load stays in a small part of the
/// pool whatever its size. One thread at a time. Nothing is allocated after construction.
class block_pool {
 public:
  /// Free blocks are handed out from 1 up at first. Raises invalid_argument where `blocks` is 0 or more than
  /// max_blocks. O(blocks).
  explicit block_pool(std::uint32_t blocks) : entries_(checked(blocks)), free_(blocks) {
    counts_.free = blocks;
    for (std::uint32_t i = 0; i < blocks; ++i) free_[i] = blocks - i;
  }

  [[nodiscard]] std::uint32_t capacity() const noexcept { return static_cast<std::uint32_t>(free_.size()); }
  [[nodiscard]] const block_counts& counts() const noexcept { return counts_; }
  [[nodiscard]] bool contains(block_id block) const noexcept { return block - 1 < capacity(); }
  /// Precondition, here and for ref_count: contains(block).
  [[nodiscard]] block_state state(block_id block) const noexcept { return at(block).state; }
  [[nodiscard]] std::uint32_t ref_count(block_id block) const noexcept { return at(block).ref_count; }

  /// Fills `out` with free blocks, each referenced once: all or none. out_of_blocks. O(out).
  result<void> allocate(std::span<block_id> out) noexcept {
    if (out.size() > counts_.free) return failure{errc::out_of_blocks, out.size(), counts_.free};
    for (block_id& block : out) block = take();
    return {};
  }

  /// One more holder for a block that is referenced. stale_id: it is not. O(1).
  result<void> reference(block_id block) noexcept {
    if (!contains(block) || at(block).ref_count == 0) return failure{errc::stale_id, block, 0};
    ++at(block).ref_count;
    return {};
  }

  /// One holder lets go of `table`, blocks in the order of their tokens; those that nobody else holds become free, the
  /// tail to be handed out first. All or none: stale_id where a block is not referenced (a double release) or is not
  /// in the pool, duplicate_id where one is named twice. O(table).
  result<void> release(std::span<const block_id> table) noexcept {
    for (std::size_t i = 0; i < table.size(); ++i) {
      const block_id block = table[i];
      const bool known = contains(block) && at(block).ref_count != 0;
      if (known && !at(block).named) {
        at(block).named = true;
        continue;
      }
      for (std::size_t j = 0; j < i; ++j) at(table[j]).named = false;
      return known ? failure{errc::duplicate_id, block, 1} : failure{errc::stale_id, block, 0};
    }
    for (const block_id block : table) {
      at(block).named = false;
      if (drop_reference(block)) put_back(block, block_state::free);
    }
    return {};
  }

  // The rest is for who keeps track of keys and steps as well; preconditions instead of outcomes, all O(1).

  /// The front of the free list, referenced once. Precondition: there is a free block.
  block_id take() noexcept {
    KVCACHE_ASSERT(counts_.free != 0, "no free block to take");
    const block_id block = free_[--counts_.free];
    ++counts_.referenced;
    at(block) = {1, block_state::referenced, false};
    return block;
  }
  /// One holder more, whatever the state; a free block has to be taken instead.
  void add_reference(block_id block) noexcept {
    entry& e = at(block);
    if (e.ref_count++ != 0) return;
    KVCACHE_ASSERT(e.state != block_state::free, "a free block was referenced without being taken");
    --(e.state == block_state::evictable ? counts_.evictable : counts_.held);
    ++counts_.referenced;
    e.state = block_state::referenced;
  }
  /// One holder less. True: nobody holds the block, which is `held` until put_back says where it goes.
  [[nodiscard]] bool drop_reference(block_id block) noexcept {
    entry& e = at(block);
    KVCACHE_ASSERT(e.ref_count != 0, "a block was released more often than referenced");
    if (--e.ref_count != 0) return false;
    --counts_.referenced;
    ++counts_.held;
    e.state = block_state::held;
    return true;
  }
  /// Moves a held or evictable block to `state`; a free one goes to the front of the free list.
  void put_back(block_id block, block_state state) noexcept {
    entry& e = at(block);
    KVCACHE_ASSERT(e.ref_count == 0 && e.state != block_state::free && state != block_state::referenced,
                   "only unreferenced blocks are put back");
    --(e.state == block_state::evictable ? counts_.evictable : counts_.held);
    e.state = state;
    switch (state) {
      case block_state::free: free_[counts_.free++] = block; break;
      case block_state::evictable: ++counts_.evictable; break;
      default: ++counts_.held; break;
    }
  }

 private:
  struct entry {
    std::uint32_t ref_count = 0;
    block_state state = block_state::free;
    bool named = false;  // within one call of release
  };

  static std::size_t checked(std::uint32_t blocks) {
    if (blocks == 0 || blocks > max_blocks)
      detail::raise<invalid_argument>("block pool: " + std::to_string(blocks) + " blocks, from 1 to " +
                                      std::to_string(max_blocks) + " possible; size it from the memory budget");
    return std::size_t{blocks} + 1;
  }
  entry& at(block_id block) noexcept {
    KVCACHE_ASSERT(contains(block), "no such block");
    return entries_[block];
  }
  const entry& at(block_id block) const noexcept {
    KVCACHE_ASSERT(contains(block), "no such block");
    return entries_[block];
  }

  block_counts counts_;
  std::vector<entry> entries_;
  std::vector<block_id> free_;  // a stack of counts_.free blocks, the front of the order on top
};

}  // namespace kvcache
