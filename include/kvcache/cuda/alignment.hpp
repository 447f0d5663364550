// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/quantization.hpp>
#include <kvcache/views.hpp>

#include <cstdint>

namespace kvcache::device {

/// What every row of codes or elements in a view is aligned to, and a whole number of: 16 at most. Kernels copy in
/// pieces of so many bytes, and need at least 4. Scales are aligned to 2. O(1), on the host; reads no memory.
[[nodiscard]] inline std::uint32_t row_alignment(const kv_view& kv) noexcept {
  std::uint64_t all = 16;
  const auto add = [&](const plane_view& plane, std::uint64_t row_bytes) {
    if (plane.base == nullptr) return;
    all |= reinterpret_cast<std::uintptr_t>(plane.base) | static_cast<std::uint64_t>(plane.block_stride) |
           static_cast<std::uint64_t>(plane.token_stride) | static_cast<std::uint64_t>(plane.head_stride) | row_bytes;
  };
  add(kv.k, code_bytes(kv.k_dtype, kv.head_dim));
  add(kv.v, code_bytes(kv.v_dtype, kv.v_dim()));
  add(kv.k_tail, code_bytes(kv.k_tail_dtype(), kv.head_dim));
  add(kv.v_tail, code_bytes(kv.v_tail_dtype(), kv.v_dim()));
  return static_cast<std::uint32_t>(all & (~all + 1));
}

}  // namespace kvcache::device
