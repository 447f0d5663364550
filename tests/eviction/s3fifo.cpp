// SPDX-License-Identifier: Apache-2.0
#include <kvcache/eviction/s3fifo.hpp>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <string>

#include "catch.hpp"
#include "toy_cache.hpp"

using kvcache_test::toy_cache;

namespace {

/// The same in plain queues, for unrelated contents.
struct plain {
  struct entry {
    std::uint64_t content = 0;
    unsigned rounds = 0;
    unsigned released = 0;
  };
  std::deque<entry> small_queue, main_queue;  // oldest first
  std::deque<std::uint64_t> ghosts;
  std::size_t blocks = 0;
  unsigned now = 0;

  bool get(std::uint64_t content) {
    const auto is = [&](const entry& e) { return e.content == content; };
    if (const auto at = std::find_if(main_queue.begin(), main_queue.end(), is); at != main_queue.end()) {
      const unsigned rounds = at->rounds < 3 ? at->rounds + 1 : 3;
      main_queue.erase(at);
      main_queue.push_back({content, rounds, ++now});
      return true;
    }
    if (const auto at = std::find_if(small_queue.begin(), small_queue.end(), is); at != small_queue.end()) {
      small_queue.erase(at);
      main_queue.push_back({content, 0, ++now});
      return true;
    }
    if (small_queue.size() + main_queue.size() == blocks) evict();
    const auto ghost = std::find(ghosts.begin(), ghosts.end(), content);
    (ghost == ghosts.end() ? small_queue : main_queue).push_back({content, 0, ++now});
    if (ghost != ghosts.end()) ghosts.erase(ghost);
    return false;
  }
  void evict() {
    for (;;) {
      if (!small_queue.empty() &&
          (main_queue.empty() || 10 * small_queue.size() >= small_queue.size() + main_queue.size() ||
           small_queue.front().released < main_queue.front().released)) {
        if (ghosts.size() == blocks - blocks / 10) ghosts.pop_front();
        ghosts.push_back(small_queue.front().content);
        small_queue.pop_front();
        return;
      }
      const entry oldest = main_queue.front();
      main_queue.pop_front();
      if (oldest.rounds == 0) return;
      main_queue.push_back({oldest.content, oldest.rounds - 1, ++now});
    }
  }
};

}  // namespace

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

TEST_CASE("s3fifo agrees with plain queues over random requests") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  const kvcache::block_id blocks = GENERATE(1u, 7u, 40u);
  CAPTURE(seed, blocks);
  toy_cache<kvcache::s3fifo> cache(blocks);
  plain queues;
  queues.blocks = blocks;
  std::uint64_t x = seed;
  for (int i = 0; i < 20'000; ++i) {
    x = x * 6364136223846793005u + 1442695040888963407u;
    // Three in four out of a set that fits, the others out of one of three times the size.
    const std::uint64_t content = (x >> 33) % ((x >> 20) % 4 != 0 ? blocks / 2 + 1 : 3 * blocks) + 1;
    REQUIRE((cache.get(content) == 1) == queues.get(content));
  }
}

TEST_CASE("s3fifo: equal fingerprints are one ghost") {
  kvcache::s3fifo order(3);
  for (const kvcache::block_id b : {1u, 2u}) order.reference(b, 7, 0);
  for (const kvcache::block_id b : {1u, 2u}) order.insert(b);
  for (const kvcache::block_id b : {1u, 2u}) order.evict(b);
  for (const std::uint64_t other : {8u, 9u}) {
    order.reference(1, other, 0);
    order.insert(1);
    order.evict(1);
  }
  order.reference(1, 7, 0);  // three ghosts: 7, 8 and 9
  order.insert(1);
  order.reference(2, 10, 0);
  order.insert(2);
  CHECK(order.victim() == 2);
}
