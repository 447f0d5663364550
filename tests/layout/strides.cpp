// SPDX-License-Identifier: Apache-2.0
#include <kvcache/layout/hnd.hpp>
#include <kvcache/layout/nhd.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "catch.hpp"

using namespace kvcache;

namespace {

/// Every element of every (token, head) has a place of its own, and together they fill the plane.
template <class Layout, class T>
void check_fills_plane(std::uint32_t block_size, std::uint32_t heads, std::uint32_t head_dim) {
  const plane_strides strides = Layout::strides(block_size, heads, head_dim * sizeof(T));
  CAPTURE(Layout::name, block_size, heads, head_dim);
  REQUIRE(strides.bytes == static_cast<std::int64_t>(sizeof(T)) * block_size * heads * head_dim);
  std::vector<int> taken(static_cast<std::size_t>(strides.bytes));
  const std::int64_t run = static_cast<std::int64_t>(sizeof(T)) * head_dim;
  for (std::uint32_t token = 0; token < block_size; ++token)
    for (std::uint32_t head = 0; head < heads; ++head)
      for (std::int64_t byte = 0; byte < run; ++byte)
        ++taken.at(static_cast<std::size_t>(token * strides.token + head * strides.head + byte));
  std::size_t wrong = 0;
  for (const int count : taken) wrong += count != 1 ? 1u : 0u;
  REQUIRE(wrong == 0);
}

template <class Layout>
void check_sizes() {
  for (const std::uint32_t block_size : {1u, 7u, 16u, 64u})
    for (const std::uint32_t heads : {1u, 3u, 8u})
      for (const std::uint32_t head_dim : {1u, 64u, 80u}) {
        check_fills_plane<Layout, f32>(block_size, heads, head_dim);
        check_fills_plane<Layout, f16>(block_size, heads, head_dim);
        check_fills_plane<Layout, bf16>(block_size, heads, head_dim);
      }
}

}  // namespace

TEST_CASE("NHD fills its plane, all heads of a token together") {
  check_sizes<nhd>();
  static_assert(nhd::strides(16, 8, 256).head == 256);
  static_assert(nhd::strides(16, 8, 256).token == 2'048);
  static_assert(nhd::strides(16, 8, 512).token == 4'096);
  CHECK(std::string(nhd::name) == "nhd");
}

TEST_CASE("HND fills its plane, all tokens of a head together") {
  check_sizes<hnd>();
  static_assert(hnd::strides(16, 8, 256).token == 256);
  static_assert(hnd::strides(16, 8, 256).head == 4'096);
  static_assert(hnd::strides(16, 8, 512).head == 8'192);
  CHECK(std::string(hnd::name) == "hnd");
}

TEST_CASE("R8 a plane beyond 2^32 bytes has exact strides") {
  static_assert(nhd::strides(1u << 20, 64, 512).bytes == std::int64_t{1} << 35);
  static_assert(hnd::strides(1u << 30, 64, 512).head == std::int64_t{1} << 39);
  static_assert(nhd::strides(1, 1u << 31, 16).token == std::int64_t{1} << 35);
  SUCCEED();
}
