// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>

namespace kvcache {

/// Host memory from the aligned operator new, so an engine that replaces it sees the pool too. Where that is the C
/// library's, a large pool is fresh zero pages that become resident when they are first written. Thread safe.
class aligned_allocator {
 public:
  static constexpr const char* name = "aligned";
  static constexpr memory_space space = memory_space::host;

  /// Memory for `bytes` bytes; `alignment` is a power of two. Raises system_failure where there is none.
  [[nodiscard]] void* allocate(std::size_t bytes, std::size_t alignment) {
    // Some standard libraries round the size up to the alignment without looking for an overflow.
    void* const memory =
        bytes > PTRDIFF_MAX ? nullptr : ::operator new (bytes, std::align_val_t{alignment}, std::nothrow);
    if (memory == nullptr)
      detail::raise<system_failure>("aligned_allocator: no memory for " + std::to_string(bytes) + " bytes aligned to " +
                                    std::to_string(alignment) + "; give the pool fewer blocks, or another allocator");
    return memory;
  }

  void deallocate(void* memory, std::size_t /*bytes*/, std::size_t alignment) noexcept {
    ::operator delete (memory, std::align_val_t{alignment});
  }
};

static_assert(memory_allocator<aligned_allocator>);

}  // namespace kvcache
