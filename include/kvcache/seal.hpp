// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>
#include <kvcache/quantise.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>

namespace kvcache {

namespace detail {

/// Seals K or V of a block.
inline void seal_plane(const kv_view& view, const block_seal& s, bool keys) {
  const plane_view& plane = keys ? view.k : view.v;
  const plane_view& scales = keys ? view.k_scales : view.v_scales;
  const dtype_id dtype = without_rotation(keys ? view.k_dtype : view.v_dtype);
  const std::uint32_t dim = keys ? view.head_dim : view.v_dim();
  const auto stored = [&](std::uint32_t token, std::uint32_t head) {
    return keys ? view.k_head(s.tail | tail_bit, token, head) : view.v_head(s.tail | tail_bit, token, head);
  };
  for (std::uint32_t head = 0; head < view.kv_heads; ++head) {
    if (seals(dtype)) {
      seal_head(
          dtype, view.block_size, dim, [&](std::uint32_t token, float* x) { read_head(stored(token, head), dim, x); },
          plane.at(s.block, 0, head), plane.token_stride, scales.at(s.block, 0, head));
      continue;
    }
    for (std::uint32_t token = 0; token < view.block_size; ++token) {
      std::byte* const to = plane.at(s.block, token, head);
      if (quantization_of(dtype).bits == 0) {
        std::memcpy(to, stored(token, head).codes, code_bytes(dtype, dim));
      } else {
        float x[max_quantised_dim];
        read_head(stored(token, head), dim, x);
        quantise_head(dtype, x, dim, to, scales.at(s.block, token, head));
      }
    }
  }
}

}  // namespace detail

/// Quantises whole blocks of the tail pool into their places in one layer: every token of each is written and accepted.
/// What is stored depends on those tokens alone, however they came. Which layer group a seal names is the caller's
/// business.
///
/// Raises invalid_argument, naming value and limit, before anything is written where a block is outside its pool.
/// O(seals * block_size * kv_heads * (head_dim + head_dim_v)). Calls for different blocks may run at the same time.
inline void seal(const kv_view& view, std::span<const block_seal> seals) {
  const auto refuse = [](const char* what, std::uint32_t given, std::uint32_t end) {
    detail::raise<invalid_argument>("seal: " + std::string(what) + ' ' + std::to_string(given) +
                                    ", the pool's are fewer than " + std::to_string(end) +
                                    "; take seals from this pool's block manager");
  };
  for (const block_seal& s : seals) {
    if (s.tail >= view.tail_blocks) refuse("tail block", s.tail, view.tail_blocks);
    if (s.block == null_block || s.block >= view.blocks) refuse("block", s.block, view.blocks);
  }
  for (const block_seal& s : seals) {
    detail::seal_plane(view, s, true);
    detail::seal_plane(view, s, false);
  }
}

}  // namespace kvcache
