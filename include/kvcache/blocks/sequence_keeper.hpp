// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/block_keeper.hpp>
#include <kvcache/blocks/block_table.hpp>
#include <kvcache/blocks/content_tree.hpp>
#include <kvcache/blocks/grow.hpp>
#include <kvcache/blocks/prefix_search.hpp>
#include <kvcache/blocks/requests.hpp>
#include <kvcache/blocks/timed_pins.hpp>
#include <kvcache/detail/span_of.hpp>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace kvcache::detail {

/// What happens to a sequence outside of steps: it is opened, forked, truncated, closed, and its content committed.
/// The contracts stand at block_manager.
template <class Eviction>
class sequence_keeper {
  using prefix_index = detail::prefix_index<Eviction>;
  using content_tree = detail::content_tree<Eviction>;

 public:
  explicit sequence_keeper(block_keeper<Eviction>& blocks)
      : blocks_(blocks),
        states_(blocks.groups.size(), blocks.groups.chains()),
        found_(blocks.groups, blocks.index),
        ahead_(blocks.groups.chains()) {}

  [[nodiscard]] sequence_state* find(sequence_id id) noexcept { return states_.find(id); }
  [[nodiscard]] const sequence_state* find(sequence_id id) const noexcept { return states_.find(id); }
  [[nodiscard]] failure stale(sequence_id id) const noexcept {
    return {errc::stale_id, id.index, states_.generation(id.index)};
  }

  admission predict(const open_request& request) const noexcept {
    admission a;
    a.available = blocks_.pool.counts().available();
    a.capacity = blocks_.pool.capacity();
    const std::uint64_t size = request.content.size();
    const std::uint64_t tokens = size > request.reserve ? size : request.reserve;
    if (tokens > max_length) {
      a.total_blocks = (std::numeric_limits<std::uint64_t>::max)();
    } else {
      for (std::uint32_t g = 0; g < groups().size(); ++g)
        a.total_blocks += groups().most_blocks(g, tokens, request.chunk);
    }
    if (size == 0 || size > max_length)
      found_.run(no_content, {}, 0, false);
    else
      found_.run(tree().root(request.keys), request.content, size - 1, blocks_.partial_reuse);
    count(request, a);
    // A head is copied when it is written after, which takes a block more for each group; not worth being refused for.
    if (found_.source() != no_content && (a.total_blocks + groups().size() > a.capacity || !a.fits())) {
      found_.whole_blocks_only();
      count(request, a);
    }
    return a;
  }

  prefix_match probe(content_view content, std::span<const extra_key> keys) const noexcept {
    const std::size_t limit = content.size() < max_length ? content.size() : static_cast<std::size_t>(max_length);
    found_.run(tree().root(keys), content, limit, blocks_.partial_reuse);
    return {found_.tokens()};
  }

  result<opened> open(const open_request& request, block_statistics& statistics) noexcept {
    if (request.content.empty()) return failure{errc::empty_content, 0, 1};
    if (const result<void> good = acceptable(request.retention); !good) return good.error();
    const admission a = predict(request);
    if (a.total_blocks > a.capacity) return failure{errc::exceeds_pool, a.total_blocks, a.capacity};
    if (a.needs > a.available) return failure{errc::out_of_blocks, a.needs, a.available};

    const sequence_id id = states_.add();
    sequence_state& s = *states_.find(id);
    const content_id root = hold_found(s, request.keys, request.content);
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      blocks_.note_request(root, g, request.content, found_.blocks(g));
      for (std::size_t i = s.held[g].first; i < s.held[g].table.size(); ++i) blocks_.note_reference(s.held[g].table[i]);
    }
    set_retention(s, request.retention);
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      const std::uint64_t needed = blocks_to_hold(request, g);
      while (s.held[g].table.size() < needed) s.held[g].table.push_back(blocks_.allocate());
    }
    if (request.counted) return opened{id, a.reused_tokens};
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
    if (const std::uint64_t least = least_to_keep(*parent, tokens); tokens < least)
      return failure{errc::behind_window, tokens, least};

    const sequence_id id = states_.add();
    const sequence_state& from = *states_.find(sequence);  // add may have moved it
    sequence_state& to = *states_.find(id);
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      const auto shared = static_cast<std::ptrdiff_t>(groups().blocks_for(g, tokens));
      grow(to.held[g].table, static_cast<std::size_t>(shared));
      to.held[g].table.assign(from.held[g].table.begin(), from.held[g].table.begin() + shared);
      to.held[g].first = from.held[g].first < shared ? from.held[g].first : static_cast<std::uint32_t>(shared);
      for (std::size_t i = to.held[g].first; i < to.held[g].table.size(); ++i) blocks_.add_holder(to.held[g].table[i]);
      restore_window(from, to, g, tokens);
    }
    carry_content(from, to, tokens);
    grow(to.retention, from.retention.size());
    to.retention.assign(from.retention.begin(), from.retention.end());
    to.borrowed = from.borrowed && tokens > from.tail_start;
    states_.find(sequence)->owns_tail = false;
    to.length = to.begun = tokens;
    return id;
  }

  result<void> truncate(sequence_id sequence, std::uint32_t tokens) noexcept {
    sequence_state* s = find(sequence);
    if (s == nullptr) return stale(sequence);
    if (tokens > s->length) return failure{errc::beyond_length, tokens, s->length};
    if (s->open_steps != 0) return in_open_step(*s);
    if (const std::uint64_t least = least_to_keep(*s, tokens); tokens < least)
      return failure{errc::behind_window, tokens, least};

    s->borrowed = s->borrowed && tokens > s->tail_start;
    s->owns_tail = s->owns_tail && tokens == s->length;
    for (std::uint32_t g = 0; g < groups().size(); ++g) restore_window(*s, *s, g, tokens);
    if (tokens < s->committed) carry_content(*s, *s, tokens);
    s->length = s->begun = tokens;
    release_beyond(*s, s->last_step, [&](std::uint32_t g) { return groups().blocks_for(g, tokens); });
    return {};
  }

  result<void> close(sequence_id sequence) noexcept {
    sequence_state* s = find(sequence);
    if (s == nullptr) return stale(sequence);
    release_beyond(*s, s->last_step, [](std::uint32_t) { return std::uint64_t{0}; });
    for (const content_id head : s->heads) tree().drop_user(head);
    states_.remove(sequence.index);
    pins_.remove(sequence.index);
    return {};
  }

  result<void> commit(sequence_id sequence, content_view tokens) noexcept {
    sequence_state* s = find(sequence);
    if (s == nullptr) return stale(sequence);
    if (tokens.size() > s->length - s->committed)
      return failure{errc::beyond_length, std::uint64_t{s->committed} + tokens.size(), s->length};
    const std::uint32_t start = s->committed;
    // Blocks that began before need what is known of them and what comes now in one piece.
    const std::size_t most = groups().largest() - 1;
    const std::size_t joined = s->tail.empty() ? 0 : tokens.size() < most ? tokens.size() : most;
    for (std::size_t i = 0; i < joined; ++i) s->tail.push_back(tokens[i]);
    for (ahead& a : ahead_) a.used = a.fingerprints.size();
    blocks_.new_batch();
    for (std::size_t done = 0; done < tokens.size();) {
      // As far as the next block's end in any chain.
      std::size_t count = tokens.size() - done;
      for (std::uint32_t c = 0; c < groups().chains(); ++c) {
        const std::size_t missing = groups().chain_block_size(c) - groups().chain_remainder(c, s->committed);
        if (missing < count) count = missing;
      }
      s->committed += static_cast<std::uint32_t>(count);
      done += count;
      for (std::uint32_t c = 0; c < groups().chains(); ++c) {
        const std::uint32_t size = groups().chain_block_size(c);
        if (groups().chain_remainder(c, s->committed) != 0) continue;
        const std::uint32_t first = s->committed - size;
        const content_id content =
            first >= start
                ? obtain_next(*s, c, tokens, first - start)
                : tree().obtain(s->heads[c], c, content_view(s->tail.data() + (first - s->tail_start), size));
        for (std::uint32_t g = 0; g < groups().size(); ++g)
          if (groups().chain(g) == c) commit_block(*s, g, content);
        tree().drop_user(std::exchange(s->heads[c], content));
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
    if (groups().any_windowed()) release_behind(*s, 0);
    return {};
  }

  result<void> retain(sequence_id sequence, std::span<const retention_range> ranges) noexcept {
    sequence_state* s = find(sequence);
    if (s == nullptr) return stale(sequence);
    if (const result<void> good = acceptable(ranges); !good) return good;
    set_retention(*s, ranges);
    return {};
  }

  pinned pin(content_view content, std::span<const extra_key> keys, std::uint64_t expires) noexcept {
    const std::size_t limit = content.size() < max_length ? content.size() : static_cast<std::size_t>(max_length);
    found_.run(tree().root(keys), content, limit, false);
    const std::uint32_t tokens = found_.tokens();
    const sequence_id id = states_.add();
    hold_found(*states_.find(id), keys, content);
    if (expires != never) pins_.add(id, expires);
    return {id, tokens};
  }
  void close_expired_pins(std::uint64_t now) noexcept {
    while (const sequence_id* over = pins_.due(now)) static_cast<void>(close(*over));
  }

  /// Gives back what has left the windows of a sequence and can be found by its content, and, committed or not, what
  /// had left them when it had `surely` tokens.
  void release_behind(sequence_state& s, std::uint32_t surely) noexcept {
    bool begun = false;
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      if (!groups().windowed(g)) continue;
      const std::uint64_t committed = groups().block_of(g, s.committed);
      const std::uint64_t behind = groups().first_needed(g, s.length);
      const std::uint64_t long_behind = groups().first_needed(g, surely);
      std::uint64_t until = committed < behind ? committed : behind;
      if (until < long_behind) until = long_behind;
      if (until <= s.held[g].first) continue;
      if (!std::exchange(begun, true)) blocks_.new_batch();
      for (std::uint64_t i = until; i-- > s.held[g].first;)
        blocks_.let_go(std::exchange(s.held[g].table[i], null_block), s.last_step);
      s.held[g].first = static_cast<std::uint32_t>(until);
    }
    if (!begun) return;
    s.changed(s.room);
    blocks_.flush();
  }

  /// Gives back the blocks of each group beyond the first keep(group), the last tokens' first.
  template <class Keep>
  void release_beyond(sequence_state& s, std::uint64_t step_number, Keep&& keep) noexcept {
    s.changed();
    blocks_.new_batch();
    for (;;) {
      std::uint32_t group = groups().size();
      std::uint64_t latest = 0;
      for (std::uint32_t g = 0; g < groups().size(); ++g) {
        const std::uint64_t end = s.held[g].table.size();
        if (end <= keep(g)) continue;
        const std::uint64_t start = (end - 1) * groups().block_size(g);
        if (group != groups().size() && start <= latest) continue;
        group = g;
        latest = start;
      }
      if (group == groups().size()) break;
      const block_id block = s.held[group].table.back();
      s.held[group].table.pop_back();
      ++s.held[group].version;
      if (block != null_block)
        blocks_.let_go(block, step_number);
      else if (s.held[group].first > s.held[group].table.size())
        s.held[group].first = static_cast<std::uint32_t>(s.held[group].table.size());
    }
    blocks_.flush();
  }

 private:
  [[nodiscard]] const layer_groups& groups() const noexcept { return blocks_.groups; }
  [[nodiscard]] const prefix_index& index() const noexcept { return blocks_.index; }
  [[nodiscard]] content_tree& tree() noexcept { return blocks_.index.tree(); }
  [[nodiscard]] const content_tree& tree() const noexcept { return blocks_.index.tree(); }

  [[nodiscard]] failure in_open_step(const sequence_state& s) const noexcept {
    return {errc::step_order, blocks_.steps.newest() + 1, s.last_step};
  }

  /// Gives a new sequence what a search has found of its content, and nothing more. The root of its content.
  content_id hold_found(sequence_state& s, std::span<const extra_key> keys, content_view content) noexcept {
    const content_id root = tree().obtain_root(keys);
    for (std::uint32_t c = 0; c < groups().chains(); ++c) {
      const std::uint32_t size = groups().chain_block_size(c);
      s.heads[c] = found_.known(c) == 0 ? root : found_.head(c);
      tree().add_user(s.heads[c]);
      for (std::uint64_t i = found_.known(c); i < found_.whole() / size; ++i)
        tree().drop_user(std::exchange(s.heads[c], tree().obtain(s.heads[c], c, content.sub(i * size, size))));
    }
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      std::vector<block_id>& table = s.held[g].table;
      const std::uint32_t hits = found_.blocks(g);
      s.held[g].first = found_.first(g);
      grow(table, std::size_t{hits} + 1);
      table.assign(hits, null_block);
      for (std::uint32_t i = s.held[g].first; i < hits; ++i) table[i] = found_.block(g, i);
      if (found_.source() != no_content) table.push_back(index().block(found_.source(), g));
      for (std::size_t i = s.held[g].first; i < table.size(); ++i) blocks_.add_holder(table[i]);
    }
    s.length = s.begun = s.committed = found_.tokens();
    s.tail_start = static_cast<std::uint32_t>(found_.whole());
    s.borrowed = found_.source() != no_content;
    if (s.borrowed) {
      const content_view tail = tree().content(found_.source(), s.committed - s.tail_start);
      for (std::size_t i = 0; i < tail.size(); ++i) s.tail.push_back(tail[i]);
    }
    return root;
  }

  /// Entries that a group's table shall have when a request is opened, after a search for its content.
  [[nodiscard]] std::uint64_t blocks_to_hold(const open_request& request, std::uint32_t group) const noexcept {
    std::uint64_t tokens = request.reserve;
    const std::uint64_t reused = found_.tokens();
    if (groups().windowed(group) && request.chunk != 0 && tokens > reused && request.chunk < tokens - reused)
      tokens = reused + request.chunk;
    // One more for the copy of a tail that is another's.
    const bool spare = found_.source() != no_content && tokens > found_.tokens();
    return groups().blocks_for(group, tokens) + spare;
  }

  /// What opening a request takes, after a search for its content.
  void count(const open_request& request, admission& a) const noexcept {
    const block_pool& pool = blocks_.pool;
    a.reused_tokens = found_.tokens();
    a.new_blocks = a.revived_blocks = 0;
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      const std::uint32_t hits = found_.blocks(g);
      const bool head = found_.source() != no_content;
      const std::uint64_t needed = blocks_to_hold(request, g);
      if (needed > std::uint64_t{hits} + head) a.new_blocks += needed - hits - head;
      if (head && pool.state(index().block(found_.source(), g)) == block_state::evictable) ++a.revived_blocks;
      for (std::uint32_t i = hits; i-- > found_.first(g);) {
        if (pool.state(found_.block(g, i)) == block_state::evictable)
          ++a.revived_blocks;
        else if (!groups().windowed(g))
          break;  // what is before a block that is in use is in use
      }
    }
    a.needs = a.new_blocks + a.revived_blocks;
  }

  /// First token of `tokens` that is not in a full block of every chain.
  [[nodiscard]] std::uint32_t tail_start(std::uint32_t tokens) const noexcept {
    std::uint32_t start = tokens;
    for (std::uint32_t c = 0; c < groups().chains(); ++c) {
      const std::uint32_t first = tokens - groups().chain_remainder(c, tokens);
      if (first < start) start = first;
    }
    return start;
  }

  /// The content of a sequence's committed block i in a chain. O(groups); where that block is cached no longer,
  /// O(blocks after it).
  [[nodiscard]] content_id content_at(const sequence_state& s, std::uint32_t chain, std::uint64_t i) const noexcept {
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      const std::vector<block_id>& table = s.held[g].table;
      if (groups().chain(g) == chain && i < table.size() && index().contains(table[i]))
        return index().content(table[i]);
    }
    content_id at = s.heads[chain];
    for (std::uint64_t j = s.committed / groups().chain_block_size(chain); j > i + 1; --j) at = tree().parent(at);
    return at;
  }

  /// Gives `to` (which may be `from`) what commit has to know of the first `tokens` tokens of `from`.
  void carry_content(const sequence_state& from, sequence_state& to, std::uint32_t tokens) noexcept {
    const std::uint32_t committed = tokens < from.committed ? tokens : from.committed;
    const std::uint32_t start = tail_start(committed);
    const std::uint32_t size = committed - start;
    if (from.tail_start <= start) {
      const std::uint32_t skip = start - from.tail_start;
      if (&from != &to) {
        grow(to.tail, size);
        to.tail.resize(size);
      }
      for (std::uint32_t i = 0; i < size; ++i) to.tail[i] = from.tail[skip + i];
      to.tail.resize(size);
    } else {
      // The cut is in a block that was committed whole, in the chain whose newest block begins first.
      std::uint32_t chain = 0;
      while (committed - committed % groups().chain_block_size(chain) != start) ++chain;
      grow(to.tail, size);
      to.tail.resize(size);
      if (size != 0) {
        const content_view content =
            tree().content(content_at(from, chain, start / groups().chain_block_size(chain)), size);
        for (std::uint32_t i = 0; i < size; ++i) to.tail[i] = content[i];
      }
    }
    for (std::uint32_t c = 0; c < groups().chains(); ++c) {
      const std::uint32_t block_size = groups().chain_block_size(c);
      const std::uint32_t blocks = committed / block_size;
      content_id head = from.heads[c];
      if (blocks < from.committed / block_size)
        head = blocks == 0 ? tree().parent(content_at(from, c, 0)) : content_at(from, c, blocks - 1);
      tree().add_user(head);
      if (&from == &to) tree().drop_user(to.heads[c]);
      to.heads[c] = head;
    }
    to.tail_start = start;
    to.committed = committed;
  }

  /// `tokens` where a sequence can be cut to so many: its windows still have, or the index does, what the next query
  /// sees. Otherwise the fewest tokens that need nothing but what it holds.
  [[nodiscard]] std::uint64_t least_to_keep(const sequence_state& s, std::uint32_t tokens) const noexcept {
    bool restorable = true;
    std::uint64_t least = 0;
    for (std::uint32_t g = 0; g < groups().size(); ++g) {
      if (!groups().windowed(g)) continue;
      restorable = restorable && window_can_be_restored(s, g, tokens);
      const std::uint64_t held = groups().least_tokens(g, s.held[g].first);
      if (held > least) least = held;
    }
    if (restorable) return tokens;
    return least;
  }
  [[nodiscard]] bool window_can_be_restored(const sequence_state& s, std::uint32_t group,
                                            std::uint32_t tokens) const noexcept {
    const std::uint64_t first = groups().first_needed(group, tokens);
    std::uint64_t end = groups().blocks_for(group, tokens);
    if (end > s.held[group].first) end = s.held[group].first;
    if (first >= end) return true;
    if (end > s.committed / groups().block_size(group)) return false;
    content_id at = content_at(s, groups().chain(group), end - 1);
    for (std::uint64_t i = end; i-- > first; at = tree().parent(at))
      if (index().block(at, group) == null_block) return false;
    return true;
  }
  /// Takes back for `to`, a copy of `from` or itself, the blocks that the query after `tokens` tokens sees and that
  /// were given back as behind the window. Precondition: window_can_be_restored.
  void restore_window(const sequence_state& from, sequence_state& to, std::uint32_t group,
                      std::uint32_t tokens) noexcept {
    const std::uint64_t first = groups().first_needed(group, tokens);
    std::uint64_t end = groups().blocks_for(group, tokens);
    if (end > from.held[group].first) end = from.held[group].first;
    if (first >= end) return;
    content_id at = content_at(from, groups().chain(group), end - 1);
    for (std::uint64_t i = end; i-- > first; at = tree().parent(at)) {
      to.held[group].table[i] = index().block(at, group);
      blocks_.add_holder(to.held[group].table[i]);
    }
    to.held[group].first = static_cast<std::uint32_t>(first);
    ++to.held[group].version;
    to.changed();
  }

  /// The content of the block that begins at `first` in `tokens`, with a user more. The blocks of one commit come in
  /// order.
  content_id obtain_next(const sequence_state& s, std::uint32_t chain, content_view tokens,
                         std::size_t first) noexcept {
    const std::uint32_t size = groups().chain_block_size(chain);
    ahead& a = ahead_[chain];
    if (a.used == a.fingerprints.size()) {
      tree().expect(s.heads[chain], chain, tokens.sub(first, tokens.size() - first), a.fingerprints);
      a.used = 0;
    }
    return tree().obtain(s.heads[chain], chain, tokens.sub(first, size), a.fingerprints[a.used++]);
  }

  /// Keys the block that ends where the sequence is committed to.
  void commit_block(sequence_state& s, std::uint32_t group, content_id content) noexcept {
    block_id& entry = s.held[group].table[groups().block_of(group, s.committed) - 1];
    const block_id own = entry;
    const block_id cached = index().block(content, group);
    if (own == null_block || cached == own) return;
    if (cached != null_block) {
      blocks_.add_holder(cached);
      blocks_.note_reference(cached);
      retain(s, s.committed - groups().block_size(group), cached);
      entry = cached;
      ++s.held[group].version;
      s.changed(s.room);
      blocks_.let_go(own, s.last_step);
      return;
    }
    // Only after a broken precondition: the chain ends where a block was committed with other content.
    KVCACHE_ASSERT(!index().contains(own), "a shared block was committed before with other content");
    if (index().contains(own)) return;
    const content_id before = tree().parent(content);
    if (!groups().windowed(group) && !tree().is_root(before) && index().block(before, group) == null_block) return;
    blocks_.give_key(own, group, content);
    blocks_.note_reference(own);
    retain(s, s.committed - groups().block_size(group), own);
  }

  [[nodiscard]] static result<void> acceptable(std::span<const retention_range> ranges) noexcept {
    return check_retention(ranges, told_of_priorities<Eviction>);
  }
  /// Of the blocks that a sequence has committed and of those to come. A tail that is cached has other content too: it
  /// is borrowed, or was cut.
  void set_retention(sequence_state& s, std::span<const retention_range> ranges) noexcept {
    grow(s.retention, ranges.size());
    s.retention.assign(ranges.begin(), ranges.end());
    if (ranges.empty()) return;
    for (std::uint32_t g = 0; g < groups().size(); ++g)
      for (std::size_t i = s.held[g].first; i < groups().block_of(g, s.committed); ++i)
        if (index().contains(s.held[g].table[i])) retain(s, i * groups().block_size(g), s.held[g].table[i]);
  }
  /// Of a cached block that begins with a token.
  void retain(const sequence_state& s, std::uint64_t token, block_id block) noexcept {
    if (const retention_range* range = range_of(span_of(s.retention), token)) blocks_.retain(block, *range);
  }

  block_keeper<Eviction>& blocks_;
  sequence_table<Eviction> states_;

  /// Fingerprints of the blocks that a commit comes to next in a chain, and how many of them it has used.
  struct ahead {
    typename content_tree::fingerprints_ahead fingerprints{};
    std::size_t used = 0;
  };

  mutable prefix_search<Eviction> found_;
  std::vector<ahead> ahead_;  // per chain
  timed_pins<Eviction> pins_;
};

}  // namespace kvcache::detail
