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
  std::uint32_t held_at = 0;      // its place in a step's list of held blocks, counted from 1; 0: in none
  // While room for a step is counted: wants that will copy from it, and whether one of them is in flight.
  std::uint32_t copies = 0;
  bool copier_in_flight = false;

  [[nodiscard]] std::uint64_t newest() const noexcept { return released_in > copied_in ? released_in : copied_in; }
};

/// A step's list of held blocks, in the order in which they will go back. Blocks released by one call form a batch,
/// whose first entry is marked with tail_bit, so that each batch goes back as it would have at once. A block that
/// found a new holder leaves its entry behind, which no longer agrees with its held_at.
using held_list = std::vector<block_id>;

inline void hold(held_list& list, std::vector<block_use>& uses, block_id block, bool first) noexcept {
  list.push_back(first ? block | tail_bit : block);
  uses[block].held_at = static_cast<std::uint32_t>(list.size());
}

/// Moves all entries to the end of another list.
inline void move_held(held_list& from, held_list& to, std::vector<block_use>& uses) noexcept {
  bool first = false;
  for (std::size_t i = 0; i < from.size(); ++i) {
    const block_id block = from[i] & ~tail_bit;
    first = first || (from[i] & tail_bit) != 0;
    if (uses[block].held_at != i + 1) continue;
    hold(to, uses, block, first);
    first = false;
  }
  from.clear();
}

}  // namespace kvcache::detail
