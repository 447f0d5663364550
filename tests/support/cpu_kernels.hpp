// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU for tests, its kernels compiled once for all of them: link kvcache_test_kernels.
#pragma once

#include <kvcache/attention/cpu/cpu.hpp>

namespace kvcache {

extern template struct cpu_kernels<f32, f32>;
extern template struct cpu_kernels<f16, f16>;
extern template struct cpu_kernels<bf16, bf16>;
extern template struct cpu_kernels<f16, bf16>;
extern template struct cpu_kernels<bf16, f32>;
extern template struct cpu_kernels<f32, f16>;

}  // namespace kvcache
