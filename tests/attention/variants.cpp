// SPDX-License-Identifier: Apache-2.0
// Every variant, alone and together, against the reference.
#include <type_traits>

#include "support.hpp"

using namespace kvcache_test;

namespace {

const std::vector<sequence> mixed{
    {1, 130}, {thorough ? 70u : 20u, 70}, {5, thorough ? 200u : 90u}, {1, 1}, {33, 97}, {0, 9}, {3, 2}, {1, 0}};

// Long enough to be cut for several threads and under batch_invariant.
const std::vector<sequence> long_ones{{1, 3000}, {9, 2900}, {2, 40}};

template <class Variant>
void hold() {
  for (const std::uint32_t group : {1u, 4u, 7u, 17u}) {
    if (!thorough && group != 1 && group != 17) continue;
    for (const std::uint32_t window : {1u, 2u, 63u, 64u, 65u, 1000u}) {
      if (!Variant::features.window && window > 1) break;
      if (!thorough && window != 2 && window != 64 && Variant::features.window) continue;
      const scene<bf16> s({.block_size = 16, .kv_heads = 2, .group = group, .head_dim = 64}, mixed, group);
      const given g = values_for<Variant>(s, window, group);
      const expectation e = expected<Variant>(s, g.values);
      for (const cpu_isa isa : isas()) {
        for (const unsigned threads : {1u, 7u}) {
          INFO(text(s.form(), isa, threads) << " " << Variant::name << " window " << g.values.window);
          CHECK(distance(attend<Variant>(s, g.values, isa, threads), e) < 1);
          CHECK(distance(attend<Variant, true>(s, g.values, isa, threads), e) < 1);
        }
      }
    }
  }
}

/// Parts of a KV range end as states, which the last one to end merges.
template <class Variant>
void hold_when_cut() {
  for (const std::uint32_t group : {1u, 6u}) {
    if (!thorough && group != 6) continue;
    const scene<bf16> s({.block_size = 16, .kv_heads = 2, .group = group, .head_dim = 64}, long_ones, group);
    const given g = values_for<Variant>(s, 2200, group);
    const expectation e = expected<Variant>(s, g.values);
    for (const bool invariant : {false, true}) {
      const attention_plan plan = plan_attention(
          s.batch(),
          {.shape = {2 * group, 2, 64, 64}, .features = Variant::features, .threads = 7, .batch_invariant = invariant});
      REQUIRE(plan.state_rows() > 0);
    }
    for (const cpu_isa isa : isas()) {
      INFO(text(s.form(), isa, 7) << " " << Variant::name << " cut");
      CHECK(distance(attend<Variant>(s, g.values, isa, 7), e) < 1);
      CHECK(distance(attend<Variant, true>(s, g.values, isa, 7), e) < 1);
    }
  }
}

}  // namespace

TEST_CASE("causal agrees with the reference") {
  hold<causal>();
  hold_when_cut<causal>();
}
TEST_CASE("full agrees with the reference") {
  hold<full>();
  hold_when_cut<full>();
}
TEST_CASE("R17 a window of W sees the W newest positions") {
  hold<sliding_window>();
  hold_when_cut<sliding_window>();
}
TEST_CASE("a soft cap agrees with the reference") {
  hold<combine<causal, soft_cap>>();
  hold_when_cut<combine<causal, soft_cap>>();
  hold<soft_cap>();
}
TEST_CASE("slopes agree with the reference") {
  hold<combine<causal, alibi>>();
  hold_when_cut<combine<causal, alibi>>();
  hold<alibi>();
}
TEST_CASE("R15 sinks are applied once, when a row is finished") {
  hold<combine<causal, sinks>>();
  hold_when_cut<combine<causal, sinks>>();
  hold<sinks>();
}
TEST_CASE("custom masks agree with the reference") {
  hold<custom_mask>();
  hold<combine<causal, custom_mask>>();
  hold_when_cut<combine<causal, custom_mask>>();
}
TEST_CASE("variants together agree with the reference") {
  hold<combine<sliding_window, soft_cap>>();
  hold<combine<sliding_window, sinks>>();
  hold<combine<causal, alibi, soft_cap>>();
  hold<combine<sliding_window, soft_cap, alibi, sinks, custom_mask>>();
  hold_when_cut<combine<sliding_window, soft_cap, alibi, sinks, custom_mask>>();
}

TEST_CASE("combine joins names and features") {
  using both = combine<sliding_window, soft_cap, sinks>;
  STATIC_REQUIRE(both::features == variant_features{.causal = true, .window = true, .soft_cap = true, .sinks = true});
  CHECK(std::string(both::name) == "sliding_window+soft_cap+sinks");
  CHECK(std::string(combine<full>::name) == "full");
}

TEST_CASE("a scale of one's own takes the place of 1 / sqrt(head_dim)") {
  const scene<f32> s({.group = 3}, mixed, 9);
  const variant_values values{.scale = 0.37f};
  const expectation e = expected<causal>(s, values);
  for (const cpu_isa isa : isas()) CHECK(distance(attend<causal>(s, values, isa), e) < 1);
  CHECK(distance(attend<causal>(s), e) > 1);
}
