// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/plan.hpp>
#include <kvcache/attention/state.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>
#include <kvcache/geometry.hpp>
#include <kvcache/quantise.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvcache::detail {

/// One run, without types.
struct attention_call {
  const attention_plan* plan = nullptr;
  kv_view kv;
  rows_view<const std::byte> q;  ///< strides in elements of q_dtype
  rows_view<std::byte> out;      ///< strides in elements of out_dtype
  dtype_id q_dtype = dtype_id::float32;
  dtype_id out_dtype = dtype_id::float32;
  lse_view<float> lse;
  variant_features features;
  variant_values values;
  float scale = 0;
};

/// Whether a layer is kept in `tail_dtype` where others are stored in `format`.
[[nodiscard]] constexpr bool is_wide_layer(const kv_view& kv, kv_format format, dtype_id tail_dtype) noexcept {
  const bool narrow = quantization_of(format.k).bits != 0 || quantization_of(format.v).bits != 0 ||
                      bits(format.k) < 16 || bits(format.v) < 16;
  return narrow && kv.k_dtype == tail_dtype && kv.v_dtype == tail_dtype;
}

/// Holds a call against its plan, and its view's types against `format` and `tail_dtype`, which the kernels were made
/// for. Raises invalid_argument; reads no tensor. O(1).
KVCACHE_NOINLINE inline void check_call(const attention_call& call, kv_format format, dtype_id tail_dtype,
                                        bool batch_invariant) {
  const attention_plan& plan = *call.plan;
  const kv_view& kv = call.kv;
  const attention_shape& shape = plan.options().shape;
  const auto refuse = [](const std::string& text) { raise<invalid_argument>("attention: " + text); };
  const auto equal = [&](const char* what, std::uint64_t value, std::uint64_t needed, const char* remedy) {
    if (value != needed)
      refuse(std::string(what) + " is " + std::to_string(value) + ", " + std::to_string(needed) + " needed; " + remedy);
  };
  const auto enough = [&](const char* what, std::uint64_t value, std::uint64_t needed, const char* remedy) {
    if (value < needed)
      refuse(std::string(what) + " is " + std::to_string(value) + ", at least " + std::to_string(needed) + " needed; " +
             remedy);
  };
  const auto planned = [&](const char* what, std::uint64_t value, std::uint64_t made_for) {
    if (made_for != 0) equal(what, value, made_for, "the plan was made for that");
  };

  if ((kv.k_dtype != format.k || kv.v_dtype != format.v) && !is_wide_layer(kv, format, tail_dtype))
    refuse(std::string("the view holds ") + name(kv.k_dtype) + " and " + name(kv.v_dtype) + ", the policies say " +
           name(format.k) + " and " + name(format.v) + "; use one policy bundle for both");
  if (plan.options().features != call.features || plan.options().batch_invariant != batch_invariant)
    refuse("the plan was made for another variant; plan with the object that runs it");

  if (plan.rows() > 0) {
    equal("the view's block_size", kv.block_size, plan.block_size(), "plan and view describe one pool");
    enough("the view's kv_heads", kv.kv_heads, 1, "set it from the model");
    enough("q's heads", call.q.heads, 1, "set it from the model");
    if (call.q.heads % kv.kv_heads != 0)
      refuse(std::to_string(call.q.heads) + " query heads are no multiple of " + std::to_string(kv.kv_heads) +
             " kv heads; give every kv head the same group");
    enough("q's head_dim", call.q.head_dim, 1, "set it from the model");
    enough("out's head_dim", call.out.head_dim, 1, "set it from the model");
    equal("q's head_dim", call.q.head_dim, kv.head_dim, "it has to be that of the keys");
    equal("out's head_dim", call.out.head_dim, kv.head_dim_v, "it has to be that of the values");
    equal("out's heads", call.out.heads, call.q.heads, "out has the heads of q");
    enough("q's rows", call.q.rows, plan.rows(), "q has a row for each query of the batch");
    enough("out's rows", call.out.rows, plan.rows(), "out has a row for each query of the batch");
    const auto shown = [&](const char* what, dtype_id dtype, const plane_view& scales, std::uint32_t dim) {
      if (quantization_of(dtype).bits != 0 && scales.base == nullptr)
        refuse(std::string(what) + " is " + name(dtype) + ", and its scales have no base; set k_scales and v_scales");
      if ((quantization_of(dtype).bits != 0 || is_rotated(dtype)) && dim > max_quantised_dim)
        refuse(std::string(what) + " is " + name(dtype) + " with a head_dim of " + std::to_string(dim) + ", at most " +
               std::to_string(max_quantised_dim) + " possible; take an element type");
    };
    shown("the view's K", kv.k_dtype, kv.k_scales, kv.head_dim);
    shown("the view's V", kv.v_dtype, kv.v_scales, kv.head_dim_v);
    const bool tails_differ = kv.k_tail_dtype() != kv.k_dtype || kv.v_tail_dtype() != kv.v_dtype;
    if (plan.tail_blocks_needed() != 0 && tails_differ && kv.tail_dtype != tail_dtype)
      refuse(std::string("the view's tail pool holds ") + name(kv.tail_dtype) + ", the policies say " +
             name(tail_dtype) + "; use one policy bundle for both");
    planned("q's heads", call.q.heads, shape.query_heads);
    planned("the view's kv_heads", kv.kv_heads, shape.kv_heads);
    planned("the view's head_dim", kv.head_dim, shape.head_dim);
    planned("the view's head_dim_v", kv.head_dim_v, shape.head_dim_v != 0 ? shape.head_dim_v : shape.head_dim);
    if (plan.blocks_needed() > kv.blocks)
      refuse("block id " + std::to_string(plan.blocks_needed() - 1) + " stands in a table, the view has " +
             std::to_string(kv.blocks) + " blocks; table and view belong to one pool");
    if (plan.tail_blocks_needed() > kv.tail_blocks)
      refuse("tail block id " + std::to_string(plan.tail_blocks_needed() - 1) + " stands in a table, the view has " +
             std::to_string(kv.tail_blocks) + " tail blocks; table and view belong to one pool");
  }
  validate(call.features, call.values, call.q.heads, plan.rows(), plan.longest());
  // Behind it the tables have null blocks, which hold nothing.
  if (plan.longest() > plan.window() && (!call.features.window || call.values.window > plan.window()))
    refuse("the batch is of a layer group with a window, its tables hold the newest " + std::to_string(plan.window()) +
           " tokens, but a query sees " +
           (call.features.window ? std::to_string(call.values.window) : std::string("all before it")) +
           "; take the variant sliding_window and give run .window = " + std::to_string(plan.window()));
  if (plan.options().window != 0 && call.values.window > plan.options().window)
    refuse("window is " + std::to_string(call.values.window) + ", the plan was made for at most " +
           std::to_string(plan.options().window) + "; set attention_options::window to the largest");
}

/// Refuses a share that the plan has no memory for: it was set aside for the shape that the plan was made with.
inline void check_share(const attention_plan& plan, unsigned ith, unsigned nth) {
  const attention_shape& shape = plan.options().shape;
  if (shape.query_heads == 0 || shape.kv_heads == 0 || shape.head_dim == 0 || ith >= nth ||
      nth > plan.workspace().threads)
    raise<invalid_argument>("attention: thread " + std::to_string(ith) + " of " + std::to_string(nth) +
                            " runs a plan made for " + std::to_string(plan.workspace().threads) +
                            " threads; set attention_options::shape and threads");
}

}  // namespace kvcache::detail
