// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/content_hash.hpp>
#include <kvcache/blocks/content_id.hpp>
#include <kvcache/blocks/content_store.hpp>
#include <kvcache/blocks/extra_key.hpp>
#include <kvcache/blocks/hash_table.hpp>
#include <kvcache/blocks/key_sets.hpp>
#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace kvcache::detail {

/// What blocks can be found by: a tree of contents, a node for each run of block_size tokens after all that is before
/// it, and a root for each set of extra keys. Layer groups with equal block sizes share their nodes; each block size
/// has its own `chain` of them below the same roots.
///
/// A node's identity is its parent, its chain and its content, compared whole; a hash only narrows. Each got a serial
/// that is never used again, and is there as long as it has users: blocks, nodes after it, and sequences whose
/// newest full block it is. So a node whose parent has gone cannot be, and ids of nodes that went can be used again.
///
/// 64 bytes a node, 8 a token and 16 a node in the table. One thread at a time; const members may overlap each other.
/// `Owner`: see block_keeper.
template <class Owner>
class content_tree {
  using key_sets = detail::key_sets<Owner>;

 public:
  using fingerprints_ahead = std::array<std::uint64_t, 8>;

  /// Hashes are cut to `hash_bits`; raises invalid_argument for more than 64. Room for `expected` nodes is set aside.
  content_tree(const layer_groups& groups, unsigned hash_bits, std::size_t expected)
      : groups_(&groups), contents_(groups.largest()), hash_mask_(checked_mask(hash_bits)) {
    nodes_.reserve(expected + 2);
    nodes_.resize(empty_root);
    static_cast<void>(new_node());
    nodes_[empty_root].fingerprint = key_sets::hash_of({});
    nodes_[empty_root].parent = root_bit;
    nodes_[empty_root].users = 1;  // stays for good
  }

  /// One more than the highest id so far.
  [[nodiscard]] std::size_t ids() const noexcept { return nodes_.size(); }

  /// What stands before all content under these keys, or no_content where nobody uses them. O(keys^2 + bytes).
  [[nodiscard]] content_id root(std::span<const extra_key> keys) const noexcept {
    if (keys.empty()) return empty_root;
    const key_set_id set = sets_.find(keys);
    return set == no_key_set ? no_content : sets_.root(set);
  }
  /// The same, made where it is not there. It goes unless it gets a user at once.
  content_id obtain_root(std::span<const extra_key> keys) noexcept {
    if (keys.empty()) return empty_root;
    const key_set_id known = sets_.find(keys);
    if (known != no_key_set) return sets_.root(known);
    const content_id id = new_node();
    const key_set_id set = sets_.acquire(keys);
    sets_.set_root(set, id);
    nodes_[id].parent = root_bit | set;
    nodes_[id].fingerprint = sets_.hash(set);
    return id;
  }
  [[nodiscard]] bool is_root(content_id id) const noexcept { return (nodes_[id].parent & root_bit) != 0; }

  /// The node before. Precondition: no root.
  [[nodiscard]] content_id parent(content_id id) const noexcept { return nodes_[id].parent; }
  [[nodiscard]] serial serial_of(content_id id) const noexcept { return nodes_[id].own; }
  /// Of the content, all before it and the extra keys: equal for equal content at any time.
  [[nodiscard]] std::uint64_t fingerprint(content_id id) const noexcept { return nodes_[id].fingerprint; }
  /// The first `size` units. Precondition: no root.
  [[nodiscard]] content_view content(content_id id, std::uint32_t size) const noexcept {
    return contents_.get(id, size);
  }

  /// The node of `content` after `parent`, made where it is not there, with one user more. O(content).
  content_id obtain(content_id parent, std::uint32_t chain, content_view content) noexcept {
    return obtain(parent, chain, content, chain_fingerprint(before(parent, chain), content));
  }
  content_id obtain(content_id parent, std::uint32_t chain, content_view content, std::uint64_t fingerprint) noexcept {
    content_id id = find(parent, chain, fingerprint, content);
    if (id == no_content) {
      id = new_node();
      nodes_[id].parent = parent;
      nodes_[id].chain = chain;
      nodes_[id].fingerprint = fingerprint;
      link_first(id);
      add_user(parent);
      contents_.put(id, content);
      table_.insert(narrowed(fingerprint), id);
    }
    add_user(id);
    return id;
  }
  /// Fingerprints of the first few blocks of `content` after `parent`, which will be obtained one by one: what that
  /// reads is asked for here. O(content looked at).
  void expect(content_id parent, std::uint32_t chain, content_view content, fingerprints_ahead& out) const noexcept {
    const std::uint32_t size = groups_->chain_block_size(chain);
    std::uint64_t fingerprint = before(parent, chain);
    for (std::size_t i = 0; i < out.size() && (i + 1) * size <= content.size(); ++i) {
      fingerprint = chain_fingerprint(fingerprint, content.sub(i * size, size));
      out[i] = fingerprint;
      table_.prefetch(narrowed(fingerprint));
      if (i >= free_.size()) continue;
      const content_id next = free_[free_.size() - 1 - i];  // where a new node would be
      KVCACHE_PREFETCH(&nodes_[next]);
      contents_.prefetch(next);
    }
  }
  // Hints that a node's members are read soon, and then that it goes.
  KVCACHE_ALWAYS_INLINE void prefetch(content_id id) const noexcept { KVCACHE_PREFETCH(&nodes_[id]); }
  KVCACHE_ALWAYS_INLINE void expect_end(content_id id) const noexcept {
    table_.prefetch(narrowed(nodes_[id].fingerprint));
  }

  void add_user(content_id id) noexcept { ++nodes_[id].users; }
  [[nodiscard]] bool last_user(content_id id) const noexcept { return nodes_[id].users == 1; }
  /// One user less. A node without users goes, and so on with those before it. O(nodes that go).
  void drop_user(content_id id) noexcept {
    while (--nodes_[id].users == 0) {
      const content_id before = nodes_[id].parent;
      if ((before & root_bit) != 0) {
        sets_.drop_user(before & ~root_bit);
        free_.push_back(id);
        return;
      }
      unlink(id);
      table_.erase(narrowed(nodes_[id].fingerprint), id);
      free_.push_back(id);
      id = before;
    }
  }

  /// Appends to `out` the nodes after `root` that `content` begins with, at most `limit` and only as long as
  /// `wanted(id)` says so. O(content). In three passes over some nodes at a time, each of which asks for the memory
  /// that the next one reads.
  template <class Wanted>
  void follow(content_id root, std::uint32_t chain, content_view content, std::uint64_t limit,
              std::vector<content_id>& out, Wanted&& wanted) const noexcept {
    constexpr std::size_t most = 64;
    std::size_t next = 16;  // first, since often nothing is there
    std::uint64_t fingerprints[most];
    content_id candidates[most];
    content_id at = root;
    std::uint64_t fingerprint = before(root, chain);
    const std::uint32_t size = groups_->chain_block_size(chain);
    const auto part = [&](std::size_t i) { return content.sub(i * size, size); };
    for (std::size_t first = 0, count = 0; first < limit; first += count) {
      count = limit - first < next ? static_cast<std::size_t>(limit - first) : next;
      next = most;
      for (std::size_t i = 0; i < count; ++i) {
        fingerprint = chain_fingerprint(fingerprint, part(first + i));
        fingerprints[i] = fingerprint;
        table_.prefetch(narrowed(fingerprint));
      }
      std::size_t found = 0;
      for (; found < count; ++found) {
        const content_id candidate = table_.find(narrowed(fingerprints[found]), [](content_id) { return true; });
        if (candidate == no_content) break;
        candidates[found] = candidate;
        KVCACHE_PREFETCH(&nodes_[candidate]);
        contents_.prefetch(candidate);
      }
      for (std::size_t i = 0; i < found; ++i) {
        // Mostly the first with the hash is the one.
        at = is(candidates[i], at, chain, part(first + i)) ? candidates[i]
                                                           : find(at, chain, fingerprints[i], part(first + i));
        if (at == no_content || !wanted(at)) return;
        out.push_back(at);
      }
      if (found < count) return;
    }
  }

  /// Appends the fingerprints of all full blocks of `content` after `root`, there or not. O(content).
  void fingerprints(content_id root, std::uint32_t chain, content_view content,
                    std::vector<std::uint64_t>& out) const noexcept {
    const std::uint32_t size = groups_->chain_block_size(chain);
    std::uint64_t fingerprint = before(root, chain);
    for (std::size_t end = size; end <= content.size(); end += size) {
      fingerprint = chain_fingerprint(fingerprint, content.sub(end - size, size));
      out.push_back(fingerprint);
    }
  }

  /// Calls `visit` with every node but the roots, none before the one it follows. O(nodes), allocates nothing.
  template <class Visit>
  void each(Visit&& visit) const {
    const auto below = [&](content_id root) {
      for (content_id at = nodes_[root].first_child; at != no_content;) {
        visit(at);
        if (nodes_[at].first_child != no_content) {
          at = nodes_[at].first_child;
          continue;
        }
        while (at != root && nodes_[at].next == nodes_[nodes_[at].parent].first_child) at = nodes_[at].parent;
        at = at == root ? no_content : nodes_[at].next;
      }
    };
    below(empty_root);
    sets_.each_root(below);
  }

  // The nodes after a node form a ring, of which first_child is one.
  [[nodiscard]] content_id first_child(content_id id) const noexcept { return nodes_[id].first_child; }
  [[nodiscard]] content_id next_sibling(content_id id) const noexcept { return nodes_[id].next; }
  /// The block that holds the content in layer group 0; here since it is asked for when the node is.
  [[nodiscard]] block_id& block(content_id id) noexcept { return nodes_[id].block; }
  [[nodiscard]] block_id block(content_id id) const noexcept { return nodes_[id].block; }
  /// The node becomes the first or the last of its siblings. Precondition: no root.
  void move_first(content_id id) noexcept {
    if (nodes_[nodes_[id].parent].first_child == id) return;
    unlink(id);
    link_first(id);
  }
  void move_last(content_id id) noexcept {
    move_first(id);
    nodes_[nodes_[id].parent].first_child = nodes_[id].next;
  }

 private:
  struct alignas(64) node {
    serial own = 0;
    std::uint64_t fingerprint = 0;
    content_id parent = no_content;  // of a root: its set, and root_bit
    std::uint32_t chain = 0;
    std::uint32_t users = 0;
    content_id first_child = no_content;
    content_id next = no_content;
    content_id previous = no_content;
    block_id block = null_block;
  };
  static constexpr content_id root_bit = 0x8000'0000u;
  static constexpr content_id empty_root = 1;

  [[nodiscard]] std::uint64_t before(content_id parent, std::uint32_t chain) const noexcept {
    return is_root(parent) ? mix(nodes_[parent].fingerprint + chain) : nodes_[parent].fingerprint;
  }
  [[nodiscard]] content_id find(content_id parent, std::uint32_t chain, std::uint64_t fingerprint,
                                content_view content) const noexcept {
    return table_.find(narrowed(fingerprint), [&](content_id id) { return is(id, parent, chain, content); });
  }
  /// Whether a node is the one of `content` after `parent`.
  [[nodiscard]] bool is(content_id id, content_id parent, std::uint32_t chain, content_view content) const noexcept {
    return nodes_[id].parent == parent && nodes_[id].chain == chain &&
           equal(contents_.get(id, static_cast<std::uint32_t>(content.size())), content);
  }

  content_id new_node() noexcept {
    content_id id = static_cast<content_id>(nodes_.size());
    if (free_.empty()) {
      nodes_.push_back({});
    } else {
      id = free_.back();
      free_.pop_back();
      nodes_[id] = {};
    }
    nodes_[id].own = ++serials_;
    return id;
  }
  void link_first(content_id id) noexcept {
    node& n = nodes_[id];
    content_id& first = nodes_[n.parent].first_child;
    if (first == no_content) {
      n.next = n.previous = id;
    } else {
      n.next = first;
      n.previous = nodes_[first].previous;
      nodes_[n.previous].next = id;
      nodes_[first].previous = id;
    }
    first = id;
  }
  void unlink(content_id id) noexcept {
    const node& n = nodes_[id];
    content_id& first = nodes_[n.parent].first_child;
    if (n.next == id) {
      first = no_content;
      return;
    }
    nodes_[n.previous].next = n.next;
    nodes_[n.next].previous = n.previous;
    if (first == id) first = n.next;
  }

  /// As the table knows it.
  [[nodiscard]] std::uint32_t narrowed(std::uint64_t fingerprint) const noexcept {
    return static_cast<std::uint32_t>(fingerprint) & hash_mask_;
  }
  static std::uint32_t checked_mask(unsigned hash_bits) {
    if (hash_bits > 64)
      raise<invalid_argument>("prefix index: " + std::to_string(hash_bits) +
                              " hash bits, at most 64 possible; leave the default unless collisions are wanted");
    return hash_bits >= 32 ? ~0u : (1u << hash_bits) - 1u;
  }

  const layer_groups* groups_;
  std::vector<node> nodes_;
  std::vector<content_id> free_;  // a stack
  content_store<Owner> contents_;
  key_sets sets_;
  hash_table<Owner> table_;
  std::uint32_t hash_mask_;
  serial serials_ = 0;
};

}  // namespace kvcache::detail
