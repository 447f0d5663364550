// SPDX-License-Identifier: Apache-2.0
// The kernels of attention on the CPU for our own programs: compiled in the library kvcache_kernels, once, and only
// declared where this is included. Nearly all of the code is the same for every pair of types, so one more pair costs a
// line here, while a source file that uses a pair which is missing compiles everything again.
#pragma once

#include <kvcache/attention/cpu/cpu.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/quantization.hpp>

// Empty in cpu_kernels.cpp, which has what is only declared everywhere else.
#ifndef KVCACHE_KERNELS_EXTERN
#define KVCACHE_KERNELS_EXTERN extern
#endif

namespace kvcache {

// Element types.
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<f32, f32>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<f16, f16>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<bf16, bf16>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<fp8_e4m3, fp8_e4m3>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<fp8_e5m2, fp8_e5m2>;

// Scales per token.
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int8_per_token, int8_per_token>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_grouped<16>, int4_grouped<16>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_grouped<32>, int4_grouped<32>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_grouped<64>, int4_grouped<64>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_grouped<128>, int4_grouped<128>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_grouped_asymmetric<16>, int4_grouped_asymmetric<16>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_grouped_asymmetric<32>, int4_grouped_asymmetric<32>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_grouped_asymmetric<64>, int4_grouped_asymmetric<64>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_grouped_asymmetric<128>, int4_grouped_asymmetric<128>>;

// Scales per channel.
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int8_per_channel, int8_per_channel>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_per_channel, int4_per_channel>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_per_channel_symmetric, int4_per_channel_symmetric>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int2_per_channel, int2_per_channel>;

// Rotated.
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<f32>, rotated<f32>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<f16>, rotated<f16>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<bf16>, rotated<bf16>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<fp8_e4m3>, rotated<fp8_e4m3>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<fp8_e5m2>, rotated<fp8_e5m2>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int8_per_token>, rotated<int8_per_token>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped<16>>, rotated<int4_grouped<16>>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped<32>>, rotated<int4_grouped<32>>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped<64>>, rotated<int4_grouped<64>>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped<128>>, rotated<int4_grouped<128>>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped_asymmetric<16>>,
                                                   rotated<int4_grouped_asymmetric<16>>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped_asymmetric<32>>,
                                                   rotated<int4_grouped_asymmetric<32>>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped_asymmetric<64>>,
                                                   rotated<int4_grouped_asymmetric<64>>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped_asymmetric<128>>,
                                                   rotated<int4_grouped_asymmetric<128>>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int8_per_channel>, rotated<int8_per_channel>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_per_channel>, rotated<int4_per_channel>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_per_channel_symmetric>,
                                                   rotated<int4_per_channel_symmetric>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int2_per_channel>, rotated<int2_per_channel>>;

// K and V of different types.
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<f16, bf16>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<bf16, f32>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<f32, f16>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<bf16, f16>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<bf16, int4_grouped<32>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<f32, fp8_e5m2>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<fp8_e4m3, int2_per_channel>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int8_per_token, int4_grouped<32>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int8_per_token, rotated<int4_per_channel>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int8_per_channel, int4_grouped<64>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_grouped_asymmetric<16>, f16>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_per_channel, int4_grouped<32>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_per_channel, int4_grouped_asymmetric<32>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_per_channel, rotated<int4_grouped<32>>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_per_channel_symmetric, int4_grouped<32>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int2_per_channel, int4_grouped<32>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<f16, fp8_e4m3>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<fp8_e4m3>, fp8_e4m3>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped<32>>, int4_grouped<32>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped<32>>, int8_per_token>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<f16, rotated<int8_per_channel>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<fp8_e4m3, fp8_e5m2>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<fp8_e4m3, int4_per_channel_symmetric>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int4_per_channel, int4_grouped<64>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int8_per_channel, rotated<int2_per_channel>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<int8_per_token, rotated<int8_per_token>>;
KVCACHE_KERNELS_EXTERN template struct cpu_kernels<rotated<int4_grouped<32>>, int4_grouped_asymmetric<32>>;

}  // namespace kvcache
