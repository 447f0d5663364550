// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/content_hash.hpp>
#include <kvcache/blocks/content_store.hpp>
#include <kvcache/blocks/hash_table.hpp>
#include <kvcache/blocks/key_sets.hpp>
#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvcache {

/// Cached blocks by what they hold. A forest: each cached block has the serial that its content was given, the serial
/// of its parent (the block before it, or its set of extra keys and layer group), and its content. Those two are its
/// identity; serials are never reused, so neither a block id that is handed out again nor a hash that collides can
/// make two contents one. The block before a cached block is cached as long as it is.
///
/// Blocks that someone holds, or that a step may touch, are `active`; the index counts active children, so that its
/// owner knows which unreferenced blocks can go. 56 bytes a block from the start, 8 a cached token and 16 a cached
/// block as they come. One thread at a time; calls of const members may overlap each other.
class prefix_index {
 public:
  using key_set = detail::key_sets::index;

  /// A cached chain: its last block (the null block: nothing) and its length in blocks.
  struct chain {
    block_id last = null_block;
    std::uint32_t blocks = 0;
  };

  /// A parent's serial, and the fingerprint of the chain that ends with a content after it.
  struct identity {
    serial parent = 0;
    std::uint64_t fingerprint = 0;
  };

  /// For blocks 1 to `highest`. Hashes are cut to `hash_bits`; raises invalid_argument for more than 64. O(blocks).
  prefix_index(block_id highest, const layer_groups& groups, unsigned hash_bits)
      : nodes_(std::size_t{highest} + 1),
        contents_(highest, groups.largest()),
        sets_(groups.size()),
        hash_mask_(checked_mask(hash_bits)),
        next_serial_(serial{1} + groups.size()) {}

  [[nodiscard]] bool contains(block_id block) const noexcept { return nodes_[block].own != 0; }
  /// Of the block's content and all before it. Precondition: cached.
  [[nodiscard]] std::uint64_t fingerprint(block_id block) const noexcept { return nodes_[block].fingerprint; }

  /// Of what stands before a chain's first block.
  [[nodiscard]] identity root(key_set keys, std::uint32_t group) const noexcept {
    return {sets_.serial_of(keys, group), sets_.fingerprint(keys, group)};
  }
  /// Of a cached block, as the parent of those after it.
  [[nodiscard]] identity as_parent(block_id block) const noexcept {
    return {nodes_[block].own, nodes_[block].fingerprint};
  }
  /// Of `content` after a parent. O(content).
  [[nodiscard]] static identity identify(const identity& parent, content_view content) noexcept {
    return {parent.parent, detail::chain_fingerprint(parent.fingerprint, content)};
  }
  /// The block that holds `content` after the parent of `id`, or the null block. O(content).
  [[nodiscard]] block_id find(const identity& id, content_view content) const noexcept {
    return table_.find(narrowed(id.fingerprint), [&](block_id block) {
      return nodes_[block].parent_serial == id.parent &&
             detail::equal(contents_.get(block, static_cast<std::uint32_t>(content.size())), content);
    });
  }

  /// The longest cached chain that `content` begins with, at most `limit` blocks. O(content). In three passes over a
  /// few blocks at a time, each of which asks for the memory that the next one reads: only serials are compared one
  /// after another.
  [[nodiscard]] chain longest(key_set keys, std::uint32_t group, std::uint32_t block_size, content_view content,
                              std::uint64_t limit) const noexcept {
    constexpr std::size_t most = 16;
    std::uint64_t fingerprints[most];
    chain found;
    identity parent = root(keys, group);
    std::uint64_t fingerprint = parent.fingerprint;
    const auto part = [&](std::size_t i) { return content.sub(i * block_size, block_size); };
    while (found.blocks < limit) {
      const std::size_t first = found.blocks;
      const std::size_t count = limit - first < most ? static_cast<std::size_t>(limit - first) : most;
      for (std::size_t i = 0; i < count; ++i) {
        fingerprint = detail::chain_fingerprint(fingerprint, part(first + i));
        fingerprints[i] = fingerprint;
        table_.prefetch(narrowed(fingerprint));
      }
      for (std::size_t i = 0; i < count; ++i) {
        const block_id candidate = table_.find(narrowed(fingerprints[i]), [](block_id) { return true; });
        if (candidate == null_block) break;
        KVCACHE_PREFETCH(&nodes_[candidate]);
        contents_.prefetch(candidate);
      }
      for (std::size_t i = 0; i < count; ++i) {
        const block_id next = find({parent.parent, fingerprints[i]}, part(first + i));
        if (next == null_block) return found;
        found.last = next;
        ++found.blocks;
        parent.parent = nodes_[next].own;
      }
    }
    return found;
  }

  /// Appends the fingerprints of all full blocks of `content`, cached or not. O(content).
  void fingerprints(key_set keys, std::uint32_t group, std::uint32_t block_size, content_view content,
                    std::vector<std::uint64_t>& out) const noexcept {
    std::uint64_t fingerprint = sets_.fingerprint(keys, group);
    for (std::size_t end = block_size; end <= content.size(); end += block_size) {
      fingerprint = detail::chain_fingerprint(fingerprint, content.sub(end - block_size, block_size));
      out.push_back(fingerprint);
    }
  }

  /// Caches a block, active, as the first one under `keys`. Preconditions: not cached; `id` is that of its content
  /// after the serial of the keys, and not cached either. O(content).
  void insert_first(block_id block, key_set keys, const identity& id, content_view content) noexcept {
    sets_.add_user(keys);
    insert(block, id, content);
    nodes_[block].parent = tail_bit | keys;
  }
  /// Caches a block, active, as the one after `parent`. Preconditions as above; the parent is cached. O(content).
  void insert_after(block_id block, block_id parent, const identity& id, content_view content) noexcept {
    insert(block, id, content);
    node& n = nodes_[block];
    node& p = nodes_[parent];
    n.parent = parent;
    n.next = p.first_child;
    if (n.next != null_block) nodes_[n.next].previous = block;
    p.first_child = block;
    ++p.active_children;
  }

  /// Forgets a block. Preconditions: cached, without children, not active. O(content).
  void erase(block_id block) noexcept {
    node& n = nodes_[block];
    table_.erase(narrowed(n.fingerprint), block);
    if ((n.parent & tail_bit) != 0) {
      sets_.drop_user(n.parent & ~tail_bit);
    } else {
      if (n.next != null_block) nodes_[n.next].previous = n.previous;
      (n.previous != null_block ? nodes_[n.previous].next : nodes_[n.parent].first_child) = n.next;
    }
    n = {};
  }

  /// The block before it, or the null block where it is the first. Precondition, here and below: cached.
  [[nodiscard]] block_id parent(block_id block) const noexcept {
    const block_id p = nodes_[block].parent;
    return (p & tail_bit) != 0 ? null_block : p;
  }
  /// One of the blocks after it, or the null block.
  [[nodiscard]] block_id child(block_id block) const noexcept { return nodes_[block].first_child; }
  [[nodiscard]] std::uint32_t active_children(block_id block) const noexcept { return nodes_[block].active_children; }
  /// The first `size` units of the block's content.
  [[nodiscard]] content_view content(block_id block, std::uint32_t size) const noexcept {
    return contents_.get(block, size);
  }

  /// Someone holds the block again.
  void activate(block_id block) noexcept {
    if (const block_id p = parent(block); p != null_block) ++nodes_[p].active_children;
  }
  /// Nobody needs the block any more. Its parent, or the null block.
  block_id deactivate(block_id block) noexcept {
    const block_id p = parent(block);
    if (p != null_block) --nodes_[p].active_children;
    return p;
  }

  /// The set of extra keys, or key_sets::none where no open sequence and no cached block has it.
  [[nodiscard]] key_set find_keys(std::span<const extra_key> keys) const noexcept { return sets_.find(keys); }
  [[nodiscard]] static constexpr key_set no_keys() noexcept { return detail::key_sets::none; }
  /// The set, with an open sequence more.
  key_set acquire_keys(std::span<const extra_key> keys) noexcept { return sets_.acquire(keys, next_serial_); }
  void add_user(key_set keys) noexcept { sets_.add_user(keys); }
  void drop_user(key_set keys) noexcept { sets_.drop_user(keys); }

 private:
  struct node {
    serial own = 0;
    serial parent_serial = 0;
    block_id parent = null_block;  // with tail_bit: a set of keys
    block_id first_child = null_block;
    block_id next = null_block;  // sibling
    block_id previous = null_block;
    std::uint32_t active_children = 0;
    std::uint64_t fingerprint = 0;
  };

  /// As the table knows it.
  [[nodiscard]] std::uint32_t narrowed(std::uint64_t fingerprint) const noexcept {
    return static_cast<std::uint32_t>(fingerprint) & hash_mask_;
  }

  static std::uint32_t checked_mask(unsigned hash_bits) {
    if (hash_bits > 64)
      detail::raise<invalid_argument>(
          "prefix index: " + std::to_string(hash_bits) +
          " hash bits, at most 64 possible; leave the default unless collisions are wanted");
    return hash_bits >= 32 ? ~0u : (1u << hash_bits) - 1u;
  }
  void insert(block_id block, const identity& id, content_view content) noexcept {
    node& n = nodes_[block];
    n = {};
    n.own = next_serial_++;
    n.parent_serial = id.parent;
    n.fingerprint = id.fingerprint;
    contents_.put(block, content);
    table_.insert(narrowed(n.fingerprint), block);
  }

  std::vector<node> nodes_;
  detail::content_store contents_;
  detail::key_sets sets_;
  detail::hash_table table_;
  std::uint32_t hash_mask_;
  serial next_serial_;
};

}  // namespace kvcache
