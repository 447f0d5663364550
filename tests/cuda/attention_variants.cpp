// SPDX-License-Identifier: Apache-2.0
// Every variant, alone and together, by the bodies of the device's kernels.
#include "attention_support.hpp"

using namespace kvcache_test;

TEMPLATE_TEST_CASE("Device attention holds for every variant", "[cuda]", causal, full, sliding_window,
                   (combine<causal, soft_cap>), (combine<causal, alibi>), (combine<causal, sinks>),
                   (combine<causal, custom_mask>), custom_mask,
                   (combine<sliding_window, soft_cap, alibi, sinks, custom_mask>)) {
  for (const std::uint32_t group : {1u, 7u})
    for (const std::uint32_t window : {2u, 64u, 65u}) {
      if (!TestType::features.window && window > 2) break;
      if (!thorough && group == 1) continue;
      const scene<bf16> s({.block_size = 16, .kv_heads = 2, .group = group},
                          {{1, 130}, {20, 70}, {5, 90}, {1, 1}, {0, 9}, {3, 2}, {1, 0}, {1, 1200}}, group);
      const given g = values_for<TestType>(s, window, group);
      const expectation e = expected<TestType>(s, g.values);
      each_device_run([&](const device_run& how) {
        INFO(TestType::name << " group " << group << " window " << window);
        CHECK(distance(attend_on_device<TestType>(s, g.values, how), e) < 1);
      });
    }
}
