// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/content_id.hpp>
#include <kvcache/blocks/retention.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvcache {

/// The slots of tokens [first, first + out.size()) of a sequence whose blocks are `table`; no_slot for those that a
/// window has left behind. Precondition: the table covers them. O(out).
inline void map_slots(std::span<const block_id> table, std::uint32_t block_size, std::uint32_t first,
                      std::span<slot_id> out) noexcept {
  std::size_t done = 0;
  std::size_t i = first / block_size;
  std::uint32_t offset = first % block_size;
  while (done < out.size()) {
    const block_id block = table[i++];
    slot_id slot = make_slot(block, offset, block_size);
    for (; offset < block_size && done < out.size(); ++offset, ++slot)
      out[done++] = block != null_block ? slot : no_slot;
    offset = 0;
  }
}

namespace detail {

/// The blocks of one sequence in one layer group.
struct held_blocks {
  std::vector<block_id> table;  // in the order of its tokens; null blocks behind a window
  std::uint32_t first = 0;      // entries before it are null blocks
  // Changes whenever an entry does other than by being appended, or being given back as behind the window; never the
  // same for two sequences at one place.
  std::uint32_t version = 0;
};

/// What the manager knows of one sequence. The first line is all that a decode within a block looks at.
struct alignas(64) sequence_state {
  std::uint32_t generation = 0;
  bool open = false;
  bool borrowed = false;         // its tail blocks are cached with more content than its own
  bool owns_tail = false;        // nobody else holds, caches or copies the blocks that its next token goes to
  std::uint32_t length = 0;      // accepted
  std::uint32_t begun = 0;       // length, and what steps not yet accepted add to it
  std::uint32_t committed = 0;   // tokens whose content is known
  std::uint32_t open_steps = 0;  // steps begun with it and not yet accepted
  std::uint32_t room = 0;        // tokens after `begun` that its tables are known to have blocks for
  std::uint32_t changes = 0;     // of its tables so far, never the same for two sequences at one place
  std::uint64_t last_step = 0;   // number of the newest step that it takes part in
  std::uint64_t call = 0;        // the newest call that named it among several

  std::vector<held_blocks> held;   // per layer group
  std::vector<content_id> heads;   // per chain: the content of its newest full committed block, or a root
  std::vector<content_unit> tail;  // content of [tail_start, committed): what is not in full blocks yet
  std::uint32_t tail_start = 0;
  std::vector<retention_range> retention;

  /// To be called when a table changes, with what is known of its room then.
  void changed(std::uint32_t new_room = 0) noexcept {
    ++changes;
    room = new_room;
  }
};

/// The sequences of a manager. Places are used again with the arrays they have grown, so memory follows the tokens that
/// were held at once. `Owner`: see block_keeper.
template <class Owner>
class sequence_table {
 public:
  sequence_table(std::uint32_t groups, std::uint32_t chains) : groups_(groups), chains_(chains) {}

  /// A new sequence without tokens. O(1).
  sequence_id add() noexcept {
    if (unused_.empty()) {
      unused_.push_back(static_cast<std::uint32_t>(states_.size()));
      sequence_state& fresh = states_.emplace_back();
      fresh.held.resize(groups_);
      fresh.heads.resize(chains_);
    }
    const std::uint32_t index = unused_.back();
    unused_.pop_back();
    states_[index].open = true;
    return {index, states_[index].generation};
  }
  /// Precondition: open, its tables empty.
  void remove(std::uint32_t index) noexcept {
    sequence_state& s = states_[index];
    ++s.generation;
    s.open = s.borrowed = s.owns_tail = false;
    s.length = s.begun = s.committed = s.open_steps = s.tail_start = 0;
    s.changed();
    s.last_step = 0;
    for (held_blocks& h : s.held) h.first = 0;
    s.tail.clear();
    s.retention.clear();
    unused_.push_back(index);
  }

  [[nodiscard]] sequence_state* find(sequence_id id) noexcept {
    return const_cast<sequence_state*>(static_cast<const sequence_table*>(this)->find(id));
  }
  [[nodiscard]] const sequence_state* find(sequence_id id) const noexcept {
    if (id.index >= states_.size()) return nullptr;
    const sequence_state& s = states_[id.index];
    return s.open && s.generation == id.generation ? &s : nullptr;
  }
  /// The generation at an index now, 0 where there never was a sequence.
  [[nodiscard]] std::uint32_t generation(std::uint32_t index) const noexcept {
    return index < states_.size() ? states_[index].generation : 0;
  }

 private:
  std::vector<sequence_state> states_;
  std::vector<std::uint32_t> unused_;  // a stack
  std::uint32_t groups_;
  std::uint32_t chains_;
};

}  // namespace detail
}  // namespace kvcache
