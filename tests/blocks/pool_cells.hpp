// SPDX-License-Identifier: Apache-2.0
// What the random driver knows of the bytes in a pool and in its groups' tail pools: a number for each slot. Seals
// between them run late, after the steps that came before them.
#pragma once

#include <kvcache/blocks/block_manager.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace kvcache_test {

class pool_cells {
 public:
  pool_cells(std::uint32_t blocks, const std::vector<kvcache::layer_group>& groups)
      : blocks_(blocks + 1), tails_(groups.size()) {
    for (std::size_t g = 0; g < groups.size(); ++g) {
      const std::vector<std::uint64_t> block(groups[g].block_size);
      tails_[g].assign(groups[g].tail_blocks, block);
      for (auto& any : blocks_) any.resize(std::max(any.size(), block.size()));
    }
  }

  /// Whether a group's blocks are sealed.
  [[nodiscard]] bool sealing(std::uint32_t group) const { return !tails_[group].empty(); }
  [[nodiscard]] bool any_sealing() const {
    return std::any_of(tails_.begin(), tails_.end(), [](const auto& blocks) { return !blocks.empty(); });
  }
  /// What lies in an entry of a group's table.
  std::vector<std::uint64_t>& at(std::uint32_t group, kvcache::block_id entry) {
    return (entry & kvcache::tail_bit) != 0 ? tails_[group].at(entry & ~kvcache::tail_bit) : blocks_.at(entry);
  }

  /// Steps accepted so far.
  [[nodiscard]] std::uint64_t accepted() const { return accepted_; }
  void accept_step() { ++accepted_; }
  /// The manager's seals after a step was accepted: with `late`, those that are new are kept for later.
  void take(std::span<const kvcache::block_seal> seals, bool late) {
    for (; taken_ < seals.size(); ++taken_)
      if (late) late_.push_back({seals[taken_], accepted_});
  }
  /// Seals of blocks that steps filled which were accepted by then; those steps have been executed.
  void seal_until(std::uint64_t accepted_steps) {
    for (; !late_.empty() && late_.front().accepted <= accepted_steps; late_.pop_front()) {
      const kvcache::block_seal& s = late_.front().seal;
      const auto& from = tails_[s.layer_group].at(s.tail);
      std::copy(from.begin(), from.end(), blocks_.at(s.block).begin());
    }
  }
  /// All of them, for the manager to forget its own.
  void seal_all() {
    seal_until(accepted_);
    taken_ = 0;
  }

 private:
  // A seal that is not carried out yet, and how many steps were accepted with the one that filled its block.
  struct late_seal {
    kvcache::block_seal seal;
    std::uint64_t accepted = 0;
  };
  std::vector<std::vector<std::uint64_t>> blocks_;
  std::vector<std::vector<std::vector<std::uint64_t>>> tails_;  // by group
  std::deque<late_seal> late_;
  std::size_t taken_ = 0;  // of the manager's seals: those that are in late_ or were
  std::uint64_t accepted_ = 0;
};

}  // namespace kvcache_test
