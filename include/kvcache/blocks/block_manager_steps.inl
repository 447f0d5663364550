// SPDX-License-Identifier: Apache-2.0
// Part of block_manager.hpp: begin, accept, drop, retire.

namespace kvcache {

template <class Eviction>
bool block_manager<Eviction>::in_flight(std::uint64_t step_number) const noexcept {
  // Numbers beyond the newest step are those of dropped steps; they count as the newest.
  return step_number > retired_ && !open_steps_.empty();
}

/// Adds to `needed` the blocks that the wants take; marks sequences as named and tail blocks as copied on the way.
template <class Eviction>
result<void> block_manager<Eviction>::count_wants(std::span<const want> wants, std::uint64_t& needed) const noexcept {
  std::uint64_t tokens = 0;
  for (const want& w : wants) {
    const sequence_state* s = sequences_.find(w.sequence);
    if (s == nullptr) return stale(w.sequence);
    if (s->named) return failure{errc::duplicate_id, w.sequence.index, 1};
    s->named = true;
    const std::uint64_t end = std::uint64_t{s->begun} + w.tokens;
    tokens += w.tokens;
    const std::uint64_t longest = end > tokens ? end : tokens;
    if (longest > max_length) return failure{errc::beyond_length, longest, max_length};
    const std::uint64_t total = groups_.blocks_for(end);
    if (total > capacity()) return failure{errc::exceeds_pool, total, capacity()};
    if (w.tokens == 0) continue;
    for (std::uint32_t g = 0; g < groups_.size(); ++g) {
      const std::uint64_t blocks = groups_.blocks_for(g, end);
      if (blocks > s->tables[g].size()) needed += blocks - s->tables[g].size();
      if (s->begun % groups_.block_size(g) == 0) continue;
      const block_id tail = s->tables[g][s->begun / groups_.block_size(g)];
      detail::block_use& use = uses_[tail];
      if (pool_.ref_count(tail) - use.copies == 1 && !use.copier_in_flight && !in_flight(use.newest())) continue;
      ++needed;
      ++use.copies;
      use.copier_in_flight = use.copier_in_flight || in_flight(s->last_step);
    }
  }
  return {};
}

template <class Eviction>
result<std::uint64_t> block_manager<Eviction>::blocks_needed(std::span<const want> wants) const noexcept {
  std::uint64_t needed = 0;
  const result<void> counted = count_wants(wants, needed);
  for (const want& w : wants) {
    const sequence_state* s = sequences_.find(w.sequence);
    if (s == nullptr || !s->named) continue;
    s->named = false;
    for (std::uint32_t g = 0; g < groups_.size(); ++g) {
      if (s->begun % groups_.block_size(g) == 0) continue;
      detail::block_use& use = uses_[s->tables[g][s->begun / groups_.block_size(g)]];
      use.copies = 0;
      use.copier_in_flight = false;
    }
  }
  if (!counted) return counted.error();
  return needed;
}

template <class Eviction>
auto block_manager<Eviction>::new_record() noexcept -> record& {
  if (unused_records_.empty()) {
    records_.push_back(std::make_unique<record>());
    records_.back()->groups.resize(groups_.size());
    for (std::uint32_t g = 0; g < groups_.size(); ++g) records_.back()->groups[g].block_size = groups_.block_size(g);
    unused_records_.push_back(records_.back().get());
  }
  record& r = *unused_records_.back();
  unused_records_.pop_back();
  open_steps_.push_back(&r);
  r.number = newest_step();
  r.stamp = ++stamps_;
  return r;
}

/// Precondition: no longer among the open steps.
template <class Eviction>
void block_manager<Eviction>::recycle(record& r) noexcept {
  r.stamp = 0;
  r.accepted = false;
  r.rows.clear();
  r.query_offsets.clear();
  r.kv_lengths.clear();
  r.copies.clear();
  r.replacements.clear();
  for (auto& g : r.groups) {
    g.blocks.clear();
    g.offsets.clear();
    g.padded.clear();
    g.slots.clear();
    g.blocks_before.clear();
  }
  unused_records_.push_back(&r);
}

template <class Eviction>
result<step> block_manager<Eviction>::begin(std::span<const want> wants) noexcept {
  const result<std::uint64_t> needed = blocks_needed(wants);
  if (!needed) return needed.error();
  if (*needed > counts().available()) return failure{errc::out_of_blocks, *needed, counts().available()};

  const bool others_in_flight = !open_steps_.empty();
  record& r = new_record();
  ++batches_;
  for (const want& w : wants) {
    sequence_state& s = *sequences_.find(w.sequence);
    r.rows.push_back({w.sequence, w.tokens, s.begun, s.last_step});
    make_room(r, s, others_in_flight);
    s.begun += w.tokens;
    s.last_step = r.number;
    ++s.open_steps;
  }
  describe(r);
  return step(*this, r);
}

/// Blocks for the newest row of a step: as count_wants counted them.
template <class Eviction>
void block_manager<Eviction>::make_room(record& r, sequence_state& s, bool others_in_flight) noexcept {
  const auto row = static_cast<std::uint32_t>(r.rows.size() - 1);
  const std::uint32_t start = r.rows[row].start;
  const std::uint32_t tokens = r.rows[row].tokens;
  for (std::uint32_t g = 0; g < groups_.size(); ++g) {
    const std::uint32_t size = groups_.block_size(g);
    std::vector<block_id>& table = s.tables[g];
    r.groups[g].blocks_before.push_back(static_cast<std::uint32_t>(table.size()));
    if (tokens == 0) continue;
    if (start % size != 0) {
      block_id& entry = table[start / size];
      const block_id tail = entry;
      detail::block_use& use = uses_[tail];
      const bool copied_before = others_in_flight && use.copied_in > retired_ && use.copied_in != r.number;
      if (pool_.ref_count(tail) > 1 || copied_before || (others_in_flight && use.released_in > retired_)) {
        r.replacements.push_back({row, g, tail, use.copied_in});
        if (copied_before && use.copied_in > use.released_in) use.released_in = use.copied_in;
        use.copied_in = r.number;
        entry = allocate();
        r.copies.push_back({g, tail, entry, start % size});
        let_go(tail, s.last_step);
      } else if (index_.contains(tail)) {
        forget_subtree(tail);
        flush_unkeyed();
      }
    }
    const std::uint64_t blocks = groups_.blocks_for(g, std::uint64_t{start} + tokens);
    while (table.size() < blocks) table.push_back(allocate());
  }
}

/// Fills the arrays that the step's views show.
template <class Eviction>
void block_manager<Eviction>::describe(record& r) noexcept {
  r.query_offsets.push_back(0);
  for (const record::row& row : r.rows) {
    r.query_offsets.push_back(r.query_offsets.back() + row.tokens);
    r.kv_lengths.push_back(row.start + row.tokens);
  }
  for (std::uint32_t g = 0; g < groups_.size(); ++g) {
    auto& arrays = r.groups[g];
    arrays.slots.resize(r.query_offsets.back());
    arrays.offsets.push_back(0);
    for (std::size_t i = 0; i < r.rows.size(); ++i) {
      const std::vector<block_id>& table = sequences_.find(r.rows[i].sequence)->tables[g];
      const auto used = static_cast<std::ptrdiff_t>(groups_.blocks_for(g, r.kv_lengths[i]));
      arrays.blocks.insert(arrays.blocks.end(), table.begin(), table.begin() + used);
      arrays.offsets.push_back(static_cast<std::uint32_t>(arrays.blocks.size()));
      map_slots(table, arrays.block_size, r.rows[i].start,
                std::span<slot_id>(arrays.slots).subspan(r.query_offsets[i], r.rows[i].tokens));
    }
  }
}

template <class Eviction>
result<void> block_manager<Eviction>::accept_step(record& r, const std::uint32_t* counts, std::size_t size) noexcept {
  for (const record* earlier : open_steps_) {
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
    if (count == tokens) continue;
    s->begun = s->length;
    // What the sequence held before the step was reserved for it and stays so.
    release_beyond(*s, r.number, [&](std::uint32_t g) {
      const std::uint64_t before = r.groups[g].blocks_before[i];
      const std::uint64_t filled = groups_.blocks_for(g, s->length);
      return before > filled ? before : filled;
    });
  }
  r.accepted = true;
  return {};
}

template <class Eviction>
void block_manager<Eviction>::drop_step(record& r) noexcept {
  while (r.stamp != 0) roll_back_newest();
}

/// Takes back what the newest step did, in reverse, so that free blocks lie as before.
template <class Eviction>
void block_manager<Eviction>::roll_back_newest() noexcept {
  record& r = *open_steps_.back();
  for (std::size_t i = r.rows.size(); i-- > 0;) {
    const record::row& row = r.rows[i];
    sequence_state* s = sequences_.find(row.sequence);
    for (std::uint32_t g = groups_.size(); g-- > 0;) {
      if (s != nullptr) {
        std::vector<block_id>& table = s->tables[g];
        for (; table.size() > r.groups[g].blocks_before[i]; table.pop_back()) free_unused(table.back());
      }
      if (r.replacements.empty() || r.replacements.back().row != i || r.replacements.back().group != g) continue;
      const record::replacement& was = r.replacements.back();
      uses_[was.source].copied_in = was.copied_before;
      if (s != nullptr) {
        block_id& entry = s->tables[g][row.start / groups_.block_size(g)];
        free_unused(entry);
        entry = was.source;
        add_holder(was.source);
      }
      r.replacements.pop_back();
    }
    if (s == nullptr) continue;
    s->begun = row.start;
    s->last_step = row.previous_step;
    --s->open_steps;
  }
  open_steps_.pop_back();
  // What was released meanwhile may be in use by the step before.
  if (open_steps_.empty())
    release_held(r.held);
  else
    detail::move_held(r.held, open_steps_.back()->held, uses_);
  recycle(r);
}

/// A block that was allocated and never used.
template <class Eviction>
void block_manager<Eviction>::free_unused(block_id block) noexcept {
  const bool last = pool_.drop_reference(block);
  KVCACHE_ASSERT(last, "a block of an unaccepted step has a second holder");
  if (last) pool_.put_back(block, block_state::free);
}

template <class Eviction>
result<void> block_manager<Eviction>::retire(step& done) noexcept {
  if (done.owner_ != this || !done.open()) return failure{errc::stale_id, done.stamp_, stamps_};
  const auto steps = static_cast<std::size_t>(done.record_->number - retired_);
  for (std::size_t i = 0; i < steps; ++i)
    if (!open_steps_[i]->accepted) return failure{errc::step_order, done.record_->number, open_steps_[i]->number};
  retire_oldest(steps);
  done.record_ = nullptr;
  return {};
}

template <class Eviction>
void block_manager<Eviction>::retire_accepted() noexcept {
  std::size_t steps = 0;
  while (steps < open_steps_.size() && open_steps_[steps]->accepted) ++steps;
  retire_oldest(steps);
}

template <class Eviction>
void block_manager<Eviction>::retire_oldest(std::size_t steps) noexcept {
  for (std::size_t i = 0; i < steps; ++i) {
    ++retired_;
    release_held(open_steps_[i]->held);
    recycle(*open_steps_[i]);
  }
  open_steps_.erase(open_steps_.begin(), open_steps_.begin() + static_cast<std::ptrdiff_t>(steps));
}

}  // namespace kvcache
