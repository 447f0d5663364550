// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/block_work.hpp>
#include <kvcache/cuda/context.hpp>
#include <kvcache/cuda/plane_bytes.hpp>
#include <kvcache/cuda/stored_rows.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/quantization.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvcache::device {

/// What a block of one layer is outside its pool: K's codes or elements, K's scales, those of V, each [token][head]
/// without gaps whatever the pool's layout (scales per channel once for a head), and each from a multiple of 16 bytes
/// on. All numbers are bytes.
struct block_record {
  std::uint32_t k_scales = 0;  ///< K is at 0
  std::uint32_t v = 0;
  std::uint32_t v_scales = 0;
  std::uint32_t size = 0;

  friend constexpr bool operator==(const block_record&, const block_record&) = default;
};

/// The record of a block of the pool, or of one of the tail pool, where formats that have scales lie without them.
/// O(1), pure. What pads a record has no value.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr block_record record_of(const kv_view& view, bool in_tail = false) noexcept {
  const auto padded = [](std::uint64_t bytes) { return static_cast<std::uint32_t>((bytes + 15) / 16 * 16); };
  const auto codes = [&](dtype_id dtype, std::uint32_t dim) {
    return padded(std::uint64_t{view.block_size} * view.kv_heads * stored_bytes(dtype, dim));
  };
  const auto scales = [&](dtype_id dtype, std::uint32_t dim) {
    return padded(std::uint64_t{seals(dtype) ? 1 : view.block_size} * view.kv_heads * scale_bytes(dtype, dim));
  };
  block_record r;
  r.k_scales = codes(in_tail ? view.k_tail_dtype() : view.k_dtype, view.head_dim);
  r.v = r.k_scales + (in_tail ? 0 : scales(view.k_dtype, view.head_dim));
  r.v_scales = r.v + codes(in_tail ? view.v_tail_dtype() : view.v_dtype, view.v_dim());
  r.size = r.v_scales + (in_tail ? 0 : scales(view.v_dtype, view.v_dim()));
  return r;
}

/// Blocks of one layer and their records, for swapping and transfer. Every pointer is the device's, or of host memory
/// that the device can reach.
struct gather_params {
  kv_view kv;
  const block_id* blocks = nullptr;  ///< entries of block tables: a block of the tail pool has tail_bit set
  std::uint32_t most = 0;
  const std::uint32_t* count = nullptr;  ///< how many there are, `most` at most; null: `most`
  std::byte* staging = nullptr;          ///< record i is at i * record_stride; both best multiples of 16
  std::int64_t record_stride = 0;        ///< at least the largest record
};
static_assert(std::is_trivially_copyable_v<gather_params>);

/// Blocks to records, or back: the bytes of a record in their order, a few warps to a block. Null blocks, and what is
/// outside the pool, are padding: neither block nor record is touched. Records may be written back into a pool of
/// another layout; no block is to be written twice.
template <bool ToStaging>
struct block_mover {
  static constexpr unsigned threads = 128;
  static constexpr unsigned min_blocks = 4;  ///< of a multiprocessor, for __launch_bounds__: without it ptxas spills
  using params = gather_params;
  struct shared {};

  template <context C>
  KVCACHE_DEVICE_INLINE static void run(C& c, shared&, const params& p) {
    const std::uint32_t count = number_of(c, p.most, p.count);
    const std::uint32_t warps = warps_for(record_of(p.kv).size);
    for (warp_pairs at(c, threads, warps); at.row < count; at.next()) {
      const block_id entry = c.shuffle(c.load(p.blocks + at.row), 0);
      if (!is_block(p.kv, entry)) continue;
      const bool in_tail = (entry & tail_bit) != 0;
      const block_id block = entry & ~tail_bit;
      const block_record record = record_of(p.kv, in_tail);
      std::byte* const first = p.staging + at.row * p.record_stride;
      const lane_share share{at.column * warp_lanes + c.lane(), warps * warp_lanes};
      const auto move = [&](const plane_view& plane, std::uint32_t tokens, std::uint64_t head_bytes, std::uint32_t to) {
        const plane_bytes b =
            bytes_of<false>(plane, block, tokens, p.kv.kv_heads, static_cast<std::uint32_t>(head_bytes));
        const flat_bytes staged{first + to, b.size};
        if constexpr (ToStaging)
          copy_bytes(c, b, staged, share);
        else
          copy_bytes(c, staged, b, share);
      };
      for (unsigned i = 0; i < 2; ++i) {
        const kv_side side = side_of(p.kv, i == 0);
        move(either(in_tail, side.tail, side.plane), p.kv.block_size,
             stored_bytes(in_tail ? side.tail_dtype : side.dtype, side.dim), i == 0 ? 0 : record.v);
        if (!in_tail)
          move(side.scales, seals(side.dtype) ? 1 : p.kv.block_size, scale_bytes(side.dtype, side.dim),
               i == 0 ? record.k_scales : record.v_scales);
      }
    }
  }
};
using gather_blocks = block_mover<true>;
using scatter_blocks = block_mover<false>;

}  // namespace kvcache::device
