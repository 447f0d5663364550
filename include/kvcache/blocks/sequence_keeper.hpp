// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/block_keeper.hpp>
#include <kvcache/blocks/block_table.hpp>
#include <kvcache/blocks/grow.hpp>
#include <kvcache/blocks/requests.hpp>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

namespace kvcache::detail {

/// What happens to a sequence outside of steps: it is opened, forked, truncated, closed, and its content committed.
/// The contracts stand at block_manager.
template <class Eviction>
class sequence_keeper {
 public:
  explicit sequence_keeper(block_keeper<Eviction>& blocks)
      : blocks_(blocks), states_(blocks.groups.size()), chains_(blocks.groups.size()) {}

  [[nodiscard]] sequence_state* find(sequence_id id) noexcept { return states_.find(id); }
  [[nodiscard]] const sequence_state* find(sequence_id id) const noexcept { return states_.find(id); }
  [[nodiscard]] failure stale(sequence_id id) const noexcept {
    return {errc::stale_id, id.index, states_.generation(id.index)};
  }

  admission predict(const open_request& request) const noexcept {
    const block_pool& pool = blocks_.pool;
    admission a;
    a.available = pool.counts().available();
    a.capacity = pool.capacity();
    const std::uint64_t size = request.content.size();
    const std::uint64_t tokens = size > request.reserve ? size : request.reserve;
    a.total_blocks = tokens > max_length ? (std::numeric_limits<std::uint64_t>::max)() : groups().blocks_for(tokens);
    a.reused_tokens = size == 0 || size > max_length
                          ? look_up(prefix_index::no_keys(), {}, 0)
                          : look_up(index().find_keys(request.keys), request.content, request.content.size() - 1);
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      const std::uint64_t needed = groups().blocks_for(g, request.reserve);
      if (needed > chains_[g].blocks) a.new_blocks += needed - chains_[g].blocks;
      // Descendants of an evictable block are evictable, so those of a chain are its end.
      for (block_id b = chains_[g].last; b != null_block && pool.state(b) == block_state::evictable;
           b = index().parent(b))
        ++a.revived_blocks;
    }
    a.needs = a.new_blocks + a.revived_blocks;
    return a;
  }

  prefix_match probe(content_view content, std::span<const extra_key> keys) const noexcept {
    const std::size_t limit = content.size() < max_length ? content.size() : static_cast<std::size_t>(max_length);
    return {look_up(index().find_keys(keys), content, limit)};
  }

  result<opened> open(const open_request& request, block_statistics& statistics) noexcept {
    if (request.content.empty()) return failure{errc::empty_content, 0, 1};
    const admission a = predict(request);
    if (a.total_blocks > a.capacity) return failure{errc::exceeds_pool, a.total_blocks, a.capacity};
    if (a.needs > a.available) return failure{errc::out_of_blocks, a.needs, a.available};

    const sequence_id id = states_.add();
    sequence_state& s = *states_.find(id);
    s.keys = blocks_.index.acquire_keys(request.keys);
    // Every hit first: an allocation may evict, and must not evict what was found.
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      std::vector<block_id>& table = s.tables[g];
      grow(table, chains_[g].blocks);
      table.resize(chains_[g].blocks);
      block_id b = chains_[g].last;
      for (std::size_t i = table.size(); i-- > 0; b = index().parent(b)) table[i] = b;
      for (const block_id hit : table) blocks_.add_holder(hit);
      blocks_.note_request(s.keys, g, request.content, chains_[g].blocks);
      for (const block_id hit : table) blocks_.note_reference(hit);
    }
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      const std::uint64_t needed = groups().blocks_for(g, request.reserve);
      while (s.tables[g].size() < needed) s.tables[g].push_back(blocks_.allocate());
    }
    s.length = s.begun = s.committed = s.tail_start = a.reused_tokens;
    ++statistics.opened_sequences;
    statistics.queried_tokens += request.content.size();
    statistics.hit_tokens += a.reused_tokens;
    return opened{id, a.reused_tokens};
  }

  result<sequence_id> fork(sequence_id sequence, std::uint32_t tokens) noexcept {
    const sequence_state* parent = find(sequence);
    if (parent == nullptr) return stale(sequence);
    if (tokens > parent->length) return failure{errc::beyond_length, tokens, parent->length};
    if (parent->open_steps != 0) return in_open_step(*parent);

    const sequence_id id = states_.add();
    const sequence_state& from = *states_.find(sequence);  // add may have moved it
    sequence_state& to = *states_.find(id);
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      const auto shared = static_cast<std::ptrdiff_t>(groups().blocks_for(g, tokens));
      grow(to.tables[g], static_cast<std::size_t>(shared));
      to.tables[g].assign(from.tables[g].begin(), from.tables[g].begin() + shared);
      for (const block_id block : to.tables[g]) blocks_.add_holder(block);
    }
    carry_tail(from, to, tokens);
    to.length = to.begun = tokens;
    to.keys = from.keys;
    blocks_.index.add_user(to.keys);
    return id;
  }

  result<void> truncate(sequence_id sequence, std::uint32_t tokens) noexcept {
    sequence_state* s = find(sequence);
    if (s == nullptr) return stale(sequence);
    if (tokens > s->length) return failure{errc::beyond_length, tokens, s->length};
    if (s->open_steps != 0) return in_open_step(*s);
    if (tokens < s->committed) carry_tail(*s, *s, tokens);
    s->length = s->begun = tokens;
    release_beyond(*s, s->last_step, [&](std::uint32_t g) { return groups().blocks_for(g, tokens); });
    return {};
  }

  result<void> close(sequence_id sequence) noexcept {
    sequence_state* s = find(sequence);
    if (s == nullptr) return stale(sequence);
    release_beyond(*s, s->last_step, [](std::uint32_t) { return std::uint64_t{0}; });
    blocks_.index.drop_user(s->keys);
    states_.remove(sequence.index);
    return {};
  }

  result<void> commit(sequence_id sequence, content_view tokens) noexcept {
    sequence_state* s = find(sequence);
    if (s == nullptr) return stale(sequence);
    if (tokens.size() > s->length - s->committed)
      return failure{errc::beyond_length, std::uint64_t{s->committed} + tokens.size(), s->length};
    if (s->unkeyed) {
      s->committed += static_cast<std::uint32_t>(tokens.size());
      return {};
    }
    const std::uint32_t start = s->committed;
    // Blocks that began before need what is known of them and what comes now in one piece.
    const std::size_t most = groups().largest() - 1;
    const std::size_t joined = s->tail.empty() ? 0 : tokens.size() < most ? tokens.size() : most;
    for (std::size_t i = 0; i < joined; ++i) s->tail.push_back(tokens[i]);
    blocks_.new_batch();
    for (std::size_t done = 0; done < tokens.size();) {
      // As far as the next block's end in any group.
      std::size_t count = tokens.size() - done;
      for (std::uint32_t g = 0; g < groups().size(); ++g) {
        const std::size_t missing = groups().block_size(g) - s->committed % groups().block_size(g);
        if (missing < count) count = missing;
      }
      s->committed += static_cast<std::uint32_t>(count);
      done += count;
      for (std::uint32_t g = 0; g < groups().size(); ++g) {
        const std::uint32_t size = groups().block_size(g);
        if (s->committed % size != 0) continue;
        const std::uint32_t first = s->committed - size;
        commit_block(*s, g,
                     first >= start ? tokens.sub(first - start, size)
                                    : content_view(s->tail.data() + (first - s->tail_start), size));
      }
    }
    blocks_.flush();
    const std::uint32_t rest = tail_start(s->committed);
    if (rest >= start) {
      s->tail.clear();
      for (std::size_t i = rest - start; i < tokens.size(); ++i) s->tail.push_back(tokens[i]);
    } else {
      s->tail.erase(s->tail.begin(), s->tail.begin() + (rest - s->tail_start));
    }
    s->tail_start = rest;
    return {};
  }

  /// Gives back the blocks of each group beyond the first keep(group), the last tokens' first.
  template <class Keep>
  void release_beyond(sequence_state& s, std::uint64_t step_number, Keep&& keep) noexcept {
    blocks_.new_batch();
    for (;;) {
      std::uint32_t group = groups().size();
      std::uint64_t latest = 0;
      for (std::uint32_t g = 0; g < groups().size(); ++g) {
        const std::uint64_t end = s.tables[g].size();
        if (end <= keep(g)) continue;
        const std::uint64_t start = (end - 1) * groups().block_size(g);
        if (group != groups().size() && start <= latest) continue;
        group = g;
        latest = start;
      }
      if (group == groups().size()) break;
      const block_id block = s.tables[group].back();
      s.tables[group].pop_back();
      blocks_.let_go(block, step_number);
    }
    blocks_.flush();
  }

 private:
  [[nodiscard]] const layer_groups& groups() const noexcept { return blocks_.groups; }
  [[nodiscard]] const prefix_index& index() const noexcept { return blocks_.index; }

  [[nodiscard]] failure in_open_step(const sequence_state& s) const noexcept {
    return {errc::step_order, blocks_.steps.newest() + 1, s.last_step};
  }

  /// Leaves in chains_ what every group has of the first `limit` tokens, cut to the length that all have.
  std::uint32_t look_up(prefix_index::key_set keys, content_view content, std::size_t limit) const noexcept {
    std::uint64_t length = keys == prefix_index::no_keys() ? 0 : limit - limit % groups().stride();
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      const std::uint32_t size = groups().block_size(g);
      chains_[g] = length == 0 ? prefix_index::chain{} : index().longest(keys, g, size, content, length / size);
      length = std::uint64_t{chains_[g].blocks} * size;
      length -= length % groups().stride();
    }
    for (std::uint32_t g = 0; g < groups().size(); ++g)
      for (; chains_[g].blocks > length / groups().block_size(g); --chains_[g].blocks)
        chains_[g].last = index().parent(chains_[g].last);
    return static_cast<std::uint32_t>(length);
  }

  /// First token of `tokens` that is not in a full block of every group.
  [[nodiscard]] std::uint32_t tail_start(std::uint32_t tokens) const noexcept {
    std::uint32_t start = tokens;
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      const std::uint32_t first = tokens - tokens % groups().block_size(g);
      if (first < start) start = first;
    }
    return start;
  }

  /// Gives `to` (which may be `from`) what commit has to know of the first `tokens` tokens of `from`. The content of a
  /// block that was committed whole is in the index.
  void carry_tail(const sequence_state& from, sequence_state& to, std::uint32_t tokens) noexcept {
    const std::uint32_t committed = tokens < from.committed ? tokens : from.committed;
    const std::uint32_t start = tail_start(committed);
    const std::uint32_t size = committed - start;
    std::uint32_t group = 0;
    while (committed - committed % groups().block_size(group) != start) ++group;
    const std::uint32_t block_size = groups().block_size(group);

    to.unkeyed = from.unkeyed;
    if (size == 0 || to.unkeyed) {
      to.tail.clear();
    } else if (from.committed - start >= block_size) {
      const block_id cut = from.tables[group][start / block_size];
      to.unkeyed = !index().contains(cut);
      const content_view content = to.unkeyed ? content_view{} : index().content(cut, size);
      grow(to.tail, content.size());
      to.tail.resize(content.size());
      for (std::size_t i = 0; i < content.size(); ++i) to.tail[i] = content[i];
    } else {
      const std::uint32_t skip = start - from.tail_start;
      if (&from != &to) {
        grow(to.tail, size);
        to.tail.resize(size);
      }
      for (std::uint32_t i = 0; i < size; ++i) to.tail[i] = from.tail[skip + i];
      to.tail.resize(size);
    }
    to.tail_start = start;
    to.committed = committed;
  }

  /// Keys the block that ends where the sequence is committed to.
  void commit_block(sequence_state& s, std::uint32_t group, content_view content) noexcept {
    std::vector<block_id>& table = s.tables[group];
    const std::size_t i = s.committed / groups().block_size(group) - 1;
    const block_id own = table[i];
    const block_id parent = i == 0 ? null_block : table[i - 1];
    // Only after a broken precondition: the chain ends where a parent was committed with other content.
    if (i != 0 && !index().contains(parent)) return;
    const prefix_index::identity before = i == 0 ? index().root(s.keys, group) : index().as_parent(parent);
    const prefix_index::identity id = prefix_index::identify(before, content);
    const block_id cached = index().find(id, content);
    if (cached == own) return;
    if (cached != null_block) {
      blocks_.add_holder(cached);
      blocks_.note_reference(cached);
      table[i] = cached;
      blocks_.let_go(own, s.last_step);
      return;
    }
    KVCACHE_ASSERT(!index().contains(own), "a shared block was committed before with other content");
    if (index().contains(own)) return;
    if (i == 0)
      blocks_.index.insert_first(own, s.keys, id, content);
    else
      blocks_.index.insert_after(own, parent, id, content);
    blocks_.note_reference(own);
  }

  block_keeper<Eviction>& blocks_;
  sequence_table states_;
  mutable std::vector<prefix_index::chain> chains_;  // per group, what look_up found
};

}  // namespace kvcache::detail
