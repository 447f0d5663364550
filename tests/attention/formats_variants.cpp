// SPDX-License-Identifier: Apache-2.0
// Every variant over formats, alone and together, whole and cut into parts that are merged.
#include "formats.hpp"

using namespace kvcache_test;

namespace {

const std::vector<sequence> mixed{{1, 130}, {20, 70}, {5, 90}, {1, 1}, {33, 97}, {0, 9}, {3, 2}, {1, 0}};
const std::vector<sequence> long_ones{{1, thorough ? 3000u : 2300u}, {3, 2200}, {2, 40}};

template <class Dtype, class Variant>
void hold_variant() {
  for (const std::uint32_t group : {1u, 4u, 16u}) {
    if (!thorough && group != 4) continue;
    shape form{.block_size = group == 1 ? 7u : 16u, .kv_heads = 2, .group = group};
    form.tails = group == 4;
    const scene_of<Dtype> s(form, mixed, group);
    const given g = values_for<Variant>(s, 33, group);
    hold<Variant>(s, g.values);
  }
  // Long enough for parts.
  const scene_of<Dtype> s({.kv_heads = 1, .group = 3}, long_ones);
  const given g = values_for<Variant>(s, 2100, 5);
  const attention_plan plan =
      plan_attention(s.batch(), {.shape = s.heads(), .features = Variant::features, .threads = 5});
  REQUIRE(plan.state_rows() > 0);
  hold<Variant>(s, g.values);
}

}  // namespace

TEMPLATE_TEST_CASE("variants over formats agree with the reference", "", int8, int4, channels_beside_rotated) {
  hold_variant<TestType, full>();
  hold_variant<TestType, sliding_window>();
  hold_variant<TestType, combine<causal, soft_cap>>();
  hold_variant<TestType, combine<causal, alibi>>();
  hold_variant<TestType, combine<causal, sinks>>();
  hold_variant<TestType, combine<causal, custom_mask>>();
}

TEMPLATE_TEST_CASE("variants together over formats agree with the reference", "", int8, int4, int4_asymmetric,
                   int8_beside_int4, fp8_small) {
  hold_variant<TestType, combine<sliding_window, soft_cap, alibi, sinks, custom_mask>>();
}
