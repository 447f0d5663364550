// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/check.cuh>
#include <kvcache/cuda/device_context.cuh>
#include <kvcache/detail/config.hpp>
#include <kvcache/error.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace kvcache::device {

// Programs whose files are compiled for different architectures have kernels of their own in each.
inline namespace KVCACHE_ARCHITECTURES {

/// A body as a kernel. Told how many blocks have to be resident at least, the compiler takes the registers that leaves;
/// without, it spills some to reach an occupancy that shared memory does not allow anyway.
template <class Body>
__global__ void __launch_bounds__(Body::threads, Body::min_blocks)
    kernel(const __grid_constant__ typename Body::params params) {
  extern __shared__ __align__(128) unsigned char memory[];
  device_context c;
  Body::run(c, *reinterpret_cast<typename Body::shared*>(memory), params);
}

/// Lets a body's kernel have the shared memory it needs. Raises device_failure where the device has less. Once for each
/// kernel and device would do; a call costs about a microsecond.
template <class Body>
void prepare(const device_properties& on) {
  constexpr std::size_t needed = sizeof(typename Body::shared);
  if (needed > on.shared_bytes)
    detail::raise<device_failure>("kernel needs " + std::to_string(needed) + " bytes of shared memory in a block, " +
                                  on.name + " has " + std::to_string(on.shared_bytes) +
                                  "; take a smaller head_dim or a narrower dtype");
  if constexpr (needed > 48 * 1024)
    check(cudaFuncSetAttribute(kernel<Body>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(needed)),
          "cudaFuncSetAttribute");
}

/// How many blocks of a body's threads are resident on the device at a time. Raises device_failure.
template <class Body>
[[nodiscard]] unsigned resident_blocks(const device_properties& on) {
  prepare<Body>(on);
  int each = 0;
  check(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel<Body>, Body::threads, sizeof(typename Body::shared)),
      "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return static_cast<unsigned>(each) * on.multiprocessors;
}

/// Starts `blocks` blocks of the body on `stream`; none where that is 0. Raises device_failure where the launch is
/// refused; what goes wrong later shows in the calls that follow. O(1).
template <class Body>
void launch(const device_properties& on, unsigned blocks, const typename Body::params& params, cudaStream_t stream) {
  if (blocks == 0) return;
  prepare<Body>(on);
  kernel<Body><<<blocks, Body::threads, sizeof(typename Body::shared), stream>>>(params);
  check(cudaGetLastError(), "kernel launch");
}

}  // namespace KVCACHE_ARCHITECTURES

}  // namespace kvcache::device
