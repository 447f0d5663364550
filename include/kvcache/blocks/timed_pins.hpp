// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/id_heap.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// Which sequences are closed at which time. O(log n) a call for those, O(1) for others; 28 bytes for each place that
/// sequences with a time have had. `Owner`: see block_keeper.
template <class Owner>
class timed_pins {
 public:
  void add(sequence_id pin, std::uint64_t expires) noexcept {
    if (pin.index >= ids_.size()) {
      ids_.resize(std::size_t{pin.index} + 1 + pin.index / 2);
      expiries_.reach(static_cast<std::uint32_t>(ids_.size()));
    }
    ids_[pin.index] = pin;
    expiries_.insert(pin.index + 1, expires);
  }
  /// A sequence is closed, one of these or another.
  void remove(std::uint32_t index) noexcept {
    if (index < ids_.size() && expiries_.contains(index + 1)) expiries_.erase(index + 1);
  }
  /// One whose time is over, or null.
  [[nodiscard]] const sequence_id* due(std::uint64_t now) const noexcept {
    const std::uint32_t first = expiries_.least();
    return first != 0 && expiries_.key(first) <= now ? &ids_[first - 1] : nullptr;
  }

 private:
  std::vector<sequence_id> ids_;     // by index
  id_heap<std::uint64_t> expiries_;  // by index + 1
};

}  // namespace kvcache::detail
