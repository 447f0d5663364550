// SPDX-License-Identifier: Apache-2.0
#include "format_kernels.hpp"

namespace kvcache {

template struct cpu_kernels<fp8_e4m3, fp8_e4m3>;
template struct cpu_kernels<fp8_e5m2, fp8_e5m2>;
template struct cpu_kernels<int8_per_token, int8_per_token>;
template struct cpu_kernels<int8_per_channel, int4_grouped<64>>;
template struct cpu_kernels<int4_grouped<32>, int4_grouped<32>>;
template struct cpu_kernels<int4_grouped_asymmetric<32>, int4_grouped_asymmetric<32>>;
template struct cpu_kernels<int4_per_channel, int4_per_channel>;
template struct cpu_kernels<int4_per_channel, rotated<int4_grouped<32>>>;
template struct cpu_kernels<int2_per_channel, int2_per_channel>;
template struct cpu_kernels<rotated<int4_grouped<32>>, rotated<int4_grouped<32>>>;

}  // namespace kvcache
