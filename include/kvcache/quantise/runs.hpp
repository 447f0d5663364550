// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>

#include <cstdint>

// What is stored must not depend on how a program was compiled. So nothing in this folder divides or sums up floats in
// a way that -ffast-math might change, no sum follows a product that it could be fused with, and subnormal numbers
// count as 0.

namespace kvcache::detail {

/// Elements worked on together, in arrays of their own: a fixed count of what nothing else can point to lets the
/// compiler use whatever vectors the build allows. Loops of 16 g++ would unroll before it looks for vectors.
inline constexpr std::uint32_t quantise_width = 32;
template <class T>
using run_of = T[quantise_width];

/// `count` elements, at most a run. What a run has too much repeats the first of its last half.
KVCACHE_ALWAYS_INLINE void load_run(const float* x, std::uint32_t count, run_of<float>& run) noexcept {
  const std::uint32_t last = count > quantise_width / 2 ? quantise_width / 2 : 0;
  for (std::uint32_t j = 0; j < quantise_width; ++j) run[j] = x[j < count ? j : last];
}

}  // namespace kvcache::detail
