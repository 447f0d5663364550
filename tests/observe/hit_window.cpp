// SPDX-License-Identifier: Apache-2.0
#include <kvcache/observe/hit_window.hpp>

#include <cstdint>
#include <deque>

#include "catch.hpp"

using kvcache::hit_sums;
using kvcache::hit_window;

TEST_CASE("V22 the hit window weighs tokens and forgets whole groups, never the newest one") {
  hit_window w(5);
  CHECK(w.window().ratio() == 0);
  const auto after = [&](std::uint64_t requests, std::uint64_t queried, std::uint64_t hit) {
    w.record({requests, queried, hit});
    return w.window().ratio();
  };
  CHECK(after(1, 20, 9) == 0.45);
  CHECK(after(4, 80, 16) == 0.25);
  CHECK(after(1, 10, 2) == 0.20);
  CHECK(w.window() == hit_sums{5, 90, 18});
  CHECK(after(11, 20, 10) == 0.5);
  CHECK(w.window() == hit_sums{11, 20, 10});
  CHECK(after(22, 40, 30) == 0.75);
  CHECK(after(1, 100, 1) == 0.01);
  CHECK(w.total() == hit_sums{40, 270, 68});
}

TEST_CASE("R13 a request counts once: no request is no record, and one admitted again stands apart") {
  hit_window w(3);
  w.record({1, 100, 40});
  w.record({0, 0, 0});
  w.record({0, 50, 50});  // tried and refused
  CHECK(w.window() == hit_sums{1, 100, 40});
  w.record_again({1, 140, 96});
  w.record_again({1, 150, 0});
  CHECK(w.window() == hit_sums{1, 100, 40});
  CHECK(w.total() == hit_sums{1, 100, 40});
  CHECK(w.again() == hit_sums{2, 290, 96});
}

TEST_CASE("R13 the window holds the last N requests, whatever came before") {
  const std::uint32_t limit = GENERATE(1u, 2u, 7u, 100u);
  CAPTURE(limit);
  hit_window w(limit);
  CHECK(w.limit() == limit);
  std::deque<hit_sums> kept;
  std::uint32_t random = 5;
  const auto below = [&](std::uint32_t n) { return (random = random * 1'664'525u + 1'013'904'223u) / 65'536 % n; };
  for (int i = 0; i < 3'000; ++i) {
    const std::uint32_t queried = below(1'000);
    const hit_sums group{i % 500 < 250 ? 1 : below(2 * limit + 2), queried, below(queried + 1)};
    w.record(group);
    if (group.requests != 0) kept.push_back(group);
    hit_sums sum;
    for (const hit_sums& g : kept) sum += g;
    while (kept.size() > 1 && sum.requests > limit) {
      sum -= kept.front();
      kept.pop_front();
    }
    REQUIRE(w.window() == sum);
  }
}

TEST_CASE("a cleared hit window begins anew, its totals go on") {
  hit_window w(2);
  w.record({2, 10, 10});
  w.record_again({1, 5, 5});
  w.clear();
  CHECK(w.window() == hit_sums{});
  w.record({1, 10, 0});
  CHECK(w.window() == hit_sums{1, 10, 0});
  w.record({2, 30, 20});
  CHECK(w.window() == hit_sums{2, 30, 20});
  CHECK(w.total() == hit_sums{5, 50, 30});
  CHECK(w.again() == hit_sums{1, 5, 5});
}

#if KVCACHE_HAS_EXCEPTIONS
TEST_CASE("a hit window of no request, or of far too many, is refused with value, limit and remedy") {
  CHECK_THROWS_WITH(hit_window(0), "hit window: 0 requests, from 1 to 16777216 possible; a thousand tell a trend");
  CHECK_THROWS_AS(hit_window(16'777'217), kvcache::invalid_argument);
}
#endif
