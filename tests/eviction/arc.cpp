// SPDX-License-Identifier: Apache-2.0
#include <kvcache/eviction/arc.hpp>

#include <string>

#include "catch.hpp"
#include "toy_cache.hpp"

using kvcache_test::toy_cache;

TEST_CASE("arc resists a scan: ten blocks used once pass through what was used once") {
  toy_cache<kvcache::arc> cache(4);
  CHECK(std::string(kvcache::arc::name) == "arc");
  cache.get("ABAB");
  CHECK(cache.get("cdefghijkl") == 0);
  CHECK(cache.letters() == "ABkl");
  CHECK(cache.get("AB") == 2);
}

TEST_CASE("arc learns: misses of what was used once give it room, misses of what was used often take it back") {
  toy_cache<kvcache::arc> cache(4);
  cache.get("ABABcd");  // often A B, once c d, target 0
  cache.get("e");       // c, used once, goes
  CHECK(cache.letters() == "ABde");
  cache.get("c");  // d goes; c was lost: target 1, often A B c, once e
  CHECK(cache.letters() == "ABce");
  // Once e, one of four, is no more than its share: the oldest of the others goes.
  CHECK(cache.next() == 'A');
  cache.get("f");
  CHECK(cache.letters() == "Bcef");
  // Two of four is more.
  CHECK(cache.next() == 'e');
  cache.get("A");  // e goes; A was lost, of two ghosts of the one kind and one of the other: target 1 - 2 < 0
  CHECK(cache.letters() == "ABcf");
  CHECK(cache.next() == 'f');
}

TEST_CASE("arc: what was used once and is older than all else goes first, whatever the target") {
  toy_cache<kvcache::arc> cache(4);
  cache.get("ABABcdec");  // as before: target 1, often A B c, once e, which is no more than its share
  CHECK(cache.next() == 'A');
  cache.get("ABc");  // now e is the oldest
  CHECK(cache.next() == 'e');
}

TEST_CASE("arc remembers no more of what was used once than the pool has blocks") {
  toy_cache<kvcache::arc> cache(4);
  cache.get("abcdef");  // a goes and then b; beside c d e there is room for one ghost
  cache.get("a");       // so a is new
  CHECK(cache.letters() == "adef");
  cache.get("ghij");
  CHECK(cache.letters() == "ghij");
}

TEST_CASE("arc: a tail that comes back is used often only if its parent is") {
  kvcache::arc order(3);
  order.reference(1, 11, 0);
  order.insert(1);
  order.evict(1);
  order.reference(2, 10, 0);
  order.reference(1, 11, 2);  // a ghost behind a new block
  order.insert(1);
  order.insert(2);
  CHECK(order.victim() == 1);
}
