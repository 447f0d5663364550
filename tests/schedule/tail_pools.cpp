// SPDX-License-Identifier: Apache-2.0
// Layer groups whose blocks are sealed: the scheduler never runs out of places in their tail pools.
#include "support.hpp"

#include <array>

using namespace kvcache_test;
using kvcache::layer_group;
using kvcache_test::contains_text;

TEST_CASE("R20 a tail pool that a step might not fit into is refused by its numbers") {
  manager m({.blocks = 100, .block_size = 16, .tail_blocks = 19});
  CHECK_THROWS_WITH(scheduler(m, {.running = 4, .step_tokens = 64}), contains_text("19 tail blocks") &&
                                                                         contains_text("at least 20") &&
                                                                         contains_text("tail_blocks_for"));
  manager enough({.blocks = 100, .block_size = 16, .tail_blocks = 20});
  CHECK_NOTHROW(scheduler(enough, {.running = 4, .step_tokens = 64}));
}

TEST_CASE("R20 requests of any kind are served through the smallest tail pools, several steps in flight or one") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u, 4u);
  const std::uint32_t wide_tokens = GENERATE(0u, 5u);
  CAPTURE(block_size, depth, wide_tokens);
  const auto tails = static_cast<std::uint32_t>(kvcache::tail_blocks_for(4, 40, block_size, 1, wide_tokens));
  const std::array groups{layer_group{block_size, layer_group::full, tails, wide_tokens}, layer_group{4, 9}};
  manager m({.blocks = 400 / block_size + 60, .layer_groups = groups});
  scheduler s(m, {.running = 4, .step_tokens = 40});
  hash_engine engine(m, 1000, {layer_group::full, 9});
  const text shared = words(7, 37);
  for (std::uint32_t i = 0; i < 24; ++i)
    engine.submit(s, i % 3 == 0 ? shared + words(100 + i, 1 + i) : words(i, 3 + 5 * (i % 9)), 1 + i % 13,
                  static_cast<std::int32_t>(i % 2), i % 4);
  engine.run_to_end(s, depth);
  engine.seal();
  CHECK(engine.seals > 0);
  CHECK(m.tail_blocks_available(0) == tails);
}

TEST_CASE("R20 a long prompt goes through the smallest tail pool in whole steps, though seals wait for the next step") {
  const std::uint32_t block_size = GENERATE(1u, 8u, 16u, 64u);
  CAPTURE(block_size);
  const auto tails = static_cast<std::uint32_t>(kvcache::tail_blocks_for(1, 128, block_size));
  const std::array groups{layer_group{block_size, layer_group::full, tails}};
  manager m({.blocks = 2000, .layer_groups = groups});
  scheduler s(m, {.running = 1, .step_tokens = 128});
  hash_engine engine(m, 1000, {layer_group::full});
  engine.submit(s, words(1, 1000), 3);
  std::size_t steps = 0;
  for (; engine.plan(s); ++steps) engine.finish(s);
  CHECK(steps == 8 + 2);
  engine.check_tokens();
}
