// SPDX-License-Identifier: Apache-2.0
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/eviction/gittins.hpp>
#include <kvcache/eviction/priority.hpp>
#include <kvcache/eviction/s3fifo.hpp>
#include <kvcache/observe/observed.hpp>

#include <cstdint>
#include <string>
#include <utility>

#include "../blocks/support.hpp"
#include "../eviction/toy_cache.hpp"
#include "catch.hpp"

using kvcache::histogram;
using kvcache::lru;
using kvcache::observed;
using kvcache_test::toy_cache;

namespace {

/// Asks to be told of everything.
struct listener : lru {
  using lru::lru;
  void open(std::span<const std::uint64_t>, std::uint32_t hits, std::uint32_t tokens) noexcept {
    told += "open " + std::to_string(hits) + " " + std::to_string(tokens) + ";";
  }
  void reference(kvcache::block_id block, std::uint64_t fingerprint, kvcache::block_id parent) noexcept {
    told +=
        "reference " + std::to_string(block) + " " + std::to_string(fingerprint) + " " + std::to_string(parent) + ";";
  }
  void evict(kvcache::block_id block) noexcept {
    told += "evict " + std::to_string(block) + ";";
    erase(block);
  }
  void advance(std::uint64_t now) noexcept { told += "advance " + std::to_string(now) + ";"; }
  std::string told;
};

histogram of(std::initializer_list<std::uint64_t> values) {
  histogram h;
  for (const std::uint64_t v : values) h.add(v);
  return h;
}

/// The same load on both: what they keep at every turn.
template <class Policy>
void check_same_decisions() {
  toy_cache<Policy> plain(7);
  toy_cache<observed<Policy>> watched(7);
  std::uint32_t random = 1;
  const auto below = [&](std::uint32_t n) { return (random = random * 1'664'525u + 1'013'904'223u) / 65'536 % n; };
  for (int i = 0; i < 5'000; ++i) {
    const std::uint64_t content = 'a' + below(1 + below(20));
    REQUIRE(plain.get(content) == watched.get(content));
    REQUIRE(plain.letters() == watched.letters());
  }
}

}  // namespace

TEST_CASE("R12 an observed policy decides as it does alone") {
  check_same_decisions<lru>();
  check_same_decisions<kvcache::s3fifo>();
  check_same_decisions<kvcache::priority>();
  check_same_decisions<listener>();
  CHECK(std::string(observed<kvcache::s3fifo>::name) == "s3fifo");
}

TEST_CASE("an observed policy asks only for what it or the other needs") {
  using kvcache::told_of_evictions;
  using kvcache::told_of_references;
  using kvcache::told_of_requests;
  static_assert(kvcache::eviction_policy<observed<lru>>);
  static_assert(!told_of_requests<observed<lru>> && told_of_references<observed<lru>> &&
                told_of_evictions<observed<lru>>);
  static_assert(told_of_requests<observed<kvcache::gittins>> && told_of_requests<observed<listener>>);
  static_assert(!told_of_requests<observed<kvcache::s3fifo>>);

  observed<listener> watched(4);
  watched.advance(9);
  watched.open({}, 3, 16);
  watched.reference(2, 77, 1);
  watched.insert(2);
  watched.evict(2);
  CHECK(watched.policy().told == "advance 9;open 3 16;reference 2 77 1;evict 2;");
  CHECK(watched.victim() == kvcache::null_block);
}

TEST_CASE("ages, idle times and gaps are in the caller's time") {
  observed<lru> p(3);
  p.advance(100);
  p.reference(1, 11, 0);
  p.reference(2, 22, 1);
  p.advance(107);
  p.insert(2);
  p.insert(1);
  p.advance(112);
  p.advance(50);  // nobody goes back
  p.erase(1);
  p.reference(1, 11, 0);
  CHECK(p.gap() == of({12}));
  p.advance(120);
  p.insert(1);
  p.advance(150);
  p.evict(2);
  CHECK(p.age() == of({50}));
  CHECK(p.idle() == of({43}));
  p.evict(1);
  CHECK(p.age() == of({50, 50}));
  CHECK(p.idle() == of({43, 30}));

  // The block's next content is another one.
  p.reference(1, 33, 0);
  CHECK(p.gap() == of({12}));
  p.advance(151);
  p.insert(1);
  p.evict(1);
  CHECK(p.age() == of({50, 50, 1}));
  CHECK(p.idle() == of({43, 30, 0}));
}

TEST_CASE("without a time of the caller, requests are the time") {
  toy_cache<observed<lru>> cache(2);
  cache.get("abacb");
  // a, b at 1, 2; a again at 3, a gap of 2; c at 4 evicts b, stored and released at 2; b at 5 evicts a.
  CHECK(cache.policy.gap() == of({2}));
  // The request that evicts counts only once it has a block.
  CHECK(cache.policy.age() == of({1, 3}));
  CHECK(cache.policy.idle() == of({1, 1}));
  // A chain is one request.
  observed<lru> p(4);
  p.reference(1, 11, 0);
  p.reference(2, 22, 1);
  p.reference(3, 33, 2);
  p.insert(1);
  p.evict(1);
  CHECK(p.age() == of({0}));
}

TEST_CASE("a time that starts at 0 after the first requests starts the figures anew, and nothing is older than time") {
  const std::uint64_t start = GENERATE(0u, 2u);
  observed<lru> p(3);
  for (int i = 0; i < 5; ++i) {
    for (kvcache::block_id b = 1; b <= 3; ++b) {
      if (i != 0) p.erase(b);
      p.reference(b, b * 11, 0);
      p.insert(b);
    }
  }
  p.evict(1);
  CHECK(p.gap().count() == 12);
  p.advance(start);
  CHECK(p.gap().count() + p.age().count() + p.idle().count() == 0);
  p.erase(2);
  p.reference(2, 22, 0);
  CHECK(p.gap() == of({start}));
  p.insert(2);
  p.advance(9);
  p.evict(2);
  p.evict(3);
  CHECK(p.age() == of({9, 9}));
  CHECK(p.idle() == of({9 - start, 9}));
}

TEST_CASE("what a reset or a time to live has forgotten is stored anew when it comes back, and no gap") {
  kvcache::block_manager<observed<lru>> m({.blocks = 8, .block_size = 2});
  const kvcache_test::text content = kvcache_test::words(1, 5);
  const kvcache::retention_range ranges[]{{.end = 5, .time_to_live = 10}};
  const auto ask = [&](std::uint64_t now) {
    m.advance(now);
    const auto opened = m.open({.content = content, .reserve = 5, .retention = ranges});
    REQUIRE(opened.has_value());
    kvcache_test::extend(m, opened->sequence, {content.begin() + opened->reused_tokens, content.end()});
    kvcache_test::close(m, opened->sequence);
    return opened->reused_tokens;
  };
  CHECK(ask(0) == 0);
  CHECK(ask(3) == 4);
  CHECK(m.policy().gap() == of({3, 3}));
  REQUIRE(m.reset().has_value());
  CHECK(ask(7) == 0);
  CHECK(ask(50) == 0);
  CHECK(m.policy().gap() == of({3, 3}));
  CHECK(ask(51) == 4);
  CHECK(m.policy().gap() == of({3, 3, 1, 1}));
  // Two by the reset at 3, two when they were 43 old.
  CHECK(m.policy().age() == of({3, 3, 43, 43}));
}

TEST_CASE("content that was forgotten is not counted as evicted, nor what follows it as used again") {
  observed<lru> p(2);
  p.advance(1);
  p.reference(1, 11, 0);
  p.insert(1);
  p.advance(5);
  p.erase(1);
  p.reference(1, 12, 0);
  CHECK(p.age().count() == 0);
  CHECK(p.gap().count() == 0);
  p.insert(1);
  p.advance(8);
  p.evict(1);
  CHECK(p.age() == of({3}));
}

TEST_CASE("content that comes back after its eviction is stored anew, not used again") {
  observed<lru> p(2);
  p.advance(1);
  p.reference(1, 11, 0);
  p.insert(1);
  p.advance(10);
  p.evict(1);
  p.advance(30);
  p.reference(1, 11, 0);
  CHECK(p.gap().count() == 0);
  p.insert(1);
  p.advance(34);
  p.evict(1);
  CHECK(p.age() == of({9, 4}));
}

TEST_CASE("a chain's order for reuse is that of its release, tail first") {
  observed<lru> p(3);
  for (kvcache::block_id b = 1; b <= 3; ++b) p.reference(b, b * 11, b - 1);
  for (kvcache::block_id b = 3; b >= 1; --b) p.insert(b);
  for (kvcache::block_id b = 1; b <= 3; ++b) p.erase(b);
  for (kvcache::block_id b = 1; b <= 3; ++b) p.reference(b, b * 11, b - 1);
  CHECK(p.reuse().distances() == of({0, 1, 2}));
}

TEST_CASE("the curve of an observed policy is what lru finds in pools of other sizes") {
  // Chains of one to six blocks, a tree of them; released tail first.
  const kvcache::block_id blocks = 30;
  std::uint32_t random = 8;
  const auto below = [&](std::uint32_t n) { return (random = random * 1'664'525u + 1'013'904'223u) / 65'536 % n; };
  toy_cache<observed<lru>> watched(blocks);
  toy_cache<lru> small_pool(10), same(blocks), large(100);
  unsigned in_small = 0, in_same = 0, in_large = 0;
  constexpr unsigned uses = 20'000;
  for (unsigned i = 0; i < uses; ++i) {
    const std::uint64_t content = below(1 + below(200));
    watched.get(content);
    in_small += small_pool.get(content);
    in_same += same.get(content);
    in_large += large.get(content);
  }
  const auto share = [&](unsigned hits) { return static_cast<double>(hits) / uses; };
  CHECK(watched.policy.reuse().references() == uses);
  CHECK(watched.policy.reuse().hit_ratio(10) == share(in_small));
  CHECK(watched.policy.reuse().hit_ratio(30) == share(in_same));
  CHECK(watched.policy.reuse().hit_ratio(100) == Approx(share(in_large)).margin(0.003));
  CHECK(in_large > in_same + 1'000);
}
