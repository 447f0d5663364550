// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/block_pool.hpp>
#include <kvcache/blocks/block_use.hpp>
#include <kvcache/blocks/event_log.hpp>
#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/blocks/prefix_index.hpp>
#include <kvcache/blocks/requests.hpp>
#include <kvcache/blocks/step_queue.hpp>
#include <kvcache/blocks/tail_pools.hpp>
#include <kvcache/blocks/time_to_live.hpp>
#include <kvcache/concepts.hpp>
#include <kvcache/detail/span_of.hpp>
#include <kvcache/error.hpp>
#include <kvcache/events.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvcache::detail {

/// Moves blocks between their states: what pool, index, eviction order and steps in flight have to agree on. A call
/// that lets go of blocks starts with new_batch() and ends with flush().
///
/// Its parts know nothing of policies and have theirs as `Owner` all the same: what is a template is compiled where
/// blocks are managed, and not for everyone who includes the umbrella.
template <class Eviction>
class block_keeper {
  using prefix_index = detail::prefix_index<Eviction>;

 public:
  explicit block_keeper(const block_manager_options& options)
      : groups(
            options.layer_groups,
            {.block_size = options.block_size, .tail_blocks = options.tail_blocks, .wide_tokens = options.wide_tokens}),
        pool(options.blocks),
        tails(groups, options.blocks),
        index(options.blocks, groups, options.hash_bits),
        steps(groups),
        uses(std::size_t{options.blocks} + 1),
        partial_reuse(checked_partial_reuse(options, groups)),
        unit_tokens_(checked_unit_tokens(options, groups)),
        policy_(options.blocks),
        lives_(options.blocks),
        events_(checked_events(options)),
        places_(std::size_t{options.blocks} + 1) {}
  // The queue of steps keeps the address of the groups.
  block_keeper(const block_keeper&) = delete;
  block_keeper& operator=(const block_keeper&) = delete;

  const layer_groups groups;
  block_pool pool;
  tail_pools<Eviction> tails;
  prefix_index index;
  step_queue<Eviction> steps;
  std::vector<block_use> uses;  // by block
  std::uint64_t evicted = 0;
  const bool partial_reuse;

  /// Precondition: a block is available.
  block_id allocate() noexcept {
    if (pool.counts().free == 0) {
      const block_id leaf = next_leaf();
      index.expect_end(leaf);
      if (groups.any_windowed() && !groups.windowed(index.group(leaf))) evict_useless(index.content(leaf));
      evict(leaf);
    }
    const block_id block = pool.take();
    uses[block] = {};
    return block;
  }

  /// Forgets all that is cached. Precondition: no block is referenced or held.
  void forget_all() noexcept {
    while (pool.counts().evictable != 0) {
      const block_id leaf = next_leaf();
      erase_evicted(leaf);
      lives_.forget(leaf);
      index.erase(leaf);
      set_free(leaf);
    }
    events_.cleared();
  }

  /// Caches a block; as prefix_index::insert.
  void give_key(block_id block, std::uint32_t group, content_id content) noexcept {
    index.insert(block, group, content);
    if (events_.enabled()) events_.stored(event_of(block));
  }
  [[nodiscard]] const event_log& events() const noexcept { return events_; }
  /// Calls `visit` with every cached block as if it were stored now, none before the one it follows. The number of the
  /// last event that this includes. O(contents * groups).
  template <class Visit>
  std::uint64_t visit_cached(Visit&& visit) const {
    index.tree().each([&](content_id content) {
      for (std::uint32_t g = 0; g < groups.size(); ++g)
        if (const block_id block = index.block(content, g); block != null_block) visit(event_of(block));
    });
    return events_.newest();
  }
  [[nodiscard]] Eviction& policy() noexcept { return policy_; }
  [[nodiscard]] const Eviction& policy() const noexcept { return policy_; }

  /// Takes back an allocation of which no use was made.
  void free_unused(block_id block) noexcept {
    const bool last = pool.drop_reference(block);
    KVCACHE_ASSERT(last, "a block of an unaccepted step has a second holder");
    if (last) set_free(block);
  }

  void add_holder(block_id block) noexcept {
    const block_state state = pool.state(block);
    if (state == block_state::evictable) {
      policy_.erase(block);
      lives_.stop(block);
      tails.wake(block);
      index.activate(block);
    } else if (state == block_state::held) {
      places_[block].place = 0;
    }
    pool.add_reference(block);
  }

  /// A request uses a cached, active block.
  void note_reference(block_id block) noexcept {
    if constexpr (told_of_references<Eviction>)
      policy_.reference(block, index.fingerprint(block), index.parent(block));
    else
      static_cast<void>(block);
  }
  /// A request begins. `hits` blocks of one layer group are cached of its content.
  void note_request(content_id root, std::uint32_t group, content_view content, std::uint32_t hits) noexcept {
    if constexpr (told_of_requests<Eviction>) {
      fingerprints_.clear();
      index.tree().fingerprints(root, groups.chain(group), content, fingerprints_);
      for (std::uint64_t& f : fingerprints_) f = prefix_index::in_group(f, group);
      policy_.open(span_of(fingerprints_), hits, groups.block_size(group) * unit_tokens_);
    } else {
      static_cast<void>(root), static_cast<void>(group), static_cast<void>(content), static_cast<void>(hits);
    }
  }

  /// What a request says of a block that it has just referenced.
  void retain(block_id block, const retention_range& range) noexcept {
    if constexpr (told_of_priorities<Eviction>)
      policy_.set_priority(block, range.priority, later(now_, range.duration));
    lives_.limit(block, range.time_to_live);
  }
  /// False where the time would go back, which it never does.
  bool set_time(std::uint64_t now) noexcept {
    if (now < now_) return false;
    if constexpr (told_of_time<Eviction>) {
      if (now != now_) policy_.advance(now);
    }
    now_ = now;
    return true;
  }
  /// Frees what has not been used for its time to live, and what follows it: that is not used either.
  void forget_expired() noexcept {
    new_batch();
    for (block_id block = lives_.due(now_); block != null_block; block = lives_.due(now_)) forget_subtree(block);
    flush();
  }

  void new_batch() noexcept { ++batches_; }

  /// One holder, whose newest step is `step_number`, gives the block up.
  void let_go(block_id block, std::uint64_t step_number) noexcept {
    block_use& use = uses[block];
    if (step_number > use.released_in) use.released_in = step_number;
    if (!pool.drop_reference(block)) return;
    if (!steps.in_flight(use.newest())) {
      settle(block);
      return;
    }
    step_record& r = steps.at(use.newest());
    hold(r.held, r.number, places_, block, r.held_batch != batches_);
    r.held_batch = batches_;
  }

  /// Takes the keys from a block and from all that follow it: its content is about to be overwritten.
  void forget_subtree(block_id block) noexcept {
    for (block_id at = block;;) {
      while (index.child(at) != null_block) at = index.child(at);
      const block_id parent = index.parent(at);
      forget(at);
      if (at == block) return;
      at = parent;
    }
  }

  /// Unkeyed blocks of one batch go in front of all others, the first that was let go at the very front.
  void flush() noexcept {
    for (std::size_t i = unkeyed_.size(); i-- > 0;) set_free(unkeyed_[i]);
    unkeyed_.clear();
  }

  /// The blocks of a step that ended go back batch by batch, as they would have when they were let go.
  void release_held(step_record& ended) noexcept {
    tails.release(ended.sealed);
    take_held(ended.held, ended.number, places_, [&](block_id block, bool first) {
      if (first) flush();
      settle(block);
    });
    flush();
  }

  /// The blocks of a step that was dropped wait for the step before it: that one may use them too.
  void pass_held(step_record& dropped, step_record& before) noexcept {
    for (const block_seal& s : dropped.sealed) before.sealed.push_back(s);
    dropped.sealed.clear();
    take_held(dropped.held, dropped.number, places_,
              [&](block_id block, bool first) { hold(before.held, before.number, places_, block, first); });
  }

 private:
  static bool checked_partial_reuse(const block_manager_options& options, const layer_groups& groups) {
    if (options.partial_reuse && groups.chains() != 1)
      raise<invalid_argument>("block manager: partial reuse over " + std::to_string(groups.chains()) +
                              " block sizes, 1 possible; give all layer groups one block size or turn it off");
    return options.partial_reuse;
  }

  static std::uint32_t checked_unit_tokens(const block_manager_options& options, const layer_groups& groups) {
    const std::uint64_t most = max_length / groups.largest();
    if (options.unit_tokens == 0 || options.unit_tokens > most)
      raise<invalid_argument>("block manager: " + std::to_string(options.unit_tokens) + " tokens a unit, from 1 to " +
                              std::to_string(most) + " possible; leave the default unless a unit is a run of tokens");
    return options.unit_tokens;
  }
  static std::size_t checked_events(const block_manager_options& options) {
    constexpr std::size_t most = std::size_t{1} << 30;
    if (options.events > most)
      raise<invalid_argument>("block manager: " + std::to_string(options.events) + " events to keep, at most " +
                              std::to_string(most) + " possible; keep what consumers fall behind by");
    return options.events;
  }

  void set_free(block_id block) noexcept {
    tails.drop(block);
    pool.put_back(block, block_state::free);
  }
  void drop_key(block_id block) noexcept {
    if (events_.enabled()) events_.removed(event_of(block));
    index.erase(block);
    lives_.forget(block);
  }
  /// Groups share contents, and have serials of their own all the same.
  [[nodiscard]] cache_event event_of(block_id block) const noexcept {
    const content_tree<Eviction>& tree = index.tree();
    const content_id content = index.content(block);
    const std::uint32_t group = index.group(block);
    cache_event e;
    e.number = events_.newest();
    e.content = tree.serial_of(content) * groups.size() + group;
    e.parent = tree.serial_of(tree.parent(content)) * groups.size() + group;
    e.fingerprint = tree.fingerprint(content);
    e.layer_group = group;
    e.block = block;
    e.tokens = groups.block_size(group);
    return e;
  }

  /// Frees a leaf to make room.
  void evict(block_id leaf) noexcept {
    erase_evicted(leaf);
    drop_key(leaf);
    set_free(leaf);
    ++evicted;
  }
  void erase_evicted(block_id leaf) noexcept {
    if constexpr (told_of_evictions<Eviction>)
      policy_.evict(leaf);
    else
      policy_.erase(leaf);
  }
  /// What windows hold of a content is found no more once a group that needs all of it has lost it.
  void evict_useless(content_id content) noexcept {
    for (std::uint32_t g = 0; g < groups.size(); ++g) {
      if (!groups.windowed(g)) continue;
      const block_id block = index.block(content, g);
      if (block != null_block && pool.state(block) == block_state::evictable) evict(block);
    }
  }

  /// What is to be evicted next. Only leaves go, so that a cached block never loses its head.
  [[nodiscard]] block_id next_leaf() const noexcept {
    block_id leaf = policy_.victim();
    KVCACHE_ASSERT(leaf != null_block, "neither a free block nor one to evict");
    while (index.child(leaf) != null_block) leaf = index.child(leaf);
    return leaf;
  }

  /// Held for the sake of children only, not of a step.
  [[nodiscard]] bool waits_for_children(block_id block) const noexcept {
    return pool.state(block) == block_state::held && places_[block].place == 0;
  }

  /// Where a block goes that nobody holds and no step touches. One with children in use stays `held` until they
  /// settle, so that evictable blocks have evictable descendants only. Sharing alone never leads there; a duplicate
  /// that gave way in one of several sequences that share its successors does.
  void settle(block_id block) noexcept {
    for (;;) {
      if (!index.contains(block)) {
        unkeyed_.push_back(block);
        return;
      }
      if (index.active_children(block) != 0) return;
      pool.put_back(block, block_state::evictable);
      tails.rest(block);
      policy_.insert(block);
      lives_.start(block, now_);
      block = index.deactivate(block);
      if (block == null_block || index.active_children(block) != 0 || !waits_for_children(block)) return;
    }
  }

  /// Takes the key from a block without children.
  void forget(block_id block) noexcept {
    block_id parent = null_block;
    if (pool.state(block) == block_state::evictable) {
      erase_evicted(block);
      unkeyed_.push_back(block);
    } else {
      // Policies hear of blocks that they keep, so it is one for a moment.
      if constexpr (told_of_evictions<Eviction>) {
        policy_.insert(block);
        policy_.evict(block);
      }
      parent = index.deactivate(block);
      if (waits_for_children(block)) unkeyed_.push_back(block);
    }
    drop_key(block);
    if (parent != null_block && waits_for_children(parent)) settle(parent);
  }

  std::uint32_t unit_tokens_;
  Eviction policy_;
  time_to_live<Eviction> lives_;
  event_log events_;
  std::uint64_t now_ = 0;
  std::vector<held_place> places_;  // by block
  std::uint64_t batches_ = 0;
  std::vector<block_id> unkeyed_;            // let go, to be free when the batch is whole
  std::vector<std::uint64_t> fingerprints_;  // of the request that begins
};

}  // namespace kvcache::detail
