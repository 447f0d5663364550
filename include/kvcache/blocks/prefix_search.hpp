// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/content_id.hpp>
#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/blocks/prefix_index.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// The longest prefix of some content that is cached in every layer group. One search after another, each of which
/// leaves what it found until the next; allocates nothing once its arrays have grown. `Owner`: see block_keeper.
template <class Owner>
class prefix_search {
  using prefix_index = detail::prefix_index<Owner>;

 public:
  prefix_search(const layer_groups& groups, const prefix_index& index)
      : groups_(groups), index_(index), nodes_(groups.chains()) {}

  /// Looks at the first `limit` tokens of `content` under `root` (no_content: nothing is cached). With `partial`, also
  /// for a cached block of whose content only the head is asked for. O(content).
  void run(content_id root, content_view content, std::uint64_t limit, bool partial) noexcept {
    root_ = root;
    source_ = no_content;
    whole_ = limit - limit % groups_.stride();
    for (std::uint32_t c = 0; c < groups_.chains(); ++c) {
      nodes_[c].clear();
      const std::uint32_t size = groups_.chain_block_size(c);
      if (root != no_content)
        index_.tree().follow(root, c, content, whole_ / size, nodes_[c],
                             [&](content_id id) { return in_full_groups(id, c); });
      if (has_full_group(c)) shorten(std::uint64_t{nodes_[c].size()} * size);
    }
    // Every group that sees all has `whole_` tokens, and so any fewer. What one window cuts off, another may not end
    // at.
    for (std::uint64_t before = whole_ + 1; whole_ != before;) {
      before = whole_;
      for (std::uint32_t g = 0; g < groups_.size(); ++g)
        if (groups_.windowed(g)) shorten(warm_in_window(g, whole_));
    }
    tokens_ = whole_;
    if (partial && root != no_content && whole_ < limit) look_for_head(content.sub(whole_, limit - whole_));
  }
  /// As if run without `partial`.
  void whole_blocks_only() noexcept {
    source_ = no_content;
    tokens_ = whole_;
  }

  [[nodiscard]] std::uint32_t tokens() const noexcept { return static_cast<std::uint32_t>(tokens_); }
  /// Of those, in whole blocks.
  [[nodiscard]] std::uint64_t whole() const noexcept { return whole_; }
  /// The content of whose head the remaining tokens are, or no_content.
  [[nodiscard]] content_id source() const noexcept { return source_; }
  /// Of the whole blocks of a chain, how many have nodes. What a window needs none of may have fewer than all.
  [[nodiscard]] std::uint64_t known(std::uint32_t chain) const noexcept {
    const std::uint64_t all = whole_ / groups_.chain_block_size(chain);
    return nodes_[chain].size() < all ? nodes_[chain].size() : all;
  }
  /// The newest of those, or the root.
  [[nodiscard]] content_id head(std::uint32_t chain) const noexcept {
    return known(chain) == 0 ? root_ : nodes_[chain][known(chain) - 1];
  }
  /// Whole blocks of a group, those behind its window included.
  [[nodiscard]] std::uint32_t blocks(std::uint32_t group) const noexcept {
    return static_cast<std::uint32_t>(whole_ / groups_.block_size(group));
  }
  /// The first of them that the next query sees.
  [[nodiscard]] std::uint32_t first(std::uint32_t group) const noexcept {
    return static_cast<std::uint32_t>(groups_.first_needed(group, tokens_));
  }
  /// Precondition: i < blocks(group). The null block only behind a window.
  [[nodiscard]] block_id block(std::uint32_t group, std::uint32_t i) const noexcept {
    const std::vector<content_id>& nodes = nodes_[groups_.chain(group)];
    return i < nodes.size() ? index_.block(nodes[i], group) : null_block;
  }

 private:
  [[nodiscard]] bool in_full_groups(content_id id, std::uint32_t chain) const noexcept {
    for (std::uint32_t g = 0; g < groups_.size(); ++g)
      if (groups_.chain(g) == chain && !groups_.windowed(g) && index_.block(id, g) == null_block) return false;
    return true;
  }
  [[nodiscard]] bool has_full_group(std::uint32_t chain) const noexcept {
    for (std::uint32_t g = 0; g < groups_.size(); ++g)
      if (groups_.chain(g) == chain && !groups_.windowed(g)) return true;
    return false;
  }
  void shorten(std::uint64_t tokens) noexcept {
    tokens -= tokens % groups_.stride();
    if (tokens < whole_) whole_ = tokens;
  }

  /// The most tokens, up to `limit`, after which a query finds all blocks of its window cached. O(blocks).
  [[nodiscard]] std::uint64_t warm_in_window(std::uint32_t group, std::uint64_t limit) const noexcept {
    const std::uint32_t size = groups_.block_size(group);
    std::uint64_t tokens = limit;
    std::uint64_t cached_from = tokens / size;  // blocks from here up to `tokens` are
    while (tokens != 0 && cached_from > groups_.first_needed(group, tokens)) {
      --cached_from;
      if (block(group, static_cast<std::uint32_t>(cached_from)) != null_block) continue;
      tokens = cached_from * size;
      tokens -= tokens % groups_.stride();
      cached_from = tokens / size;
    }
    return tokens;
  }

  /// Among the newest blocks after the whole ones, the one that begins with most of `rest`. The number looked at is
  /// bounded, since a prompt that all share can have any number of continuations.
  void look_for_head(content_view rest) noexcept {
    constexpr int most = 64;
    const content_tree<Owner>& tree = index_.tree();
    const std::uint32_t size = groups_.block_size(0);
    const std::size_t asked = rest.size() < size ? rest.size() : size;
    std::size_t longest = 0;
    const content_id first = tree.first_child(head(0));
    content_id at = first;
    for (int i = 0; i < most && at != no_content; ++i) {
      const content_view there = tree.content(at, size);
      std::size_t equal = 0;
      while (equal < asked && there[equal] == rest[equal]) ++equal;
      if (equal > longest && in_all_groups(at)) {
        longest = equal;
        source_ = at;
      }
      at = tree.next_sibling(at);
      if (at == first) break;
    }
    tokens_ = whole_ + longest;
  }
  [[nodiscard]] bool in_all_groups(content_id id) const noexcept {
    for (std::uint32_t g = 0; g < groups_.size(); ++g)
      if (index_.block(id, g) == null_block) return false;
    return true;
  }

  const layer_groups& groups_;
  const prefix_index& index_;
  std::vector<std::vector<content_id>> nodes_;  // per chain
  content_id root_ = no_content;
  content_id source_ = no_content;
  std::uint64_t whole_ = 0;
  std::uint64_t tokens_ = 0;
};

}  // namespace kvcache::detail
