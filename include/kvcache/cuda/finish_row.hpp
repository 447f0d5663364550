// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/state.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/cuda/attention_params.hpp>
#include <kvcache/cuda/context.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>

#include <cstddef>
#include <cstdint>

// What happens to a row when all its tokens have been met.

namespace kvcache::device {

/// kvcache::rotate, by a warp, of `dim` floats in shared memory.
template <context C>
KVCACHE_DEVICE_INLINE void rotate_row(C& c, float* x, unsigned dim) {
  const unsigned run = dim & (~dim + 1);
  c.sync_warp();
  for (unsigned half = 1; half < run; half *= 2) {
    for (unsigned i = c.lane(); i < dim / 2; i += warp_lanes) {
      float* const pair = x + (i / half * 2 * half + i % half);
      const float a = pair[0];
      const float b = pair[half];
      pair[0] = a + b;
      pair[half] = a - b;
    }
    c.sync_warp();
  }
  float factor = 1;
  for (unsigned four = 4; four <= run; four *= 4) factor *= 0.5f;
  if ((run & 0xaaaa'aaaau) != 0) factor *= 0.70710678118654752f;
  for (unsigned i = c.lane(); i < dim; i += warp_lanes) x[i] *= factor;
  c.sync_warp();
}

template <context C>
KVCACHE_DEVICE_INLINE void store_element(const C& c, std::byte* to, dtype_id dtype, float x) {
  if (dtype == dtype_id::float32)
    c.store(reinterpret_cast<float*>(to), x);
  else if (dtype == dtype_id::float16)
    c.store(reinterpret_cast<f16*>(to), from_float<f16>(x));
  else
    c.store(reinterpret_cast<bf16*>(to), from_float<bf16>(x));
}
template <context C>
KVCACHE_DEVICE_INLINE float load_element(const C& c, const std::byte* from, dtype_id dtype) {
  if (dtype == dtype_id::float32) return c.load(reinterpret_cast<const float*>(from));
  if (dtype == dtype_id::float16) return to_float(c.load(reinterpret_cast<const f16*>(from)));
  return to_float(c.load(reinterpret_cast<const bf16*>(from)));
}
KVCACHE_DEVICE_INLINE std::int64_t element_bytes(dtype_id dtype) { return dtype == dtype_id::float32 ? 4 : 2; }

/// Lets the sink join, turns rotated values back, and writes the row's output and lse. By a warp; `x` is the row's
/// state in shared memory, normalised, `lse` in base 2.
template <variant_features Features, bool Rotated, context C>
KVCACHE_DEVICE_INLINE void finish_row(C& c, const attention_params& p, float* x, float lse, unsigned dim,
                                      std::uint32_t row, std::uint32_t head) {
  float keep = 1;
  if constexpr (Features.sinks) {
    constexpr float most = 2.3e38f;  // as kvcache::apply_sink
    const float sink = c.load(p.sinks + head);
    if (!is_empty(sink)) {
      const float logit = (sink > most ? most : sink) * log2_e;
      if (is_empty(lse)) {
        lse = logit;
      } else {
        const float top = logit > lse ? logit : lse;
        const float own = c.exp2(lse - top);
        const float total = own + c.exp2(logit - top);
        keep = own * c.reciprocal(total);
        lse = top + c.log2(total);
      }
    }
  }
  if constexpr (Rotated) rotate_row(c, x, dim);
  std::byte* const out = p.out.data + (row * p.out.row_stride + head * p.out.head_stride) * element_bytes(p.out_dtype);
  for (unsigned d = c.lane(); d < dim; d += warp_lanes)
    store_element(c, out + d * element_bytes(p.out_dtype), p.out_dtype, x[d] * keep);
  if (p.lse.data != nullptr && c.lane() == 0)
    c.store(p.lse.at(row, head), p.lse.base == lse_base::two || is_empty(lse) ? lse : lse * ln_2);
}

}  // namespace kvcache::device
