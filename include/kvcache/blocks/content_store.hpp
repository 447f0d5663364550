// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvcache::detail {

/// Looks at every unit, so that the loop becomes vectors: blocks that a hash has singled out are nearly always equal.
[[nodiscard]] constexpr bool equal(std::span<const content_unit> stored, content_view content) noexcept {
  return content.visit([&](auto units) {
    content_unit different = 0;
    for (std::size_t i = 0; i < stored.size(); ++i) different |= stored[i] ^ content_view::unit(units[i]);
    return different == 0;
  });
}

/// The content of cached blocks, by block id, in chunks that are allocated when the first of their blocks is cached: it
/// grows with the blocks in use and never moves. 8 bytes a token.
class content_store {
 public:
  content_store(block_id highest, std::uint32_t block_size)
      : block_size_(block_size),
        chunk_bits_(bits_for(block_size)),
        chunks_((std::size_t{highest} >> chunk_bits_) + 1) {}

  void put(block_id block, content_view content) noexcept {
    auto& chunk = chunks_[block >> chunk_bits_];
    // A block that has a chunk to itself may be one of a group whose blocks are smaller.
    const std::size_t units = chunk_bits_ == 0 ? content.size() : std::size_t{block_size_} << chunk_bits_;
    if (chunk.size() < units) chunk.resize(units);
    content_unit* to = chunk.data() + offset(block);
    for (std::size_t i = 0; i < content.size(); ++i) to[i] = content[i];
  }
  /// A hint that the block's content is read soon.
  void prefetch(block_id block) const noexcept {
    const std::vector<content_unit>& chunk = chunks_[block >> chunk_bits_];
    if (chunk.empty()) return;
    const content_unit* const from = chunk.data() + offset(block);
    const std::size_t units = block_size_ < prefetched_units ? block_size_ : prefetched_units;
    for (std::size_t i = 0; i < units; i += units_per_line) KVCACHE_PREFETCH(from + i);
  }
  /// Precondition: the block's content was put. The first `size` units of it.
  [[nodiscard]] std::span<const content_unit> get(block_id block, std::uint32_t size) const noexcept {
    return {chunks_[block >> chunk_bits_].data() + offset(block), size};
  }

 private:
  /// At most 256 blocks and 128 KiB in a chunk, at least one block.
  [[nodiscard]] static constexpr unsigned bits_for(std::uint32_t block_size) noexcept {
    unsigned bits = 0;
    while (bits < 8 && (std::uint64_t{block_size} << (bits + 1)) <= 16'384) ++bits;
    return bits;
  }
  static constexpr std::size_t units_per_line = 64 / sizeof(content_unit);
  static constexpr std::size_t prefetched_units = 4 * units_per_line;  // the processor goes on by itself

  [[nodiscard]] std::size_t offset(block_id block) const noexcept {
    return std::size_t{block & ((1u << chunk_bits_) - 1)} * block_size_;
  }

  std::uint32_t block_size_;
  unsigned chunk_bits_;
  std::vector<std::vector<content_unit>> chunks_;
};

}  // namespace kvcache::detail
