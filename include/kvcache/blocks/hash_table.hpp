// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/content_id.hpp>
#include <kvcache/detail/config.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvcache::detail {

/// Contents by a 32-bit hash: open addressing with linear probing, at most half full; an entry is taken out by shifting
/// its followers back (Knuth, The Art of Computer Programming 3, 6.4, algorithm R), so there are no tombstones. Doubles
/// when full, which costs O(entries) once; it never shrinks. `Owner`: see block_keeper.
template <class Owner>
class hash_table {
 public:
  /// Starts a search for `hash`. Calls `same(id)` on contents with that hash until it says yes. That one, or
  /// no_content. O(1) on average with a hash that spreads.
  template <class Same>
  [[nodiscard]] content_id find(std::uint32_t hash, Same&& same) const noexcept {
    for (std::size_t i = hash & mask(); slots_[i].id != no_content; i = (i + 1) & mask())
      if (slots_[i].hash == hash && same(slots_[i].id)) return slots_[i].id;
    return no_content;
  }
  /// A hint that a search for `hash` starts soon.
  KVCACHE_ALWAYS_INLINE void prefetch(std::uint32_t hash) const noexcept { KVCACHE_PREFETCH(&slots_[hash & mask()]); }
  void insert(std::uint32_t hash, content_id id) noexcept {
    if (2 * (used_ + 1) > slots_.size()) grow();
    ++used_;
    place({id, hash});
  }
  /// Precondition: it was inserted with this hash.
  void erase(std::uint32_t hash, content_id id) noexcept {
    std::size_t hole = hash & mask();
    while (slots_[hole].id != id) hole = (hole + 1) & mask();
    for (std::size_t i = (hole + 1) & mask(); slots_[i].id != no_content; i = (i + 1) & mask()) {
      const std::size_t home = slots_[i].hash & mask();
      // The entry may move back where the hole lies between its home and it.
      if (((i - home) & mask()) >= ((i - hole) & mask())) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole] = {};
    --used_;
  }

 private:
  struct slot {
    content_id id = no_content;
    std::uint32_t hash = 0;
  };

  [[nodiscard]] std::size_t mask() const noexcept { return slots_.size() - 1; }
  void place(slot s) noexcept {
    std::size_t i = s.hash & mask();
    while (slots_[i].id != no_content) i = (i + 1) & mask();
    slots_[i] = s;
  }
  void grow() noexcept {
    const std::vector<slot> old = std::exchange(slots_, std::vector<slot>(slots_.size() * 2));
    for (const slot& s : old)
      if (s.id != no_content) place(s);
  }

  std::vector<slot> slots_ = std::vector<slot>(64);
  std::size_t used_ = 0;
};

}  // namespace kvcache::detail
