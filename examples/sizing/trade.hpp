// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/geometry.hpp>
#include <kvcache/types.hpp>

#include <cstdint>

namespace sizing {

/// What a block size costs: slots that stay unused at the end of the last block against block table entries.
struct block_size_trade {
  std::uint32_t block_size;
  double table_entries;   ///< mean per request and layer group
  double table_bytes;     ///< mean per request
  double unused_slots;    ///< mean per request
  double unused_percent;  ///< of the slots allocated
  double requests;        ///< that the memory holds at once, by mean size, each with a tail block where one is needed
  double tail_percent;    ///< of the memory: their tail blocks
};

/// Exact means over requests of every length from 1 to 2 * mean_tokens - 1, each as frequent. O(1).
inline block_size_trade trade(const kvcache::geometry& shape, kvcache::kv_format format, std::uint64_t memory,
                              std::uint64_t mean_tokens, std::uint32_t block_size) {
  const std::uint64_t longest = 2 * mean_tokens - 1;
  const std::uint64_t full = longest / block_size;
  const std::uint64_t rest = longest % block_size;
  // Lengths that need k blocks: block_size of them for each k up to `full`, then `rest` that need one more.
  const double blocks_of_all =
      static_cast<double>(block_size) * static_cast<double>(full) * (static_cast<double>(full) + 1) / 2 +
      static_cast<double>(rest) * (static_cast<double>(full) + 1);

  block_size_trade row{};
  row.block_size = block_size;
  row.table_entries = blocks_of_all / static_cast<double>(longest);
  row.table_bytes = row.table_entries * sizeof(kvcache::block_id);
  const double slots = row.table_entries * block_size;
  row.unused_slots = slots - static_cast<double>(mean_tokens);
  row.unused_percent = 100 * row.unused_slots / slots;
  const auto tail = static_cast<double>(kvcache::tail_pool_bytes(shape, block_size, 1, format));
  const double tail_in_blocks = tail / static_cast<double>(kvcache::bytes_per_block(shape, block_size, format));
  row.requests =
      static_cast<double>(kvcache::blocks_in(memory, shape, block_size, format)) / (row.table_entries + tail_in_blocks);
  row.tail_percent = 100 * row.requests * tail / static_cast<double>(memory);
  return row;
}

}  // namespace sizing
