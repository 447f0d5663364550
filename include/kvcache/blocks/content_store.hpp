// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/content_id.hpp>
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

/// The content of nodes, by their id, in chunks that are allocated when the first of their nodes is there: it grows
/// with the nodes in use and never moves. 8 bytes a token. `Owner`: see block_keeper.
template <class Owner>
class content_store {
 public:
  /// `block_size`: of the largest blocks.
  explicit content_store(std::uint32_t block_size) : block_size_(block_size), chunk_bits_(bits_for(block_size)) {}

  void put(content_id id, content_view content) noexcept {
    const std::size_t at = id >> chunk_bits_;
    if (at >= chunks_.size()) chunks_.resize(at + 1 + at / 2);
    auto& chunk = chunks_[at];
    // A node that has a chunk to itself may be of blocks that are smaller.
    const std::size_t units = chunk_bits_ == 0 ? content.size() : std::size_t{block_size_} << chunk_bits_;
    if (chunk.size() < units) chunk.resize(units);
    content_unit* to = chunk.data() + offset(id);
    for (std::size_t i = 0; i < content.size(); ++i) to[i] = content[i];
  }
  /// A hint that the content is read or written soon.
  KVCACHE_ALWAYS_INLINE void prefetch(content_id id) const noexcept {
    const std::size_t at = id >> chunk_bits_;
    if (at >= chunks_.size() || chunks_[at].empty()) return;
    const content_unit* const from = chunks_[at].data() + offset(id);
    // After a few lines the processor goes on by itself.
    KVCACHE_PREFETCH(from);
    if (block_size_ > units_per_line) KVCACHE_PREFETCH(from + units_per_line);
    if (block_size_ > 2 * units_per_line) KVCACHE_PREFETCH(from + 2 * units_per_line);
    if (block_size_ > 3 * units_per_line) KVCACHE_PREFETCH(from + 3 * units_per_line);
  }
  /// The first `size` units of the content. Precondition: it was put.
  [[nodiscard]] std::span<const content_unit> get(content_id id, std::uint32_t size) const noexcept {
    return {chunks_[id >> chunk_bits_].data() + offset(id), size};
  }

 private:
  /// At most 256 nodes and 128 KiB in a chunk, at least one node.
  [[nodiscard]] static constexpr unsigned bits_for(std::uint32_t block_size) noexcept {
    unsigned bits = 0;
    while (bits < 8 && (std::uint64_t{block_size} << (bits + 1)) <= 16'384) ++bits;
    return bits;
  }
  static constexpr std::size_t units_per_line = 64 / sizeof(content_unit);

  [[nodiscard]] std::size_t offset(content_id id) const noexcept {
    return std::size_t{id & ((1u << chunk_bits_) - 1)} * block_size_;
  }

  std::uint32_t block_size_;
  unsigned chunk_bits_;
  std::vector<std::vector<content_unit>> chunks_;
};

}  // namespace kvcache::detail
