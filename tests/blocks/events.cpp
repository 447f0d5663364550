// SPDX-License-Identifier: Apache-2.0
// What the block manager says of what it caches: enough to rebuild its index from any snapshot.
#include <array>
#include <cstdint>
#include <vector>

#include "../observe/replay_events.hpp"
#include "random_driver.hpp"
#include "support.hpp"

using namespace kvcache_test;
using kvcache::cache_event;
using kvcache::cache_event_kind;
using kvcache::layer_group;

namespace {

std::vector<cache_event> events_after(const manager& m, std::uint64_t number) {
  std::vector<cache_event> all(1000);
  const auto reading = m.events().read(number, all);
  REQUIRE(reading.lost == 0);
  all.resize(reading.events);
  return all;
}

}  // namespace

TEST_CASE("V8 reset is one cleared event, whatever was cached") {
  const std::uint32_t size = GENERATE(1u, 4u, 16u);
  CAPTURE(size);
  manager m({.blocks = 10, .block_size = size, .events = 64});
  const text content = words(1, 3 * size);
  const auto s = prompt(m, content).sequence;
  const auto stored = events_after(m, 0);
  REQUIRE(stored.size() == 3);
  for (std::size_t i = 0; i < 3; ++i) {
    CHECK(stored[i].number == i + 1);
    CHECK(stored[i].kind == cache_event_kind::stored);
    CHECK(stored[i].block == table(m, s)[i]);
    CHECK(stored[i].tokens == size);
    if (i != 0) CHECK(stored[i].parent == stored[i - 1].content);
  }
  CHECK(m.reset().error().code == kvcache::errc::in_use);
  CHECK(m.events().newest() == 3);
  close(m, s);
  REQUIRE(m.reset().has_value());
  const auto cleared = events_after(m, 3);
  REQUIRE(cleared.size() == 1);
  CHECK(cleared[0].kind == cache_event_kind::cleared);
  CHECK(m.probe(content).tokens == 0);
}

TEST_CASE("Events: what is evicted is removed as it was stored; equal content has an equal fingerprint") {
  manager m({.blocks = 2, .block_size = 4, .events = 64});
  close(m, prompt(m, words(1, 8)).sequence);
  close(m, prompt(m, words(2, 8)).sequence);
  close(m, prompt(m, words(1, 8)).sequence);
  const auto all = events_after(m, 0);
  REQUIRE(all.size() == 10);
  for (std::size_t i = 0; i < 2; ++i) {
    cache_event removed = all[3 - i];  // the tail goes first
    CHECK(removed.kind == cache_event_kind::removed);
    removed.number = all[i].number;
    removed.kind = cache_event_kind::stored;
    CHECK(removed == all[i]);
    CHECK(all[8 + i].fingerprint == all[i].fingerprint);
    CHECK(all[8 + i].content > all[i].content);
  }
  const manager off({.blocks = 2, .block_size = 4});
  CHECK_FALSE(off.events().enabled());
}

TEST_CASE("Events replayed from any snapshot rebuild an equal index, under the random driver") {
  const std::uint64_t seed = GENERATE(1u, 2u);
  INFO("seed " << seed);
  const std::size_t log = GENERATE(4u, 300u);
  const auto replay = [&](const random_load& load, const std::set<std::uint32_t>& windows) {
    random_driver<manager> driver(load);
    const auto outcome = replay_events(driver.manager(), windows, 600, [&] { driver.run(5); });
    CHECK(outcome.compared > 600);
    CHECK((outcome.lost > 0) == (log == 4));
  };
  replay({.seed = seed, .groups = {{4}}, .events = log}, {});
  replay({.seed = seed, .blocks = 60, .groups = {{4}, {4, 9}, {2, 4}}, .events = log}, {1, 2});
}
