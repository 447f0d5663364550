// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/attention.hpp>
#include <kvcache/convert.hpp>
#include <kvcache/quantise.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvcache::detail::cpu {

/// q . offset: what every q . k of a row lacks since the offset was subtracted from the keys.
[[nodiscard]] inline float key_shift(const attention_call& call, std::uint32_t row, std::uint32_t head) noexcept {
  if (call.kv.key_offset == nullptr) return 0;
  const std::uint32_t dim = call.q.head_dim;
  const std::int64_t bytes = bits(call.q_dtype) / 8;
  const std::byte* const q = call.q.data + (row * call.q.row_stride + head * call.q.head_stride) * bytes;
  const float* const offset = call.kv.key_offset + std::size_t{head / (call.q.heads / call.kv.kv_heads)} * dim;
  double sum = 0;
  constexpr std::uint32_t slice = 64;  // converted as a whole, so that a compiler may use vectors
  float x[slice];
  for (std::uint32_t d = 0; d < dim; d += slice) {
    const std::uint32_t count = dim - d < slice ? dim - d : slice;
    convert(q + d * bytes, call.q_dtype, count, x);
    for (std::uint32_t i = 0; i < count; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(offset[d + i]);
  }
  return static_cast<float>(sum);
}

/// Ends a row: its sink joins, and output and lse are written in the caller's types. `output` is changed.
inline void finish_row(const attention_call& call, std::uint32_t row, std::uint32_t head, float* output,
                       float lse) noexcept {
  const std::uint32_t dim = call.out.head_dim;
  if (is_rotated(call.kv.v_dtype)) rotate(output, dim);
  // Under a soft cap every logit has it already; without one, softmax does not see what is the same for all tokens.
  if (!call.features.soft_cap && !is_empty(lse)) lse += key_shift(call, row, head) * call.scale * log2_e;
  if (call.features.sinks) apply_sink(call.values.sinks[head], dim, output, &lse);
  const std::int64_t first = row * call.out.row_stride + head * call.out.head_stride;
  if (call.out_dtype == dtype_id::float32) {
    std::memcpy(call.out.data + first * 4, output, std::size_t{dim} * sizeof(float));
  } else {
    std::byte* const to = call.out.data + first * 2;
    constexpr std::uint32_t slice = 64;  // converted as a whole, so that a compiler may use vectors
    std::uint16_t converted[slice];
    for (std::uint32_t d = 0; d < dim; d += slice) {
      const std::uint32_t count = dim - d < slice ? dim - d : slice;
      if (call.out_dtype == dtype_id::float16)
        for (std::uint32_t i = 0; i < count; ++i) converted[i] = from_float<f16>(output[d + i]).bits;
      else
        for (std::uint32_t i = 0; i < count; ++i) converted[i] = from_float<bf16>(output[d + i]).bits;
      std::memcpy(to + d * 2, converted, count * sizeof(std::uint16_t));
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

/// One thread's share of a run: takes units until none is left, and hands each to `run_unit`. The last thread to leave
/// makes the workspace ready for the next run.
inline void run_share(const attention_call& call, unsigned ith, unsigned nth,
                      void (*run_unit)(const attention_call&, const work_unit&, float*)) noexcept {
  attention_workspace& w = call.plan->workspace();
  const auto units = call.plan->units();
  float* scratch = w.scratch.data();
  scratch += (64 - reinterpret_cast<std::uintptr_t>(scratch) % 64) % 64 / sizeof(float) + ith * w.scratch_floats;
  const std::atomic_ref<std::uint32_t> next(w.next);
  for (;;) {
    const std::uint32_t taken = next.fetch_add(1, std::memory_order_relaxed);
    if (taken >= units.size()) break;
    const work_unit& unit = units[taken];
    const query_tile& tile = call.plan->tiles()[unit.tile];
    run_unit(call, unit, scratch);
    if (tile.parts > 1) leave_part(call, tile, unit);
  }
  const std::atomic_ref<std::uint32_t> left(w.left);
  if (left.fetch_add(1, std::memory_order_acq_rel) + 1 == nth) {
    next.store(0, std::memory_order_relaxed);
    left.store(0, std::memory_order_relaxed);
  }
}

}  // namespace kvcache::detail::cpu
