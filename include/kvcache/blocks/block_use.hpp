// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// Which steps may still touch a block through someone who let go of it, by step number; 0: none.
struct block_use {
  std::uint64_t released_in = 0;  // newest step of a holder that let go
  std::uint64_t copied_in = 0;    // newest step that copies from it
  std::uint64_t held_in = 0;      // the step in whose list of held blocks it is
  std::uint32_t held_at = 0;      // its place there, counted from 1; 0: in no list
  // While room for a step is counted: wants that will copy from it, and whether one of them is in flight.
  std::uint32_t copies = 0;
  bool copier_in_flight = false;

  [[nodiscard]] std::uint64_t newest() const noexcept { return released_in > copied_in ? released_in : copied_in; }
};

/// The blocks that are held for a step, in the order in which they will go back. Blocks released by one call form a
/// batch, whose first entry is marked with tail_bit, so that each batch goes back as it would have at once. A block
/// that found a new holder leaves its entry behind, which its block_use no longer agrees with.
using held_list = std::vector<block_id>;

inline void hold(held_list& list, std::uint64_t step_number, std::vector<block_use>& uses, block_id block,
                 bool first) noexcept {
  list.push_back(first ? block | tail_bit : block);
  uses[block].held_in = step_number;
  uses[block].held_at = static_cast<std::uint32_t>(list.size());
}

/// Empties the list of a step: calls visit(block, first) for each block that is still held in it, `first` for the first
/// one of a batch.
template <class Visit>
void take_held(held_list& list, std::uint64_t step_number, std::vector<block_use>& uses, Visit&& visit) noexcept {
  bool first = false;
  for (std::size_t i = 0; i < list.size(); ++i) {
    first = first || (list[i] & tail_bit) != 0;
    const block_id block = list[i] & ~tail_bit;
    block_use& use = uses[block];
    if (use.held_at != i + 1 || use.held_in != step_number) continue;
    use.held_at = 0;
    visit(block, first);
    first = false;
  }
  list.clear();
}

}  // namespace kvcache::detail
