// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/attention.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvcache::detail::cpu {

/// Rows and dims are padded to so many floats: a multiple of every instruction set's lanes and row block.
inline constexpr std::size_t padding = 16;

[[nodiscard]] constexpr std::size_t padded(std::size_t n) noexcept { return (n + padding - 1) / padding * padding; }

/// Parts of one thread's scratch for tiles, in floats.
struct tile_scratch {
  std::size_t rows = 0;   ///< query tokens times group, padded
  std::size_t dim = 0;    ///< head_dim, padded
  std::size_t dim_v = 0;  ///< head_dim_v, padded

  constexpr tile_scratch(std::uint32_t tile_rows, const attention_shape& s) noexcept
      : rows(padded(std::size_t{tile_rows} * (s.query_heads / s.kv_heads))),
        dim(padded(s.head_dim)),
        dim_v(padded(s.head_dim_v != 0 ? s.head_dim_v : s.head_dim)) {}

  [[nodiscard]] constexpr std::size_t queries() const noexcept { return 0; }                           // [dim, rows]
  [[nodiscard]] constexpr std::size_t output() const noexcept { return dim * rows; }                   // [rows, dim_v]
  [[nodiscard]] constexpr std::size_t logits() const noexcept { return output() + rows * dim_v; }      // [chunk, rows]
  [[nodiscard]] constexpr std::size_t allowed() const noexcept { return logits() + kv_chunk * rows; }  // [chunk, rows]
  [[nodiscard]] constexpr std::size_t keys() const noexcept { return allowed() + kv_chunk * rows; }    // [chunk, dim]
  [[nodiscard]] constexpr std::size_t values() const noexcept { return keys() + kv_chunk * dim; }      // [chunk, dim_v]
  [[nodiscard]] constexpr std::size_t per_row() const noexcept { return values() + kv_chunk * dim_v; }  // [7, rows]
  [[nodiscard]] constexpr std::size_t size() const noexcept { return per_row() + 7 * rows; }
};

/// The float at element `i` of `from`, of the given type.
[[nodiscard]] inline float load_element(const std::byte* from, std::int64_t i, dtype_id id) noexcept {
  if (id == dtype_id::float32) {
    float x;
    std::memcpy(&x, from + i * 4, sizeof x);
    return x;
  }
  std::uint16_t bits16;
  std::memcpy(&bits16, from + i * 2, sizeof bits16);
  return id == dtype_id::float16 ? to_float(f16{bits16}) : to_float(bf16{bits16});
}

/// Ends a row: its sink joins, and output and lse are written in the caller's types. `output` is changed.
inline void finish_row(const attention_call& call, std::uint32_t row, std::uint32_t head, float* output,
                       float lse) noexcept {
  const std::uint32_t dim = call.out.head_dim;
  if (call.features.sinks) apply_sink(call.values.sinks[head], dim, output, &lse);
  const std::int64_t first = row * call.out.row_stride + head * call.out.head_stride;
  if (call.out_dtype == dtype_id::float32) {
    std::memcpy(call.out.data + first * 4, output, std::size_t{dim} * sizeof(float));
  } else {
    std::byte* const to = call.out.data + first * 2;
    for (std::uint32_t d = 0; d < dim; ++d) {
      const std::uint16_t bits16 =
          call.out_dtype == dtype_id::float16 ? from_float<f16>(output[d]).bits : from_float<bf16>(output[d]).bits;
      std::memcpy(to + d * 2, &bits16, sizeof bits16);
    }
  }
  if (call.lse.data != nullptr)
    *call.lse.at(row, head) = call.lse.base == lse_base::two || is_empty(lse) ? lse : lse * ln_2;
}

/// Takes a row's result over one part: the row's end where the tile has one part, else a state to be merged.
inline void leave_row(const attention_call& call, const query_tile& tile, const work_unit& unit, std::uint32_t row,
                      std::uint32_t head, float* output, float lse) noexcept {
  if (tile.parts == 1) {
    finish_row(call, row, head, output, lse);
    return;
  }
  const attention_workspace& w = call.plan->workspace();
  const std::size_t dim = call.out.head_dim;
  const std::size_t rows = tile.query_end - tile.query_begin;
  const std::size_t at = (tile.first_row + unit.part * rows + (row - tile.query_begin)) * call.q.heads + head;
  float* const states = const_cast<float*>(w.states.data());
  std::memcpy(states + at * dim, output, dim * sizeof(float));
  states[call.plan->state_rows() * call.q.heads * dim + at] = lse;
}

/// Ends a unit of a tile with several parts. Whoever ends last merges the parts of every row, in their order.
inline void leave_part(const attention_call& call, const query_tile& tile, const work_unit& unit) noexcept {
  attention_workspace& w = call.plan->workspace();
  std::atomic_ref<std::uint32_t> arrivals(w.arrivals[unit.tile]);
  if (arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 != tile.parts) return;
  arrivals.store(0, std::memory_order_relaxed);
  const std::size_t heads = call.q.heads;
  const std::size_t dim = call.out.head_dim;
  const std::size_t rows = tile.query_end - tile.query_begin;
  float* const outputs = w.states.data();
  float* const lses = outputs + call.plan->state_rows() * heads * dim;
  for (std::uint32_t row = tile.query_begin; row < tile.query_end; ++row) {
    for (std::uint32_t head = 0; head < heads; ++head) {
      const std::size_t at = (tile.first_row + (row - tile.query_begin)) * heads + head;
      float lse = 0;
      merge_states(tile.parts, outputs + at * dim, static_cast<std::int64_t>(rows * heads * dim), lses + at,
                   static_cast<std::int64_t>(rows * heads), static_cast<std::uint32_t>(dim), outputs + at * dim, &lse);
      finish_row(call, row, head, outputs + at * dim, lse);
    }
  }
}

}  // namespace kvcache::detail::cpu
