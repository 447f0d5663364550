// SPDX-License-Identifier: Apache-2.0
// What every allocator promises.
#include <kvcache/concepts.hpp>
#include <kvcache/memory/aligned_allocator.hpp>
#include <kvcache/memory/huge_page_allocator.hpp>
#include <kvcache/memory/mapped_file_allocator.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "catch.hpp"
#include "resident.hpp"
#include "temporary_path.hpp"

using namespace kvcache;
using kvcache_test::contains_text;
using kvcache_test::temporary_path;

// AddressSanitizer stops at a request that no machine can serve, unless told to refuse it as the system does.
extern "C" const char* __asan_default_options();
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

bool aligned(const void* memory, std::size_t alignment) {
  return reinterpret_cast<std::uintptr_t>(memory) % alignment == 0;
}

/// The allocator, and where it needs one a file for each of two allocations.
template <class A>
struct made {
  A first;
  A second;
};
template <>
struct made<mapped_file_allocator> {
  temporary_path path;
  temporary_path other;
  mapped_file_allocator first{path.string()};
  mapped_file_allocator second{other.string()};
};

}  // namespace

TEMPLATE_TEST_CASE("memory is aligned, writable to its end, and nobody else's", "", aligned_allocator,
                   huge_page_allocator, mapped_file_allocator) {
  static_assert(memory_allocator<TestType>);
  made<TestType> a;
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{64}, std::size_t{4'095}, 2 * mib - 1, 2 * mib + 1}) {
    for (const std::size_t alignment : {std::size_t{64}, std::size_t{4'096}}) {
      CAPTURE(bytes, alignment);
      auto* const one = static_cast<unsigned char*>(a.first.allocate(bytes, alignment));
      auto* const two = static_cast<unsigned char*>(a.second.allocate(bytes, alignment));
      REQUIRE(one != nullptr);
      REQUIRE(aligned(one, alignment));
      REQUIRE(aligned(two, alignment));
      std::memset(one, 1, bytes);
      std::memset(two, 2, bytes);
      CHECK(one[0] == 1);
      CHECK(one[bytes - 1] == 1);
      a.first.deallocate(one, bytes, alignment);
      CHECK(two[0] == 2);
      CHECK(two[bytes - 1] == 2);
      a.second.deallocate(two, bytes, alignment);
    }
  }
}

TEMPLATE_TEST_CASE("memory of no bytes is no null pointer", "", aligned_allocator, huge_page_allocator,
                   mapped_file_allocator) {
  made<TestType> a;
  void* const memory = a.first.allocate(0, 64);
  CHECK(memory != nullptr);
  a.first.deallocate(memory, 0, 64);
}

TEMPLATE_TEST_CASE("a large pool is not resident before it is written", "", aligned_allocator, huge_page_allocator,
                   mapped_file_allocator) {
  made<TestType> a;
  constexpr std::size_t bytes = 256 * mib;
  auto* const memory = static_cast<unsigned char*>(a.first.allocate(bytes, 64));
  const std::size_t before = kvcache_test::resident_bytes(memory, bytes);
  CHECK(before <= mib);
  memory[bytes / 2] = 1;
  const std::size_t after = kvcache_test::resident_bytes(memory, bytes);
  CHECK(after > 0);
  CHECK(after <= bytes / 8);  // a huge page, or what the file system reads around a byte
  a.first.deallocate(memory, bytes, 64);
}

TEMPLATE_TEST_CASE("more memory than there is names the bytes", "", aligned_allocator, huge_page_allocator,
                   mapped_file_allocator) {
  made<TestType> a;
  const std::size_t too_much = std::size_t{1} << 62;
  CHECK_THROWS_AS(a.first.allocate(too_much, 64), system_failure);
  CHECK_THROWS_WITH(a.first.allocate(too_much, 64),
                    contains_text("4611686018427387904 bytes") && contains_text(TestType::name));
  CHECK_THROWS_AS(a.first.allocate(SIZE_MAX, 64), system_failure);
}

TEST_CASE("allocators are named and live in host memory") {
  static_assert(aligned_allocator::space == memory_space::host && huge_page_allocator::space == memory_space::host &&
                mapped_file_allocator::space == memory_space::host);
  CHECK(std::string(aligned_allocator::name) == "aligned");
  CHECK(std::string(huge_page_allocator::name) == "huge_page");
  CHECK(std::string(mapped_file_allocator::name) == "mapped_file");
}
