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

/// Blocks of one layer to be filled. Every pointer is the device's.
struct fill_params {
  kv_view kv;
  const block_id* blocks = nullptr;  ///< entries of block tables: a block of the tail pool has tail_bit set
  std::uint32_t most = 0;
  const std::uint32_t* count = nullptr;  ///< how many there are, `most` at most; null: `most`
  std::uint8_t byte = 0;
};
static_assert(std::is_trivially_copyable_v<fill_params>);

/// Every byte of the blocks' tokens and scales becomes `byte`, and none that only lies between them. Null blocks, and
/// what is outside the pool, are padding.
struct fill_blocks {
  static constexpr unsigned threads = 128;
  static constexpr unsigned min_blocks = 4;  ///< of a multiprocessor, for __launch_bounds__: without it ptxas spills
  using params = fill_params;
  struct shared {};

  template <context C>
  KVCACHE_DEVICE_INLINE static void run(C& c, shared&, const params& p) {
    const std::uint32_t count = number_of(c, p.most, p.count);
    const std::uint32_t widest = stored_bytes(p.kv.k_dtype, p.kv.head_dim) + stored_bytes(p.kv.v_dtype, p.kv.v_dim());
    const std::uint32_t warps = warps_for(p.kv.block_size * p.kv.kv_heads * widest);
    const std::uint32_t word = p.byte * 0x0101'0101u;
    for (warp_pairs at(c, threads, warps); at.row < count; at.next()) {
      const block_id entry = c.shuffle(c.load(p.blocks + at.row), 0);
      if (!is_block(p.kv, entry)) continue;
      const bool in_tail = (entry & tail_bit) != 0;
      const lane_share share{at.column * warp_lanes + c.lane(), warps * warp_lanes};
      for (unsigned i = 0; i < 2; ++i) {
        const kv_side side = side_of(p.kv, i == 0);
        fill_bytes(c,
                   bytes_of<true>(either(in_tail, side.tail, side.plane), entry & ~tail_bit, p.kv.block_size,
                                  p.kv.kv_heads, stored_bytes(in_tail ? side.tail_dtype : side.dtype, side.dim)),
                   word, share);
        if (!in_tail)
          fill_bytes(c,
                     bytes_of<true>(side.scales, entry, seals(side.dtype) ? 1 : p.kv.block_size, p.kv.kv_heads,
                                    static_cast<std::uint32_t>(scale_bytes(side.dtype, side.dim))),
                     word, share);
      }
    }
  }

 private:
  template <context C>
  KVCACHE_DEVICE_INLINE static void fill_bytes(const C& c, const plane_bytes& to, std::uint32_t word,
                                               lane_share share) {
    if (to.size == 0) return;
    switch (widest_unit(to.aligned_bits())) {
      case 16: return fill_units(c, to, words4{{word, word, word, word}}, share);
      case 8: return fill_units(c, to, words2{{word, word}}, share);
      case 4: return fill_units(c, to, word, share);
      case 2: return fill_units(c, to, static_cast<std::uint16_t>(word), share);
      default: return fill_units(c, to, static_cast<std::uint8_t>(word), share);
    }
  }
  template <class Unit, context C>
  KVCACHE_DEVICE_INLINE static void fill_units(const C& c, const plane_bytes& to, Unit unit, lane_share share) {
    const std::uint32_t units = to.size / sizeof(Unit);
    for (std::uint32_t u = share.first; u < units; u += share.step)
      c.store(reinterpret_cast<Unit*>(to.at(u * sizeof(Unit))), unit);
  }
};

}  // namespace kvcache::device
