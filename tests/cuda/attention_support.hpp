// SPDX-License-Identifier: Apache-2.0
// Attention by the bodies of the device's kernels, on the host: the scenes are those of attention on the CPU.
#pragma once

#include "../attention/support.hpp"
#include "host_context.hpp"

#include <kvcache/cuda/attention_merge.hpp>
#include <kvcache/cuda/attention_tile.hpp>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace kvcache_test {

/// What a run on the host may differ in.
struct device_run {
  unsigned parts_for = 1;  ///< as many blocks as work is cut for
  unsigned blocks = 3;
  thread_order order = thread_order::forward;
  bool bf16_queries = true;
  const std::uint32_t* kv_lengths = nullptr;
  bool check_memory = true;
};

/// Everything that the bodies take, where the bodies find it.
template <class Variant>
struct device_call {
  attention_plan plan;
  std::vector<bf16> narrow;
  std::vector<float> states;
  std::vector<float> lses;
  std::uint32_t units = 0;
  std::uint32_t tiles = 0;
  kvcache::device::attention_params params;

  device_call(const any_scene& s, const variant_values& values, outcome& o, const device_run& how,
              bool batch_invariant = false)
      : narrow(narrowed<bf16>(s.queries())) {
    const shape& f = s.form();
    plan = plan_attention(s.batch(), {.shape = s.heads(),
                                      .features = Variant::features,
                                      .threads = how.parts_for,
                                      .batch_invariant = batch_invariant});
    units = static_cast<std::uint32_t>(plan.units().size());
    tiles = static_cast<std::uint32_t>(plan.tiles().size());
    states.assign(plan.state_rows() * f.query_heads() * f.v_dim(), poison_value());
    lses.assign(plan.state_rows() * f.query_heads(), poison_value());
    params.work = {
        &units,        plan.units().data(), &tiles, plan.tiles().data(), plan.sequences().data(), plan.blocks().data(),
        how.kv_lengths};
    params.kv = s.view();
    params.q = {reinterpret_cast<const std::byte*>(how.bf16_queries ? static_cast<const void*>(narrow.data())
                                                                    : static_cast<const void*>(s.q.data())),
                s.rows(), f.query_heads(), f.head_dim};
    params.q_dtype = how.bf16_queries ? dtype_id::bfloat16 : dtype_id::float32;
    params.out = {reinterpret_cast<std::byte*>(o.out.data()), s.rows(), f.query_heads(), f.v_dim()};
    params.out_dtype = dtype_id::float32;
    params.lse = {o.lse.data(), f.query_heads()};
    params.states = states.data();
    params.state_lses = lses.data();
    params.group = f.group;
    params.scale = values.scale != 0 ? values.scale : 1 / std::sqrt(static_cast<float>(f.head_dim));
    params.window = values.window;
    params.soft_cap = values.soft_cap;
    params.alibi_slopes = values.alibi_slopes.data();
    params.sinks = values.sinks.data();
    params.mask = values.mask;
    params.copy_bytes = f.aligned;
  }
};

/// Attention over a scene, output and lse of poison where nothing is written.
template <class Variant, bool ManyRows, unsigned DimK, unsigned DimV, bool Invariant = false, class K, class V,
          class Tail>
outcome attend_on_device(const scene<K, V, Tail>& s, const variant_values& values = {}, const device_run& how = {}) {
  const shape& f = s.form();
  outcome o{std::vector<float>(std::size_t{s.rows()} * f.query_heads() * f.v_dim(), poison_value()),
            std::vector<float>(std::size_t{s.rows()} * f.query_heads(), poison_value())};
  device_call<Variant> call(s, values, o, how, Invariant);
  using tile = kvcache::device::attention_tile<K, V, Tail, DimK, DimV, Variant::features, ManyRows>;
  using merge = kvcache::device::attention_merge<V, DimV, Variant::features>;
  run_on_host<tile>(how.blocks, call.params, {{}, how.order});
  run_on_host<merge>(how.blocks, call.params, {{}, how.order});
  // Weights are rounded to what values are multiplied as, and so are codes times their scales.
  using v_as = kvcache::device::stored_as<V>;
  using k_as = kvcache::device::stored_as<K>;
  const bool fine =
      std::is_same_v<typename v_as::value_operand, f16> && std::is_same_v<typename k_as::key_operand, f16>;
  o.rounding = fine ? 0x1p-10 : 0x1p-7;
  return o;
}

}  // namespace kvcache_test
