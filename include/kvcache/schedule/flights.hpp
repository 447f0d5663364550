// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/step.hpp>
#include <kvcache/schedule/step_plan.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

namespace kvcache::detail {

/// A step that was planned and has not finished.
struct flight {
  step blocks;
  std::vector<plan_row> rows;
};

/// The steps in flight, in order, numbered from 1. Records are used again with the arrays they have grown.
/// `Owner`: see block_keeper.
template <class Owner>
class flights {
 public:
  [[nodiscard]] bool empty() const noexcept { return open_.empty(); }
  [[nodiscard]] std::size_t size() const noexcept { return open_.size(); }
  /// Number of the last step that has finished.
  [[nodiscard]] std::uint64_t finished() const noexcept { return finished_; }
  /// Number of the newest step.
  [[nodiscard]] std::uint64_t newest() const noexcept { return finished_ + open_.size(); }
  /// Precondition, here and below: not empty.
  [[nodiscard]] flight& oldest() noexcept { return *open_.front(); }

  flight& add() noexcept {
    if (unused_.empty()) unused_.push_back(&records_.emplace_back());
    open_.push_back(unused_.back());
    unused_.pop_back();
    return *open_.back();
  }
  void finish_oldest() noexcept {
    ++finished_;
    unused_.push_back(open_.front());
    open_.erase(open_.begin());
  }

 private:
  std::deque<flight> records_;  // addresses stay
  std::vector<flight*> unused_;
  std::vector<flight*> open_;
  std::uint64_t finished_ = 0;
};

}  // namespace kvcache::detail
