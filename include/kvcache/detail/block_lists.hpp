// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/types.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// `Lists` queues over the ids 1 to `highest`, an id in at most one of them, threaded through one array: every call is
/// O(1) and allocates nothing, 9 bytes an id.
template <std::uint32_t Lists>
class block_lists {
 public:
  explicit block_lists(block_id highest)
      : links_(std::size_t{highest} + 1 + Lists), list_(std::size_t{highest} + 1, nowhere), highest_(highest) {
    for (std::uint32_t list = 0; list < Lists; ++list) links_[end(list)] = {end(list), end(list)};
  }

  /// The newest of its list. Precondition: in no list.
  void push(std::uint32_t list, block_id block) noexcept {
    const block_id newest = links_[end(list)].previous;
    links_[block] = {newest, end(list)};
    links_[newest].next = block;
    links_[end(list)].previous = block;
    list_[block] = static_cast<std::uint8_t>(list);
    ++sizes_[list];
  }
  /// Precondition: in a list.
  void erase(block_id block) noexcept {
    const link gone = links_[block];
    links_[gone.previous].next = gone.next;
    links_[gone.next].previous = gone.previous;
    --sizes_[list_[block]];
    list_[block] = nowhere;
  }
  /// The oldest, or the null block where there is none.
  [[nodiscard]] block_id oldest(std::uint32_t list) const noexcept {
    const block_id block = links_[end(list)].next;
    return block > highest_ ? null_block : block;
  }
  /// The next younger in its list, or the null block where there is none. Precondition: in a list.
  [[nodiscard]] block_id younger(block_id block) const noexcept {
    const block_id next = links_[block].next;
    return next > highest_ ? null_block : next;
  }
  [[nodiscard]] std::uint32_t size(std::uint32_t list) const noexcept { return sizes_[list]; }
  [[nodiscard]] bool contains(block_id block) const noexcept { return list_[block] != nowhere; }
  /// Precondition: in a list.
  [[nodiscard]] std::uint32_t list(block_id block) const noexcept { return list_[block]; }

 private:
  static_assert(Lists < 255);
  static constexpr std::uint8_t nowhere = 255;
  struct link {
    block_id previous = null_block;
    block_id next = null_block;
  };

  /// Stands between the newest and the oldest of a list.
  [[nodiscard]] block_id end(std::uint32_t list) const noexcept { return highest_ + 1 + list; }

  std::vector<link> links_;
  std::vector<std::uint8_t> list_;
  std::array<std::uint32_t, Lists> sizes_{};
  block_id highest_;
};

}  // namespace kvcache::detail
