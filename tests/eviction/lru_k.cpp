// SPDX-License-Identifier: Apache-2.0
#include <kvcache/eviction/lru_k.hpp>

#include <string>

#include "catch.hpp"
#include "toy_cache.hpp"

using kvcache_test::toy_cache;

TEST_CASE("lru_k evicts what was used once before all else, then by the last use but one") {
  toy_cache<kvcache::lru_k> cache(3);
  CHECK(std::string(kvcache::lru_k::name) == "lru_k");
  cache.get("ABBA");  // A at 1 and 4, B at 2 and 3
  CHECK(cache.next() == 'A');
  cache.get("C");
  CHECK(cache.next() == 'C');
  cache.get("C");  // C at 5 and 6
  CHECK(cache.next() == 'A');
  cache.get("A");  // A at 4 and 7, B at 2 and 3
  CHECK(cache.next() == 'B');
}

TEST_CASE("lru_k resists a scan: ten blocks used once pass through one place") {
  toy_cache<kvcache::lru_k> cache(3);
  cache.get("ABAB");
  CHECK(cache.get("cdefghijkl") == 0);
  CHECK(cache.letters() == "ABl");
  CHECK(cache.get("AB") == 2);
}

TEST_CASE("lru_k remembers the last use of what it evicted") {
  toy_cache<kvcache::lru_k> cache(2);
  cache.get("ABC");  // A, used at 1, is evicted
  CHECK(cache.letters() == "BC");
  cache.get("A");  // evicts B; A was used at 1 and 4
  cache.get("D");
  CHECK(cache.letters() == "AD");
  // Eight ghosts: A, evicted before nine others, is new again.
  toy_cache<kvcache::lru_k> other(2);
  other.get("Abcdefghijk");  // A and then b to i were evicted
  CHECK(other.letters() == "jk");
  other.get("A");
  CHECK(other.letters() == "Ak");
  CHECK(other.next() == 'k');
  other.get("l");
  CHECK(other.next() == 'A');
  other.get("m");
  CHECK_FALSE(other.has('A'));
}

TEST_CASE("lru_k: of two uses at a time the first has not ended when the second begins") {
  kvcache::lru_k order(3);
  order.reference(1, 11, 0);
  order.insert(1);  // released at 1
  order.erase(1);
  order.reference(1, 11, 0);  // used at 1 and now
  order.reference(2, 12, 0);
  order.insert(2);  // released at 2
  order.erase(2);
  order.reference(2, 12, 0);  // used at 2 and now
  order.reference(1, 11, 0);  // a second request: used now and now
  order.insert(1);
  order.insert(2);
  CHECK(order.victim() == 2);
}

TEST_CASE("lru_k: a chain that comes back is no warmer at its tail than at its head") {
  kvcache::lru_k order(4);
  order.reference(1, 11, 0);
  order.reference(2, 12, 1);
  order.reference(1, 11, 0);  // a second request holds the head only
  order.insert(2);            // the first ends
  order.evict(2);
  order.reference(3, 12, 1);  // the second caches the tail again
  order.insert(3);
  order.insert(1);
  CHECK(order.victim() == 3);
}
