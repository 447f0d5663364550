// SPDX-License-Identifier: Apache-2.0
#include <kvcache/observe/storm_alarm.hpp>

#include <cstdint>
#include <limits>
#include <vector>

#include "catch.hpp"

using kvcache::storm_alarm;

namespace {

/// Requests of 1,000 tokens.
class load {
 public:
  explicit load(const kvcache::storm_alarm_options& options = {}) : alarm(options) {}

  /// `count` requests of which about `percent` of the tokens are hits. How often the alarm rose.
  unsigned run(unsigned count, std::uint32_t percent, std::uint32_t noise = 0) {
    unsigned rose = 0;
    for (unsigned i = 0; i < count; ++i) {
      random_ = random_ * 1'664'525u + 1'013'904'223u;
      const std::uint32_t spread = noise == 0 ? 0 : random_ / 65'536 % (2 * noise + 1);
      const bool rises = alarm.record({1, 1'000, std::uint64_t{10} * percent + spread - noise});
      CHECK((!rises || alarm.raised()));
      if (rises) ++rose, risen_at.push_back(requests);
      ++requests;
    }
    return rose;
  }

  storm_alarm alarm;
  unsigned requests = 0;
  std::vector<unsigned> risen_at;

 private:
  std::uint32_t random_ = 3;
};

}  // namespace

TEST_CASE("a storm raises the alarm once, soon, and is over when the ratio is back") {
  load l;
  CHECK(l.run(3'000, 60, 100) == 0);
  CHECK(l.run(400, 10, 50) == 1);
  CHECK(l.alarm.raised());
  CHECK(l.risen_at[0] - 3'000 < 100);
  CHECK(l.run(100, 60, 100) == 0);
  CHECK_FALSE(l.alarm.raised());
  CHECK(l.run(3'000, 60, 100) == 0);
  CHECK(l.run(400, 10, 50) == 1);
  CHECK(l.alarm.storms() == 2);
}

TEST_CASE("the alarm rises exactly where the window falls to its share of the average") {
  load l({.window = 10, .average = 1'000, .falls_to = 0.5, .recovers_to = 0.8});
  CHECK(l.run(1'000, 50) == 0);
  // After n misses the window is at 0.5 * (10 - n) / 10 and the average at 0.5 * (1000 - n) / 1000: n = 6.
  CHECK(l.run(5, 0) == 0);
  CHECK(l.run(1, 0) == 1);
  CHECK(l.alarm.window().ratio() == 0.2);
  CHECK(l.alarm.average().ratio() == 0.497);
  // Four misses have to leave the window: 0.8 * 0.497 is below 0.4, and 0.5 * 8 / 10 is 0.4.
  CHECK(l.run(7, 50) == 0);
  CHECK(l.alarm.raised());
  CHECK(l.run(1, 50) == 0);
  CHECK_FALSE(l.alarm.raised());
}

TEST_CASE("a window at exactly its share of the average is a storm") {
  storm_alarm alarm({.window = 10, .average = 40});
  for (int i = 0; i < 29; ++i) CHECK_FALSE(alarm.record({1, 1'000, 583}));
  CHECK_FALSE(alarm.record({1, 1'000, 593}));
  for (int i = 0; i < 9; ++i) CHECK_FALSE(alarm.record({1, 1'000, 250}));
  CHECK(alarm.record({1, 1'000, 250}));
  CHECK(alarm.window().ratio() == 0.25);
  CHECK(alarm.average().ratio() == 0.5);
}

TEST_CASE("a ratio that wavers about the limit raises the alarm once") {
  load l({.window = 10});
  CHECK(l.run(2'000, 60) == 0);
  unsigned rose = 0;
  for (int i = 0; i < 20; ++i) rose += l.run(10, 28) + l.run(10, 36);
  CHECK(rose == 1);
  CHECK(l.alarm.raised());
}

TEST_CASE("a lower ratio that lasts becomes the usual: the storm is over, and a further fall is another") {
  load l;
  CHECK(l.run(3'000, 80) == 0);
  CHECK(l.run(3'000, 30) == 1);
  CHECK_FALSE(l.alarm.raised());
  CHECK(l.run(500, 5) == 1);
  CHECK(l.alarm.storms() == 2);
}

TEST_CASE("noise, a slow decline, a start from nothing, and a load that never hits raise no alarm") {
  SECTION("noise") { CHECK(load().run(20'000, 50, 400) == 0); }
  SECTION("slow decline") {
    load l;
    for (std::uint32_t percent = 80; percent > 10; --percent) CHECK(l.run(500, percent) == 0);
  }
  SECTION("start") {
    load l;
    CHECK(l.run(50, 100) == 0);
    CHECK(l.run(349, 0) == 0);  // before four windows have been seen
    CHECK(l.run(1, 0) == 1);
  }
  SECTION("never hits") {
    load l;
    CHECK(l.run(5'000, 4) == 0);
    CHECK(l.run(5'000, 0) == 0);
  }
}

TEST_CASE("R12 two alarms that are told alike rise alike") {
  load a, b;
  for (int i = 0; i < 20; ++i) {
    CHECK(a.run(150, i % 3 == 0 ? 10 : 70, 99) == b.run(150, i % 3 == 0 ? 10 : 70, 99));
  }
  CHECK(a.risen_at == b.risen_at);
  CHECK(a.alarm.storms() > 0);
}

#if KVCACHE_HAS_EXCEPTIONS
TEST_CASE("a storm alarm that could never work is refused with value, limit and remedy") {
  using kvcache::invalid_argument;
  CHECK_THROWS_WITH(
      storm_alarm({.window = 100, .average = 399}),
      "storm alarm: an average of 399 requests, at least 400 needed; let it be many windows long, so that "
      "a storm is no part of the usual");
  CHECK_THROWS_AS(storm_alarm({.window = 0}), invalid_argument);
  CHECK_THROWS_AS(storm_alarm({.falls_to = 0}), invalid_argument);
  CHECK_THROWS_AS(storm_alarm({.falls_to = 0.8, .recovers_to = 0.8}), invalid_argument);
  CHECK_THROWS_AS(storm_alarm({.recovers_to = 1.1}), invalid_argument);
  CHECK_THROWS_AS(storm_alarm({.falls_to = std::numeric_limits<double>::quiet_NaN()}), invalid_argument);
  CHECK_THROWS_WITH(
      storm_alarm({.least_average = 0}),
      "storm alarm: a least average of 0.000000, more than 0 and at most 1 possible; 0.05 leaves noise alone");
  for (const double bad : {-0.1, 1.1, std::numeric_limits<double>::quiet_NaN()})
    CHECK_THROWS_AS(storm_alarm({.least_average = bad}), invalid_argument);
  CHECK_NOTHROW(storm_alarm({.least_average = 1}));
  CHECK_NOTHROW(storm_alarm({.window = 100, .average = 400, .recovers_to = 1}));
}
#endif
