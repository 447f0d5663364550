// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/call.hpp>
#include <kvcache/attention/executor.hpp>
#include <kvcache/attention/plan.hpp>
#include <kvcache/attention/state.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/concepts.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/policies.hpp>
#include <kvcache/views.hpp>

#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace kvcache {

/// Instruction sets that the CPU kernels are built for. Linux lets a process use AMX once it has asked, which
/// best_isa() and has_isa() do where the processor has it: for all threads and for good, and stacks for signals
/// (sigaltstack) have to be large enough to hold its registers from then on. Where the system refuses, the next best
/// set is taken. A call uses the registers of AMX as functions may: what a caller had in them is gone.
enum class cpu_isa : std::uint8_t {
  best,        ///< the best that this machine has
  scalar,      ///< plain C++
  neon,        ///< aarch64: NEON, which all of them have
  avx2,        ///< AVX2, FMA, F16C
  avx512,      ///< AVX-512 F, BW, DQ, VL
  avx512_dot,  ///< and its dot products, BF16 and VNNI: Cooper Lake, Sapphire Rapids, Zen 4 and later
  amx,         ///< and AMX's products of matrices of bf16: Sapphire Rapids and later
};

/// Attention on the CPU. <kvcache/attention/cpu/cpu.hpp> brings the kernels.
struct cpu_backend {
  static constexpr const char* name = "cpu";
  struct options {
    cpu_isa isa = cpu_isa::best;
  };
};

/// What an attention object is told when it is made. All of it may be left out; see each member.
template <class Backend = cpu_backend>
struct attention_options {
  /// The model's heads. Needed where the engine's own threads call run(..., ith, nth); otherwise taken from q and the
  /// view when a plan runs, at the price of query tiles of a fixed size.
  attention_shape shape{};
  /// Threads that work is planned for; 0: those of the executor. Where the engine's own threads run a plan: the most
  /// that will ever run it together.
  unsigned threads = 0;
  /// See plan_options::window.
  std::uint32_t window = 0;
  typename Backend::options backend{};
};

namespace detail {

/// The kernels of a backend. The backend's own header specialises this with `present = true` and the functions below;
/// declared here, so that a missing header is one message.
template <class Backend>
struct attention_kernels {
  static constexpr bool present = false;
  static executor_ref default_executor();
  static void validate(const typename Backend::options& options);
  static std::size_t scratch_floats(const attention_plan& plan, const attention_shape& shape);
  template <class K, class V>
  static void run(const attention_call& call, const typename Backend::options& options, unsigned ith, unsigned nth);
};

template <class Policies>
using attention_variant_or_causal =
    typename std::conditional_t<attention_variant<typename Policies::variant>,
                                std::type_identity<typename Policies::variant>, std::type_identity<causal>>::type;
template <class Policies>
using attention_dtype_or_bf16 =
    typename std::conditional_t<kv_dtype_policy<typename Policies::dtype>, std::type_identity<typename Policies::dtype>,
                                std::type_identity<kv_dtype<bf16>>>::type;

}  // namespace detail

/// Attention over paged KV: `plan` turns a step's batch into work, `run` carries it out for one layer.
///
///     kvcache::attention<mine> attention{{.shape = {.query_heads = 32, .kv_heads = 8, .head_dim = 128}}};
///     auto plan = attention.plan(step->batch());
///     attention.run(plan, cache, layer, q, out);
///
/// Holds no state of a run: any number of threads may plan and run at once, each with a plan of its own. An executor
/// given to the constructor is referred to and has to outlive the object; without one, the backend's own threads serve.
template <class Policies>
class attention {
 public:
  using policies_type = Policies;
  using variant = detail::attention_variant_or_causal<Policies>;
  using dtype = detail::attention_dtype_or_bf16<Policies>;
  /// What tokens lie in that are not quantised yet, or in layers that never are.
  using tail_dtype = std::conditional_t<element<typename Policies::tail_dtype>, typename Policies::tail_dtype, bf16>;
  using backend = typename Policies::backend;
  using options_type = attention_options<backend>;

  /// Checks nothing: what does not fit is refused by plan and run. O(1), no allocation.
  explicit attention(options_type options = {}) : options_(std::move(options)) {}
  template <executor E>
  attention(options_type options, E& threads) : options_(std::move(options)), executor_(threads) {}

  /// Plans a step's attention. `reuse`: a plan that is not needed any more, for its memory. Raises and costs what
  /// plan_attention does, O(blocks + rows + units).
  [[nodiscard]] attention_plan plan(const batch_view& batch, attention_plan reuse = {}) const {
    need_kernels();
    plan_options o;
    o.shape = options_.shape;
    o.features = variant::features;
    o.threads = options_.threads != 0 ? options_.threads : lent().threads();
    o.batch_invariant = Policies::batch_invariant;
    o.window = options_.window;
    attention_plan made = plan_attention(batch, o, std::move(reuse));
    const attention_shape& s = options_.shape;
    if (s.query_heads != 0 && s.kv_heads != 0 && s.head_dim != 0) reserve(made, s, o.threads);
    return made;
  }

  /// Attention of one layer, on the executor; returns when `out` is written. q is [rows, query_heads, head_dim], out
  /// [rows, query_heads, head_dim_v], rows as in the planned batch; elements f32, f16 or bf16, any strides. A row that
  /// sees no token is written as 0 with an lse of -inf. Raises invalid_argument, before anything is read or written,
  /// where shapes, types, values or block ids do not fit. Sums are f32, and so are products, but for two cases where
  /// cpu_isa is avx512_dot or amx: q, K and V all bf16, where weights become bf16; and tiles of fewer than 16 rows, as
  /// decode has, over K and V of 8 bits or fewer without batch_invariant, where queries and weights of any type become
  /// whole numbers of 8 or 16 bits, which costs less than the codes did. avx512 keeps f32 throughout. One run of a plan
  /// at a time. O(visible tokens * query_heads * head_dim) over all rows; K and V of a kv head are read once for a tile
  /// of rows, whatever the group.
  template <class Q, class Out>
    requires wide_element<std::remove_const_t<Q>> && wide_element<Out>
  void run(const attention_plan& plan, const kv_view& kv, rows_view<Q> q, rows_view<Out> out,
           const variant_values& values = {}, lse_view<float> lse = {}) const {
    const detail::attention_call call = checked_call(plan, kv, q, out, values, lse);
    if (plan.rows() == 0) return;
    const executor_ref threads = lent();
    const unsigned nth = plan.units().size() <= 1 ? 1 : threads.threads();
    reserve(plan, {call.q.heads, kv.kv_heads, kv.head_dim, kv.v_dim()}, nth);
    auto work = [&](unsigned ith, unsigned n) { run_kernels(call, ith, n); };
    if (nth == 1)
      work(0, 1);
    else
      threads.run(work);
  }

  /// The share of thread `ith` of `nth`, on the calling thread: the engine's own threads each call this once for every
  /// run, with the same arguments but `ith`, and `out` is whole when all have returned. Waits for nobody. All have to
  /// return before the plan runs again. Needs attention_options::shape, and threads >= nth.
  template <class Q, class Out>
    requires wide_element<std::remove_const_t<Q>> && wide_element<Out>
  void run(const attention_plan& plan, const kv_view& kv, rows_view<Q> q, rows_view<Out> out, unsigned ith,
           unsigned nth, const variant_values& values = {}, lse_view<float> lse = {}) const {
    const detail::attention_call call = checked_call(plan, kv, q, out, values, lse);
    if (plan.rows() == 0) return;
    detail::check_share(plan, ith, nth);
    run_kernels(call, ith, nth);
  }

  /// The same over layer `layer` of anything that shows its layers as views.
  template <class Cache, class Q, class Out>
    requires requires(const Cache& c, std::uint32_t l) {
      { c.view(l) } -> std::convertible_to<kv_view>;
    }
  void run(const attention_plan& plan, const Cache& cache, std::uint32_t layer, rows_view<Q> q, rows_view<Out> out,
           const variant_values& values = {}, lse_view<float> lse = {}) const {
    run(plan, static_cast<kv_view>(cache.view(layer)), q, out, values, lse);
  }
  template <class Cache, class Q, class Out>
    requires requires(const Cache& c, std::uint32_t l) {
      { c.view(l) } -> std::convertible_to<kv_view>;
    }
  void run(const attention_plan& plan, const Cache& cache, std::uint32_t layer, rows_view<Q> q, rows_view<Out> out,
           unsigned ith, unsigned nth, const variant_values& values = {}, lse_view<float> lse = {}) const {
    run(plan, static_cast<kv_view>(cache.view(layer)), q, out, ith, nth, values, lse);
  }

  [[nodiscard]] const options_type& options() const noexcept { return options_; }

 private:
  using kernels = detail::attention_kernels<backend>;

  static constexpr kv_format format{dtype_traits<typename dtype::k>::id, dtype_traits<typename dtype::v>::id};
  static constexpr bool has_wide_layers =
      detail::is_wide_layer({.k_dtype = dtype_traits<tail_dtype>::id, .v_dtype = dtype_traits<tail_dtype>::id}, format,
                            dtype_traits<tail_dtype>::id);

  void run_kernels(const detail::attention_call& call, unsigned ith, unsigned nth) const {
    if constexpr (has_wide_layers) {
      if (detail::is_wide_layer(call.kv, format, dtype_traits<tail_dtype>::id))
        return kernels::template run<tail_dtype, tail_dtype>(call, options_.backend, ith, nth);
    }
    kernels::template run<typename dtype::k, typename dtype::v>(call, options_.backend, ith, nth);
  }

  // A function of its own, so that a missing header is one message however many members are used.
  static void need_kernels() noexcept {
    static_assert(kernels::present,
                  "backend has no kernels here: include its header first, <kvcache/attention/cpu/cpu.hpp> for "
                  "cpu_backend");
  }

  [[nodiscard]] executor_ref lent() const { return executor_ ? executor_ : kernels::default_executor(); }

  static void reserve(const attention_plan& plan, const attention_shape& shape, unsigned threads) {
    const std::uint32_t dim_v = shape.head_dim_v != 0 ? shape.head_dim_v : shape.head_dim;
    attention_workspace& w = plan.workspace();
    const std::size_t states = plan.state_rows() * shape.query_heads * (std::size_t{dim_v} + 1);
    if (w.states.size() < states) w.states.resize(states);
    const std::size_t each = kernels::scratch_floats(plan, shape);
    if (w.scratch_floats < each || w.threads < threads) {
      if (w.scratch_floats < each) w.scratch_floats = each;
      if (w.threads < threads) w.threads = threads;
      w.scratch.resize(w.scratch_floats * w.threads + 16);
    }
  }

  template <class Q, class Out>
  [[nodiscard]] detail::attention_call checked_call(const attention_plan& plan, const kv_view& kv, rows_view<Q> q,
                                                    rows_view<Out> out, const variant_values& values,
                                                    lse_view<float> lse) const {
    need_kernels();
    kernels::validate(options_.backend);
    detail::attention_call call;
    call.plan = &plan;
    call.kv = kv;
    call.kv.head_dim_v = kv.v_dim();
    call.q = {reinterpret_cast<const std::byte*>(q.data), q.rows, q.heads, q.head_dim, q.row_stride, q.head_stride};
    call.out = {
        reinterpret_cast<std::byte*>(out.data), out.rows, out.heads, out.head_dim, out.row_stride, out.head_stride};
    call.q_dtype = dtype_traits<std::remove_const_t<Q>>::id;
    call.out_dtype = dtype_traits<Out>::id;
    call.lse = lse;
    call.features = variant::features;
    call.values = values;
    call.scale = values.scale != 0 ? values.scale : 1.0f / std::sqrt(static_cast<float>(q.head_dim));
    detail::check_call(call, format, dtype_traits<tail_dtype>::id, Policies::batch_invariant);
    return call;
  }

  options_type options_;
  executor_ref executor_;

  // Last, so that the default goes on where one of them fails.
  static_assert(attention_variant<typename Policies::variant>,
                "variant needs `static constexpr const char* name` and "
                "`static constexpr kvcache::variant_features features`");
  static_assert(
      kv_dtype_policy<typename Policies::dtype>,
      "dtype needs `using k = T; using v = T;`, each T an element type (f32, f16, bf16, fp8_e4m3, fp8_e5m2) or "
      "a format of <kvcache/quantization.hpp>: kvcache::kv_dtype<K, V>");
};

}  // namespace kvcache
