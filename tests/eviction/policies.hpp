// SPDX-License-Identifier: Apache-2.0
// Policies that no engine would choose: the block manager has to keep its rules under them all the same.
#pragma once

#include <kvcache/concepts.hpp>

#include <cstdint>
#include <vector>

namespace kvcache_test {

/// The newest goes first.
class mru {
 public:
  static constexpr const char* name = "mru";
  explicit mru(kvcache::block_id highest) { order_.reserve(highest); }
  void insert(kvcache::block_id block) noexcept { order_.push_back(block); }
  void erase(kvcache::block_id block) noexcept { std::erase(order_, block); }
  [[nodiscard]] kvcache::block_id victim() const noexcept {
    return order_.empty() ? kvcache::null_block : order_.back();
  }

 private:
  std::vector<kvcache::block_id> order_;
};

/// The lowest id goes first: in a fresh pool the head of a chain.
class lowest_id {
 public:
  static constexpr const char* name = "lowest_id";
  explicit lowest_id(kvcache::block_id highest) : present_(std::size_t{highest} + 1) {}
  void insert(kvcache::block_id block) noexcept { present_[block] = true; }
  void erase(kvcache::block_id block) noexcept { present_[block] = false; }
  [[nodiscard]] kvcache::block_id victim() const noexcept {
    for (std::size_t b = 1; b < present_.size(); ++b)
      if (present_[b]) return static_cast<kvcache::block_id>(b);
    return kvcache::null_block;
  }

 private:
  std::vector<bool> present_;
};

static_assert(kvcache::eviction_policy<mru> && kvcache::eviction_policy<lowest_id>);

}  // namespace kvcache_test
