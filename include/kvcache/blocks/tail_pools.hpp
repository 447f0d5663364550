// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/detail/block_lists.hpp>
#include <kvcache/detail/span_of.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvcache::detail {

/// Which blocks lie in the tail pools of their layer groups: those that are not sealed yet, and those of a sequence's
/// first tokens that stay at 16 bits beside their sealed bytes. The latter give up their place there once nobody uses
/// them and others need it, the one first that has waited longest. `Owner`: see block_keeper.
template <class Owner>
class tail_pools {
 public:
  tail_pools(const layer_groups& groups, std::uint32_t blocks) : groups_(groups) {
    if (!groups.any_sealed()) return;
    places_.resize(std::size_t{blocks} + 1);
    for (std::uint32_t g = 0; g < groups.size(); ++g) {
      pool& p = pools_.emplace_back(groups.wide_blocks(g) != 0 ? blocks : 0);
      for (std::uint32_t i = groups.tail_blocks(g); i-- > 0;) p.free.push_back(i);
    }
  }

  [[nodiscard]] bool any() const noexcept { return !pools_.empty(); }
  /// Whether the blocks of a group are sealed.
  [[nodiscard]] bool uses(std::uint32_t group) const noexcept { return any() && groups_.tail_blocks(group) != 0; }
  [[nodiscard]] bool has(block_id block) const noexcept { return any() && places_[block].tail != none; }
  /// Whether a block stays in the tail pool when it is sealed.
  [[nodiscard]] bool kept(block_id block) const noexcept { return has(block) && places_[block].kept; }
  /// What stands in a table for a block.
  [[nodiscard]] block_id entry(block_id block) const noexcept {
    return has(block) ? places_[block].tail | tail_bit : block;
  }
  /// Places that give() can draw on.
  [[nodiscard]] std::uint32_t available(std::uint32_t group) const noexcept {
    return static_cast<std::uint32_t>(pools_[group].free.size()) + pools_[group].resting.size(0);
  }

  /// A place for a block that has none. Precondition: one is available. O(1).
  void give(block_id block, std::uint32_t group) noexcept {
    pool& p = pools_[group];
    if (p.free.empty()) drop(p.resting.oldest(0));
    places_[block] = {p.free.back(), group, false};
    p.free.pop_back();
  }
  /// Takes its place from a block, if it has one.
  void drop(block_id block) noexcept {
    if (!has(block)) return;
    wake(block);
    pools_[places_[block].group].free.push_back(places_[block].tail);
    places_[block].tail = none;
  }

  /// A block is full of accepted tokens, and `keep` says whether it stays. Unless it does, its place is in use until
  /// the step in `ended` is over.
  void seal(block_id block, bool keep, std::vector<block_seal>& ended) noexcept {
    place& p = places_[block];
    const block_seal s{p.group, p.tail, block};
    if (p.kept) return;  // as it was
    pending_.push_back(s);
    p.kept = keep;
    if (keep) return;
    ended.push_back(s);
    p.tail = none;
  }
  /// A kept block is about to be written: it has to be sealed again.
  void reopen(block_id block) noexcept { places_[block].kept = false; }

  [[nodiscard]] std::span<const block_seal> pending() const noexcept { return span_of(pending_); }
  void sealed() noexcept {
    pending_.clear();
    for (const block_seal& s : waiting_) pools_[s.layer_group].free.push_back(s.tail);
    waiting_.clear();
  }
  /// A step is over that may have used these places. They are free once what lay there is sealed.
  void release(std::vector<block_seal>& ended) noexcept {
    for (const block_seal& s : ended) {
      if (pending_.empty())
        pools_[s.layer_group].free.push_back(s.tail);
      else
        waiting_.push_back(s);
    }
    ended.clear();
  }

  /// Nobody uses a cached block any more, or somebody does again.
  void rest(block_id block) noexcept {
    if (!kept(block)) return;
    pools_[places_[block].group].resting.push(0, block);
  }
  void wake(block_id block) noexcept {
    if (!kept(block)) return;
    block_lists<1>& resting = pools_[places_[block].group].resting;
    if (resting.contains(block)) resting.erase(block);
  }

 private:
  static constexpr std::uint32_t none = ~0u;
  struct place {
    std::uint32_t tail = none;
    std::uint32_t group = 0;
    bool kept = false;
  };
  struct pool {
    explicit pool(std::uint32_t blocks) : resting(blocks) {}
    std::vector<std::uint32_t> free;  // a stack
    block_lists<1> resting;           // kept blocks that nobody uses
  };

  const layer_groups& groups_;
  std::vector<place> places_;        // by block
  std::vector<pool> pools_;          // by group; none where no group seals its blocks
  std::vector<block_seal> pending_;  // to be carried out
  std::vector<block_seal> waiting_;  // their places are free when that is done
};

}  // namespace kvcache::detail
