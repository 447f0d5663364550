// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/attention.hpp>
#include <kvcache/attention/cpu/cpuid.hpp>
#include <kvcache/attention/cpu/scratch.hpp>
#include <kvcache/attention/cpu/thread_pool.hpp>
#include <kvcache/attention/cpu/vector_amx.hpp>
#include <kvcache/attention/cpu/vector_avx2.hpp>
#include <kvcache/attention/cpu/vector_avx512.hpp>
#include <kvcache/attention/cpu/vector_dot.hpp>
#include <kvcache/attention/cpu/vector_neon.hpp>
#include <kvcache/attention/cpu/vector_scalar.hpp>
#include <kvcache/attention/cpu/work.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/quantise.hpp>

// Everything that the .inl files use is included above: a standard header first seen between BEGIN and END would be
// compiled for that instruction set, for everybody.
#include <atomic>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>

namespace kvcache::detail::isa_scalar {
#include <kvcache/attention/cpu/functions.inl>

#include <kvcache/attention/cpu/multiply.inl>

#include <kvcache/attention/cpu/tile.inl>
}  // namespace kvcache::detail::isa_scalar

#if KVCACHE_NEON
namespace kvcache::detail::isa_neon {
#include <kvcache/attention/cpu/functions.inl>

#include <kvcache/attention/cpu/multiply.inl>

#include <kvcache/attention/cpu/tile.inl>

#include <kvcache/attention/cpu/decode_products.inl>

#include <kvcache/attention/cpu/decode.inl>
}  // namespace kvcache::detail::isa_neon
#endif

#if KVCACHE_X86
KVCACHE_AVX2_BEGIN
namespace kvcache::detail::isa_avx2 {
#include <kvcache/attention/cpu/functions.inl>

#include <kvcache/attention/cpu/multiply.inl>

#include <kvcache/attention/cpu/tile.inl>

#include <kvcache/attention/cpu/decode_products.inl>

#include <kvcache/attention/cpu/decode.inl>
}  // namespace kvcache::detail::isa_avx2
KVCACHE_ISA_END

KVCACHE_AVX512_BEGIN
namespace kvcache::detail::isa_avx512 {
#include <kvcache/attention/cpu/functions.inl>

#include <kvcache/attention/cpu/multiply.inl>

#include <kvcache/attention/cpu/tile.inl>

#include <kvcache/attention/cpu/decode_products.inl>

#include <kvcache/attention/cpu/decode.inl>
}  // namespace kvcache::detail::isa_avx512
KVCACHE_ISA_END

// The same namespace again, with more instructions: only what needs them is compiled for them.
KVCACHE_AVX512_DOT_BEGIN
namespace kvcache::detail::isa_avx512 {
#include <kvcache/attention/cpu/decode_dot.inl>

#include <kvcache/attention/cpu/tile_dot.inl>

#include <kvcache/attention/cpu/codes.inl>

#include <kvcache/attention/cpu/codes_keys.inl>

#include <kvcache/attention/cpu/codes_values.inl>

#include <kvcache/attention/cpu/decode_codes.inl>
}  // namespace kvcache::detail::isa_avx512
KVCACHE_ISA_END

KVCACHE_AMX_BEGIN
namespace kvcache::detail::isa_avx512 {
#include <kvcache/attention/cpu/tile_matrix.inl>
}  // namespace kvcache::detail::isa_avx512
KVCACHE_ISA_END
#endif

namespace kvcache {

/// The CPU kernels for K of type K and V of type V. Large code: an engine that runs attention in several source files
/// compiles it once by naming it in all of them and instantiating it in one.
///
///     extern template struct kvcache::cpu_kernels<kvcache::bf16, kvcache::bf16>;  // after the header, everywhere
///     template struct kvcache::cpu_kernels<kvcache::bf16, kvcache::bf16>;         // in one source file
template <class K, class V>
struct cpu_kernels {
  static void run(const detail::attention_call& call, const cpu_backend::options& options, unsigned ith,
                  unsigned nth) noexcept;
};

// Outside the class: a member defined inside is inline, and those are compiled whatever `extern template` says.
template <class K, class V>
void cpu_kernels<K, V>::run(const detail::attention_call& call, const cpu_backend::options& options, unsigned ith,
                            unsigned nth) noexcept {
  const cpu_isa isa = options.isa == cpu_isa::best ? best_isa() : options.isa;
#if KVCACHE_X86
  if constexpr (std::is_same_v<K, bf16> && std::is_same_v<V, bf16>) {
    if (isa == cpu_isa::amx && call.q_dtype == dtype_id::bfloat16)
      return detail::cpu::run_share(call, ith, nth, detail::isa_avx512::run_unit_of_matrices);
    const bool dots = options.isa == cpu_isa::avx512_dot || (isa == cpu_isa::avx512_dot && detail::dots_are_fast());
    if (dots && call.q_dtype == dtype_id::bfloat16)
      return detail::cpu::run_share(call, ith, nth, detail::isa_avx512::run_unit_of_pairs);
  }
  if constexpr (dtype_traits<K>::bits <= 8 && dtype_traits<V>::bits <= 8) {
    if (isa >= cpu_isa::avx512_dot && !call.plan->options().batch_invariant)
      return detail::cpu::run_share(call, ith, nth, detail::isa_avx512::run_codes);
  }
  if (isa >= cpu_isa::avx512) return detail::cpu::run_share(call, ith, nth, detail::isa_avx512::run_unit<K, V>);
  if (isa == cpu_isa::avx2) return detail::cpu::run_share(call, ith, nth, detail::isa_avx2::run_unit<K, V>);
#elif KVCACHE_NEON
  if (isa == cpu_isa::neon) return detail::cpu::run_share(call, ith, nth, detail::isa_neon::run_unit<K, V>);
#endif
  static_cast<void>(isa);
  detail::cpu::run_share(call, ith, nth, detail::isa_scalar::run_tile);
}

namespace detail {

template <>
struct attention_kernels<cpu_backend> {
  static constexpr bool present = true;

  [[nodiscard]] static executor_ref default_executor() { return default_thread_pool(); }

  static void validate(const cpu_backend::options& options) {
    if (!has_isa(options.isa))
      raise<invalid_argument>(std::string("attention: isa is ") + name(options.isa) + ", this machine has " +
                              name(best_isa()) + " at best; leave it at cpu_isa::best");
  }

  [[nodiscard]] static std::size_t scratch_floats(const attention_plan& plan, const attention_shape& shape) noexcept {
    const std::size_t tile = cpu::tile_scratch(plan.tile_rows(), shape).size();
    const std::size_t decode = cpu::padded(cpu::decode_scratch(shape).size()) + cpu::code_scratch(shape).size();
    return cpu::padded(tile > decode ? tile : decode);
  }

  template <class K, class V>
  static void run(const attention_call& call, const cpu_backend::options& options, unsigned ith,
                  unsigned nth) noexcept {
    cpu_kernels<K, V>::run(call, options, ith, nth);
  }
};

}  // namespace detail

}  // namespace kvcache
