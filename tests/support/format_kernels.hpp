// SPDX-License-Identifier: Apache-2.0
// Attention over formats that several test files use, compiled once: link kvcache_test_format_kernels.
#pragma once

#include <kvcache/attention/cpu/cpu.hpp>

namespace kvcache {

extern template struct cpu_kernels<fp8_e4m3, fp8_e4m3>;
extern template struct cpu_kernels<fp8_e5m2, fp8_e5m2>;
extern template struct cpu_kernels<int8_per_token, int8_per_token>;
extern template struct cpu_kernels<int8_per_channel, int4_grouped<64>>;
extern template struct cpu_kernels<int4_grouped<32>, int4_grouped<32>>;
extern template struct cpu_kernels<int4_grouped_asymmetric<32>, int4_grouped_asymmetric<32>>;
extern template struct cpu_kernels<int4_per_channel, int4_per_channel>;
extern template struct cpu_kernels<int4_per_channel, rotated<int4_grouped<32>>>;
extern template struct cpu_kernels<int2_per_channel, int2_per_channel>;
extern template struct cpu_kernels<rotated<int4_grouped<32>>, rotated<int4_grouped<32>>>;

}  // namespace kvcache
