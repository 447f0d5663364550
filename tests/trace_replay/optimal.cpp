// SPDX-License-Identifier: Apache-2.0
#include "optimal.hpp"

#include "catch.hpp"
#include "replay.hpp"
#include "trace.hpp"

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

namespace {

replay::trace of(std::vector<replay::request> requests) {
  replay::trace t;
  t.requests = std::move(requests);
  for (const auto& r : t.requests) t.references += r.size();
  return t;
}

/// The most hits by trying every choice of what to keep after each request.
std::size_t by_trying(const replay::trace& all, std::uint32_t blocks, std::size_t from = 0,
                      const std::set<kvcache::content_unit>& resident = {}) {
  if (from == all.requests.size()) return 0;
  const auto& wanted = all.requests[from];
  std::size_t leading = 0;
  while (leading < wanted.size() && resident.contains(wanted[leading])) ++leading;
  std::set<kvcache::content_unit> candidates = resident;
  candidates.insert(wanted.begin(), wanted.end());
  const std::vector<kvcache::content_unit> list(candidates.begin(), candidates.end());
  std::size_t best = 0;
  for (std::uint32_t chosen = 0; chosen < 1u << list.size(); ++chosen) {
    std::set<kvcache::content_unit> kept;
    for (std::size_t i = 0; i < list.size(); ++i)
      if ((chosen >> i & 1u) != 0) kept.insert(list[i]);
    if (kept.size() != std::min<std::size_t>(blocks, list.size())) continue;
    best = std::max(best, by_trying(all, blocks, from + 1, kept));
  }
  return leading + best;
}

}  // namespace

TEST_CASE("eviction: optimal keeps what is needed first, and bypasses what is never needed again") {
  const auto t = of({{1, 2}, {3}, {4}, {1, 2}, {3}});
  CHECK(replay::optimal_hits(t, 1) == 1);
  CHECK(replay::optimal_hits(t, 2) == 2);
  CHECK(replay::optimal_hits(t, 3) == 3);
  CHECK(replay::hits("lru", t, {2}) == 0);
}

TEST_CASE("eviction: optimal is what trying every choice finds") {
  std::mt19937 random(5);
  for (int round = 0; round < 30; ++round) {
    // Chains of a small tree: block 1 with children 2 and 3, 2 with 4, or block 5 alone.
    const std::vector<replay::request> chains{{1}, {1, 2}, {1, 3}, {1, 2, 4}, {5}};
    std::vector<replay::request> requests;
    for (int i = 0; i < 5; ++i) requests.push_back(chains[random() % chains.size()]);
    const auto t = of(requests);
    for (const std::uint32_t blocks : {1u, 2u, 3u}) CHECK(replay::optimal_hits(t, blocks) == by_trying(t, blocks));
  }
}

TEST_CASE("eviction: with several requests open at once what they hold stays, which changes nothing for lru") {
  std::mt19937 random(9);
  std::vector<replay::request> requests;
  for (int i = 0; i < 2000; ++i) {
    const std::uint64_t chain = random() % 40;
    requests.push_back({});
    for (std::uint64_t b = 0; b < 1 + chain % 7; ++b) requests.back().push_back(100 * chain + b);
  }
  const auto t = of(std::move(requests));
  const auto found = [&](const char* policy, std::uint32_t at_once) {
    return replay::hits(policy, t, {.blocks = 60, .at_once = at_once});
  };
  const std::size_t optimal = replay::optimal_hits(t, 60);
  for (const std::uint32_t at_once : {2u, 8u, 1000u}) {
    // The oldest ends first, so what is held is what lru would keep.
    CHECK(found("lru", at_once) == found("lru", 1));
    CHECK(found("s3fifo", at_once) <= optimal);
  }
  CHECK(found("s3fifo", 8) != found("s3fifo", 1));
}

TEST_CASE("eviction: a request with more blocks than the pool keeps its first ones") {
  const auto t = of({{1, 2, 3, 4}, {1, 2, 3, 4}});
  for (const std::string& name : replay::known_policies()) {
    CAPTURE(name);
    CHECK(replay::hits(name, t, {3}) == 3);
    CHECK(replay::hits(name, t, {100}) == 4);
  }
}

TEST_CASE("eviction: what a request generated is found by the prompt that sends it back") {
  auto t = of({{1}, {1, 2, 3, 4}, {5, 6}, {1, 2, 3, 4}});
  t.outputs = {{2, 3, 9}};
  for (const std::string& name : replay::known_policies()) {
    CAPTURE(name);
    CHECK(replay::hits(name, t, {100}) == 3 + 4);
    CHECK(replay::hits(name, t, {1}) <= 2);
  }
  CHECK(replay::optimal_hits(t, 2) == 4);
  CHECK(replay::hits("lru", t, {2}) == 2);
}
