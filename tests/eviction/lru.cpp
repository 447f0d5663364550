// SPDX-License-Identifier: Apache-2.0
#include <kvcache/eviction/lru.hpp>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "catch.hpp"

using kvcache::block_id;
using kvcache::lru;
using kvcache::null_block;

TEST_CASE("lru gives the block that has been there for longest") {
  lru order(5);
  CHECK(std::string(lru::name) == "lru");
  CHECK(order.victim() == null_block);
  for (const block_id b : {3u, 1u, 5u}) order.insert(b);
  CHECK(order.victim() == 3);
  CHECK(order.victim() == 3);
  order.erase(3);
  CHECK(order.victim() == 1);
  order.insert(3);
  order.erase(5);
  order.erase(1);
  CHECK(order.victim() == 3);
  order.erase(3);
  CHECK(order.victim() == null_block);
}

TEST_CASE("R12 lru agrees with a plain queue over random calls") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  INFO("seed " << seed);
  const block_id highest = 50;
  lru order(highest);
  std::deque<block_id> queue;
  std::uint64_t x = seed;
  for (int i = 0; i < 20'000; ++i) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    const auto b = static_cast<block_id>((x >> 33) % highest + 1);
    const auto at = std::find(queue.begin(), queue.end(), b);
    if (at == queue.end()) {
      order.insert(b);
      queue.push_back(b);
    } else {
      order.erase(b);
      queue.erase(at);
    }
    REQUIRE(order.victim() == (queue.empty() ? null_block : queue.front()));
  }
  lru moved = std::move(order);
  for (; !queue.empty(); queue.pop_front()) {
    REQUIRE(moved.victim() == queue.front());
    moved.erase(queue.front());
  }
}
