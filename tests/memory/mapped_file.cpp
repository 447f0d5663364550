// SPDX-License-Identifier: Apache-2.0
#include <kvcache/memory/mapped_file_allocator.hpp>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include <sys/resource.h>
#include <sys/stat.h>

#include "catch.hpp"
#include "resident.hpp"
#include "temporary_path.hpp"

using kvcache::mapped_file_allocator;
using kvcache_test::contains_text;
using kvcache_test::temporary_path;

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

std::string content(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Bytes that the file takes on its disk.
std::size_t disk_bytes(const std::string& path) {
  struct stat state {};
  REQUIRE(::stat(path.c_str(), &state) == 0);
  return static_cast<std::size_t>(state.st_blocks) * 512;
}

}  // namespace

TEST_CASE("a mapped file has no name once it is mapped") {
  const temporary_path path;
  mapped_file_allocator allocator(path.string());
  void* const memory = allocator.allocate(mib, 64);
  CHECK_FALSE(path.exists());
  std::memset(memory, 7, mib);
  // So the same allocator serves again, with memory of its own.
  void* const other = allocator.allocate(mib, 64);
  CHECK(static_cast<unsigned char*>(other)[0] == 0);
  CHECK(static_cast<unsigned char*>(memory)[0] == 7);
  allocator.deallocate(memory, mib, 64);
  allocator.deallocate(other, mib, 64);
}

TEST_CASE("a mapped file that is kept holds what was written") {
  const temporary_path path;
  mapped_file_allocator allocator(path.string(), {.keep = true});
  auto* const memory = static_cast<char*>(allocator.allocate(5'000, 64));
  std::memset(memory, 'k', 5'000);
  allocator.deallocate(memory, 5'000, 64);
  CHECK(content(path.string()) == std::string(5'000, 'k'));
}

TEST_CASE("a mapped file is reserved on the disk, or sparse when asked") {
  const temporary_path reserved;
  const temporary_path sparse;
  mapped_file_allocator a(reserved.string(), {.keep = true});
  mapped_file_allocator b(sparse.string(), {.keep = true, .reserve = false});
  void* const one = a.allocate(8 * mib, 64);
  void* const two = b.allocate(8 * mib, 64);
  CHECK(disk_bytes(reserved.string()) >= 8 * mib);
  CHECK(disk_bytes(sparse.string()) < mib);
  CHECK(std::filesystem::file_size(sparse.string()) == 8 * mib);
  CHECK(kvcache_test::resident_bytes(two, 8 * mib) == 0);
  a.deallocate(one, 8 * mib, 64);
  b.deallocate(two, 8 * mib, 64);
}

TEST_CASE("a file that exists is never written over") {
  const temporary_path path;
  std::ofstream(path.string()) << "somebody's";
  mapped_file_allocator allocator(path.string());
  CHECK_THROWS_WITH(allocator.allocate(mib, 64), contains_text(path.string()) && contains_text("1048576 bytes") &&
                                                     contains_text(std::strerror(EEXIST)));
  CHECK(content(path.string()) == "somebody's");
}

TEST_CASE("a directory that does not exist is named") {
  mapped_file_allocator allocator("/no/such/directory/pool");
  CHECK_THROWS_AS(allocator.allocate(mib, 64), kvcache::system_failure);
  CHECK_THROWS_WITH(allocator.allocate(mib, 64),
                    contains_text("'/no/such/directory/pool'") && contains_text(std::strerror(ENOENT)));
}

TEST_CASE("a file that cannot grow is removed again") {
  const temporary_path path;
  for (const bool reserve : {true, false}) {
    mapped_file_allocator allocator(path.string(), {.keep = true, .reserve = reserve});
    CHECK_THROWS_AS(allocator.allocate(std::size_t{1} << 61, 64), kvcache::system_failure);
    CHECK_FALSE(path.exists());
  }
}

TEST_CASE("an alignment beyond a page is refused with both numbers") {
  const temporary_path path;
  mapped_file_allocator allocator(path.string());
  CHECK_THROWS_AS(allocator.allocate(mib, mib), kvcache::invalid_argument);
  CHECK_THROWS_WITH(allocator.allocate(mib, mib), contains_text("1048576") && contains_text("4096"));
  CHECK_FALSE(path.exists());
}

TEST_CASE("a mapped file beyond the process's limit of file sizes is refused, and no file is left") {
  ::rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  ::rlimit small = before;
  small.rlim_cur = mib;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &small) == 0);
  for (const bool reserve : {true, false}) {
    const temporary_path path;
    mapped_file_allocator allocator(path.string(), {.reserve = reserve});
    CHECK_THROWS_WITH(allocator.allocate(2 * mib, 64), contains_text("cannot grow") && contains_text("2097152 bytes"));
    CHECK_FALSE(path.exists());
    allocator.deallocate(allocator.allocate(mib, 64), mib, 64);
  }
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
}
