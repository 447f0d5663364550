// SPDX-License-Identifier: Apache-2.0
#include <kvcache/eviction/priority.hpp>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "catch.hpp"

using kvcache::block_id;
using kvcache::priority;

namespace {

/// A request computes a chain of new blocks, head first, and lets go of it.
void chain(priority& order, std::initializer_list<block_id> blocks, unsigned level = kvcache::default_priority,
           std::uint64_t expires = priority::never) {
  block_id parent = kvcache::null_block;
  for (const block_id b : blocks) {
    order.reference(b, 100 + b, parent);
    if (level != kvcache::default_priority) order.set_priority(b, level, expires);
    parent = b;
  }
  for (auto b = blocks.end(); b != blocks.begin();) order.insert(*--b);
}

std::vector<block_id> drain(priority& order) {
  std::vector<block_id> all;
  for (block_id b = order.victim(); b != kvcache::null_block; b = order.victim()) {
    all.push_back(b);
    order.evict(b);
  }
  return all;
}

using ids = std::vector<block_id>;

}  // namespace

TEST_CASE("T4 what is at 90 stays and what is at the default level goes, though it is younger") {
  priority order(4);
  CHECK(std::string(priority::name) == "priority");
  chain(order, {1, 2}, 90);
  chain(order, {3, 4});
  CHECK(order.victim() == 4);
  order.evict(4);
  CHECK(order.victim() == 3);
  order.evict(3);
  chain(order, {3, 4});  // C takes B's blocks
  CHECK(drain(order) == ids{4, 3, 2, 1});
}

TEST_CASE("T4 the default level is 35; inside one level the oldest goes first") {
  priority order(6);
  chain(order, {1});
  chain(order, {2}, 34);
  chain(order, {3}, 36);
  chain(order, {4}, 35);
  chain(order, {5}, 0);
  chain(order, {6}, 1'000);  // 100
  order.set_priority(3, 100);
  CHECK(drain(order) == ids{5, 2, 1, 4, 3, 6});
}

TEST_CASE("priority: a level with a duration falls back at expiry, on the caller's time") {
  priority order(4);
  order.advance(1'000);
  chain(order, {1}, 80, 1'500);
  chain(order, {2});
  chain(order, {3}, 10, 1'400);
  chain(order, {4}, 60, 1'000);  // has expired
  CHECK(order.victim() == 3);
  order.advance(1'399);
  CHECK(order.victim() == 3);
  order.advance(1'400);  // 3 is at 35 and keeps its age: 2, 3, 4
  CHECK(order.victim() == 2);
  order.advance(1'499);
  CHECK(order.victim() == 2);
  order.advance(1'500);
  CHECK(order.victim() == 1);
  order.advance(0);  // time does not go back
  CHECK(drain(order) == ids{1, 2, 3, 4});
  chain(order, {1});
  chain(order, {2}, 10, 1'500);
  chain(order, {3}, 10, 1'501);
  CHECK(drain(order) == ids{3, 1, 2});
}

TEST_CASE("priority: a level set anew replaces the old one and its expiry, also while the block is in use") {
  priority order(2);
  chain(order, {1}, 80, 100);
  chain(order, {2}, 50);
  order.erase(1);
  order.reference(1, 101, 0);
  order.set_priority(1, 70, 300);
  order.insert(1);
  order.advance(299);
  CHECK(order.victim() == 2);
  order.set_priority(1, 70);
  order.advance(400);
  CHECK(order.victim() == 2);
  order.set_priority(1, 40);
  CHECK(order.victim() == 1);
}

TEST_CASE("priority: other content in the same block starts at the default level") {
  priority order(2);
  chain(order, {1}, 90, 1'000);
  order.evict(1);
  chain(order, {1, 2});
  CHECK(order.victim() == 2);
  order.erase(2);
  order.erase(1);  // forgotten
  order.reference(1, 55, 0);
  order.set_priority(1, 90);
  order.reference(2, 56, 0);
  order.insert(1);
  order.erase(1);
  order.reference(1, 57, 0);
  order.insert(1);
  order.insert(2);
  CHECK(order.victim() == 1);
}

TEST_CASE("R7 priority: a block waits for its children, so that a child is not sent away for its parent's level") {
  priority order(3);
  order.reference(1, 11, 0);
  order.reference(2, 12, 1);
  order.set_priority(2, 80);
  order.reference(3, 13, 0);
  order.set_priority(3, 40);
  for (const block_id b : {2u, 1u, 3u}) order.insert(b);
  CHECK(drain(order) == ids{3, 2, 1});

  // Forgotten, block 1 used for something else, and both back where they were.
  chain(order, {1, 2});
  order.erase(2);
  order.erase(1);
  order.reference(1, 300, 0);
  order.insert(1);
  order.evict(1);
  chain(order, {1, 2});
  order.set_priority(2, 80);
  CHECK(drain(order) == ids{2, 1});
}
