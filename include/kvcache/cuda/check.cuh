// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/error.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace kvcache::device {

/// The device or its runtime has failed, or there is none that can run the kernels.
struct device_failure : system_failure {
  using system_failure::system_failure;
};

/// Raises device_failure, naming the call and what the runtime says of it, unless it has succeeded.
inline void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  static_cast<void>(cudaGetLastError());  // it is told; calls that follow are not to fail by it
  detail::raise<device_failure>(std::string(call) + ": " + cudaGetErrorName(result) + ", " +
                                cudaGetErrorString(result));
}

/// What launches have to know of a device.
struct device_properties {
  std::string name;
  int device = 0;
  unsigned multiprocessors = 0;
  unsigned capability = 0;       ///< 80 for 8.0
  std::size_t shared_bytes = 0;  ///< that a block may have

  /// Of the calling thread's current device. Raises device_failure where there is none, its driver is too old for this
  /// program's runtime, or its compute capability is below 8.0.
  [[nodiscard]] static device_properties current() {
    int count = 0;
    const cudaError_t found = cudaGetDeviceCount(&count);
    if (found == cudaErrorInsufficientDriver)
      detail::raise<device_failure>(
          "no CUDA driver, or one that is older than the runtime that this program was "
          "built with; install or update it, or build with an older toolkit");
    if (found == cudaErrorNoDevice || (found == cudaSuccess && count == 0))
      detail::raise<device_failure>(
          "no CUDA device; take cpu_backend, or make a device visible "
          "(CUDA_VISIBLE_DEVICES)");
    check(found, "cudaGetDeviceCount");
    device_properties p;
    check(cudaGetDevice(&p.device), "cudaGetDevice");
    cudaDeviceProp all{};
    check(cudaGetDeviceProperties(&all, p.device), "cudaGetDeviceProperties");
    p.name = all.name;
    p.multiprocessors = static_cast<unsigned>(all.multiProcessorCount);
    p.capability = static_cast<unsigned>(10 * all.major + all.minor);
    p.shared_bytes = all.sharedMemPerBlockOptin;
    if (p.capability < 80)
      detail::raise<device_failure>(p.name + " has compute capability " + std::to_string(all.major) + '.' +
                                    std::to_string(all.minor) +
                                    ", at least 8.0 needed; take cpu_backend or a newer device");
    return p;
  }
};

}  // namespace kvcache::device
