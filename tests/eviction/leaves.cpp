// SPDX-License-Identifier: Apache-2.0
// R7 under any policy: only leaves of the prefix tree are evicted.
#include <kvcache/blocks/block_manager.hpp>

#include "../blocks/support.hpp"
#include "policies.hpp"

using namespace kvcache_test;

TEMPLATE_TEST_CASE("R7 a chain loses its tail first, whatever block the policy names", "", kvcache::lru, mru,
                   lowest_id) {
  kvcache::block_manager<TestType> m({.blocks = 6, .block_size = 4});
  const text content = words(1, 24);
  close(m, prompt(m, content).sequence);
  for (std::uint32_t left = 6; left-- > 0;) {
    const text other = words(2, 1);
    const auto s = m.open({.content = other, .reserve = 1});
    REQUIRE(s.has_value());
    CHECK(table(m, s->sequence) == ids{left + 1});
    CHECK(m.probe(content).tokens == 4 * left);
    check_counts(m);
  }
}

TEMPLATE_TEST_CASE("R4 R7 everything that counts as available can be taken, whatever the policy", "", kvcache::lru, mru,
                   lowest_id) {
  kvcache::block_manager<TestType> m({.blocks = 12, .block_size = 4});
  const text stem = words(1, 8);
  const auto keeps = prompt(m, stem).sequence;
  for (int topic = 2; topic < 7; ++topic) close(m, prompt(m, stem + words(topic, 8)).sequence);
  CHECK(m.counts().available() == 10);
  CHECK(drain(m).size() == 10);
  CHECK(m.probe(stem).tokens == 8);
  close(m, keeps);
}
