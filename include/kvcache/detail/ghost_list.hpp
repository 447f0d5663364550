// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/block_lists.hpp>
#include <kvcache/types.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// Names a ghost; 0 is none.
using ghost_id = std::uint32_t;

/// Fingerprints of blocks that were evicted, in `Lists` queues that share room for `capacity`; the longest gone is
/// forgotten first. Found by open addressing with linear probing, at most half full, taken out by shifting followers
/// back (Knuth, The Art of Computer Programming 3, 6.4, algorithm R). O(1) a call on average with fingerprints that
/// spread, no allocation after the constructor; 25 to 33 bytes a ghost.
template <std::uint32_t Lists = 1>
class ghost_list {
 public:
  explicit ghost_list(std::uint32_t capacity)
      : order_(capacity),
        fingerprints_(std::size_t{capacity} + 1),
        slots_(std::bit_ceil(2 * std::size_t{capacity} + 2)),
        shift_(64u - static_cast<unsigned>(std::bit_width(slots_.size() - 1))),
        capacity_(capacity) {}

  [[nodiscard]] ghost_id find(std::uint64_t fingerprint) const noexcept { return slots_[slot(fingerprint)]; }

  /// The newest of its list; where there is no room the oldest of the list, else of another, gives way. A fingerprint
  /// that is already here moves. The ghost's id, or 0 where the capacity is 0.
  ghost_id push(std::uint32_t list, std::uint64_t fingerprint) noexcept {
    if (capacity_ == 0) return 0;
    if (const ghost_id same = find(fingerprint)) erase(same);
    if (used_ == capacity_ && !pop(list))
      for (std::uint32_t other = 0; other < Lists && !pop(other);) ++other;
    ghost_id ghost = unused_;
    if (ghost == 0) {
      ghost = ++touched_;
    } else {
      unused_ = static_cast<ghost_id>(fingerprints_[ghost]);
    }
    fingerprints_[ghost] = fingerprint;
    order_.push(list, ghost);
    slots_[slot(fingerprint)] = ghost;
    ++used_;
    return ghost;
  }
  /// Forgets the oldest of a list; false where there is none.
  bool pop(std::uint32_t list) noexcept {
    const ghost_id oldest = order_.oldest(list);
    if (oldest == 0) return false;
    erase(oldest);
    return true;
  }
  /// Precondition: `find` or `push` has given it and it is not forgotten since.
  void erase(ghost_id ghost) noexcept {
    std::size_t hole = slot(fingerprints_[ghost]);
    for (std::size_t i = (hole + 1) & mask(); slots_[i] != 0; i = (i + 1) & mask()) {
      const std::size_t home = this->home(fingerprints_[slots_[i]]);
      // The entry may move back where the hole lies between its home and it.
      if (((i - home) & mask()) >= ((i - hole) & mask())) {
        slots_[hole] = slots_[i];
        hole = i;
      }
    }
    slots_[hole] = 0;
    order_.erase(ghost);
    fingerprints_[ghost] = unused_;
    unused_ = ghost;
    --used_;
  }
  [[nodiscard]] std::uint32_t list(ghost_id ghost) const noexcept { return order_.list(ghost); }
  [[nodiscard]] std::uint32_t size(std::uint32_t list) const noexcept { return order_.size(list); }
  [[nodiscard]] std::uint32_t capacity() const noexcept { return capacity_; }

 private:
  [[nodiscard]] std::size_t mask() const noexcept { return slots_.size() - 1; }
  [[nodiscard]] std::size_t home(std::uint64_t fingerprint) const noexcept {
    return static_cast<std::size_t>((fingerprint * 0x9e3779b97f4a7c15u) >> shift_);
  }
  /// Where the fingerprint is, or where it would go.
  [[nodiscard]] std::size_t slot(std::uint64_t fingerprint) const noexcept {
    std::size_t i = home(fingerprint);
    while (slots_[i] != 0 && fingerprints_[slots_[i]] != fingerprint) i = (i + 1) & mask();
    return i;
  }

  block_lists<Lists> order_;
  std::vector<std::uint64_t> fingerprints_;  // by ghost; of an unused one: the next unused
  std::vector<ghost_id> slots_;
  unsigned shift_;
  std::uint32_t capacity_;
  std::uint32_t used_ = 0;
  std::uint32_t touched_ = 0;  // ghosts from 1 to here have been in use
  ghost_id unused_ = 0;
};

}  // namespace kvcache::detail
