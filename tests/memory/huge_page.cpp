// SPDX-License-Identifier: Apache-2.0
#include <kvcache/memory/huge_page_allocator.hpp>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>

#include "catch.hpp"

using kvcache::huge_page_allocator;

namespace {

constexpr std::size_t page = huge_page_allocator::page_bytes;

/// The kernel's flags of the mapping that holds `memory`.
std::string mapping_flags(const void* memory) {
  std::ifstream maps("/proc/self/smaps");
  const auto wanted = reinterpret_cast<std::uintptr_t>(memory);
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t first = 0;
    std::uintptr_t last = 0;
    char dash = 0;
    std::istringstream head(line);
    if (head >> std::hex >> first >> dash >> last && dash == '-') inside = first <= wanted && wanted < last;
    if (inside && line.rfind("VmFlags:", 0) == 0) return line + ' ';
  }
  return {};
}

}  // namespace

TEST_CASE("huge pages start on their boundary") {
  huge_page_allocator allocator;
  for (const std::size_t bytes : {std::size_t{1}, page, page + 1, 5 * page - 1}) {
    void* const memory = allocator.allocate(bytes, 64);
    CHECK(reinterpret_cast<std::uintptr_t>(memory) % page == 0);
    allocator.deallocate(memory, bytes, 64);
  }
}

TEST_CASE("an alignment above the huge page's is kept") {
  huge_page_allocator allocator;
  void* const memory = allocator.allocate(3 * page, 8 * page);
  CHECK(reinterpret_cast<std::uintptr_t>(memory) % (8 * page) == 0);
  allocator.deallocate(memory, 3 * page, 8 * page);
}

TEST_CASE("huge pages are asked for where the system has them") {
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled")) {
    SUCCEED("no transparent huge pages in this kernel");
    return;
  }
  huge_page_allocator allocator;
  void* const memory = allocator.allocate(4 * page, 64);
  CHECK(mapping_flags(memory).find(" hg ") != std::string::npos);
  allocator.deallocate(memory, 4 * page, 64);
}

TEST_CASE("memory given back leaves the address space") {
  huge_page_allocator allocator;
  void* const memory = allocator.allocate(4 * page, 64);
  REQUIRE_FALSE(mapping_flags(memory).empty());
  allocator.deallocate(memory, 4 * page, 64);
  CHECK(mapping_flags(memory).find(" hg ") == std::string::npos);
}
