// SPDX-License-Identifier: Apache-2.0
// Part of block_manager.hpp: open, look-up, fork, truncate, close, commit.

namespace kvcache {

template <class Eviction>
failure block_manager<Eviction>::stale(sequence_id sequence) const noexcept {
  return {errc::stale_id, sequence.index, sequences_.generation(sequence.index)};
}

template <class Eviction>
failure block_manager<Eviction>::in_open_step(const sequence_state& s) const noexcept {
  return {errc::step_order, newest_step() + 1, s.last_step};
}

/// Leaves in chains_ what every group has of the first `limit` tokens, cut to the length that all have.
template <class Eviction>
std::uint32_t block_manager<Eviction>::look_up(prefix_index::key_set keys, content_view content,
                                               std::size_t limit) const noexcept {
  std::uint64_t length = keys == prefix_index::no_keys() ? 0 : limit - limit % groups_.stride();
  for (std::uint32_t g = 0; g < groups_.size(); ++g) {
    const std::uint32_t size = groups_.block_size(g);
    chains_[g] = length == 0 ? prefix_index::chain{} : index_.longest(keys, g, size, content, length / size);
    length = std::uint64_t{chains_[g].blocks} * size;
    length -= length % groups_.stride();
  }
  for (std::uint32_t g = 0; g < groups_.size(); ++g)
    for (; chains_[g].blocks > length / groups_.block_size(g); --chains_[g].blocks)
      chains_[g].last = index_.parent(chains_[g].last);
  return static_cast<std::uint32_t>(length);
}

template <class Eviction>
admission block_manager<Eviction>::predict(const open_request& request) const noexcept {
  admission a;
  a.available = counts().available();
  a.capacity = capacity();
  const std::uint64_t size = request.content.size();
  const std::uint64_t tokens = size > request.reserve ? size : request.reserve;
  a.total_blocks = tokens > max_length ? std::numeric_limits<std::uint64_t>::max() : groups_.blocks_for(tokens);
  a.reused_tokens = size == 0 || size > max_length
                        ? look_up(prefix_index::no_keys(), {}, 0)
                        : look_up(index_.find_keys(request.keys), request.content, request.content.size() - 1);
  for (std::uint32_t g = 0; g < groups_.size(); ++g) {
    const std::uint64_t held = groups_.blocks_for(g, request.reserve);
    if (held > chains_[g].blocks) a.new_blocks += held - chains_[g].blocks;
    // Whoever holds a block holds its parent, so the evictable blocks of a chain are its end.
    for (block_id b = chains_[g].last; b != null_block && state(b) == block_state::evictable; b = index_.parent(b))
      ++a.revived_blocks;
  }
  a.needs = a.new_blocks + a.revived_blocks;
  return a;
}

template <class Eviction>
prefix_match block_manager<Eviction>::probe(content_view content, std::span<const extra_key> keys) const noexcept {
  const std::size_t limit = content.size() < max_length ? content.size() : static_cast<std::size_t>(max_length);
  return {look_up(index_.find_keys(keys), content, limit)};
}

template <class Eviction>
result<opened> block_manager<Eviction>::open(const open_request& request) noexcept {
  if (request.content.empty()) return failure{errc::empty_content, 0, 1};
  const admission a = predict(request);
  if (a.total_blocks > a.capacity) return failure{errc::exceeds_pool, a.total_blocks, a.capacity};
  if (a.needs > a.available) return failure{errc::out_of_blocks, a.needs, a.available};

  const sequence_id id = sequences_.add();
  sequence_state& s = *sequences_.find(id);
  s.keys = index_.acquire_keys(request.keys);
  // Every hit first: an allocation may evict, and must not evict what was found.
  for (std::uint32_t g = 0; g < groups_.size(); ++g) {
    std::vector<block_id>& table = s.tables[g];
    table.resize(chains_[g].blocks);
    block_id b = chains_[g].last;
    for (std::size_t i = table.size(); i-- > 0; b = index_.parent(b)) table[i] = b;
    for (const block_id hit : table) add_holder(hit);
  }
  for (std::uint32_t g = 0; g < groups_.size(); ++g) {
    const std::uint64_t held = groups_.blocks_for(g, request.reserve);
    while (s.tables[g].size() < held) s.tables[g].push_back(allocate());
  }
  s.length = s.begun = s.committed = s.tail_start = a.reused_tokens;
  ++statistics_.opened_sequences;
  statistics_.queried_tokens += request.content.size();
  statistics_.hit_tokens += a.reused_tokens;
  return opened{id, a.reused_tokens};
}

/// First token whose block is not full in every group, when there are `tokens`.
template <class Eviction>
std::uint32_t block_manager<Eviction>::tail_start(std::uint32_t tokens) const noexcept {
  std::uint32_t start = tokens;
  for (std::uint32_t g = 0; g < groups_.size(); ++g) {
    const std::uint32_t first = tokens - tokens % groups_.block_size(g);
    if (first < start) start = first;
  }
  return start;
}

/// Gives `to` (which may be `from`) what commit has to know of the first `tokens` tokens of `from`. The content of a
/// block that was committed whole is in the index.
template <class Eviction>
void block_manager<Eviction>::carry_tail(const sequence_state& from, sequence_state& to,
                                         std::uint32_t tokens) noexcept {
  const std::uint32_t committed = tokens < from.committed ? tokens : from.committed;
  const std::uint32_t start = tail_start(committed);
  const std::uint32_t size = committed - start;
  std::uint32_t group = 0;
  while (committed - committed % groups_.block_size(group) != start) ++group;
  const std::uint32_t block_size = groups_.block_size(group);

  to.unkeyed = from.unkeyed;
  if (size == 0 || to.unkeyed) {
    to.tail.clear();
  } else if (from.committed - start >= block_size) {
    const block_id cut = from.tables[group][start / block_size];
    to.tail.resize(size);
    to.unkeyed = !index_.contains(cut);
    const content_view content = to.unkeyed ? content_view{} : index_.content(cut, size);
    for (std::uint32_t i = 0; i < content.size(); ++i) to.tail[i] = content[i];
  } else {
    const std::uint32_t skip = start - from.tail_start;
    if (&from != &to) to.tail.resize(size);
    for (std::uint32_t i = 0; i < size; ++i) to.tail[i] = from.tail[skip + i];
    to.tail.resize(size);
  }
  to.tail_start = start;
  to.committed = committed;
}

template <class Eviction>
result<sequence_id> block_manager<Eviction>::fork(sequence_id sequence, std::uint32_t tokens) noexcept {
  if (!contains(sequence)) return stale(sequence);
  {
    const sequence_state& s = *sequences_.find(sequence);
    if (tokens == all_tokens) tokens = s.length;
    if (tokens > s.length) return failure{errc::beyond_length, tokens, s.length};
    if (s.open_steps != 0) return in_open_step(s);
  }
  const sequence_id id = sequences_.add();  // may move every state
  const sequence_state& from = *sequences_.find(sequence);
  sequence_state& to = *sequences_.find(id);
  for (std::uint32_t g = 0; g < groups_.size(); ++g) {
    const auto shared = static_cast<std::ptrdiff_t>(groups_.blocks_for(g, tokens));
    to.tables[g].assign(from.tables[g].begin(), from.tables[g].begin() + shared);
    for (const block_id block : to.tables[g]) add_holder(block);
  }
  carry_tail(from, to, tokens);
  to.length = to.begun = tokens;
  to.keys = from.keys;
  index_.add_user(to.keys);
  return id;
}

template <class Eviction>
result<void> block_manager<Eviction>::truncate(sequence_id sequence, std::uint32_t tokens) noexcept {
  sequence_state* s = sequences_.find(sequence);
  if (s == nullptr) return stale(sequence);
  if (tokens > s->length) return failure{errc::beyond_length, tokens, s->length};
  if (s->open_steps != 0) return in_open_step(*s);
  if (tokens < s->committed) carry_tail(*s, *s, tokens);
  s->length = s->begun = tokens;
  release_beyond(*s, s->last_step, [&](std::uint32_t g) { return groups_.blocks_for(g, tokens); });
  return {};
}

template <class Eviction>
result<void> block_manager<Eviction>::close(sequence_id sequence) noexcept {
  sequence_state* s = sequences_.find(sequence);
  if (s == nullptr) return stale(sequence);
  release_beyond(*s, s->last_step, [](std::uint32_t) { return std::uint64_t{0}; });
  index_.drop_user(s->keys);
  sequences_.remove(sequence.index);
  return {};
}

template <class Eviction>
result<void> block_manager<Eviction>::commit(sequence_id sequence, content_view tokens) noexcept {
  sequence_state* s = sequences_.find(sequence);
  if (s == nullptr) return stale(sequence);
  if (tokens.size() > s->length - s->committed)
    return failure{errc::beyond_length, std::uint64_t{s->committed} + tokens.size(), s->length};
  if (s->unkeyed) {
    s->committed += static_cast<std::uint32_t>(tokens.size());
    return {};
  }
  ++batches_;
  for (std::size_t done = 0; done < tokens.size();) {
    // As far as the next block's end in any group.
    std::size_t count = tokens.size() - done;
    for (std::uint32_t g = 0; g < groups_.size(); ++g) {
      const std::size_t missing = groups_.block_size(g) - s->committed % groups_.block_size(g);
      if (missing < count) count = missing;
    }
    for (std::size_t i = 0; i < count; ++i) s->tail.push_back(tokens[done + i]);
    s->committed += static_cast<std::uint32_t>(count);
    done += count;
    for (std::uint32_t g = 0; g < groups_.size(); ++g) {
      const std::uint32_t size = groups_.block_size(g);
      if (s->committed % size == 0) commit_block(*s, g, {s->tail.data() + (s->tail.size() - size), size});
    }
    const std::uint32_t start = tail_start(s->committed);
    s->tail.erase(s->tail.begin(), s->tail.begin() + (start - s->tail_start));
    s->tail_start = start;
  }
  flush_unkeyed();
  return {};
}

/// Keys the block that ends where the sequence is committed to.
template <class Eviction>
void block_manager<Eviction>::commit_block(sequence_state& s, std::uint32_t group, content_view content) noexcept {
  std::vector<block_id>& table = s.tables[group];
  const std::size_t i = s.committed / groups_.block_size(group) - 1;
  const block_id own = table[i];
  const block_id parent = i == 0 ? null_block : table[i - 1];
  // Only after a broken precondition: the chain ends where a parent was committed with other content.
  if (i != 0 && !index_.contains(parent)) return;
  const serial parent_serial = i == 0 ? index_.root_serial(s.keys, group) : index_.serial_of(parent);
  const block_id cached_block = index_.find(parent_serial, content);
  if (cached_block == own) return;
  if (cached_block != null_block) {
    add_holder(cached_block);
    table[i] = cached_block;
    let_go(own, s.last_step);
    return;
  }
  KVCACHE_ASSERT(!index_.contains(own), "a shared block was committed before with other content");
  if (index_.contains(own)) return;
  if (i == 0)
    index_.insert_first(own, s.keys, group, content);
  else
    index_.insert_after(own, parent, content);
}

template <class Eviction>
result<std::uint32_t> block_manager<Eviction>::length(sequence_id sequence) const noexcept {
  const sequence_state* s = sequences_.find(sequence);
  if (s == nullptr) return stale(sequence);
  return s->length;
}

template <class Eviction>
result<std::uint32_t> block_manager<Eviction>::committed(sequence_id sequence) const noexcept {
  const sequence_state* s = sequences_.find(sequence);
  if (s == nullptr) return stale(sequence);
  return s->committed;
}

template <class Eviction>
result<std::span<const block_id>> block_manager<Eviction>::table(sequence_id sequence,
                                                                 std::uint32_t layer_group) const noexcept {
  KVCACHE_ASSERT(layer_group < groups(), "no such layer group");
  const sequence_state* s = sequences_.find(sequence);
  if (s == nullptr) return stale(sequence);
  return std::span<const block_id>(s->tables[layer_group]);
}

template <class Eviction>
result<void> block_manager<Eviction>::slots(sequence_id sequence, std::uint32_t first, std::span<slot_id> out,
                                            std::uint32_t layer_group) const noexcept {
  const auto blocks = table(sequence, layer_group);
  if (!blocks) return blocks.error();
  const std::uint64_t end = std::uint64_t{first} + out.size();
  const std::uint64_t there = std::uint64_t{blocks->size()} * block_size(layer_group);
  if (end > there) return failure{errc::beyond_length, end, there};
  map_slots(*blocks, block_size(layer_group), first, out);
  return {};
}

}  // namespace kvcache
