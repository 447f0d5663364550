// SPDX-License-Identifier: Apache-2.0
// Pins with a time, many of them.
#include <map>
#include <random>
#include <utility>

#include "support.hpp"

using namespace kvcache_test;

TEST_CASE("Retention: of any number of pins, opened and closed in any order, each ends at its time") {
  const unsigned seed = GENERATE(range(1u, 6u));
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const auto below = [&](unsigned end) { return std::uniform_int_distribution<unsigned>(0, end - 1)(random); };
  manager m({.blocks = 8, .block_size = 4});
  const text content = words(1, 32);
  close(m, prompt(m, content).sequence);
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::uint64_t> model;  // a pin's end, by index and generation
  std::uint64_t now = 0;
  for (int call = 0; call < 4000; ++call) {
    switch (below(4)) {
      case 0:
      case 1: {
        const std::uint64_t expires = below(5) == 0 ? kvcache::never : now + below(50);
        const auto pin = m.pin(head(content, 4 * (1 + below(8))), {}, expires);
        model[{pin.sequence.index, pin.sequence.generation}] = expires;
        break;
      }
      case 2: {
        if (model.empty()) break;
        const auto closed = std::next(model.begin(), below(static_cast<unsigned>(model.size())));
        REQUIRE(m.close({closed->first.first, closed->first.second}).has_value());
        model.erase(closed);
        break;
      }
      default:
        m.advance(now += below(8));
        std::erase_if(model, [&](const auto& pin) { return pin.second <= now && pin.second != kvcache::never; });
    }
    for (const auto& [id, expires] : model) REQUIRE(m.contains({id.first, id.second}));
    REQUIRE((m.counts().referenced != 0) == !model.empty());
  }
  m.advance(now + 50);
  for (const auto& [id, expires] : model)
    if (expires == kvcache::never) REQUIRE(m.close({id.first, id.second}).has_value());
  CHECK(m.counts().evictable == 8);
}
