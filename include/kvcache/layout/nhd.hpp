// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>

#include <cstdint>

namespace kvcache {

/// Plane of a block: [token, head, dim]. All heads of a token lie together, so an append writes one run and kernels
/// that take all heads of a block inside one pass stream through it.
struct nhd {
  static constexpr const char* name = "nhd";

  /// Strides of a plane that holds `head_bytes` bytes for each head of a token. The product of the three sizes has to
  /// fit 63 bits; storage checks that.
  [[nodiscard]] static constexpr plane_strides strides(std::uint32_t block_size, std::uint32_t heads,
                                                       std::uint64_t head_bytes) noexcept {
    const std::int64_t head = static_cast<std::int64_t>(head_bytes);
    const std::int64_t token = head * heads;
    return {.token = token, .head = head, .bytes = token * block_size};
  }
};

static_assert(kv_layout<nhd>);

}  // namespace kvcache
