// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/dtype.hpp>

#include <cstdint>

namespace kvcache {

/// Plane of a block: [token, head, dim]. All heads of a token lie together, so an append writes one run and kernels
/// that take all heads of a block inside one pass stream through it.
struct nhd {
  static constexpr const char* name = "nhd";

  /// Strides of a plane whose elements are T. The product of the three sizes has to fit 60 bits; storage checks that.
  template <class T>
  [[nodiscard]] static constexpr plane_strides strides(std::uint32_t block_size, std::uint32_t heads,
                                                       std::uint32_t head_dim) noexcept {
    const std::int64_t head = std::int64_t{head_dim} * dtype_traits<T>::bits / 8;
    const std::int64_t token = head * heads;
    return {.token = token, .head = head, .bytes = token * block_size};
  }
};

static_assert(kv_layout<nhd>);

}  // namespace kvcache
