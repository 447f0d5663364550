// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/detail/block_lists.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

/// Evicts the block that was referenced least often, with dynamic ageing (LFU-DA; Arlitt, Cherkasova, Dilley, Friedrich
/// and Jin, Evaluating Content Management Techniques for Web Proxy Caches, 2000): a block's value is the count of its
/// references since it was cached plus the cache's age when it was last released; the age is the least value at the
/// newest eviction, so what was popular once is overtaken by what comes later. Among equal values the oldest goes. One
/// difference: a count stops at `most`, since the chain of an agent counts hundreds and is dead at once. So values lie
/// close together, one LRU order each: O(1) a call, 25 bytes a block. A parent counts whatever its children count and
/// is released after them, so it is never colder. One thread at a time.
class lfu {
 public:
  static constexpr const char* name = "lfu";
  static constexpr std::uint32_t most = 8;

  /// An empty order over the blocks 1 to `highest`.
  explicit lfu(block_id highest) : uses_(std::size_t{highest} + 1), order_(highest) {}

  /// A request uses the block; content it has not held before starts to count at 1.
  void reference(block_id block, std::uint64_t fingerprint, block_id parent) noexcept {
    use& u = uses_[block];
    if (u.fingerprint != fingerprint) u = {fingerprint, 0};
    if (u.count < most) ++u.count;
    // Forgotten content may find its old count in the block it comes back to.
    if (parent != null_block && u.count > uses_[parent].count) u.count = uses_[parent].count;
  }
  /// Precondition: not in the order.
  void insert(block_id block) noexcept { order_.push(list(age_ + uses_[block].count), block); }
  /// Precondition: in the order.
  void erase(block_id block) noexcept { order_.erase(block); }
  /// Erases, and the cache ages. Precondition: in the order.
  void evict(block_id block) noexcept {
    age_ = least();
    uses_[block].count = 0;
    order_.erase(block);
  }
  /// The block of least value, or the null block where there is none.
  [[nodiscard]] block_id victim() const noexcept { return order_.oldest(list(least())); }

 private:
  static constexpr std::uint32_t lists = most + 1;
  struct use {
    std::uint64_t fingerprint = 0;
    std::uint32_t count = 0;
  };

  [[nodiscard]] static std::uint32_t list(std::uint64_t value) noexcept {
    return static_cast<std::uint32_t>(value % lists);
  }
  /// Values are from the age to `most` above it.
  [[nodiscard]] std::uint64_t least() const noexcept {
    std::uint64_t value = age_;
    while (value < age_ + most && order_.size(list(value)) == 0) ++value;
    return value;
  }

  std::vector<use> uses_;  // by block
  detail::block_lists<lists> order_;
  std::uint64_t age_ = 0;
};

static_assert(eviction_policy<lfu>);

}  // namespace kvcache
