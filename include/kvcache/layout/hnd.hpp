// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/dtype.hpp>

#include <cstdint>

namespace kvcache {

/// Plane of a block: [head, token, dim]. All tokens of a head lie together, which suits kernels that give each head to
/// another worker.
struct hnd {
  static constexpr const char* name = "hnd";

  /// Strides of a plane whose elements are T. The product of the three sizes has to fit 60 bits; storage checks that.
  template <class T>
  [[nodiscard]] static constexpr plane_strides strides(std::uint32_t block_size, std::uint32_t heads,
                                                       std::uint32_t head_dim) noexcept {
    const std::int64_t token = std::int64_t{head_dim} * dtype_traits<T>::bits / 8;
    const std::int64_t head = token * block_size;
    return {.token = token, .head = head, .bytes = head * heads};
  }
};

static_assert(kv_layout<hnd>);

}  // namespace kvcache
