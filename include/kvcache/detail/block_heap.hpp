// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// A heap of blocks 1 to `highest` by key, the least on top, that finds a block by its id: four below each, since at a
/// million blocks a level costs a cache miss. O(log n), no allocation but for `reach`; an entry and 4 bytes a
/// block. Keys that are all different make the order unique.
template <class Key>
class block_heap {
 public:
  explicit block_heap(block_id highest = 0) { reach(highest); }
  /// Makes room for ids up to `highest`. O(highest).
  void reach(block_id highest) {
    entries_.resize(std::size_t{highest} + 1);
    places_.resize(std::size_t{highest} + 1);
  }

  /// Precondition: not in the heap.
  void insert(block_id block, const Key& key) noexcept { rise(++size_, {key, block}); }
  /// Precondition: in the heap.
  void erase(block_id block) noexcept {
    const std::uint32_t hole = places_[block];
    places_[block] = 0;
    const entry last = entries_[size_--];
    if (last.block != block) settle(hole, last);
  }
  /// Precondition: in the heap.
  void change(block_id block, const Key& key) noexcept { settle(places_[block], {key, block}); }

  [[nodiscard]] bool contains(block_id block) const noexcept { return places_[block] != 0; }
  /// Precondition: in the heap.
  [[nodiscard]] const Key& key(block_id block) const noexcept { return entries_[places_[block]].key; }
  /// The block of the least key, or the null block where there is none.
  [[nodiscard]] block_id least() const noexcept { return size_ == 0 ? null_block : entries_[1].block; }

 private:
  struct entry {
    Key key{};
    block_id block = null_block;
  };

  [[nodiscard]] static std::uint32_t above(std::uint32_t place) noexcept { return (place + 2) / 4; }
  void put(std::uint32_t place, const entry& e) noexcept {
    entries_[place] = e;
    places_[e.block] = place;
  }
  void rise(std::uint32_t place, const entry& e) noexcept {
    for (; place > 1 && e.key < entries_[above(place)].key; place = above(place)) put(place, entries_[above(place)]);
    put(place, e);
  }
  void settle(std::uint32_t place, const entry& e) noexcept {
    for (;;) {
      const std::uint64_t first = 4 * std::uint64_t{place} - 2;
      if (first > size_) break;
      auto least = static_cast<std::uint32_t>(first);
      for (std::uint32_t i = least + 1; i < first + 4 && i <= size_; ++i)
        if (entries_[i].key < entries_[least].key) least = i;
      if (!(entries_[least].key < e.key)) break;
      put(place, entries_[least]);
      place = least;
    }
    rise(place, e);
  }

  std::vector<entry> entries_;  // from 1; below n lie 4n - 2 to 4n + 1
  std::vector<std::uint32_t> places_;
  std::uint32_t size_ = 0;
};

}  // namespace kvcache::detail
