// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/types.hpp>

#include <cstdint>
#include <numeric>

namespace kvcache::detail {

/// In what multiples of tokens a scheduler deals with the content of its requests.
struct strides {
  /// Cached prefixes end at multiples of what all block sizes divide. More than any length is as good as any other.
  std::uint64_t prefix = 1;
  /// Tokens are committed in multiples of it. With less than a prefix nothing more can be found; but windows give back
  /// only blocks that are committed, so where there are windows, each of their blocks is as soon as it is full.
  std::uint64_t commit = 1;
  bool windows = false;
};

/// Of the layer groups of a block manager. O(groups).
template <class Manager>
[[nodiscard]] strides strides_of(const Manager& manager) noexcept {
  strides s;
  for (std::uint32_t g = 0; g < manager.layer_group_count(); ++g) {
    const std::uint64_t size = manager.block_size(g);
    const std::uint64_t part = s.prefix / std::gcd(s.prefix, size);
    s.prefix = part > max_length / size ? max_length + 1 : part * size;
  }
  s.commit = s.prefix;
  for (std::uint32_t g = 0; g < manager.layer_group_count(); ++g) {
    if (!manager.windowed(g)) continue;
    s.windows = true;
    s.commit = std::gcd(s.commit, std::uint64_t{manager.block_size(g)});
  }
  return s;
}

/// The first multiple of `stride` that is more than `tokens`.
[[nodiscard]] constexpr std::uint32_t end_after(std::uint32_t tokens, std::uint64_t stride) noexcept {
  const std::uint64_t end = (tokens / stride + 1) * stride;
  return static_cast<std::uint32_t>(end > max_length ? max_length : end);
}

}  // namespace kvcache::detail
