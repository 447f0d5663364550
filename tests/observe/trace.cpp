// SPDX-License-Identifier: Apache-2.0
// An hour's conversations through observed<lru>: the curve it predicts from one pool, against what lru finds in pools
// of other sizes.
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/observe/observed.hpp>

#include <array>
#include <cstdint>
#include <vector>

#include "catch.hpp"
#include "conversation_trace.hpp"

namespace {

/// One request at a time. Two units of content are a block; half a block more is an end that is never cached.
void replay_through(kvcache::block_manager<kvcache::observed<kvcache::lru>>& manager, const replay::trace& all) {
  replay::request content;
  bool good = true;
  for (const replay::request& wanted : all.requests) {
    content.clear();
    for (const auto block : wanted) content.insert(content.end(), 2, block);
    content.push_back(0);
    const auto opened = manager.open({.content = content, .reserve = content.size()});
    if (!opened) {
      good = false;
      break;
    }
    const auto rest = kvcache::content_view(content).sub(opened->reused_tokens, content.size() - opened->reused_tokens);
    const kvcache::want w{opened->sequence, static_cast<std::uint32_t>(rest.size())};
    auto step = manager.begin({&w, 1});
    good = good && step && step->accept() && manager.commit(opened->sequence, rest) && manager.retire(*step) &&
           manager.close(opened->sequence);
  }
  REQUIRE(good);
}

}  // namespace

TEST_CASE("the curve predicted on the conversation trace is within 0.015 of what lru finds, at every size") {
  const auto all = kvcache_test::conversation_trace();
  if (!all) return;
  constexpr std::array<std::uint32_t, 7> capacities{1'000, 3'000, 5'859, 10'000, 30'000, 50'000, 100'000};
  constexpr std::array<double, 7> found{12'847, 18'850, 39'258, 61'046, 93'978, 102'290, 104'924};
  for (const std::uint32_t pool : {1'000u, 5'859u, 50'000u}) {
    kvcache::block_manager<kvcache::observed<kvcache::lru>> manager({.blocks = pool, .block_size = 2});
    replay_through(manager, *all);
    const auto& reuse = manager.policy().reuse();
    CHECK(reuse.references() == all->references);
    CHECK(reuse.stands_for() >= 8);
    for (std::size_t i = 0; i < capacities.size(); ++i) {
      CAPTURE(pool, capacities[i], reuse.stands_for());
      const double lru = found[i] / static_cast<double>(all->references);
      CHECK(reuse.hit_ratio(capacities[i]) == Approx(lru).margin(0.015));
    }
    CHECK(manager.policy().age().count() == manager.statistics().evicted_blocks);
  }
}
