// SPDX-License-Identifier: Apache-2.0
#include <kvcache/eviction/lru_k.hpp>

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <utility>

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
  cache.get("D");  // C goes
  CHECK(cache.letters() == "AD");
  CHECK(cache.next() == 'D');
  cache.get("E");
  CHECK(cache.letters() == "AE");
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

TEST_CASE("lru_k agrees with a plain table of last uses over random requests") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  const kvcache::block_id blocks = GENERATE(1u, 7u, 40u);
  CAPTURE(seed, blocks);
  toy_cache<kvcache::lru_k> cache(blocks);
  std::map<std::uint64_t, std::pair<int, int>> cached;  // content to its last use but one and its last
  std::deque<std::pair<std::uint64_t, int>> ghosts;     // oldest first
  std::uint64_t x = seed;
  for (int now = 1; now < 20'000; ++now) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    const std::uint64_t content = (x >> 33) % ((x >> 20) % 4 != 0 ? blocks / 2 + 1 : 6 * blocks) + 1;
    const bool hit = cached.count(content) != 0;
    if (!hit && cached.size() == blocks) {
      auto least = cached.begin();
      for (auto at = cached.begin(); at != cached.end(); ++at)
        if (at->second < least->second) least = at;
      if (ghosts.size() == 4 * std::size_t{blocks}) ghosts.pop_front();
      ghosts.push_back({least->first, least->second.second});
      cached.erase(least);
    }
    int before = hit ? cached[content].second : 0;
    for (auto ghost = ghosts.begin(); ghost != ghosts.end() && !hit; ++ghost)
      if (ghost->first == content) {
        before = ghost->second;
        ghosts.erase(ghost);
        break;
      }
    cached[content] = {before, now};
    REQUIRE((cache.get(content) == 1) == hit);
  }
}
