// SPDX-License-Identifier: Apache-2.0
#include <kvcache/eviction/s3fifo.hpp>

#include <string>

#include "catch.hpp"
#include "toy_cache.hpp"

using kvcache_test::toy_cache;

TEST_CASE("s3fifo resists a scan: ten blocks used once pass through the small queue") {
  toy_cache<kvcache::s3fifo> cache(4);
  CHECK(std::string(kvcache::s3fifo::name) == "s3fifo");
  cache.get("ABAB");  // both in the main queue
  CHECK(cache.get("cdefghijkl") == 0);
  CHECK(cache.letters() == "ABkl");
  CHECK(cache.get("AB") == 2);
}

TEST_CASE("s3fifo: what comes back from the ghosts goes to the main queue") {
  toy_cache<kvcache::s3fifo> cache(2);
  cache.get("abc");  // a is a ghost
  cache.get("a");    // b goes; a is in the main queue
  cache.get("d");    // c goes
  cache.get("e");    // d goes, though a is older
  CHECK(cache.letters() == "ae");
}

TEST_CASE("s3fifo: a use in the main queue is worth one more round, three at most") {
  toy_cache<kvcache::s3fifo> cache(2);
  cache.get("AAA");  // one round
  cache.get("BB");   // none; A is the oldest and has had its round: B, A
  CHECK(cache.next() == 'B');
  cache.get("A");  // one round again, but B is the oldest
  CHECK(cache.next() == 'B');
  // Used a hundred times is worth three rounds: of the blocks that are brought to the main queue the fourth outlasts
  // it.
  toy_cache<kvcache::s3fifo> other(2);
  for (int i = 0; i < 100; ++i) other.get("A");
  other.get("bbccdd");
  CHECK(other.letters() == "Ad");
  other.get("ee");
  CHECK(other.letters() == "Ae");
  other.get("f");
  CHECK(other.letters() == "ef");
}

TEST_CASE("s3fifo evicts from the main queue where the small one is less than a tenth") {
  toy_cache<kvcache::s3fifo> cache(20);
  cache.get("ABCDEFGHIJKLMNOPQRS");
  cache.get("ABCDEFGHIJKLMNOPQRS");
  cache.get("t");  // one of twenty is in the small queue
  CHECK(cache.next() == 'A');
  cache.get("u");
  CHECK(cache.next() == 't');  // two of twenty
}

TEST_CASE("s3fifo: a tail that comes back goes to the main queue only if its parent is there") {
  kvcache::s3fifo order(3);
  order.reference(1, 11, 0);
  order.insert(1);
  order.evict(1);
  order.reference(2, 10, 0);
  order.reference(1, 11, 2);  // a ghost behind a new block
  order.insert(1);
  order.insert(2);
  CHECK(order.victim() == 1);
}
