// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/plan.hpp>
#include <kvcache/attention/state.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvcache::device {

/// A plan's arrays where kernels read them. What a captured graph replays with other values stands in memory: how many
/// units there are, and the lengths.
struct attention_work {
  const std::uint32_t* unit_count = nullptr;
  const work_unit* units = nullptr;
  const std::uint32_t* tile_count = nullptr;
  const query_tile* tiles = nullptr;
  const planned_sequence* sequences = nullptr;
  const block_id* blocks = nullptr;
  /// Of each sequence its kv length, at most the planned one, where only the device knows it; null: as planned.
  const std::uint32_t* kv_lengths = nullptr;
};

/// What a step's attention over one layer is made of. Every pointer is the device's.
struct attention_params {
  attention_work work;
  kv_view kv;
  rows_view<const std::byte> q;  ///< strides in elements
  rows_view<std::byte> out;
  dtype_id q_dtype = dtype_id::bfloat16;
  dtype_id out_dtype = dtype_id::bfloat16;
  lse_view<float> lse;
  float* states = nullptr;      ///< outputs over parts, [state rows, query heads, head_dim of V]
  float* state_lses = nullptr;  ///< and their lse in base 2
  std::uint32_t group = 1;      ///< query heads of a kv head
  float scale = 0;              ///< of q . k
  std::uint32_t window = 0;
  float soft_cap = 0;
  const float* alibi_slopes = nullptr;
  const float* sinks = nullptr;
  mask_view mask;
  std::uint32_t copy_bytes = 16;  ///< what all rows of codes and elements are aligned to: 4, 8 or 16
};

static_assert(std::is_trivially_copyable_v<attention_params>);

}  // namespace kvcache::device
