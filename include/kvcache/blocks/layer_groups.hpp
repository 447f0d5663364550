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
  std::uint32_t block_size = 16;  ///< tokens in a block
};

/// Most tokens that a sequence can have: lengths are 32 bit.
inline constexpr std::uint64_t max_length = (std::numeric_limits<std::uint32_t>::max)();

/// The layer groups of a pool, checked. A prefix counts as cached where every group has it, so its length is a
/// multiple of what all block sizes divide.
class layer_groups {
 public:
  /// No groups given: one of `block_size`. Raises invalid_argument on a block size of 0.
  layer_groups(std::span<const layer_group> groups, std::uint32_t block_size) {
    if (groups.empty())
      groups_.push_back({block_size});
    else
      groups_.assign(groups.begin(), groups.end());
    for (const layer_group& g : groups_) {
      if (g.block_size == 0)
        detail::raise<invalid_argument>("layer group " + std::to_string(&g - groups_.data()) +
                                        ": block size 0, at least 1 needed; give the tokens that a block holds");
      if (g.block_size > largest_) largest_ = g.block_size;
      // A stride longer than any sequence is as good as any other such stride.
      const std::uint64_t common = stride_ / std::gcd(stride_, std::uint64_t{g.block_size});
      stride_ = common > max_length / g.block_size ? max_length + 1 : common * g.block_size;
    }
  }

  [[nodiscard]] std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(groups_.size()); }
  [[nodiscard]] std::uint32_t block_size(std::uint32_t layer_group_index) const noexcept {
    KVCACHE_ASSERT(layer_group_index < size(), "no such layer group");
    return groups_[layer_group_index].block_size;
  }
  /// The largest block size.
  [[nodiscard]] std::uint32_t largest() const noexcept { return largest_; }
  /// Least common multiple of the block sizes.
  [[nodiscard]] std::uint64_t stride() const noexcept { return stride_; }

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

 private:
  std::vector<layer_group> groups_;
  std::uint32_t largest_ = 0;
  std::uint64_t stride_ = 1;
};

}  // namespace kvcache
