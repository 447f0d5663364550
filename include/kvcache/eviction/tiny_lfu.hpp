// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/detail/block_lists.hpp>
#include <kvcache/types.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

namespace detail {

/// How often fingerprints were added of late: a count-min sketch of 4-bit counters, all halved after `sample` additions
/// for each counted item. A word of 15 counters is halved when it is next touched, or by a sweep that passes every word
/// before the next halving is due, so that no call does more than a few. 16 to 32 bytes an item.
class frequency_sketch {
 public:
  static constexpr std::uint32_t sample = 10;

  explicit frequency_sketch(std::uint32_t items)
      : words_(std::bit_ceil(items < line / 2 ? line : 2 * std::size_t{items})),
        period_(std::uint64_t{sample} * items) {}

  void add(std::uint64_t fingerprint) noexcept {
    for (const counter c : counters(fingerprint)) {
      words_[c.word] = aged(words_[c.word]);
      if ((words_[c.word] >> c.shift & most) != most) words_[c.word] += std::uint64_t{1} << c.shift;
    }
    if (added_ < words_.size()) words_[added_] = aged(words_[added_]);
    if (++added_ < period_) return;
    added_ = 0;
    epoch_ ^= epoch_bit;
  }
  /// At least as much as was added and is not aged away, 15 at most.
  [[nodiscard]] std::uint64_t estimate(std::uint64_t fingerprint) const noexcept {
    std::uint64_t least = most;
    for (const counter c : counters(fingerprint)) {
      const std::uint64_t count = aged(words_[c.word]) >> c.shift & most;
      if (count < least) least = count;
    }
    return least;
  }

 private:
  static constexpr std::uint32_t line = 8;  // words that one fingerprint's counters lie in, two for each
  static constexpr std::uint64_t most = 15;
  static constexpr std::uint64_t epoch_bit = std::uint64_t{1} << 60;
  struct counter {
    std::size_t word = 0;
    unsigned shift = 0;
  };

  [[nodiscard]] std::array<counter, 4> counters(std::uint64_t fingerprint) const noexcept {
    std::uint64_t hash = fingerprint * 0x9e3779b97f4a7c15u;
    hash = (hash ^ hash >> 32) * 0xbf58476d1ce4e5b9u;
    hash ^= hash >> 29;
    const std::size_t begin = (hash >> 32 << 3) & (words_.size() - 1);
    std::array<counter, 4> found{};
    for (std::size_t i = 0; i < found.size(); ++i) {
      const unsigned bits = hash >> 8 * i & 255;
      found[i] = {begin + 2 * i + (bits & 1), 4 * ((bits >> 1) * 15 >> 7)};
    }
    return found;
  }
  [[nodiscard]] std::uint64_t aged(std::uint64_t word) const noexcept {
    return (word & epoch_bit) == epoch_ ? word : (word >> 1 & 0x0777'7777'7777'7777u) | epoch_;
  }

  std::vector<std::uint64_t> words_;  // 15 counters, and in bit 60 the parity of halvings
  std::uint64_t period_;
  std::uint64_t added_ = 0;
  std::uint64_t epoch_ = 0;
};

}  // namespace detail

/// Admits by frequency (W-TinyLFU; Einziger, Friedman and Manes, TinyLFU: A Highly Efficient Cache Admission Policy,
/// ACM Transactions on Storage 2017): a new block passes through an LRU window of a hundredth of the pool; at its end
/// it meets the oldest of the main part, and whichever a sketch of recent frequencies counts less goes, the old one
/// where they are equal. The main part is a segmented LRU: used once there, used again there (four fifths). One
/// difference: of the oldest of the two segments the one that counts less is met, so that what was used again and is
/// dead gives way. The one order in which a parent may go before a cached child: it may lose where the child has won.
/// O(1) a call, 41 to 57 bytes a block. One thread at a time.
class tiny_lfu {
 public:
  static constexpr const char* name = "tiny_lfu";

  /// An empty order over the blocks 1 to `highest`.
  explicit tiny_lfu(block_id highest)
      : uses_(std::size_t{highest} + 1),
        order_(highest),
        sketch_(highest),
        window_room_(highest / window_share > 1 ? highest / window_share : 1),
        main_room_(highest - window_room_) {}

  /// A request uses the block.
  void reference(block_id block, std::uint64_t fingerprint, block_id) noexcept {
    sketch_.add(fingerprint);
    use& u = uses_[block];
    if (u.known && u.fingerprint == fingerprint) {
      if (u.segment == once) u.segment = again;
      return;
    }
    if (u.known) --count(u.segment);
    u = {fingerprint, window, true};
    ++in_window_;
  }
  /// The newest of its segment. Precondition: not in the order.
  void insert(block_id block) noexcept {
    order_.push(uses_[block].segment, block);
    while (order_.size(again) > std::uint64_t{main_room_} * 4 / 5) move(order_.oldest(again), once);
    leave_window();
  }
  /// Precondition: in the order.
  void erase(block_id block) noexcept { order_.erase(block); }
  /// Erases; where the oldest of the main part has lost, the winner takes its room. Precondition: in the order.
  void evict(block_id block) noexcept {
    const block_id winner =
        uses_[block].segment != window && in_window_ >= window_room_ && wins() ? order_.oldest(window) : null_block;
    order_.erase(block);
    --count(uses_[block].segment);
    uses_[block].known = false;
    full_ = true;
    if (winner != null_block) admit(winner);
    leave_window();
  }
  /// Whichever of the window's oldest and the main part's oldest is to go, or the null block where there is none.
  [[nodiscard]] block_id victim() const noexcept {
    const block_id candidate = order_.oldest(window);
    return candidate == null_block || wins() ? oldest_of_main() : candidate;
  }

 private:
  static constexpr std::uint8_t window = 0;
  static constexpr std::uint8_t once = 1;
  static constexpr std::uint8_t again = 2;
  static constexpr std::uint32_t window_share = 100;
  struct use {
    std::uint64_t fingerprint = 0;
    std::uint8_t segment = window;
    bool known = false;
  };

  /// Blocks of the window or of the main part, those in use among them.
  [[nodiscard]] std::uint32_t& count(std::uint8_t segment) noexcept {
    return segment == window ? in_window_ : in_main_;
  }
  /// Of the oldest of the main part's two segments the one that counts less.
  [[nodiscard]] block_id oldest_of_main() const noexcept {
    const block_id newer = order_.oldest(once);
    const block_id older = order_.oldest(again);
    if (newer == null_block || older == null_block) return newer == null_block ? older : newer;
    return sketch_.estimate(uses_[older].fingerprint) < sketch_.estimate(uses_[newer].fingerprint) ? older : newer;
  }
  /// The oldest of the window stays and the oldest of the main part goes: it counts no more, or the window has room for
  /// the block that is to come. False where either is missing.
  [[nodiscard]] bool wins() const noexcept {
    const block_id candidate = order_.oldest(window);
    const block_id oldest = oldest_of_main();
    if (candidate == null_block || oldest == null_block) return false;
    return in_window_ < window_room_ ||
           sketch_.estimate(uses_[candidate].fingerprint) >= sketch_.estimate(uses_[oldest].fingerprint);
  }
  void move(block_id block, std::uint8_t segment) noexcept {
    order_.erase(block);
    order_.push(segment, block);
    uses_[block].segment = segment;
  }
  void admit(block_id block) noexcept {
    move(block, once);
    --in_window_;
    ++in_main_;
  }
  /// Where the main part has room, what the window has too much goes there: all until the first eviction, then what
  /// would win.
  void leave_window() noexcept {
    while (in_window_ > window_room_ && in_main_ < main_room_ && order_.size(window) != 0 &&
           (!full_ || oldest_of_main() == null_block || wins()))
      admit(order_.oldest(window));
  }

  std::vector<use> uses_;  // by block
  detail::block_lists<3> order_;
  detail::frequency_sketch sketch_;
  std::uint32_t window_room_;
  std::uint32_t main_room_;
  std::uint32_t in_window_ = 0;
  std::uint32_t in_main_ = 0;
  bool full_ = false;  // a block was evicted
};

static_assert(eviction_policy<tiny_lfu>);

}  // namespace kvcache
