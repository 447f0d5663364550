// SPDX-License-Identifier: Apache-2.0
#include <kvcache/blocks/block_pool.hpp>
#include <kvcache/types.hpp>

#include <vector>

#include "catch.hpp"

using kvcache::block_counts;
using kvcache::block_id;
using kvcache::block_pool;
using kvcache::block_state;
using kvcache::errc;
using ids = std::vector<block_id>;

TEST_CASE("R3 the null block is in no pool: never counted, handed out, referenced or freed") {
  block_pool pool(3);
  CHECK(pool.capacity() == 3);
  CHECK_FALSE(pool.contains(kvcache::null_block));
  CHECK_FALSE(pool.contains(4));
  ids all(3);
  REQUIRE(pool.allocate(all).has_value());
  CHECK(all == ids{1, 2, 3});
  CHECK(pool.reference(kvcache::null_block).error().code == errc::stale_id);
  const ids with_null{1, kvcache::null_block};
  CHECK(pool.release(with_null).error() == kvcache::failure{errc::stale_id, 0, 0});
  CHECK(pool.counts() == block_counts{.referenced = 3});
}

TEST_CASE("A pool hands out all of what was asked for or nothing") {
  block_pool pool(4);
  ids five(5, 77);
  CHECK(pool.allocate(five).error() == kvcache::failure{errc::out_of_blocks, 5, 4});
  CHECK(five == ids(5, 77));
  CHECK(pool.counts() == block_counts{.free = 4});
  ids four(4);
  CHECK(pool.allocate(four).has_value());
  CHECK(pool.counts() == block_counts{.referenced = 4});
}

TEST_CASE("R2 the tail of a released table is handed out before its head, ahead of older free blocks") {
  block_pool pool(6);
  ids table(4);
  REQUIRE(pool.allocate(table).has_value());
  REQUIRE(pool.release(table).has_value());
  ids again(6);
  REQUIRE(pool.allocate(again).has_value());
  CHECK(again == ids{4, 3, 2, 1, 5, 6});
}

TEST_CASE("R8 a block released twice, or named twice in a call, is refused and nothing changes") {
  block_pool pool(4);
  ids table(3);
  REQUIRE(pool.allocate(table).has_value());
  REQUIRE(pool.reference(2).has_value());
  REQUIRE(pool.reference(2).has_value());

  const ids twice{3, 2, 2};
  CHECK(pool.release(twice).error() == kvcache::failure{errc::duplicate_id, 2, 1});
  CHECK(pool.ref_count(3) == 1);
  CHECK(pool.ref_count(2) == 3);

  const ids third{3};
  REQUIRE(pool.release(third).has_value());
  CHECK(pool.release(third).error() == kvcache::failure{errc::stale_id, 3, 0});
  const ids partly{1, 2, 3};
  CHECK(pool.release(partly).error() == kvcache::failure{errc::stale_id, 3, 0});
  CHECK(pool.ref_count(1) == 1);
  CHECK(pool.ref_count(2) == 3);
  CHECK(pool.counts() == block_counts{.free = 2, .referenced = 2});

  // What a refused call named can be named again.
  const ids rest{1, 2};
  CHECK(pool.release(rest).has_value());
  CHECK(pool.state(1) == block_state::free);
  CHECK(pool.ref_count(2) == 2);
}

TEST_CASE("R9 blocks of a pool move between all four states and always add up") {
  block_pool pool(5);
  const block_id b = pool.take();
  CHECK(pool.counts() == block_counts{.free = 4, .referenced = 1});
  pool.add_reference(b);
  CHECK_FALSE(pool.drop_reference(b));
  CHECK(pool.drop_reference(b));
  CHECK(pool.counts() == block_counts{.free = 4, .held = 1});
  pool.put_back(b, block_state::evictable);
  CHECK(pool.counts() == block_counts{.free = 4, .evictable = 1});
  pool.add_reference(b);
  CHECK(pool.counts() == block_counts{.free = 4, .referenced = 1});
  CHECK(pool.drop_reference(b));
  pool.add_reference(b);
  CHECK(pool.drop_reference(b));
  pool.put_back(b, block_state::free);
  CHECK(pool.counts() == block_counts{.free = 5});
  CHECK(pool.take() == b);
}

#if KVCACHE_HAS_EXCEPTIONS
TEST_CASE("A pool without blocks, or with more than ids can name, is refused with value, limit and remedy") {
  CHECK_THROWS_WITH(block_pool(0),
                    "block pool: 0 blocks, from 1 to 2147483647 possible; size it from the memory budget");
  CHECK_THROWS_AS(block_pool(kvcache::max_blocks + 1), kvcache::invalid_argument);
}
#endif
