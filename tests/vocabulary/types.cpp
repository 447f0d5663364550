// SPDX-License-Identifier: Apache-2.0
#include <kvcache/types.hpp>

#include <type_traits>

#include "catch.hpp"

using namespace kvcache;

TEST_CASE("R8 a slot beyond 2^32 is exact") {
  static_assert(make_slot(0, 0, 16) == 0);
  static_assert(make_slot(3, 5, 16) == 53);
  static_assert(make_slot(0x1000'0000u, 7, 64) == 0x4'0000'0007ll);
  static_assert(make_slot(max_blocks, 0xffff'fffeu, 0xffff'ffffu) == 0x7fff'ffff'7fff'ffffll);
  static_assert(std::is_same_v<slot_id, std::int64_t> && no_slot == -1);
  SUCCEED();
}

TEST_CASE("a tail entry is no block of the pool proper") {
  static_assert((max_blocks & tail_bit) == 0 && max_blocks + 1 == tail_bit && null_block == 0);
  SUCCEED();
}

TEST_CASE("R9 counts add up to the capacity and what is available") {
  constexpr block_counts counts{.free = 5, .evictable = 3, .referenced = 7, .held = 2};
  static_assert(counts.capacity() == 17 && counts.available() == 8);
  static_assert(counts != block_counts{.free = 5, .evictable = 3, .referenced = 7, .held = 3});
  SUCCEED();
}

TEST_CASE("a fingerprint is never a token id") {
  static_assert(fingerprint(0) != 0 && fingerprint(42) != content_unit{42});
  static_assert(fingerprint(~content_unit{0}) == ~content_unit{0});
  SUCCEED();
}

TEST_CASE("an unset sequence id equals no given one") {
  static_assert(sequence_id{} != sequence_id{.index = 0, .generation = 0});
  static_assert(sequence_id{.index = 4, .generation = 1} != sequence_id{.index = 4, .generation = 2});
  static_assert(std::is_trivially_copyable_v<sequence_id>);
  SUCCEED();
}
