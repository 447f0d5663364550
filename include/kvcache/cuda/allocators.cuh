// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/cuda/check.cuh>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace kvcache {

namespace device {

/// Memory from a call of the runtime; raises device_failure, naming the bytes, where it gives none.
template <class Call>
void* allocated(const char* who, std::size_t bytes, std::size_t alignment, const Call& call) {
  constexpr std::size_t given = 256;  // what the runtime aligns to
  if (alignment > given)
    detail::raise<invalid_argument>(std::string(who) + ": alignment of " + std::to_string(alignment) +
                                    " asked for, at most " + std::to_string(given) + " possible");
  void* memory = nullptr;
  const cudaError_t result = call(&memory, bytes == 0 ? 1 : bytes);
  if (result == cudaErrorMemoryAllocation) {
    static_cast<void>(cudaGetLastError());
    std::size_t free = 0;
    std::size_t all = 0;
    static_cast<void>(cudaMemGetInfo(&free, &all));
    detail::raise<device_failure>(std::string(who) + ": no memory for " + std::to_string(bytes) + " bytes, " +
                                  std::to_string(free) + " of the device's " + std::to_string(all) +
                                  " are free; give the pool fewer blocks");
  }
  check(result, who);
  return memory;
}

}  // namespace device

/// The device's memory, by cudaMalloc, on the current device. Both calls wait for the device. Thread safe.
class device_allocator {
 public:
  static constexpr const char* name = "device";
  static constexpr memory_space space = memory_space::device;

  [[nodiscard]] void* allocate(std::size_t bytes, std::size_t alignment) {
    return device::allocated("device_allocator", bytes, alignment,
                             [](void** memory, std::size_t n) { return cudaMalloc(memory, n); });
  }
  void deallocate(void* memory, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    static_cast<void>(cudaFree(memory));  // at the end of a program the runtime may be gone before the pool
  }
};

/// The device's memory in the order of a stream, by cudaMallocAsync from the device's default pool: what is given back
/// is used again by later work of the stream without waiting. Pools are long-lived, so the first use of the memory has
/// to be on the same stream, or ordered behind it. Thread safe.
class stream_ordered_allocator {
 public:
  static constexpr const char* name = "stream_ordered";
  static constexpr memory_space space = memory_space::device;

  explicit stream_ordered_allocator(cudaStream_t stream = nullptr) noexcept : stream_(stream) {}

  [[nodiscard]] void* allocate(std::size_t bytes, std::size_t alignment) {
    return device::allocated("stream_ordered_allocator", bytes, alignment,
                             [&](void** memory, std::size_t n) { return cudaMallocAsync(memory, n, stream_); });
  }
  void deallocate(void* memory, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    static_cast<void>(cudaFreeAsync(memory, stream_));
  }
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

 private:
  cudaStream_t stream_;
};

/// Host memory that stays where it is, so that the device copies from and to it while the host goes on. Thread safe.
class pinned_allocator {
 public:
  static constexpr const char* name = "pinned";
  static constexpr memory_space space = memory_space::pinned;

  [[nodiscard]] void* allocate(std::size_t bytes, std::size_t alignment) {
    return device::allocated("pinned_allocator", bytes, alignment, [](void** memory, std::size_t n) {
      return cudaHostAlloc(memory, n, cudaHostAllocDefault);
    });
  }
  void deallocate(void* memory, std::size_t /*bytes*/, std::size_t /*alignment*/) noexcept {
    static_cast<void>(cudaFreeHost(memory));
  }
};

static_assert(memory_allocator<device_allocator> && memory_allocator<stream_ordered_allocator> &&
              memory_allocator<pinned_allocator>);

}  // namespace kvcache
