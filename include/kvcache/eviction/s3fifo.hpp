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

/// Three queues (S3-FIFO; Yang, Zhang, Qiu, Yue and Vigfusson, FIFO Queues are All You Need for Cache Eviction, SOSP
/// 2023): new blocks pass through a small queue, a tenth of what can be evicted, and leave it as ghosts unless they
/// were used again; those, and ghosts that come back, go to the main queue, where a use is worth another round, up to
/// three. Two differences: a block that comes back from use is the newest of its queue, since it could not stay there;
/// and a block of the small queue that is older than all of the main queue goes first, which keeps a parent no colder
/// than its children. O(1) a call, amortised over the rounds that references pay for; 56 to 63 bytes a block. One
/// thread at a time.
class s3fifo {
 public:
  static constexpr const char* name = "s3fifo";

  /// An empty order over the blocks 1 to `highest`.
  explicit s3fifo(block_id highest)
      : uses_(std::size_t{highest} + 1), order_(highest), ghosts_(highest - highest / small_share) {}

  /// A request uses the block.
  void reference(block_id block, std::uint64_t fingerprint, block_id parent) noexcept {
    use& u = uses_[block];
    const std::uint8_t again = parent == null_block ? main_queue : uses_[parent].queue;
    if (u.known && u.fingerprint == fingerprint) {
      if (u.queue == main_queue && u.rounds < most_rounds) ++u.rounds;
      u.queue = again;
      return;
    }
    u = {fingerprint, u.released, small_queue, 0, true};
    if (const detail::ghost_id ghost = ghosts_.find(fingerprint)) {
      ghosts_.erase(ghost);
      u.queue = again;
    }
  }
  /// The newest of its queue. Precondition: not in the order.
  void insert(block_id block) noexcept { push(block); }
  /// Precondition: in the order.
  void erase(block_id block) noexcept { order_.erase(block); }
  /// Erases; what leaves the small queue becomes a ghost. Rounds are taken that `victim` has counted on. Precondition:
  /// in the order.
  void evict(block_id block) noexcept {
    for (block_id oldest = order_.oldest(main_queue);
         oldest != null_block && !small_goes(oldest) && uses_[oldest].rounds != 0; oldest = order_.oldest(main_queue)) {
      --uses_[oldest].rounds;
      order_.erase(oldest);
      push(oldest);
    }
    if (order_.list(block) == small_queue) ghosts_.push(0, uses_[block].fingerprint);
    uses_[block].known = false;
    order_.erase(block);
  }
  /// The oldest of the queue whose turn it is, after the rounds due, or the null block where there is none.
  [[nodiscard]] block_id victim() const noexcept {
    block_id least = null_block;
    for (block_id at = order_.oldest(main_queue); at != null_block; at = order_.younger(at)) {
      if (small_goes(at)) return order_.oldest(small_queue);
      if (uses_[at].rounds == 0) return at;
      if (least == null_block || uses_[at].rounds < uses_[least].rounds) least = at;
    }
    // After a round all of the main queue is younger than the small one.
    return order_.size(small_queue) != 0 ? order_.oldest(small_queue) : least;
  }

 private:
  static constexpr std::uint8_t small_queue = 0;
  static constexpr std::uint8_t main_queue = 1;
  static constexpr std::uint8_t most_rounds = 3;
  static constexpr std::uint32_t small_share = 10;
  struct use {
    std::uint64_t fingerprint = 0;
    std::uint64_t released = 0;
    std::uint8_t queue = small_queue;
    std::uint8_t rounds = 0;
    bool known = false;
  };

  void push(block_id block) noexcept {
    uses_[block].released = ++released_;
    order_.push(uses_[block].queue, block);
  }
  /// The oldest of the small queue goes before `oldest`, the oldest of the main queue.
  [[nodiscard]] bool small_goes(block_id oldest) const noexcept {
    if (order_.size(small_queue) == 0) return false;
    const std::uint64_t all = std::uint64_t{order_.size(small_queue)} + order_.size(main_queue);
    return std::uint64_t{order_.size(small_queue)} * small_share >= all ||
           uses_[order_.oldest(small_queue)].released < uses_[oldest].released;
  }

  std::vector<use> uses_;  // by block
  detail::block_lists<2> order_;
  detail::ghost_list<> ghosts_;
  std::uint64_t released_ = 0;
};

static_assert(eviction_policy<s3fifo>);

}  // namespace kvcache
