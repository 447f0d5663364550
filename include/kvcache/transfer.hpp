// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/types.hpp>

#include <cstdint>
#include <type_traits>

namespace kvcache {

/// A copy that bookkeeping asks for and storage carries out, before anything is written into `destination`:
/// the first `tokens` tokens of every layer of `layer_group` in block `source`. Both are entries of block tables: with
/// tail_bit set they name a block of the tail pool. A sealed source and a tail as destination reopen a block.
struct block_copy {
  std::uint32_t layer_group = 0;
  block_id source = null_block;
  block_id destination = null_block;
  std::uint32_t tokens = 0;

  friend constexpr bool operator==(const block_copy&, const block_copy&) = default;
};

/// A block that is full of accepted tokens and is to be quantised: all layers of `layer_group` in the tail pool's block
/// `tail` (without tail_bit) go to `block`.
struct block_seal {
  std::uint32_t layer_group = 0;
  block_id tail = 0;
  block_id block = null_block;

  friend constexpr bool operator==(const block_seal&, const block_seal&) = default;
};

static_assert(std::is_trivially_copyable_v<block_copy> && std::is_trivially_copyable_v<block_seal>);

}  // namespace kvcache
