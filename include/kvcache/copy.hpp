// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/convert.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>
#include <kvcache/quantise.hpp>
#include <kvcache/quantization.hpp>
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

/// Copies the first `tokens` tokens of a block inside one plane, in as few runs as the strides allow.
inline void copy_tokens(const plane_view& plane, block_id source, block_id destination, std::uint32_t tokens,
                        std::uint32_t heads, std::uint64_t head_bytes) noexcept {
  const bool tokens_adjoin = plane.token_stride == static_cast<std::int64_t>(head_bytes);
  const bool heads_adjoin = plane.head_stride == static_cast<std::int64_t>(head_bytes);
  const bool rows_adjoin = heads_adjoin && plane.token_stride == static_cast<std::int64_t>(head_bytes * heads);
  const std::uint32_t token_steps = tokens_adjoin || rows_adjoin ? 1 : tokens;
  const std::uint32_t head_steps = heads_adjoin && !tokens_adjoin ? 1 : heads;
  const std::uint64_t run = head_bytes * (tokens / token_steps) * (heads / head_steps);
  for (std::uint32_t head = 0; head < head_steps; ++head)
    for (std::uint32_t token = 0; token < token_steps; ++token)
      std::memcpy(plane.at(destination, token, head), plane.at(source, token, head), run);
}

/// One of K and V of a layer, as copies see it.
struct copied_plane {
  const plane_view& plane;
  const plane_view& scales;
  const plane_view& tail;
  dtype_id dtype;
  dtype_id tail_dtype;
  std::uint32_t heads;
  std::uint32_t dim;

  void copy(const block_copy& c) const {
    const block_id source = c.source & ~tail_bit;
    const block_id destination = c.destination & ~tail_bit;
    if ((c.source & tail_bit) != 0) {
      copy_tokens(tail, source, destination, c.tokens, heads, code_bytes(tail_dtype, dim));
    } else if ((c.destination & tail_bit) != 0) {
      reopen(source, destination, c.tokens);
    } else {
      copy_tokens(plane, source, destination, c.tokens, heads, code_bytes(dtype, dim));
      if (scales.base != nullptr)
        copy_tokens(scales, source, destination, seals(dtype) ? 1 : c.tokens, heads, scale_bytes(dtype, dim));
    }
  }

 private:
  /// A block's tokens into the tail pool.
  void reopen(block_id source, block_id destination, std::uint32_t tokens) const {
    float x[max_quantised_dim];
    for (std::uint32_t token = 0; token < tokens; ++token) {
      for (std::uint32_t head = 0; head < heads; ++head) {
        std::byte* const to = tail.at(destination, token, head);
        const std::byte* const from = plane.at(source, token, head);
        if (dtype == tail_dtype) {
          std::memcpy(to, from, code_bytes(dtype, dim));
          continue;
        }
        read_head({from, scales.base == nullptr ? nullptr : scales.at(source, token, head), dtype}, dim, x);
        convert(x, dim, to, without_rotation(tail_dtype));
      }
    }
  }
};

}  // namespace detail

/// Carries out, in the given order, copies inside one layer of a pool: the first `tokens` tokens, whatever the layout,
/// and no other byte. From the tail pool only into the tail pool; from a block into the tail pool a copy reopens it:
/// its tokens, dequantised, at 16 bits. Which layer group a copy names is the caller's business.
///
/// Raises invalid_argument, naming value and limit, before anything is copied where a block is the null block or
/// outside the pool, a block has fewer tokens, or a copy goes from the tail pool to a block. O(bytes copied). One
/// thread at a time.
inline void copy(const kv_view& view, std::span<const block_copy> copies) {
  const auto refuse = [](const char* what, std::uint32_t given, const char* limit, std::uint32_t most) {
    detail::raise<invalid_argument>("copy: " + std::string(what) + ' ' + std::to_string(given) + ", " + limit + ' ' +
                                    std::to_string(most) + "; take copies from this pool's block manager");
  };
  for (const block_copy& c : copies) {
    for (const block_id entry : {c.source, c.destination}) {
      const block_id block = entry & ~tail_bit;
      if (block != entry) {
        if (block >= view.tail_blocks)
          refuse(entry == c.source ? "source is tail block" : "destination is tail block", block,
                 "tail blocks are fewer than", view.tail_blocks);
      } else if (block == null_block || block >= view.blocks) {
        refuse(entry == c.source ? "source is block" : "destination is block", block, "the pool has 1 to",
               view.blocks == 0 ? 0 : view.blocks - 1);
      }
    }
    if ((c.source & tail_bit) != 0 && (c.destination & tail_bit) == 0)
      refuse("from the tail pool to block", c.destination, "which is sealed and not copied; blocks are fewer than",
             view.blocks);
    if (c.tokens > view.block_size) refuse("tokens to copy are", c.tokens, "a block holds", view.block_size);
  }
  const detail::copied_plane k{view.k,        view.k_scales, view.k_tail, view.k_dtype, view.k_tail_dtype(),
                               view.kv_heads, view.head_dim};
  const detail::copied_plane v{view.v,        view.v_scales, view.v_tail, view.v_dtype, view.v_tail_dtype(),
                               view.kv_heads, view.v_dim()};
  for (const block_copy& c : copies) {
    if (c.tokens == 0 || c.source == c.destination) continue;
    k.copy(c);
    v.copy(c);
  }
}

}  // namespace kvcache
