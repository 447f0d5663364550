// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/error.hpp>
#include <kvcache/types.hpp>

#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace kvcache {

/// Layers that share one block table.
struct layer_group {
  static constexpr std::uint32_t full = ~0u;

  std::uint32_t block_size = 16;  ///< tokens in a block
  std::uint32_t window = full;    ///< newest tokens that a query sees, its own included; full: all of them
};

/// Most tokens that a sequence can have: lengths are 32 bit.
inline constexpr std::uint64_t max_length = (std::numeric_limits<std::uint32_t>::max)();

/// The layer groups of a pool, checked. A prefix counts as cached where every group has what the next query sees of it,
/// so its length is a multiple of what all block sizes divide.
class layer_groups {
 public:
  /// No groups given: one of `block_size`. Raises invalid_argument on a block size or window of 0.
  layer_groups(std::span<const layer_group> groups, std::uint32_t block_size) {
    if (groups.empty())
      groups_.push_back({{block_size}, 0});
    else
      for (const layer_group& g : groups) groups_.push_back({g, 0});
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      entry& e = groups_[i];
      if (e.group.block_size == 0) refuse(i, "block size 0, at least 1 needed; give the tokens that a block holds");
      if (e.group.window == 0)
        refuse(i, "window 0, at least 1 needed; a query sees its own token, and layer_group::full is for all");
      if (e.group.block_size > largest_) largest_ = e.group.block_size;
      // A stride longer than any sequence is as good as any other such stride.
      const std::uint64_t common = stride_ / std::gcd(stride_, std::uint64_t{e.group.block_size});
      stride_ = common > max_length / e.group.block_size ? max_length + 1 : common * e.group.block_size;
      while (e.chain < chains_.size() && chains_[e.chain] != e.group.block_size) ++e.chain;
      if (e.chain == chains_.size()) chains_.push_back(e.group.block_size);
    }
  }

  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(groups_.size()); }
  [[nodiscard]] std::uint32_t block_size(std::uint32_t layer_group_index) const noexcept {
    return at(layer_group_index).group.block_size;
  }
  /// Whether a query sees only the newest tokens.
  [[nodiscard]] bool windowed(std::uint32_t layer_group_index) const noexcept {
    return at(layer_group_index).group.window != layer_group::full;
  }
  /// The largest block size.
  [[nodiscard]] std::uint32_t largest() const noexcept { return largest_; }
  /// Least common multiple of the block sizes.
  [[nodiscard]] std::uint64_t stride() const noexcept { return stride_; }

  /// Different block sizes: groups that share one cut content into the same blocks.
  [[nodiscard]] std::uint32_t chains() const noexcept { return static_cast<std::uint32_t>(chains_.size()); }
  [[nodiscard]] std::uint32_t chain(std::uint32_t layer_group_index) const noexcept {
    return at(layer_group_index).chain;
  }
  [[nodiscard]] std::uint32_t chain_block_size(std::uint32_t chain_index) const noexcept {
    return chains_[chain_index];
  }

  /// The first block that the query after `tokens` tokens sees; those before it lie behind the window.
  [[nodiscard]] std::uint64_t first_needed(std::uint32_t layer_group_index, std::uint64_t tokens) const noexcept {
    const layer_group& g = at(layer_group_index).group;
    return windowed(layer_group_index) && tokens >= g.window ? (tokens - g.window + 1) / g.block_size : 0;
  }
  /// The fewest tokens after which a query sees nothing before block `first`.
  [[nodiscard]] std::uint64_t least_tokens(std::uint32_t layer_group_index, std::uint64_t first) const noexcept {
    const layer_group& g = at(layer_group_index).group;
    return first == 0 ? 0 : first * g.block_size + g.window - 1;
  }

  /// Blocks of one group that hold `tokens` tokens.
  [[nodiscard]] std::uint64_t blocks_for(std::uint32_t layer_group_index, std::uint64_t tokens) const noexcept {
    const std::uint32_t size_of_block = block_size(layer_group_index);
    return tokens / size_of_block + (tokens % size_of_block != 0);
  }
  /// Blocks of all groups that hold `tokens` tokens. O(groups).
  [[nodiscard]] std::uint64_t blocks_for(std::uint64_t tokens) const noexcept {
    std::uint64_t sum = 0;
    for (std::uint32_t g = 0; g < size(); ++g) sum += blocks_for(g, tokens);
    return sum;
  }
  /// Most blocks of one group that a sequence of `tokens` tokens holds at once where a step computes at most `chunk` of
  /// them (0: all) and steps do not overlap: in a window group, the window before the chunk, the chunk, and one block
  /// since neither begins with a block.
  [[nodiscard]] std::uint64_t most_blocks(std::uint32_t layer_group_index, std::uint64_t tokens,
                                          std::uint64_t chunk) const noexcept {
    const std::uint64_t all = blocks_for(layer_group_index, tokens);
    if (!windowed(layer_group_index) || chunk == 0) return all;
    const std::uint64_t seen = std::uint64_t{at(layer_group_index).group.window} - 1;
    if (chunk > tokens) chunk = tokens;
    const std::uint64_t some = blocks_for(layer_group_index, seen + chunk) + 1;
    return some < all ? some : all;
  }

 private:
  struct entry {
    layer_group group;
    std::uint32_t chain = 0;
  };

  static void refuse(std::size_t layer_group_index, const char* why) {
    detail::raise<invalid_argument>("layer group " + std::to_string(layer_group_index) + ": " + why);
  }
  [[nodiscard]] const entry& at(std::uint32_t layer_group_index) const noexcept {
    KVCACHE_ASSERT(layer_group_index < size(), "no such layer group");
    return groups_[layer_group_index];
  }

  std::vector<entry> groups_;
  std::vector<std::uint32_t> chains_;  // block sizes
  std::uint32_t largest_ = 0;
  std::uint64_t stride_ = 1;
};

}  // namespace kvcache
