// SPDX-License-Identifier: Apache-2.0
// Part of block_manager.hpp: how blocks move between their states.

namespace kvcache {

template <class Eviction>
block_id block_manager<Eviction>::allocate() noexcept {
  if (pool_.counts().free == 0) {
    // Only leaves go, so that a cached block never loses its head.
    block_id leaf = policy_.victim();
    KVCACHE_ASSERT(leaf != null_block, "neither a free block nor one to evict");
    while (index_.child(leaf) != null_block) leaf = index_.child(leaf);
    policy_.erase(leaf);
    index_.erase(leaf);
    pool_.put_back(leaf, block_state::free);
    ++statistics_.evicted_blocks;
  }
  const block_id block = pool_.take();
  uses_[block] = {};
  return block;
}

template <class Eviction>
void block_manager<Eviction>::add_holder(block_id block) noexcept {
  if (state(block) == block_state::evictable) {
    policy_.erase(block);
    index_.activate(block);
  }
  uses_[block].held_at = 0;
  pool_.add_reference(block);
}

/// One holder, whose newest step is `step_number`, gives the block up.
template <class Eviction>
void block_manager<Eviction>::let_go(block_id block, std::uint64_t step_number) noexcept {
  detail::block_use& use = uses_[block];
  if (step_number > use.released_in) use.released_in = step_number;
  if (!pool_.drop_reference(block)) return;
  // A number beyond the newest step is that of a step that was dropped.
  const std::uint64_t last = use.newest() < newest_step() ? use.newest() : newest_step();
  if (last <= retired_) {
    settle(block);
    return;
  }
  record& r = *open_steps_[static_cast<std::size_t>(last - retired_ - 1)];
  detail::hold(r.held, uses_, block, r.held_batch != batches_);
  r.held_batch = batches_;
}

/// Where a block goes that nobody holds and no step touches. One with children in use stays `held` until they settle,
/// so that evictable blocks have evictable descendants only; sharing alone never leads there, but a duplicate that
/// gave way in one of several sequences that share its successors does.
template <class Eviction>
void block_manager<Eviction>::settle(block_id block) noexcept {
  for (;;) {
    if (!index_.contains(block)) {
      unkeyed_.push_back(block);
      return;
    }
    if (index_.active_children(block) != 0) return;
    pool_.put_back(block, block_state::evictable);
    policy_.insert(block);
    block = index_.deactivate(block);
    if (block == null_block || index_.active_children(block) != 0 || state(block) != block_state::held ||
        uses_[block].held_at != 0)
      return;
  }
}

/// Takes the key from a block without children.
template <class Eviction>
void block_manager<Eviction>::forget(block_id block) noexcept {
  block_id parent = null_block;
  if (state(block) == block_state::evictable) {
    policy_.erase(block);
    unkeyed_.push_back(block);
  } else {
    parent = index_.deactivate(block);
    if (state(block) == block_state::held && uses_[block].held_at == 0) unkeyed_.push_back(block);
  }
  index_.erase(block);
  if (parent != null_block && state(parent) == block_state::held && uses_[parent].held_at == 0) settle(parent);
}

/// Takes the keys from a block and from all that follow it: its content is about to be overwritten.
template <class Eviction>
void block_manager<Eviction>::forget_subtree(block_id block) noexcept {
  for (block_id at = block;;) {
    while (index_.child(at) != null_block) at = index_.child(at);
    const block_id parent = index_.parent(at);
    forget(at);
    if (at == block) return;
    at = parent;
  }
}

/// Unkeyed blocks of one call go in front of all others, the first released at the very front.
template <class Eviction>
void block_manager<Eviction>::flush_unkeyed() noexcept {
  for (std::size_t i = unkeyed_.size(); i-- > 0;) pool_.put_back(unkeyed_[i], block_state::free);
  unkeyed_.clear();
}

/// The blocks of a step that ended go back batch by batch, as they would have when they were released.
template <class Eviction>
void block_manager<Eviction>::release_held(detail::held_list& held) noexcept {
  for (std::size_t i = 0; i < held.size(); ++i) {
    if ((held[i] & tail_bit) != 0) flush_unkeyed();
    const block_id block = held[i] & ~tail_bit;
    if (uses_[block].held_at != i + 1) continue;
    uses_[block].held_at = 0;
    settle(block);
  }
  flush_unkeyed();
  held.clear();
}

/// Gives back the blocks of each group beyond the first keep(group), the last tokens' first.
template <class Eviction>
template <class Keep>
void block_manager<Eviction>::release_beyond(sequence_state& s, std::uint64_t step_number, Keep&& keep) noexcept {
  ++batches_;
  for (;;) {
    std::uint32_t group = groups_.size();
    std::uint64_t latest = 0;
    for (std::uint32_t g = 0; g < groups_.size(); ++g) {
      const std::uint64_t end = s.tables[g].size();
      if (end <= keep(g)) continue;
      const std::uint64_t start = (end - 1) * groups_.block_size(g);
      if (group != groups_.size() && start <= latest) continue;
      group = g;
      latest = start;
    }
    if (group == groups_.size()) break;
    const block_id block = s.tables[group].back();
    s.tables[group].pop_back();
    let_go(block, step_number);
  }
  flush_unkeyed();
}

}  // namespace kvcache
