// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/block_keeper.hpp>
#include <kvcache/blocks/block_table.hpp>
#include <kvcache/blocks/grow.hpp>
#include <kvcache/blocks/requests.hpp>
#include <kvcache/blocks/sequence_keeper.hpp>
#include <kvcache/blocks/step.hpp>
#include <kvcache/detail/span_of.hpp>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvcache::detail {

/// What happens to sequences in steps. The contracts stand at block_manager and step.
template <class Eviction>
class step_keeper final : public step_owner {
 public:
  step_keeper(block_keeper<Eviction>& blocks, sequence_keeper<Eviction>& sequences)
      : blocks_(blocks), sequences_(sequences), marks_(std::size_t{blocks.pool.capacity()} + 1) {}

  result<std::uint64_t> blocks_needed(std::span<const want> wants) const noexcept {
    std::uint64_t needed = 0;
    std::uint64_t optional = 0;
    const result<void> counted = count_wants(wants, needed, optional);
    for (const block_id tail : marked_) marks_[tail] = {};
    marked_.clear();
    if (!counted) return counted.error();
    if (needed + optional <= blocks_.pool.counts().available()) return needed + optional;
    for (tail_action& t : tails_)
      if (t == tail_action::copy_if_room) t = tail_action::write_in_place;
    return needed;
  }

  result<step_record*> begin(std::span<const want> wants) noexcept {
    const result<std::uint64_t> needed = blocks_needed(wants);
    if (!needed) return needed.error();
    const std::uint32_t available = blocks_.pool.counts().available();
    if (*needed > available) return failure{errc::out_of_blocks, *needed, available};

    step_record& r = blocks_.steps.push();
    blocks_.new_batch();
    resize(r.rows, wants.size());
    for (auto& g : r.groups) resize(g.blocks_before, wants.size());
    for (std::size_t i = 0; i < wants.size(); ++i) {
      sequence_state& s = *named_[i];
      step_record::row& row = r.rows[i];  // member by member: as a whole, it would be put together in memory first
      row.sequence = wants[i].sequence;
      row.tokens = wants[i].tokens;
      row.start = s.begun;
      row.previous_step = s.last_step;
      row.grew = false;
      row.owned_tail = s.owns_tail;
      if (has_room(s, wants[i].tokens))
        s.room -= wants[i].tokens;
      else
        make_room(r, static_cast<std::uint32_t>(i), s);
      s.begun += wants[i].tokens;
      s.last_step = r.number;
      ++s.open_steps;
    }
    describe(r);
    return &r;
  }

  result<void> accept_step(step_record& r, const std::uint32_t* counts, std::size_t size) noexcept override {
    for (const step_record* earlier : blocks_.steps.open()) {
      if (earlier == &r) break;
      if (!earlier->accepted) return failure{errc::step_order, r.number, earlier->number};
    }
    if (counts != nullptr && size != r.rows.size()) return failure{errc::beyond_length, size, r.rows.size()};
    for (std::size_t i = 0; counts != nullptr && i < size; ++i) {
      if (counts[i] > r.rows[i].tokens) return failure{errc::beyond_length, counts[i], r.rows[i].tokens};
      const sequence_state* s = sequences_.find(r.rows[i].sequence);
      if (s != nullptr && counts[i] < r.rows[i].tokens && s->last_step != r.number)
        return failure{errc::step_order, r.number, s->last_step};
    }

    for (std::size_t i = 0; i < r.rows.size(); ++i) {
      sequence_state* s = sequences_.find(r.rows[i].sequence);
      if (s == nullptr) continue;
      const std::uint32_t tokens = r.rows[i].tokens;
      const std::uint32_t count = counts != nullptr ? counts[i] : tokens;
      s->length = r.rows[i].start + count;
      --s->open_steps;
      if (count != tokens) {
        s->begun = s->length;
        s->room = 0;
      }
      if (count != tokens && r.rows[i].grew) {
        // What the sequence held before the step was reserved for it and stays so.
        sequences_.release_beyond(*s, r.number, [&](std::uint32_t g) {
          const std::uint64_t before = r.groups[g].blocks_before[i];
          const std::uint64_t filled = groups().blocks_for(g, s->length);
          return before > filled ? before : filled;
        });
      }
      if (blocks_.tails.any()) seal_full(*s, r.rows[i].start);
      if (groups().any_windowed()) sequences_.release_behind(*s, r.rows[i].start);
    }
    r.accepted = true;
    return {};
  }

  void drop_step(step_record& r) noexcept override {
    const std::uint64_t stamp = r.stamp;
    while (r.stamp == stamp) roll_back_newest();
  }

  /// Precondition: open.
  result<void> retire(const step_record& last) noexcept {
    const auto steps = static_cast<std::size_t>(last.number - blocks_.steps.retired());
    for (const step_record* r : blocks_.steps.open().first(steps))
      if (!r->accepted) return failure{errc::step_order, last.number, r->number};
    retire_oldest(steps);
    return {};
  }

  void retire_accepted() noexcept {
    std::size_t steps = 0;
    for (const step_record* r : blocks_.steps.open()) {
      if (!r->accepted) break;
      ++steps;
    }
    retire_oldest(steps);
  }

 private:
  /// What happens to the tail block of a row that it will write into, in one layer group.
  enum class tail_action : std::uint8_t {
    write_in_place,  // or there is nothing to write
    copy,
    copy_to_spare,  // the sequence holds a block for it
    copy_if_room,   // could be written in place, but others may want what is cached in it
  };
  // While room for a step is counted: wants that will copy from a block, and whether one of them is in flight.
  struct tail_mark {
    std::uint32_t copies = 0;
    bool copier_in_flight = false;
    std::uint32_t needed = 0;  // tokens of it that the copies take
  };

  [[nodiscard]] const layer_groups& groups() const noexcept { return blocks_.groups; }
  /// Whether a sequence takes so many tokens with its tables as they are.
  [[nodiscard]] static bool has_room(const sequence_state& s, std::uint32_t tokens) noexcept {
    return s.owns_tail && tokens <= s.room;
  }
  [[nodiscard]] block_id tail_of(const sequence_state& s, std::uint32_t group) const noexcept {
    return s.held[group].table[groups().block_of(group, s.begun)];
  }

  /// Whether a sequence may write into its tail block, which holds other content than it will: it is the only holder,
  /// no step in flight of others may touch it, and where it is cached, forgetting it and its successors sets no block
  /// free that is held for them.
  [[nodiscard]] bool writes_in_place(block_id tail, std::uint32_t filled) const noexcept {
    const prefix_index<Eviction>& index = blocks_.index;
    if (blocks_.pool.ref_count(tail) - marks_[tail].copies != 1 || marks_[tail].copier_in_flight) return false;
    // A step that is dropped gives the block back to those who copied from it, so what they have in it stays.
    if (filled < marks_[tail].needed) return false;
    if (blocks_.steps.in_flight(blocks_.uses[tail].newest())) return false;
    if (!index.contains(tail)) return true;
    const block_id parent = index.parent(tail);
    return index.active_children(tail) == 0 &&
           (parent == null_block || blocks_.pool.ref_count(parent) != marks_[parent].copies);
  }

  /// Counts the blocks that the wants take, and those that they take if these are there. Leaves in tails_ what is to be
  /// done with tails; marks sequences as named and tail blocks as copied on the way.
  result<void> count_wants(std::span<const want> wants, std::uint64_t& needed, std::uint64_t& optional) const noexcept {
    const step_queue<Eviction>& steps = blocks_.steps;
    const std::uint32_t group_count = groups().size();
    std::uint64_t tokens = 0;
    tails_.assign(wants.size() * group_count, tail_action::write_in_place);
    resize(named_, wants.size());
    tails_needed_.assign(group_count, 0);
    ++calls_;
    tail_action* action = tails_.data();
    sequence_state** named = named_.data();
    for (const want& w : wants) {
      sequence_state* const s = sequences_.find(w.sequence);
      if (s == nullptr) return sequences_.stale(w.sequence);
      if (s->call == calls_) return failure{errc::duplicate_id, w.sequence.index, 1};
      s->call = calls_;
      *named++ = s;
      const std::uint64_t end = std::uint64_t{s->begun} + w.tokens;
      tokens += w.tokens;
      const std::uint64_t longest = end > tokens ? end : tokens;
      if (longest > max_length) return failure{errc::beyond_length, longest, max_length};
      if (has_room(*s, w.tokens)) {
        action += group_count;
        continue;
      }
      std::uint64_t total = 0;
      for (std::uint32_t g = 0; g < group_count; ++g, ++action) {
        const std::uint64_t blocks = groups().blocks_for(g, end);
        const std::uint64_t held = s->held[g].table.size();
        total += blocks - groups().first_needed(g, s->begun);
        if (blocks > held) needed += blocks - held;
        if (w.tokens != 0 && blocks_.tails.uses(g)) count_tails(*s, g, blocks);
        if (s->owns_tail || w.tokens == 0 || groups().offset_in_block(g, s->begun) == 0) continue;
        const block_id tail = tail_of(*s, g);
        const std::uint32_t filled = groups().offset_in_block(g, s->begun);
        if (!writes_in_place(tail, filled)) {
          *action = s->borrowed && held > blocks ? tail_action::copy_to_spare : tail_action::copy;
          needed += *action == tail_action::copy;
          if (blocks_.tails.has(tail)) ++tails_needed_[g];  // the copy's
          ++marks_[tail].copies;
          if (filled > marks_[tail].needed) marks_[tail].needed = filled;
          if (steps.in_flight(s->last_step)) marks_[tail].copier_in_flight = true;
          marked_.push_back(tail);
        } else if (s->borrowed) {
          if (blocks_.tails.has(tail)) ++tails_needed_[g];
          *action = held > blocks ? tail_action::copy_to_spare : tail_action::copy_if_room;
          optional += *action == tail_action::copy_if_room;
        }
      }
      if (total > blocks_.pool.capacity()) return failure{errc::exceeds_pool, total, blocks_.pool.capacity()};
    }
    for (std::uint32_t g = 0; blocks_.tails.any() && g < group_count; ++g)
      if (tails_needed_[g] > blocks_.tails.available(g))
        return failure{errc::out_of_tail_blocks, tails_needed_[g], blocks_.tails.available(g)};
    return {};
  }
  /// Places in the tail pool for the blocks that a sequence writes into, the first `blocks` of its table being there
  /// then.
  void count_tails(const sequence_state& s, std::uint32_t group, std::uint64_t blocks) const noexcept {
    const std::vector<block_id>& table = s.held[group].table;
    for (std::uint64_t i = groups().block_of(group, s.begun); i < blocks; ++i)
      tails_needed_[group] += i >= table.size() || !blocks_.tails.has(table[i]);
  }

  /// Blocks for a row of a step, as count_wants counted them.
  void make_room(step_record& r, std::uint32_t row, sequence_state& s) noexcept {
    const std::uint32_t start = r.rows[row].start;
    const std::uint32_t tokens = r.rows[row].tokens;
    std::uint64_t room = max_length;
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      std::vector<block_id>& table = s.held[g].table;
      r.groups[g].blocks_before[row] = static_cast<std::uint32_t>(table.size());
      if (tokens == 0) continue;
      if (!s.owns_tail && groups().offset_in_block(g, start) != 0) {
        const tail_action action = tails_[std::size_t{row} * groups().size() + g];
        const block_id tail = table[groups().block_of(g, start)];
        if (action != tail_action::write_in_place) {
          copy_tail(r, row, g, s, action == tail_action::copy_to_spare);
        } else if (blocks_.index.contains(tail)) {
          blocks_.forget_subtree(tail);
          blocks_.flush();
        }
      }
      const std::uint64_t end = std::uint64_t{start} + tokens;
      const std::uint64_t blocks = groups().blocks_for(g, end);
      while (table.size() < blocks) table.push_back(blocks_.allocate());
      if (blocks_.tails.uses(g)) give_tails(r, row, g, s, blocks);
      // Blocks that are held beyond these have no place in the tail pool yet.
      const std::uint64_t there = blocks_.tails.uses(g) ? blocks : table.size();
      const std::uint64_t after = there * groups().block_size(g) - end;
      if (after < room) room = after;
    }
    r.rows[row].grew = true;
    if (tokens == 0) return;
    s.changed(static_cast<std::uint32_t>(room));
    s.borrowed = false;
    s.owns_tail = true;
  }

  /// Places in the tail pool for the blocks that a row writes into; a sealed one is reopened.
  void give_tails(step_record& r, std::uint32_t row, std::uint32_t group, sequence_state& s,
                  std::uint64_t blocks) noexcept {
    const std::uint32_t start = r.rows[row].start;
    const std::uint64_t first = groups().block_of(group, start);
    const std::uint32_t filled = groups().offset_in_block(group, start);
    for (std::uint64_t i = first; i < blocks; ++i) {
      const block_id block = s.held[group].table[i];
      if (blocks_.tails.has(block)) {
        blocks_.tails.reopen(block);
        continue;
      }
      give_tail(r, row, group, block);
      if (i != first || filled == 0) continue;
      r.copies.push_back({group, block, blocks_.tails.entry(block), filled});
      ++s.held[group].version;
    }
  }
  void give_tail(step_record& r, std::uint32_t row, std::uint32_t group, block_id block) noexcept {
    blocks_.tails.give(block, group);
    r.tail_gifts.push_back({row, group, block});
  }

  /// Replaces the tail block of a table by one for a copy of the tokens in it: the last of the table, or a new one.
  void copy_tail(step_record& r, std::uint32_t row, std::uint32_t group, sequence_state& s, bool spare) noexcept {
    std::vector<block_id>& table = s.held[group].table;
    block_id& entry = table[groups().block_of(group, r.rows[row].start)];
    ++s.held[group].version;
    const block_id source = entry;
    r.replacements.push_back({row, group, source, blocks_.uses[source].copied_in, s.borrowed, spare});
    blocks_.uses[source].copied_in = r.number;
    if (spare) {
      entry = table.back();
      table.pop_back();
    } else {
      entry = blocks_.allocate();
    }
    if (blocks_.tails.uses(group)) give_tail(r, row, group, entry);
    r.copies.push_back({group, blocks_.tails.entry(source), blocks_.tails.entry(entry),
                        groups().offset_in_block(group, r.rows[row].start)});
    blocks_.let_go(source, 0);  // copied_in names this step, which ends after all earlier ones of the sequence
  }

  /// The blocks of a sequence that became full of accepted tokens after the first `start` are to be sealed. The newest
  /// step may have been begun before that, and read them where they lie.
  void seal_full(sequence_state& s, std::uint32_t start) noexcept {
    bool any = false;
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      if (!blocks_.tails.uses(g)) continue;
      const std::uint64_t end = groups().block_of(g, s.length);
      for (std::uint64_t i = groups().block_of(g, start); i < end; ++i) {
        const block_id block = s.held[g].table[i];
        if (!blocks_.tails.has(block)) continue;
        blocks_.tails.seal(block, i < groups().wide_blocks(g), blocks_.steps.open().back()->sealed);
        any = true;
      }
    }
    if (any) s.changed(s.room);
  }

  /// Fills the arrays that the step's views show.
  void describe(step_record& r) noexcept {
    const std::size_t rows = r.rows.size();
    resize(r.query_offsets, rows + 1);
    resize(r.kv_lengths, rows);
    std::uint32_t queries = 0;
    for (std::size_t i = 0; i < rows; ++i) {
      r.query_offsets[i] = queries;
      queries += r.rows[i].tokens;
      r.kv_lengths[i] = r.rows[i].start + r.rows[i].tokens;
    }
    r.query_offsets[rows] = queries;
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      step_record::group_arrays& arrays = r.groups[g];
      resize(arrays.slots, queries);
      resize(arrays.begins, rows);
      resize(arrays.counts, rows);
      std::size_t entries = 0;
      for (std::size_t i = 0; i < rows; ++i) {
        const step_record::row& row = r.rows[i];
        const auto used = static_cast<std::uint32_t>(groups().blocks_for(g, r.kv_lengths[i]));
        step_record::table_copy& copy = copy_of(arrays, *named_[i], g, row.sequence.index, used);
        arrays.begins[i] = copy.begin;
        arrays.counts[i] = used;
        entries += used;
        if (row.tokens == 1) {  // a decode
          const auto block = static_cast<std::uint32_t>(groups().block_of(g, row.start));
          if (copy.tail != block) {
            copy.tail = block;
            copy.tail_slot = make_slot(arrays.blocks[copy.begin + block], 0, arrays.block_size) -
                             static_cast<slot_id>(std::uint64_t{block} * arrays.block_size);
          }
          arrays.slots[r.query_offsets[i]] = copy.tail_slot + row.start;
        } else {
          map_slots({arrays.blocks.data() + copy.begin, used}, arrays.block_size, row.start,
                    span_of(arrays.slots).subspan(r.query_offsets[i], row.tokens));
        }
      }
      // Copies of tables that were long once are not kept for ever.
      constexpr std::size_t slack = 4096;
      if (arrays.blocks.size() > 8 * entries + slack) start_over(r, g);
    }
  }
  template <class T>
  static void resize(std::vector<T>& v, std::size_t size) {
    grow(v, size);
    v.resize(size);
  }

  /// The record's copy of a table, of which the first `used` entries are brought up to date.
  step_record::table_copy& copy_of(step_record::group_arrays& arrays, const sequence_state& s, std::uint32_t group,
                                   std::uint32_t index, std::uint32_t used) const noexcept {
    if (index >= arrays.copies.size()) arrays.copies.resize(std::size_t{index} + 1 + index / 2);
    step_record::table_copy& copy = arrays.copies[index];
    if (copy.changes == s.changes && used <= copy.count) return copy;
    const held_blocks& held = s.held[group];
    if (copy.version != held.version) copy.count = copy.first = copy.settled = 0;
    if (copy.settled < copy.count) copy.count = copy.settled;
    copy.version = held.version;
    copy.changes = s.changes;
    copy.tail = ~0u;
    if (used > copy.room) {
      copy.room = 2 * used;
      copy.begin = static_cast<std::uint32_t>(arrays.blocks.size());
      copy.count = copy.first = copy.settled = 0;
      resize(arrays.blocks, arrays.blocks.size() + copy.room);
    }
    block_id* const to = arrays.blocks.data() + copy.begin;
    for (; copy.first < held.first && copy.first < copy.count; ++copy.first) to[copy.first] = null_block;
    if (copy.first < held.first) copy.first = held.first;
    if (!blocks_.tails.uses(group)) {
      for (; copy.count < used; ++copy.count) to[copy.count] = held.table[copy.count];
      copy.settled = copy.count;
      return copy;
    }
    for (; copy.count < used; ++copy.count) {
      const block_id block = held.table[copy.count];
      to[copy.count] = blocks_.tails.entry(block);
      if (copy.settled == copy.count && (!blocks_.tails.has(block) || blocks_.tails.kept(block))) ++copy.settled;
    }
    return copy;
  }
  /// Lays out the copies of one group anew, with those of the step alone.
  void start_over(step_record& r, std::uint32_t group) noexcept {
    step_record::group_arrays& arrays = r.groups[group];
    arrays.blocks.clear();
    for (step_record::table_copy& copy : arrays.copies) copy = {};
    for (std::size_t i = 0; i < r.rows.size(); ++i)
      arrays.begins[i] = copy_of(arrays, *named_[i], group, r.rows[i].sequence.index, arrays.counts[i]).begin;
  }

  /// Takes back what the newest step did, in reverse, so that free blocks lie as before.
  void roll_back_newest() noexcept {
    step_record& newest = *blocks_.steps.open().back();
    for (std::size_t i = newest.rows.size(); i-- > 0;) roll_back_row(newest, i);
    blocks_.steps.pop_newest([&](step_record& r) {
      if (blocks_.steps.open().empty())
        blocks_.release_held(r);
      else
        blocks_.pass_held(r, *blocks_.steps.open().back());
    });
  }

  void roll_back_row(step_record& r, std::size_t i) noexcept {
    const step_record::row& row = r.rows[i];
    sequence_state* s = sequences_.find(row.sequence);
    take_back_tails(r, i, s);
    for (std::uint32_t g = groups().size(); row.grew && g-- > 0;) {
      if (s != nullptr) {
        std::vector<block_id>& table = s->held[g].table;
        for (; table.size() > r.groups[g].blocks_before[i]; table.pop_back()) blocks_.free_unused(table.back());
        ++s->held[g].version;
      }
      if (r.replacements.empty() || r.replacements.back().row != i || r.replacements.back().group != g) continue;
      const step_record::replacement was = r.replacements.back();
      r.replacements.pop_back();
      detail::block_use& use = blocks_.uses[was.source];
      use.copied_in = was.copied_before;
      if (s == nullptr) {  // closed meanwhile, so it has let go for good
        if (row.previous_step > use.released_in) use.released_in = row.previous_step;
        continue;
      }
      block_id& entry = s->held[g].table[groups().block_of(g, row.start)];
      const block_id copy = entry;
      entry = was.source;
      blocks_.add_holder(was.source);
      s->borrowed = was.borrowed;
      if (was.spare)
        s->held[g].table.push_back(copy);
      else
        blocks_.free_unused(copy);
    }
    if (s == nullptr) return;
    s->begun = row.start;
    s->owns_tail = row.owned_tail;
    s->changed();
    s->last_step = row.previous_step;
    --s->open_steps;
  }

  /// Places in the tail pool that a row was given, the last one first. Those of a closed sequence went, or will go,
  /// with their blocks.
  void take_back_tails(step_record& r, std::size_t row, const sequence_state* s) noexcept {
    for (; !r.tail_gifts.empty() && r.tail_gifts.back().row == row; r.tail_gifts.pop_back())
      if (s != nullptr) blocks_.tails.drop(r.tail_gifts.back().block);
  }

  void retire_oldest(std::size_t steps) noexcept {
    blocks_.steps.pop_oldest(steps, [&](step_record& r) { blocks_.release_held(r); });
  }

  block_keeper<Eviction>& blocks_;
  sequence_keeper<Eviction>& sequences_;
  mutable std::vector<tail_mark> marks_;             // by block, cleared after each count
  mutable std::vector<block_id> marked_;             // the blocks in marks_ that are not clear
  mutable std::vector<tail_action> tails_;           // per want and group, as count_wants found
  mutable std::vector<sequence_state*> named_;       // per want, until the call that counted ends
  mutable std::vector<std::uint64_t> tails_needed_;  // per group, as count_wants found
  mutable std::uint64_t calls_ = 0;
};

}  // namespace kvcache::detail
