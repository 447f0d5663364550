// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/types.hpp>

#include <cstdint>
#include <type_traits>

namespace kvcache {

/// A copy that bookkeeping asks for and storage carries out, before anything is written into `destination`:
/// the first `tokens` tokens of every layer of `layer_group` in block `source`.
struct block_copy {
  std::uint32_t layer_group = 0;
  block_id source = null_block;
  block_id destination = null_block;
  std::uint32_t tokens = 0;

  friend constexpr bool operator==(const block_copy&, const block_copy&) = default;
};

static_assert(std::is_trivially_copyable_v<block_copy>);

}  // namespace kvcache
