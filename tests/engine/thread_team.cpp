// SPDX-License-Identifier: Apache-2.0
#include "thread_team.hpp"

#include "bad_input.hpp"
#include "catch.hpp"

#include <kvcache/concepts.hpp>

#include <cstddef>
#include <numeric>
#include <vector>

using namespace engine;
using kvcache_test::contains_text;

static_assert(kvcache::executor<thread_team>);

TEST_CASE("Each thread of a team runs each task once, and the run ends after all of them") {
  for (const unsigned threads : {1u, 2u, 3u, 5u}) {
    thread_team team(threads);
    REQUIRE(team.threads() == threads);
    std::vector<int> runs(threads, 0);  // no atomics: run() has to order the writes
    for (int round = 1; round <= 300; ++round) {
      team.run([&](unsigned ith, unsigned nth) {
        if (nth == threads) ++runs[ith];
      });
      CHECK(std::accumulate(runs.begin(), runs.end(), 0) == round * static_cast<int>(threads));
    }
  }
}

TEST_CASE("A team that never ran anything ends") { const thread_team team(4); }

TEST_CASE("Shares cover everything once, in whole grains") {
  for (const std::size_t size : {0u, 1u, 15u, 16u, 17u, 100u}) {
    for (const unsigned nth : {1u, 2u, 3u, 7u}) {
      std::size_t end = 0;
      for (unsigned ith = 0; ith < nth; ++ith) {
        const share s = share_of(size, 16, ith, nth);
        CHECK(s.begin == end);
        CHECK((s.begin % 16 == 0 || s.begin == size));
        end = s.end;
      }
      CHECK(end == size);
    }
  }
}

TEST_CASE("A team without threads is refused") {
  CHECK_THROWS_WITH(thread_team(0), contains_text("threads is 0, 1 to 1024 are possible"));
  CHECK_THROWS_WITH(thread_team(5000), contains_text("threads is 5000"));
}
