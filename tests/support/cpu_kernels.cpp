// SPDX-License-Identifier: Apache-2.0
#include "cpu_kernels.hpp"

namespace kvcache {

template struct cpu_kernels<f32, f32>;
template struct cpu_kernels<f16, f16>;
template struct cpu_kernels<bf16, bf16>;
template struct cpu_kernels<f16, bf16>;
template struct cpu_kernels<bf16, f32>;
template struct cpu_kernels<f32, f16>;

}  // namespace kvcache
