// SPDX-License-Identifier: Apache-2.0
// Attention by the bodies of the device's kernels, on the host: the scenes are those of attention on the CPU.
#pragma once

#include "../attention/support.hpp"
#include "host_context.hpp"

#include <kvcache/cuda/alignment.hpp>
#include <kvcache/cuda/attention_merge.hpp>
#include <kvcache/cuda/attention_tile.hpp>
#include <kvcache/cuda/attention_vector.hpp>

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace kvcache_test {

enum class device_kernel { few_rows, many_rows, one_row, four_rows };

inline const char* name(device_kernel k) {
  return k == device_kernel::few_rows    ? "tile of few rows"
         : k == device_kernel::many_rows ? "tile of many rows"
         : k == device_kernel::one_row   ? "vector of 1"
                                         : "vector of 4";
}

/// How the work is spread.
struct device_run {
  device_kernel kernel = device_kernel::few_rows;
  thread_order order = thread_order::forward;
  unsigned cut_for = 1;  ///< the plan cuts long sequences so that as many have work
  unsigned blocks = 2;
  bool batch_invariant = false;
  bool f32_queries = false;
  const std::uint32_t* kv_lengths = nullptr;  ///< what the device knows them to be
};

/// Everything that the bodies take, where they find it.
class device_call {
 public:
  device_call(const any_scene& s, const variant_features& features, const variant_values& values, const device_run& how,
              outcome& o)
      : narrow_(narrowed<bf16>(s.queries())),
        plan_(plan_attention(s.batch(), {.shape = s.heads(),
                                         .features = features,
                                         .threads = how.cut_for,
                                         .batch_invariant = how.batch_invariant})) {
    const shape& f = s.form();
    units = {plan_.units().begin(), plan_.units().end()};
    unit_count_ = static_cast<std::uint32_t>(units.size());
    tile_count_ = static_cast<std::uint32_t>(plan_.tiles().size());
    states_.assign(plan_.state_rows() * f.query_heads() * f.v_dim(), poison_value());
    lses_.assign(plan_.state_rows() * f.query_heads(), poison_value());
    params.work = {&unit_count_,          units.data(),  &tile_count_, plan_.tiles().data(), plan_.sequences().data(),
                   plan_.blocks().data(), how.kv_lengths};
    params.kv = s.view();
    const void* const q = how.f32_queries ? static_cast<const void*>(s.q.data()) : narrow_.data();
    params.q = {static_cast<const std::byte*>(q), s.rows(), f.query_heads(), f.head_dim};
    params.q_dtype = how.f32_queries ? dtype_id::float32 : dtype_id::bfloat16;
    params.out = {reinterpret_cast<std::byte*>(o.out.data()), s.rows(), f.query_heads(), f.v_dim()};
    params.out_dtype = dtype_id::float32;
    params.lse = {o.lse.data(), f.query_heads()};
    params.states = states_.data();
    params.state_lses = lses_.data();
    params.group = f.group;
    params.scale = values.scale != 0 ? values.scale : 1 / std::sqrt(static_cast<float>(f.head_dim));
    params.window = values.window;
    params.soft_cap = values.soft_cap;
    params.alibi_slopes = values.alibi_slopes.data();
    params.sinks = values.sinks.data();
    params.mask = values.mask;
    params.copy_bytes = kvcache::device::row_alignment(params.kv);
  }
  device_call(const device_call&) = delete;
  device_call& operator=(const device_call&) = delete;

  std::vector<work_unit> units;
  kvcache::device::attention_params params;

 private:
  std::vector<bf16> narrow_;
  attention_plan plan_;
  std::uint32_t unit_count_ = 0;
  std::uint32_t tile_count_ = 0;
  std::vector<float> states_;
  std::vector<float> lses_;
};

inline outcome nothing_written(const any_scene& s) {
  const shape& f = s.form();
  return {std::vector<float>(std::size_t{s.rows()} * f.query_heads() * f.v_dim(), poison_value()),
          std::vector<float>(std::size_t{s.rows()} * f.query_heads(), poison_value())};
}

/// What a kernel rounds off beyond f32, as a part of the largest output: queries, weights, and codes times their scales
/// become operands of products. f16 is off by 2^-11 of each, bf16 by 2^-8, and a logit of some ten times as much.
template <class K, class V>
double device_rounding(device_kernel kernel) {
  if (kernel == device_kernel::one_row || kernel == device_kernel::four_rows) return 0;
  constexpr bool fine = std::is_same_v<typename kvcache::device::stored_as<K>::key_operand, f16> &&
                        std::is_same_v<typename kvcache::device::stored_as<V>::value_operand, f16>;
  return fine ? 0x1p-10 : 0x1p-7;
}

/// Runs the kernel that `how` names, and merges. `make` puts another context between.
template <class Variant, class K, class V, class Tail, unsigned DimK, unsigned DimV, class Make>
void run_device(const device_call& call, const device_run& how, const Make& make) {
  namespace device = kvcache::device;
  constexpr variant_features features = Variant::features;
  const host_options options{{}, how.order};
  const auto run = [&]<class Body>(Body*) { run_on_host<Body>(how.blocks, call.params, options, make); };
  constexpr bool tiles = device::stored_as<K>::bits <= 16 && device::stored_as<V>::bits <= 16;
  if constexpr (tiles) {
    if (how.kernel == device_kernel::few_rows)
      run(static_cast<device::attention_tile<K, V, Tail, DimK, DimV, features, false>*>(nullptr));
    if (how.kernel == device_kernel::many_rows)
      run(static_cast<device::attention_tile<K, V, Tail, DimK, DimV, features, true>*>(nullptr));
  } else if (how.kernel == device_kernel::few_rows || how.kernel == device_kernel::many_rows) {
    throw kernel_fault("no tiles of f32");
  }
  if (how.kernel == device_kernel::one_row)
    run(static_cast<device::attention_vector<K, V, Tail, DimK, DimV, features, 1>*>(nullptr));
  if (how.kernel == device_kernel::four_rows)
    run(static_cast<device::attention_vector<K, V, Tail, DimK, DimV, features, 4>*>(nullptr));
  run(static_cast<device::attention_merge<V, DimV, features>*>(nullptr));
}

/// Attention over a scene; output and lse begin as no numbers.
template <class Variant, unsigned DimK = 64, unsigned DimV = DimK, class K, class V, class Tail>
outcome attend_on_device(const scene<K, V, Tail>& s, const variant_values& values = {}, const device_run& how = {}) {
  outcome o = nothing_written(s);
  const device_call call(s, Variant::features, values, how, o);
  run_device<Variant, K, V, Tail, DimK, DimV>(call, how, [](host_context&& c) { return std::move(c); });
  o.rounding = device_rounding<K, V>(how.kernel);
  return o;
}

/// Every kernel, each in another order of threads, with one part a tile and with several.
template <class F>
void each_device_run(const F& f) {
  for (const device_kernel kernel :
       {device_kernel::few_rows, device_kernel::many_rows, device_kernel::one_row, device_kernel::four_rows})
    for (const unsigned cut_for : {1u, 6u}) {
      if (!thorough && cut_for == 1) continue;
      const auto order = static_cast<thread_order>((static_cast<unsigned>(kernel) + cut_for) % 3);
      INFO(name(kernel) << ", order " << static_cast<int>(order) << ", cut for " << cut_for);
      f(device_run{.kernel = kernel, .order = order, .cut_for = cut_for});
    }
}

}  // namespace kvcache_test
