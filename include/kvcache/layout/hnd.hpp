// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>

#include <cstdint>

namespace kvcache {

/// Plane of a block: [head, token, dim]. All tokens of a head lie together, which suits kernels that give each head to
/// another worker.
struct hnd {
  static constexpr const char* name = "hnd";

  /// Strides of a plane that holds `head_bytes` bytes for each head of a token. The product of the three sizes has to
  /// fit 63 bits; storage checks that.
  [[nodiscard]] static constexpr plane_strides strides(std::uint32_t block_size, std::uint32_t heads,
                                                       std::uint64_t head_bytes) noexcept {
    const std::int64_t token = static_cast<std::int64_t>(head_bytes);
    const std::int64_t head = token * block_size;
    return {.token = token, .head = head, .bytes = head * heads};
  }
};

static_assert(kv_layout<hnd>);

}  // namespace kvcache
