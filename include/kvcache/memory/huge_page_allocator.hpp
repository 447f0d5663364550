// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include <sys/mman.h>

namespace kvcache {

/// Anonymous memory on 2 MiB boundaries that asks for transparent huge pages: a pool read in scattered blocks then
/// misses the TLB far less. The request is advice. Where the system has no huge pages to give, ordinary pages serve.
/// Pages are zero and become resident when they are first written, up to 2 MiB at once. Thread safe.
class huge_page_allocator {
 public:
  static constexpr const char* name = "huge_page";
  static constexpr memory_space space = memory_space::host;
  static constexpr std::size_t page_bytes = std::size_t{2} << 20;

  /// Memory for `bytes` bytes, aligned to `alignment` (a power of two) and to 2 MiB. Raises system_failure where there
  /// is none.
  [[nodiscard]] void* allocate(std::size_t bytes, std::size_t alignment) {
    const std::size_t boundary = alignment > page_bytes ? alignment : page_bytes;
    if (bytes > SIZE_MAX - page_bytes - boundary) refuse(bytes, ENOMEM);
    // The system aligns to small pages, so ask for one boundary more and give back what lies outside.
    const std::size_t wanted = whole_pages(bytes);
    void* const mapped = ::mmap(nullptr, wanted + boundary, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) refuse(bytes, errno);
    const std::size_t past = reinterpret_cast<std::uintptr_t>(mapped) % boundary;
    const std::size_t before = past == 0 ? 0 : boundary - past;
    std::byte* const memory = static_cast<std::byte*>(mapped) + before;
    if (before > 0) ::munmap(mapped, before);
    if (boundary > before) ::munmap(memory + wanted, boundary - before);
#if defined(MADV_HUGEPAGE)
    ::madvise(memory, wanted, MADV_HUGEPAGE);
#endif
    return memory;
  }

  void deallocate(void* memory, std::size_t bytes, std::size_t /*alignment*/) noexcept {
    ::munmap(memory, whole_pages(bytes));
  }

 private:
  [[nodiscard]] static constexpr std::size_t whole_pages(std::size_t bytes) noexcept {
    return bytes == 0 ? page_bytes : (bytes + page_bytes - 1) / page_bytes * page_bytes;
  }

  [[noreturn]] static void refuse(std::size_t bytes, int code) {
    detail::raise<system_failure>("huge_page_allocator: no address range for " + std::to_string(bytes) +
                                  " bytes: " + std::strerror(code) + "; give the pool fewer blocks");
  }
};

static_assert(memory_allocator<huge_page_allocator>);

}  // namespace kvcache
