// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/retention.hpp>
#include <kvcache/detail/id_heap.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvcache::detail {

/// For how long cached blocks that nobody uses may stay. Takes no memory until somebody says so of a block, if only
/// that it may stay for ever, then 8 bytes a block, and 28 from the first limit on. O(log n) a call for blocks with a
/// limit, O(1) for others. `Owner`: see block_keeper.
template <class Owner>
class time_to_live {
 public:
  explicit time_to_live(block_id highest) : highest_(highest) {}

  /// Limits a block that someone holds. The longer of two limits counts.
  void limit(block_id block, std::uint64_t time) noexcept {
    if (limits_.empty()) limits_.resize(std::size_t{highest_} + 1);
    if (time != never && !std::exchange(any_, true)) unused_.reach(highest_);
    // Kept as time + 1, so that 0 is for blocks that nobody has limited.
    const std::uint64_t kept = time == never ? never : time + 1;
    if (kept > limits_[block]) limits_[block] = kept;
  }
  /// Nobody uses the block any more.
  void start(block_id block, std::uint64_t now) noexcept {
    if (any_ && limits_[block] != 0 && limits_[block] != never) unused_.insert(block, later(now, limits_[block] - 1));
  }
  /// Someone does again.
  void stop(block_id block) noexcept {
    if (any_ && unused_.contains(block)) unused_.erase(block);
  }
  /// The block's content is gone.
  void forget(block_id block) noexcept {
    if (limits_.empty()) return;
    stop(block);
    limits_[block] = 0;
  }
  /// A block whose time is over, or the null block.
  [[nodiscard]] block_id due(std::uint64_t now) const noexcept {
    const block_id first = unused_.least();
    return first != null_block && unused_.key(first) <= now ? first : null_block;
  }

 private:
  block_id highest_;
  bool any_ = false;                   // some block has had a limit
  std::vector<std::uint64_t> limits_;  // by block
  id_heap<std::uint64_t> unused_;
};

}  // namespace kvcache::detail
