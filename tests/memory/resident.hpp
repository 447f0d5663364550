// SPDX-License-Identifier: Apache-2.0
// How much of a range of memory is resident.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <sys/mman.h>
#include <unistd.h>

namespace kvcache_test {

/// Resident bytes of the whole pages inside [memory, memory + bytes).
inline std::size_t resident_bytes(const void* memory, std::size_t bytes) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t first = (reinterpret_cast<std::uintptr_t>(memory) + page - 1) / page * page;
  const std::uintptr_t last = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / page * page;
  if (last <= first) return 0;
  std::vector<unsigned char> pages((last - first) / page);
  if (::mincore(reinterpret_cast<void*>(first), last - first, pages.data()) != 0) return bytes;
  std::size_t resident = 0;
  for (const unsigned char state : pages) resident += state & 1u;
  return resident * page;
}

}  // namespace kvcache_test
