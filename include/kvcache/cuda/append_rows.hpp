// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/block_work.hpp>
#include <kvcache/cuda/context.hpp>
#include <kvcache/cuda/finish_row.hpp>
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

/// Which elements of a key a rotary embedding turns together: element i and i + rope_dim / 2 (GPT-NeoX, Llama), or 2i
/// and 2i + 1 (GPT-J).
enum class rope_style : std::uint8_t { halves, interleaved };

/// The rotary embedding of keys on their way into the pool. (a, b) becomes (a cos - b sin, b cos + a sin), in floats.
struct rope_params {
  const float* cos = nullptr;  ///< [positions, rope_dim / 2]; null: keys come with their positions in them
  const float* sin = nullptr;
  const std::uint32_t* positions = nullptr;  ///< of each row
  std::uint32_t rope_dim = 0;                ///< even, at most head_dim; what is behind stays as it is
  rope_style style = rope_style::halves;
};

/// What an append into one layer is made of. Every pointer is the device's.
struct append_params {
  kv_view kv;
  rows_view<const std::byte> k;  ///< strides in elements
  rows_view<const std::byte> v;
  dtype_id k_from = dtype_id::bfloat16;  ///< f32, f16 or bf16
  dtype_id v_from = dtype_id::bfloat16;
  const slot_id* slots = nullptr;            ///< of each row
  const std::uint32_t* row_count = nullptr;  ///< rows, where only the device knows them, k.rows at most; null: k.rows
  rope_params rope;
};
static_assert(std::is_trivially_copyable_v<append_params>);

/// kvcache::append, byte for byte (but for which NaN a rotation or a shift leaves at 16 bits), with the rotary
/// embedding before it where that is asked for. A warp takes K or V of a row's head. A slot that is no_slot, or that
/// the host's append would refuse, is not written. Vectors that are quantised, rotated, shifted or embedded have at
/// most max_quantised_dim elements; scales are aligned to 2 bytes, elements to their size.
struct append_rows {
  static constexpr unsigned threads = 128;
  static constexpr unsigned min_blocks = 4;  ///< of a multiprocessor, for __launch_bounds__: without it ptxas spills
  using params = append_params;
  struct shared {
    float rows[threads / warp_lanes][max_quantised_dim];
  };

  template <context C>
  KVCACHE_DEVICE_INLINE static void run(C& c, shared& s, const params& p) {
    const std::uint32_t rows = number_of(c, p.k.rows, p.row_count);
    float* const x = s.rows[c.warp()];
    for (warp_pairs at(c, threads, 2 * p.kv.kv_heads); at.row < rows; at.next()) {
      const bool keys = at.column < p.kv.kv_heads;
      const std::uint32_t head = keys ? at.column : at.column - p.kv.kv_heads;
      const slot_id slot = c.shuffle(c.load(p.slots + at.row), 0);
      if (slot < 0) continue;
      const slot_id tail_first = slot_id{tail_bit} * p.kv.block_size;
      const bool in_tail = slot >= tail_first;
      const auto inside = static_cast<std::uint64_t>(in_tail ? slot - tail_first : slot);
      const std::uint32_t block = divide(inside, p.kv.block_size);
      const auto token = static_cast<std::uint32_t>(inside - std::uint64_t{block} * p.kv.block_size);
      if (in_tail ? block < p.kv.tail_blocks : block < p.kv.blocks && !seals(p.kv.k_dtype) && !seals(p.kv.v_dtype))
        write(c, x, p, keys, in_tail, block, at.row, token, head);
    }
  }

 private:
  template <context C>
  KVCACHE_DEVICE_INLINE static void write(C& c, float* x, const params& p, bool keys, bool in_tail, block_id block,
                                          std::uint32_t row, std::uint32_t token, std::uint32_t head) {
    const kv_side side = side_of(p.kv, keys);
    const dtype_id from_dtype = keys ? p.k_from : p.v_from;
    const std::int64_t row_stride = keys ? p.k.row_stride : p.v.row_stride;
    const std::int64_t head_stride = keys ? p.k.head_stride : p.v.head_stride;
    const std::byte* const from =
        (keys ? p.k.data : p.v.data) + (row * row_stride + head * head_stride) * element_bytes(from_dtype);
    std::byte* const to = in_tail ? side.tail.at(block, token, head) : side.plane.at(block, token, head);
    const dtype_id stored = without_rotation(in_tail ? side.tail_dtype : side.dtype);
    const bool embedded = keys && p.rope.cos != nullptr;
    const bool shifted = keys && p.kv.key_offset != nullptr;
    const bool as_it_is = !embedded && !shifted && !is_rotated(side.dtype) && quantization_of(side.dtype).bits == 0;
    if (as_it_is && stored == from_dtype) {  // bit for bit, a NaN too
      const std::uint32_t size = stored_bytes(stored, side.dim);
      copy_bytes(c, flat_bytes{const_cast<std::byte*>(from), size}, flat_bytes{to, size}, {c.lane(), warp_lanes});
      return;
    }
    if (as_it_is) {
      for (std::uint32_t d = 4 * c.lane(); d < side.dim; d += 4 * warp_lanes) {
        float y[4];
        const std::uint32_t count = side.dim - d < 4 ? side.dim - d : 4;
        load_row_elements(c, from_dtype, from, d, count, y);
        store_elements(c, stored, to, d, count, y);
      }
      return;
    }
    c.sync_warp();  // x may still be read: a shuffle orders no memory
    for (std::uint32_t d = 4 * c.lane(); d < side.dim; d += 4 * warp_lanes) {
      float y[4];
      const std::uint32_t count = side.dim - d < 4 ? side.dim - d : 4;
      load_row_elements(c, from_dtype, from, d, count, y);
      KVCACHE_UNROLL
      for (unsigned i = 0; i < 4; ++i)
        if (i < count) x[d + i] = y[i];
    }
    c.sync_warp();
    if (embedded) {
      embed(c, x, p.rope, c.load(p.rope.positions + row));
      c.sync_warp();
    }
    if (shifted) {
      const float* const offset = p.kv.key_offset + std::uint64_t{head} * side.dim;
      for (std::uint32_t d = c.lane(); d < side.dim; d += warp_lanes) x[d] -= c.load(offset + d);
      c.sync_warp();
    }
    if (is_rotated(side.dtype)) rotate_row(c, x, side.dim);
    if (quantization_of(stored).bits != 0) {
      quantise_row(c, stored, x, side.dim, to, side.scales.at(block, token, head));
      return;
    }
    for (std::uint32_t d = 4 * c.lane(); d < side.dim; d += 4 * warp_lanes) {
      const std::uint32_t count = side.dim - d < 4 ? side.dim - d : 4;
      float y[4];
      KVCACHE_UNROLL
      for (unsigned i = 0; i < 4; ++i) y[i] = i < count ? x[d + i] : 0.0f;
      store_elements(c, stored, to, d, count, y);
    }
  }

  /// a / b, or ~0 where that is more. A division of 64 bits is a call, which costs registers.
  KVCACHE_DEVICE_INLINE static std::uint32_t divide(std::uint64_t a, std::uint32_t b) {
    const auto high = static_cast<std::uint32_t>(a >> 32);
    const auto low = static_cast<std::uint32_t>(a);
    if (high == 0) return low / b;
    if (high >= b) return ~0u;
    std::uint64_t rest = high;
    std::uint32_t quotient = 0;
    for (std::uint32_t bit = 0x8000'0000u; bit != 0; bit /= 2) {
      rest = rest * 2 + ((low & bit) != 0 ? 1 : 0);
      if (rest < b) continue;
      rest -= b;
      quotient |= bit;
    }
    return quotient;
  }

  /// What rows come in: no 8 bits.
  template <context C>
  KVCACHE_DEVICE_INLINE static void load_row_elements(const C& c, dtype_id dtype, const std::byte* head,
                                                      std::uint32_t first, std::uint32_t count, float (&x)[4]) {
    if (dtype == dtype_id::float32)
      load_four(c, reinterpret_cast<const f32*>(head) + first, count, x);
    else if (dtype == dtype_id::float16)
      load_four(c, reinterpret_cast<const f16*>(head) + first, count, x);
    else
      load_four(c, reinterpret_cast<const bf16*>(head) + first, count, x);
  }

  template <context C>
  KVCACHE_DEVICE_INLINE static void embed(const C& c, float* x, const rope_params& rope, std::uint32_t position) {
    const std::uint32_t half = rope.rope_dim / 2;
    const std::uint64_t angles = std::uint64_t{position} * half;
    const bool halves = rope.style == rope_style::halves;
    for (std::uint32_t i = c.lane(); i < half; i += warp_lanes) {
      float* const first = x + (halves ? i : 2 * i);
      float* const second = first + (halves ? half : 1);
      const float cos = c.load(rope.cos + angles + i);
      const float sin = c.load(rope.sin + angles + i);
      const float a = *first;
      const float b = *second;
      *first = a * cos - b * sin;
      *second = b * cos + a * sin;
    }
  }
};

}  // namespace kvcache::device
