// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// A heap of ids 1 to `highest` (of blocks, say) by key, the least on top, that finds each by its id: four below each,
/// since at a million a level costs a cache miss. O(log n), no allocation but for `reach`; an entry and 4 bytes an id.
/// Keys that are all different make the order unique.
template <class Key>
class id_heap {
 public:
  explicit id_heap(std::uint32_t highest = 0) { reach(highest); }
  /// Makes room for ids up to `highest`. O(highest).
  void reach(std::uint32_t highest) {
    entries_.resize(std::size_t{highest} + 1);
    places_.resize(std::size_t{highest} + 1);
  }

  /// Precondition: not in the heap.
  void insert(std::uint32_t id, const Key& key) noexcept { rise(++size_, {key, id}); }
  /// Precondition: in the heap.
  void erase(std::uint32_t id) noexcept {
    const std::uint32_t hole = places_[id];
    places_[id] = 0;
    const entry last = entries_[size_--];
    if (last.id != id) settle(hole, last);
  }
  /// Precondition: in the heap.
  void change(std::uint32_t id, const Key& key) noexcept { settle(places_[id], {key, id}); }

  [[nodiscard]] bool contains(std::uint32_t id) const noexcept { return places_[id] != 0; }
  /// Precondition: in the heap.
  [[nodiscard]] const Key& key(std::uint32_t id) const noexcept { return entries_[places_[id]].key; }
  /// The id of the least key, or 0 where there is none.
  [[nodiscard]] std::uint32_t least() const noexcept { return size_ == 0 ? 0 : entries_[1].id; }

 private:
  struct entry {
    Key key{};
    std::uint32_t id = 0;
  };

  [[nodiscard]] static std::uint32_t above(std::uint32_t place) noexcept { return (place + 2) / 4; }
  void put(std::uint32_t place, const entry& e) noexcept {
    entries_[place] = e;
    places_[e.id] = place;
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
