// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/content_tree.hpp>
#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// Which cached block holds which content in which layer group. In a group that sees all tokens, the block before a
/// cached block is cached as long as it is; a group with a window may have lost it.
///
/// Blocks that someone holds, or that a step may touch, are `active`; the index counts active children, so that its
/// owner knows which unreferenced blocks can go. 16 bytes a block from the start, and as they come, for each node of
/// the tree, what the tree takes and 4 bytes a layer group. One thread at a time; calls of const members may overlap
/// each other. `Owner`: see block_keeper.
template <class Owner>
class prefix_index {
 public:
  /// For blocks 1 to `highest`. Raises as content_tree does. O(blocks).
  prefix_index(block_id highest, const layer_groups& groups, unsigned hash_bits)
      : groups_(&groups), tree_(groups, hash_bits, highest), entries_(std::size_t{highest} + 1) {
    blocks_.reserve((std::size_t{highest} + 2) * (groups.size() - 1));
  }

  /// What content there is, cached or held by sequences.
  [[nodiscard]] content_tree<Owner>& tree() noexcept { return tree_; }
  [[nodiscard]] const content_tree<Owner>& tree() const noexcept { return tree_; }

  /// The block that holds a content in a layer group, or the null block.
  [[nodiscard]] block_id block(content_id content, std::uint32_t group) const noexcept {
    if (group == 0) return tree_.block(content);
    const std::size_t i = place(content, group);
    return i < blocks_.size() ? blocks_[i] : null_block;
  }

  [[nodiscard]] bool contains(block_id block) const noexcept { return entries_[block].content != no_content; }
  /// Precondition, here and below: cached.
  [[nodiscard]] content_id content(block_id block) const noexcept { return entries_[block].content; }
  [[nodiscard]] std::uint32_t group(block_id block) const noexcept { return entries_[block].group; }
  /// Of the block's content, all before it, the extra keys and the layer group.
  [[nodiscard]] std::uint64_t fingerprint(block_id block) const noexcept {
    return in_group(tree_.fingerprint(content(block)), group(block));
  }
  /// What a content's fingerprint is as that of a block of one layer group.
  [[nodiscard]] static constexpr std::uint64_t in_group(std::uint64_t fingerprint, std::uint32_t group) noexcept {
    return fingerprint ^ group * 0x9e3779b97f4a7c15u;
  }

  /// The block that must stay as long as this one does: the one before it, or the null block where it is the first or
  /// its layers see a window only.
  [[nodiscard]] block_id parent(block_id block) const noexcept { return entries_[block].parent; }
  /// One of the blocks whose parent this one is, or the null block. Children whose block is gone stand behind those
  /// that have one, but where groups differ: O(1) in nearly all cases.
  [[nodiscard]] block_id child(block_id block) const noexcept {
    const entry& e = entries_[block];
    if (groups_->windowed(e.group)) return null_block;
    const content_id first = tree_.first_child(e.content);
    for (content_id at = first; at != no_content;) {
      if (const block_id b = this->block(at, e.group); b != null_block) return b;
      at = tree_.next_sibling(at);
      if (at == first) break;
    }
    return null_block;
  }
  [[nodiscard]] std::uint32_t active_children(block_id block) const noexcept { return entries_[block].active_children; }

  /// Caches a block, active, as that of a content. Preconditions: not cached; the content has no block in the group;
  /// where the group sees all tokens, the content before has one. O(1).
  void insert(block_id block, std::uint32_t group, content_id content) noexcept {
    set_block(content, group, block);
    entries_[block] = {content, group, null_block, 0};
    tree_.add_user(content);
    if (groups_->windowed(group)) return;
    tree_.move_first(content);
    const content_id before = tree_.parent(content);
    if (tree_.is_root(before)) return;
    entries_[block].parent = this->block(before, group);
    activate(block);
  }
  /// Forgets a block. Preconditions: no children, not active. O(1), and O(contents that go with it).
  void erase(block_id block) noexcept {
    const entry gone = entries_[block];
    set_block(gone.content, gone.group, null_block);
    entries_[block] = {};
    if (!tree_.last_user(gone.content) && !groups_->windowed(gone.group)) tree_.move_last(gone.content);
    tree_.drop_user(gone.content);
  }

  /// A hint that the block is erased soon, and the blocks before it one after another: what is evicted is mostly a
  /// chain from its end. Each call reads what the one before has asked for.
  KVCACHE_ALWAYS_INLINE void expect_end(block_id block) const noexcept {
    const block_id next = entries_[block].parent;
    const block_id second = entries_[next].parent;
    const block_id third = entries_[second].parent;
    const block_id fourth = entries_[third].parent;
    if (second != null_block) tree_.expect_end(entries_[second].content);
    if (third != null_block) tree_.prefetch(entries_[third].content);
    KVCACHE_PREFETCH(&entries_[fourth]);
  }

  /// Someone holds the block again.
  void activate(block_id block) noexcept {
    if (const block_id p = parent(block); p != null_block) ++entries_[p].active_children;
  }
  /// Nobody needs the block any more. Its parent, or the null block.
  block_id deactivate(block_id block) noexcept {
    const block_id p = parent(block);
    if (p != null_block) --entries_[p].active_children;
    return p;
  }

 private:
  struct entry {
    content_id content = no_content;
    std::uint32_t group = 0;
    block_id parent = null_block;
    std::uint32_t active_children = 0;
  };

  [[nodiscard]] std::size_t place(content_id content, std::uint32_t group) const noexcept {
    return std::size_t{content} * (groups_->size() - 1) + group - 1;
  }
  void set_block(content_id content, std::uint32_t group, block_id block) noexcept {
    if (group == 0) {
      tree_.block(content) = block;
      return;
    }
    const std::size_t i = place(content, group);
    if (i >= blocks_.size()) blocks_.resize(tree_.ids() * (groups_->size() - 1));
    blocks_[i] = block;
  }

  const layer_groups* groups_;
  content_tree<Owner> tree_;
  std::vector<entry> entries_;    // by block
  std::vector<block_id> blocks_;  // by content and group
};

}  // namespace kvcache::detail
