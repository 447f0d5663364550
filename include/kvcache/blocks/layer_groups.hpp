// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/error.hpp>
#include <kvcache/types.hpp>

#include <bit>
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
  /// Blocks of the tail pool, where the dtype seals whole blocks; 0 where it does not. See tail_blocks_for.
  std::uint32_t tail_blocks = 0;
  /// First tokens of each sequence that stay at 16 bits, rounded up to blocks, for as long as a sequence holds them;
  /// after that, until their place in the tail pool is needed.
  std::uint32_t wide_tokens = 0;
};

/// Blocks of a tail pool that suffice for so many sequences at once where a step computes at most `step_tokens` tokens:
/// each sequence has a block that is not full, one more that a step goes on to and its first ones, and the blocks that
/// a step fills wait there until they are sealed: when the next step is begun already, as `prepare` does it.
[[nodiscard]] constexpr std::uint64_t tail_blocks_for(std::uint64_t sequences, std::uint64_t step_tokens,
                                                      std::uint32_t block_size, std::uint32_t steps_in_flight = 1,
                                                      std::uint32_t wide_tokens = 0) noexcept {
  KVCACHE_ASSERT(block_size > 0 && steps_in_flight > 0, "tail_blocks_for: no block size, or no step in flight");
  const std::uint64_t wide = (std::uint64_t{wide_tokens} + block_size - 1) / block_size;
  return sequences * (1 + wide) + 2 * std::uint64_t{steps_in_flight} * (step_tokens / block_size + sequences);
}

namespace detail {

/// Divides by a number that is fixed at run time: a shift where that is a power of two, as block sizes mostly are. A
/// division takes as long as all else that a decode costs in bookkeeping.
class divisor {
 public:
  constexpr explicit divisor(std::uint32_t value) noexcept
      : value_(value), shift_(std::has_single_bit(value) ? static_cast<unsigned>(std::countr_zero(value)) : no_shift) {}

  [[nodiscard]] constexpr std::uint32_t value() const noexcept { return value_; }
  [[nodiscard]] constexpr std::uint64_t quotient(std::uint64_t n) const noexcept {
    return shift_ != no_shift ? n >> shift_ : n / value_;
  }
  [[nodiscard]] constexpr std::uint32_t remainder(std::uint64_t n) const noexcept {
    return static_cast<std::uint32_t>(n - quotient(n) * value_);
  }
  /// Rounded up.
  [[nodiscard]] constexpr std::uint64_t covering(std::uint64_t n) const noexcept { return quotient(n + value_ - 1); }

 private:
  static constexpr unsigned no_shift = ~0u;
  std::uint32_t value_;
  unsigned shift_;
};

}  // namespace detail

/// Most tokens that a sequence can have: lengths are 32 bit.
inline constexpr std::uint64_t max_length = (std::numeric_limits<std::uint32_t>::max)();

/// The layer groups of a pool, checked. A prefix counts as cached where every group has what the next query sees of it,
/// so its length is a multiple of what all block sizes divide.
class layer_groups {
 public:
  /// No groups given: `only`. Raises invalid_argument on a block size or window of 0, and on tail blocks that cannot
  /// be.
  layer_groups(std::span<const layer_group> groups, const layer_group& only) {
    if (groups.empty())
      groups_.push_back({only, detail::divisor(only.block_size)});
    else
      for (const layer_group& g : groups) groups_.push_back({g, detail::divisor(g.block_size)});
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      entry& e = groups_[i];
      if (e.group.block_size == 0) refuse(i, "block size 0, at least 1 needed; give the tokens that a block holds");
      if (e.group.window == 0)
        refuse(i, "window 0, at least 1 needed; a query sees its own token, and layer_group::full is for all");
      if (e.group.tail_blocks > max_blocks)
        refuse(i, "more tail blocks than the 2147483646 that a table can name; see tail_blocks_for");
      if (e.group.tail_blocks == 0 && e.group.wide_tokens != 0)
        refuse(
            i,
            "first tokens at 16 bits, but no tail pool that they could lie in; set tail_blocks, or wide_tokens to 0");
      any_sealed_ = any_sealed_ || e.group.tail_blocks != 0;
      if (e.group.block_size > largest_) largest_ = e.group.block_size;
      // A stride longer than any sequence is as good as any other such stride.
      const std::uint64_t common = stride_ / std::gcd(stride_, std::uint64_t{e.group.block_size});
      stride_ = common > max_length / e.group.block_size ? max_length + 1 : common * e.group.block_size;
      while (e.chain < chains_.size() && chains_[e.chain].value() != e.group.block_size) ++e.chain;
      if (e.chain == chains_.size()) chains_.push_back(e.size);
      any_windowed_ = any_windowed_ || e.group.window != layer_group::full;
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
  /// Newest tokens that a query sees; layer_group::full: all.
  [[nodiscard]] std::uint32_t window(std::uint32_t layer_group_index) const noexcept {
    return at(layer_group_index).group.window;
  }
  [[nodiscard]] bool any_windowed() const noexcept { return any_windowed_; }
  /// Blocks of a group's tail pool; 0: its blocks are not sealed.
  [[nodiscard]] std::uint32_t tail_blocks(std::uint32_t layer_group_index) const noexcept {
    return at(layer_group_index).group.tail_blocks;
  }
  /// First blocks of a sequence that stay in the tail pool.
  [[nodiscard]] std::uint64_t wide_blocks(std::uint32_t layer_group_index) const noexcept {
    return blocks_for(layer_group_index, at(layer_group_index).group.wide_tokens);
  }
  [[nodiscard]] bool any_sealed() const noexcept { return any_sealed_; }
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
    return chains_[chain_index].value();
  }
  /// Tokens beyond the last full block.
  [[nodiscard]] std::uint32_t chain_remainder(std::uint32_t chain_index, std::uint64_t tokens) const noexcept {
    return chains_[chain_index].remainder(tokens);
  }

  /// The block that token number `token` is in, and its place there.
  [[nodiscard]] std::uint64_t block_of(std::uint32_t layer_group_index, std::uint64_t token) const noexcept {
    return at(layer_group_index).size.quotient(token);
  }
  [[nodiscard]] std::uint32_t offset_in_block(std::uint32_t layer_group_index, std::uint64_t token) const noexcept {
    return at(layer_group_index).size.remainder(token);
  }

  /// The first block that the query after `tokens` tokens sees; those before it lie behind the window.
  [[nodiscard]] std::uint64_t first_needed(std::uint32_t layer_group_index, std::uint64_t tokens) const noexcept {
    const entry& e = at(layer_group_index);
    return tokens >= e.group.window && e.group.window != layer_group::full
               ? e.size.quotient(tokens - e.group.window + 1)
               : 0;
  }
  /// The fewest tokens after which a query sees nothing before block `first`.
  [[nodiscard]] std::uint64_t least_tokens(std::uint32_t layer_group_index, std::uint64_t first) const noexcept {
    const layer_group& g = at(layer_group_index).group;
    return first == 0 ? 0 : first * g.block_size + g.window - 1;
  }

  /// Blocks of one group that hold `tokens` tokens.
  [[nodiscard]] std::uint64_t blocks_for(std::uint32_t layer_group_index, std::uint64_t tokens) const noexcept {
    return at(layer_group_index).size.covering(tokens);
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
    detail::divisor size;
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
  std::vector<detail::divisor> chains_;  // block sizes
  bool any_windowed_ = false;
  bool any_sealed_ = false;
  std::uint32_t largest_ = 0;
  std::uint64_t stride_ = 1;
};

}  // namespace kvcache
