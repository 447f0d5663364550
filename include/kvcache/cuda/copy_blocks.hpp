// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/block_work.hpp>
#include <kvcache/cuda/context.hpp>
#include <kvcache/cuda/plane_bytes.hpp>
#include <kvcache/cuda/stored_rows.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/quantization.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvcache::device {

/// Copies inside one layer. Every pointer is the device's.
struct copy_params {
  kv_view kv;
  const block_copy* copies = nullptr;  ///< copies of a block onto itself, or of the null block, are padding
  std::uint32_t most = 0;
  const std::uint32_t* count = nullptr;  ///< how many there are, `most` at most; null: `most`
};
static_assert(std::is_trivially_copyable_v<copy_params>);

/// kvcache::copy, byte for byte, of copies that do not wait for each other: no destination is named twice, or is a
/// source as well. Those of a step of the block manager are such. Copies that the host's copy would refuse are left
/// out. Scales are aligned to 2 bytes.
struct copy_blocks {
  static constexpr unsigned threads = 128;
  static constexpr unsigned min_blocks = 4;  ///< of a multiprocessor, for __launch_bounds__: without it ptxas spills
  using params = copy_params;
  struct shared {};

  template <context C>
  KVCACHE_DEVICE_INLINE static void run(C& c, shared&, const params& p) {
    const std::uint32_t count = number_of(c, p.most, p.count);
    const std::uint32_t widest = stored_bytes(p.kv.k_dtype, p.kv.head_dim) + stored_bytes(p.kv.v_dtype, p.kv.v_dim());
    const std::uint32_t warps = warps_for(p.kv.block_size * p.kv.kv_heads * widest);
    for (warp_pairs at(c, threads, warps); at.row < count; at.next()) {
      const block_id source = c.shuffle(c.load(&p.copies[at.row].source), 0);
      const block_id destination = c.shuffle(c.load(&p.copies[at.row].destination), 0);
      const std::uint32_t tokens = c.shuffle(c.load(&p.copies[at.row].tokens), 0);
      const bool from_tail = (source & tail_bit) != 0;
      const bool to_tail = (destination & tail_bit) != 0;
      if (source == destination || !is_block(p.kv, source) || !is_block(p.kv, destination) || (from_tail && !to_tail) ||
          tokens == 0 || tokens > p.kv.block_size)
        continue;
      for (unsigned i = 0; i < 2; ++i) {
        const kv_side side = side_of(p.kv, i == 0);
        if (to_tail && !from_tail && side.dtype != side.tail_dtype) {
          reopen(c, side, source, destination & ~tail_bit, tokens, p.kv.kv_heads, at.column, warps);
          continue;
        }
        const lane_share share{at.column * warp_lanes + c.lane(), warps * warp_lanes};
        const std::uint32_t head_bytes = stored_bytes(from_tail ? side.tail_dtype : side.dtype, side.dim);
        if (from_tail == to_tail) {
          const plane_view plane = either(from_tail, side.tail, side.plane);
          copy_bytes(c, bytes_of<true>(plane, source & ~tail_bit, tokens, p.kv.kv_heads, head_bytes),
                     bytes_of<true>(plane, destination & ~tail_bit, tokens, p.kv.kv_heads, head_bytes), share);
        } else {  // two planes, whose strides may differ
          copy_bytes(c, bytes_of<false>(side.plane, source, tokens, p.kv.kv_heads, head_bytes),
                     bytes_of<false>(side.tail, destination & ~tail_bit, tokens, p.kv.kv_heads, head_bytes), share);
        }
        if (to_tail) continue;
        const std::uint32_t rows = seals(side.dtype) ? 1 : tokens;
        const auto scale_size = static_cast<std::uint32_t>(scale_bytes(side.dtype, side.dim));
        copy_bytes(c, bytes_of<true>(side.scales, source, rows, p.kv.kv_heads, scale_size),
                   bytes_of<true>(side.scales, destination, rows, p.kv.kv_heads, scale_size), share);
      }
    }
  }

 private:
  /// A block's tokens into the tail pool, dequantised: a head of a token at a time.
  template <context C>
  KVCACHE_DEVICE_INLINE static void reopen(const C& c, const kv_side& side, block_id source, block_id destination,
                                           std::uint32_t tokens, std::uint32_t heads, std::uint32_t first,
                                           std::uint32_t step) {
    for (std::uint32_t row = first; row < tokens * heads; row += step) {
      const std::uint32_t token = row / heads;
      const std::uint32_t head = row % heads;
      const std::byte* const from = side.plane.at(source, token, head);
      const std::byte* const scales = side.scales.base == nullptr ? nullptr : side.scales.at(source, token, head);
      std::byte* const to = side.tail.at(destination, token, head);
      for (std::uint32_t d = 4 * c.lane(); d < side.dim; d += 4 * warp_lanes) {
        const std::uint32_t count = side.dim - d < 4 ? side.dim - d : 4;
        float x[4];
        load_stored(c, side.dtype, from, scales, side.dim, d, count, x);
        store_elements(c, side.tail_dtype, to, d, count, x);
      }
    }
  }
};

}  // namespace kvcache::device
