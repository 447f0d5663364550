// SPDX-License-Identifier: Apache-2.0
#include <kvcache/eviction/tiny_lfu.hpp>

#include <cstdint>
#include <string>

#include "catch.hpp"
#include "toy_cache.hpp"

using kvcache::tiny_lfu;
using kvcache_test::toy_cache;

namespace {

unsigned get(toy_cache<tiny_lfu>& cache, std::uint64_t first, std::uint64_t count) {
  unsigned hits = 0;
  for (std::uint64_t c = first; c < first + count; ++c) hits += cache.get(c);
  return hits;
}

}  // namespace

TEST_CASE("tiny_lfu admits what is asked for more often than what it would replace, and no scan") {
  toy_cache<tiny_lfu> cache(4);  // a window of one, a main part of three
  CHECK(std::string(tiny_lfu::name) == "tiny_lfu");
  cache.get("ABCDABC");  // D is the newest in the window; A B C were asked for twice
  CHECK(cache.get("efgh") == 0);
  CHECK(cache.letters() == "ABCh");
  // At its second time D is as good as A, the oldest of the main part, and newer.
  cache.get("D");
  CHECK(cache.letters() == "ABCD");
  CHECK(cache.next() == 'A');
  cache.get("i");
  CHECK(cache.letters() == "BCDi");
  // i is not.
  CHECK(cache.next() == 'i');
}

TEST_CASE("tiny_lfu keeps a popular set through a scan of four times its size") {
  toy_cache<tiny_lfu> cache(100);
  for (int i = 0; i < 4; ++i) get(cache, 1, 99);
  CHECK(get(cache, 1'000, 400) == 0);
  CHECK(get(cache, 1, 99) >= 97);
}

TEST_CASE("tiny_lfu forgets what was popular once") {
  toy_cache<tiny_lfu> cache(100);
  for (int i = 0; i < 40; ++i) get(cache, 1, 99);  // as often as a counter goes
  unsigned hits = 0;
  for (int i = 0; i < 40; ++i) hits = get(cache, 1'000, 99);
  CHECK(hits >= 90);
}

TEST_CASE("tiny_lfu: the main part evicts what was not used in it before what was") {
  toy_cache<tiny_lfu> cache(6);  // a window of one, a main part of five, four of which may be protected
  cache.get("ABCDEf");
  cache.get("AB");  // used in the main part
  CHECK(cache.next() == 'C');
  cache.get("g");  // f and C were asked for once: the newer stays
  CHECK(cache.letters() == "ABDEfg");
  cache.get("hij");
  CHECK(cache.letters() == "ABghij");
}

TEST_CASE("tiny_lfu fills the pool before anything competes") {
  toy_cache<tiny_lfu> cache(50);
  CHECK(get(cache, 1, 50) == 0);
  CHECK(get(cache, 1, 50) == 50);

  // Beside a popular block others could not win a place: they are in the main part without, and a scan leaves them.
  toy_cache<tiny_lfu> other(100);
  for (int i = 0; i < 15; ++i) other.get(std::uint64_t{1});
  for (int i = 0; i < 4; ++i) get(other, 2, 99);
  get(other, 1'000, 200);
  CHECK(get(other, 2, 98) >= 90);
}

TEST_CASE("tiny_lfu: who beats the oldest takes its place, though the next would have been too strong") {
  toy_cache<tiny_lfu> cache(3);  // a window of one, a main part of two
  cache.get("ABBBCC");           // A once and B three times in the main part, C twice in the window
  cache.get("D");                // A goes
  CHECK(cache.letters() == "BCD");
  cache.get("E");
  CHECK(cache.letters() == "BCE");
}

TEST_CASE("tiny_lfu: what was used again and is dead gives way to a set that is used now") {
  toy_cache<tiny_lfu> cache(100);
  for (int i = 0; i < 40; ++i) get(cache, 1, 99);  // four fifths were used again
  unsigned hits = 0;
  for (int i = 0; i < 60; ++i) hits = get(cache, 1'000, 60);
  CHECK(hits == 60);
}
