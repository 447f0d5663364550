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

  [[nodiscard]] std::uint64_t newest() const noexcept { return released_in > copied_in ? released_in : copied_in; }
};

/// Where a held block waits: in the list of which step, and at which place, counted from 1. Place 0: in none.
struct held_place {
  std::uint64_t step_number = 0;
  std::uint32_t place = 0;
};

/// The blocks that are held for a step, in the order in which they will go back. Blocks released by one call form a
/// batch, whose first entry is marked with tail_bit, so that each batch goes back as it would have at once. A block
/// that found a new holder leaves its entry behind, which its held_place no longer agrees with.
using held_list = std::vector<block_id>;

inline void hold(held_list& list, std::uint64_t step_number, std::vector<held_place>& places, block_id block,
                 bool first) noexcept {
  list.push_back(first ? block | tail_bit : block);
  places[block] = {step_number, static_cast<std::uint32_t>(list.size())};
}

/// Empties the list of a step: calls visit(block, first) for each block that is still held in it, `first` for the first
/// one of a batch.
template <class Visit>
void take_held(held_list& list, std::uint64_t step_number, std::vector<held_place>& places, Visit&& visit) noexcept {
  bool first = false;
  for (std::size_t i = 0; i < list.size(); ++i) {
    first = first || (list[i] & tail_bit) != 0;
    const block_id block = list[i] & ~tail_bit;
    held_place& at = places[block];
    if (at.place != i + 1 || at.step_number != step_number) continue;
    at.place = 0;
    visit(block, first);
    first = false;
  }
  list.clear();
}

}  // namespace kvcache::detail
