// SPDX-License-Identifier: Apache-2.0
// An hour's conversations: what lru and a policy that knows the future find is known to the block.
#include "catch.hpp"
#include "conversation_trace.hpp"
#include "optimal.hpp"
#include "replay.hpp"

#include <array>
#include <cstdint>

namespace {

constexpr std::array<std::uint32_t, 7> capacities{1'000, 3'000, 5'859, 10'000, 30'000, 50'000, 100'000};

}  // namespace

TEST_CASE("eviction: lru finds exactly these blocks of the conversation trace") {
  const auto all = kvcache_test::conversation_trace();
  if (!all) return;
  REQUIRE(all->references == 288'500);
  constexpr std::array<std::size_t, 7> known{12'847, 18'850, 39'258, 61'046, 93'978, 102'290, 104'924};
  for (std::size_t i = 0; i < capacities.size(); ++i) CHECK(replay::hits("lru", *all, {capacities[i]}) == known[i]);
}

TEST_CASE("eviction: optimal finds exactly these blocks of the conversation trace") {
  const auto all = kvcache_test::conversation_trace();
  if (!all) return;
  constexpr std::array<std::size_t, 7> known{55'019, 84'953, 101'884, 105'710, 105'710, 105'710, 105'710};
  for (std::size_t i = 0; i < capacities.size(); ++i) CHECK(replay::optimal_hits(*all, capacities[i]) == known[i]);
}

TEST_CASE("eviction: gittins finds at least 0.98 of these blocks of the conversation trace, and 0.99 of lru's") {
  const auto all = kvcache_test::conversation_trace();
  if (!all) return;
  // A first sketch of the policy, in another language.
  constexpr std::array<double, 7> sketch{23'008, 39'632, 54'312, 69'400, 98'287, 102'656, 105'152};
  for (std::size_t i = 0; i < capacities.size(); ++i) {
    const auto found = static_cast<double>(replay::hits("gittins", *all, {capacities[i]}));
    CAPTURE(capacities[i]);
    CHECK(found >= 0.98 * sketch[i]);
    CHECK(found >= 0.99 * static_cast<double>(replay::hits("lru", *all, {capacities[i]})));
  }
}

TEST_CASE("eviction: no policy finds more than optimal, or far less than lru at the largest size") {
  const auto all = kvcache_test::conversation_trace();
  if (!all) return;
  for (const std::string& name : replay::known_policies()) {
    CAPTURE(name);
    CHECK(replay::hits(name, *all, {3'000}) <= 84'953);
    CHECK(replay::hits(name, *all, {100'000}) >= 97'000);
  }
}
