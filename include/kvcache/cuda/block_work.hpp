// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/context.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstdint>

// How work on rows and blocks is dealt out to the warps of a grid.

namespace kvcache::device {

/// How many there are of what a body works on: `most`, or fewer where `count` says so, which may change between the
/// replays of a captured graph. Never more than the arrays have room for.
template <context C>
KVCACHE_DEVICE_INLINE std::uint32_t number_of(const C& c, std::uint32_t most, const std::uint32_t* count) {
  if (count == nullptr) return most;
  const std::uint32_t n = c.load(count);
  return n < most ? n : most;
}

/// The pairs (row, column), `columns` to a row, that a warp has: every so many as the grid has warps. Only where it
/// begins is divided for.
struct warp_pairs {
  std::uint32_t row;
  std::uint32_t column;

  template <context C>
  KVCACHE_DEVICE_INLINE warp_pairs(C& c, std::uint32_t threads, std::uint32_t columns) : columns_(columns) {
    const std::uint32_t warps = threads / warp_lanes;
    // What comes from one lane is known to the compiler to be the same for all: branches on it diverge nowhere.
    const std::uint32_t first = c.block() * warps + c.shuffle(c.warp(), 0);
    row = first / columns;
    column = first % columns;
    more_rows_ = c.blocks() * warps / columns;
    more_columns_ = c.blocks() * warps % columns;
  }
  KVCACHE_DEVICE_INLINE void next() {
    row += more_rows_;
    column += more_columns_;
    if (column < columns_) return;
    column -= columns_;
    ++row;
  }

 private:
  std::uint32_t columns_;
  std::uint32_t more_rows_;
  std::uint32_t more_columns_;
};

/// Whether `entry`, of a block table or a list, names a block that can be worked on: padding does not.
KVCACHE_DEVICE_INLINE bool is_block(const kv_view& view, block_id entry) {
  if ((entry & tail_bit) != 0) return (entry & ~tail_bit) < view.tail_blocks;
  return entry != null_block && entry < view.blocks;
}

/// One of two, number by number: a choice between their addresses would put them into memory.
KVCACHE_DEVICE_INLINE plane_view either(bool first, const plane_view& a, const plane_view& b) {
  return {first ? a.base : b.base, first ? a.block_stride : b.block_stride, first ? a.token_stride : b.token_stride,
          first ? a.head_stride : b.head_stride};
}

}  // namespace kvcache::device
