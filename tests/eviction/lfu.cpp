// SPDX-License-Identifier: Apache-2.0
#include <kvcache/eviction/lfu.hpp>

#include <string>

#include "catch.hpp"
#include "toy_cache.hpp"

using kvcache_test::toy_cache;

TEST_CASE("lfu evicts what was referenced least often, the oldest among equals") {
  toy_cache<kvcache::lfu> cache(3);
  CHECK(std::string(kvcache::lfu::name) == "lfu");
  cache.get("AAABBC");
  CHECK(cache.next() == 'C');
  CHECK(cache.get("CC") == 2);  // A 3, B 2, C 3
  CHECK(cache.next() == 'B');
  CHECK(cache.get("B") == 1);  // all 3
  CHECK(cache.next() == 'A');
}

TEST_CASE("lfu ages: what was popular once is overtaken by newcomers used once") {
  toy_cache<kvcache::lfu> cache(2);
  cache.get("AAAB");  // A 3, B 1
  cache.get("C");     // B goes, the age is 1, C is worth 2
  CHECK(cache.letters() == "AC");
  cache.get("D");  // C goes, the age is 2, D is worth 3 and younger than A
  CHECK(cache.letters() == "AD");
  CHECK(cache.next() == 'A');
  cache.get("E");
  CHECK(cache.letters() == "DE");
}

TEST_CASE("lfu counts to eight: a block used a hundred times outlasts eight newcomers and no more") {
  toy_cache<kvcache::lfu> cache(2);
  for (int i = 0; i < 100; ++i) cache.get("A");
  cache.get("bcdefghi");
  CHECK(cache.has('A'));
  cache.get("j");
  CHECK_FALSE(cache.has('A'));
}

TEST_CASE("lfu counts a content from its caching on, not what its block held before") {
  kvcache::lfu order(2);
  for (int i = 0; i < 3; ++i) order.reference(1, 11, 0);
  order.insert(1);
  order.erase(1);  // forgotten: no eviction
  order.reference(1, 12, 0);
  for (int i = 0; i < 2; ++i) order.reference(2, 20, 0);
  order.insert(2);
  order.insert(1);
  CHECK(order.victim() == 1);
}
