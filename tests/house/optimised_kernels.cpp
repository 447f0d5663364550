// SPDX-License-Identifier: Apache-2.0
// Kernels of each kind, to be optimised by every clang: one version did not come to an end over a pattern of ours that
// it had read without complaint.
#include <kvcache/attention/cpu/cpu.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/quantization.hpp>

namespace kvcache {
template struct cpu_kernels<bf16, bf16>;
template struct cpu_kernels<fp8_e4m3, f16>;
template struct cpu_kernels<int4_per_channel, int8_per_token>;
}  // namespace kvcache
