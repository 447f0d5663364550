// SPDX-License-Identifier: Apache-2.0
// Replays a source's events onto snapshots of every age. The source is driven by the caller; see index_replica.hpp for
// what it has to have.
#pragma once

#include "index_replica.hpp"

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "catch.hpp"

namespace kvcache_test {

struct replay_outcome {
  unsigned compared = 0;
  unsigned lost = 0;  ///< how often a consumer had to start again
};

/// Calls change() `rounds` times. Three consumers listen from the start: one after every round, two after some rounds
/// only; more begin with a snapshot in between. All agree with a fresh snapshot whenever they have caught up.
template <class Source, class Change>
replay_outcome replay_events(const Source& source, const std::set<std::uint32_t>& window_groups, unsigned rounds,
                             Change&& change) {
  replay_outcome outcome;
  std::vector<index_replica> consumers(3, index_replica(window_groups));
  const auto agree = [&](index_replica& consumer, std::size_t room) {
    const unsigned before = consumer.snapshots();
    consumer.catch_up(source, room);
    outcome.lost += consumer.snapshots() - before;
    REQUIRE(consumer.fault() == "");
    REQUIRE(consumer.number() == source.events().newest());
    std::map<kvcache::serial, kvcache::cache_event> there;
    source.visit_cached([&](kvcache::cache_event e) {
      e.number = 0;
      there.emplace(e.content, e);
    });
    REQUIRE(consumer.cached() == there);
    ++outcome.compared;
  };
  for (unsigned round = 1; round <= rounds; ++round) {
    change();
    agree(consumers[0], 1);
    if (round % 7 == 0) agree(consumers[1], 3);
    if (round % 50 == 0) agree(consumers[2], 64);
    if (round % 37 == 0) {
      consumers.emplace_back(window_groups).start(source);
      REQUIRE(consumers.back().fault() == "");
    }
    if (round % 120 == 0)
      for (std::size_t i = 3; i < consumers.size(); ++i) agree(consumers[i], 16);
  }
  for (index_replica& consumer : consumers) agree(consumer, 5);
  return outcome;
}

}  // namespace kvcache_test
