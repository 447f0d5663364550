// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/blocks/step.hpp>
#include <kvcache/detail/span_of.hpp>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <vector>

namespace kvcache::detail {

/// The steps in flight, in order, and the records of ended ones for use again. `Owner`: see block_keeper.
template <class Owner>
class step_queue {
 public:
  explicit step_queue(const layer_groups& groups) : groups_(&groups) {}

  /// Steps that are neither dropped nor retired, the oldest first; their numbers follow retired() without a gap.
  [[nodiscard]] std::span<step_record* const> open() const noexcept { return span_of(open_); }
  /// Number of the newest step that is retired.
  [[nodiscard]] std::uint64_t retired() const noexcept { return retired_; }
  [[nodiscard]] std::uint64_t newest() const noexcept { return retired_ + open_.size(); }
  [[nodiscard]] std::uint64_t stamps() const noexcept { return stamps_; }

  /// Whether something that a step of this number did may go on. A number beyond the newest step is that of a step
  /// that was dropped; it counts as the newest.
  [[nodiscard]] bool in_flight(std::uint64_t number) const noexcept { return number > retired_ && !open_.empty(); }
  /// Precondition: in_flight(number).
  [[nodiscard]] step_record& at(std::uint64_t number) const noexcept {
    return *open_[static_cast<std::size_t>((number < newest() ? number : newest()) - retired_ - 1)];
  }

  step_record& push() noexcept {
    if (unused_.empty()) {
      step_record& fresh = records_.emplace_back();
      fresh.groups.resize(groups_->size());
      for (std::uint32_t g = 0; g < groups_->size(); ++g) {
        fresh.groups[g].block_size = groups_->block_size(g);
        fresh.groups[g].window = groups_->window(g);
      }
      unused_.push_back(&fresh);
    }
    step_record& r = *unused_.back();
    unused_.pop_back();
    open_.push_back(&r);
    r.number = newest();
    r.stamp = ++stamps_;
    return r;
  }
  /// Ends the newest step. `end` sees its record after it left the queue.
  template <class End>
  void pop_newest(End&& end) noexcept {
    step_record& r = *open_.back();
    open_.pop_back();
    end(r);
    recycle(r);
  }
  /// Ends the oldest `steps` steps.
  template <class End>
  void pop_oldest(std::size_t steps, End&& end) noexcept {
    for (std::size_t i = 0; i < steps; ++i) {
      ++retired_;
      end(*open_[i]);
      recycle(*open_[i]);
    }
    open_.erase(open_.begin(), open_.begin() + static_cast<std::ptrdiff_t>(steps));
  }

 private:
  void recycle(step_record& r) noexcept {
    r.stamp = 0;
    r.accepted = false;
    r.rows.clear();
    r.query_offsets.clear();
    r.kv_lengths.clear();
    r.copies.clear();
    r.replacements.clear();
    r.tail_gifts.clear();
    for (auto& g : r.groups) {
      g.begins.clear();
      g.counts.clear();
      g.padded.clear();
      g.slots.clear();
      g.blocks_before.clear();
    }
    unused_.push_back(&r);
  }

  const layer_groups* groups_;
  std::deque<step_record> records_;  // addresses stay
  std::vector<step_record*> unused_;
  std::vector<step_record*> open_;
  std::uint64_t retired_ = 0;
  std::uint64_t stamps_ = 0;
};

}  // namespace kvcache::detail
