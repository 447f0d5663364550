// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/block_work.hpp>
#include <kvcache/cuda/context.hpp>
#include <kvcache/cuda/plane_bytes.hpp>
#include <kvcache/cuda/stored_rows.hpp>
#include <kvcache/detail/bit_cast.hpp>
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

/// Seals of one layer. Every pointer is the device's.
struct seal_params {
  kv_view kv;
  const block_seal* seals = nullptr;  ///< seals of the null block are padding
  std::uint32_t most = 0;
  const std::uint32_t* count = nullptr;  ///< how many there are, `most` at most; null: `most`
};
static_assert(std::is_trivially_copyable_v<seal_params>);

/// kvcache::seal, byte for byte, of many blocks: K and V of each head by a few warps. Seals outside the pool are left
/// out. Scales are aligned to 2 bytes.
struct seal_blocks {
  static constexpr unsigned threads = 128;
  static constexpr unsigned min_blocks = 4;  ///< of a multiprocessor, for __launch_bounds__: without it ptxas spills
  using params = seal_params;
  struct shared {
    float rows[threads / warp_lanes][max_quantised_dim];
  };

  template <context C>
  KVCACHE_DEVICE_INLINE static void run(C& c, shared& s, const params& p) {
    const std::uint32_t count = number_of(c, p.most, p.count);
    const std::uint32_t heads = p.kv.kv_heads;
    for (warp_pairs at(c, threads, 2 * heads * parts); at.row < count; at.next()) {
      const block_id tail = c.shuffle(c.load(&p.seals[at.row].tail), 0);
      const block_id block = c.shuffle(c.load(&p.seals[at.row].block), 0);
      if (tail >= p.kv.tail_blocks || block == null_block || block >= p.kv.blocks) continue;
      const std::uint32_t part = at.column % parts;
      const std::uint32_t row = at.column / parts;
      const bool keys = row < heads;
      const kv_side side = side_of(p.kv, keys);
      const place where{tail, block, p.kv.block_size, keys ? row : row - heads, part};
      if (seals(side.dtype))
        seal_channels(c, side, where);
      else
        store_tokens(c, s.rows[c.warp()], side, where);
    }
  }

 private:
  /// Warps to a head: they share out its tokens, or its channels in runs of 128.
  static constexpr std::uint32_t parts = 4;

  struct place {
    block_id tail;
    block_id block;
    std::uint32_t tokens;
    std::uint32_t head;
    std::uint32_t part;
  };

  /// Where only the other one of K and V seals.
  template <context C>
  KVCACHE_DEVICE_INLINE static void store_tokens(C& c, float* x, const kv_side& side, const place& at) {
    const bool codes = quantization_of(side.dtype).bits != 0;
    for (std::uint32_t token = at.part; token < at.tokens; token += parts) {
      std::byte* const from = side.tail.at(at.tail, token, at.head);
      std::byte* const to = side.plane.at(at.block, token, at.head);
      if (!codes) {
        const std::uint32_t size = stored_bytes(side.dtype, side.dim);
        copy_bytes(c, flat_bytes{from, size}, flat_bytes{to, size}, {c.lane(), warp_lanes});
        continue;
      }
      c.sync_warp();  // x may still be read: a shuffle orders no memory
      for (std::uint32_t d = 4 * c.lane(); d < side.dim; d += 4 * warp_lanes) {
        float y[4];
        const std::uint32_t count = side.dim - d < 4 ? side.dim - d : 4;
        load_stored(c, side.tail_dtype, from, nullptr, side.dim, d, count, y);
        KVCACHE_UNROLL
        for (unsigned i = 0; i < 4; ++i)
          if (i < count) x[d + i] = y[i];
      }
      c.sync_warp();
      quantise_row(c, side.dtype, x, side.dim, to, side.scales.at(at.block, token, at.head));
    }
  }

  /// A lane has four channels at a time, and meets the block's tokens twice.
  template <context C>
  KVCACHE_DEVICE_INLINE static void seal_channels(const C& c, const kv_side& side, const place& at) {
    using kvcache::detail::upper_half;
    const quantization q = quantization_of(side.dtype);
    const kvcache::detail::code_grid grid = grid_of(q);
    auto* const scales = reinterpret_cast<bf16*>(side.scales.at(at.block, 0, at.head));
    for (std::uint32_t d = 4 * (at.part * warp_lanes + c.lane()); d < side.dim; d += 4 * warp_lanes * parts) {
      const std::uint32_t count = side.dim - d < 4 ? side.dim - d : 4;
      kvcache::detail::value_range ranges[4];
      for (std::uint32_t token = 0; token < at.tokens; token += tokens_at_once) {
        float x[tokens_at_once][4];
        load_tokens(c, side, at, token, d, count, x);
        KVCACHE_UNROLL
        for (unsigned t = 0; t < tokens_at_once; ++t) {
          KVCACHE_UNROLL
          for (unsigned i = 0; i < 4; ++i) ranges[i].add(x[t][i]);
        }
      }
      code_maker makers[4];
      bf16 scale[4];
      bf16 zero[4];
      KVCACHE_UNROLL
      for (unsigned i = 0; i < 4; ++i) {
        ranges[i].close();
        makers[i] = code_maker::of(c, grid, ranges[i]);
        scale[i] = upper_half(makers[i].scale);
        zero[i] = upper_half(makers[i].zero);
      }
      store_four(c, scales + d, count, scale);
      if (q.zero_points) store_four(c, scales + side.dim + d, count, zero);
      for (std::uint32_t token = 0; token < at.tokens; token += tokens_at_once) {
        float x[tokens_at_once][4];
        load_tokens(c, side, at, token, d, count, x);
        KVCACHE_UNROLL
        for (unsigned t = 0; t < tokens_at_once; ++t) {
          std::uint32_t word = 0;
          KVCACHE_UNROLL
          for (unsigned i = 0; i < 4; ++i)
            word |= (i < count ? makers[i].code(grid, q.bits, x[t][i]) : 0u) << (i * q.bits);
          if (token + t < at.tokens)
            store_codes(c, side.plane.at(at.block, token + t, at.head) + d * q.bits / 8, q.bits, count, word);
        }
      }
    }
  }

  /// The next tokens' four channels; behind the block's end the first of these again, which widens no range.
  static constexpr unsigned tokens_at_once = 4;
  template <context C>
  KVCACHE_DEVICE_INLINE static void load_tokens(const C& c, const kv_side& side, const place& at, std::uint32_t token,
                                                std::uint32_t d, std::uint32_t count, float (&x)[tokens_at_once][4]) {
    with_element(side.tail_dtype, [&](auto element) {
      KVCACHE_UNROLL
      for (unsigned t = 0; t < tokens_at_once; ++t) {
        const std::byte* const head = side.tail.at(at.tail, token + t < at.tokens ? token + t : token, at.head);
        load_four(c, reinterpret_cast<const decltype(element)*>(head) + d, count, x[t]);
      }
    });
  }
};

}  // namespace kvcache::device
