// SPDX-License-Identifier: Apache-2.0
// What submit accepts ends, alone in a pool that is just large enough for it.
#include <kvcache/blocks/layer_groups.hpp>

#include <random>
#include <vector>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::layer_group;

namespace {

struct setting {
  std::vector<layer_group> groups;
  std::size_t prompt = 0;
  std::uint32_t max_tokens = 1;
  std::uint32_t step_tokens = 0;
};

std::uint64_t total_blocks(const setting& s) {
  const manager any({.blocks = 1, .layer_groups = s.groups});
  const text first = words(1, 1);
  return any.predict({.content = first, .reserve = s.prompt + s.max_tokens - 1, .chunk = s.step_tokens}).total_blocks;
}

void run_alone(const setting& s, std::uint32_t blocks) {
  manager m({.blocks = blocks, .layer_groups = s.groups});
  scheduler plans(m, {.running = 1, .step_tokens = s.step_tokens});
  std::vector<std::uint32_t> windows;
  for (const layer_group& g : s.groups) windows.push_back(g.window);
  hash_engine engine(m, 1000, windows);
  engine.submit(plans, words(1, s.prompt), s.max_tokens);
  engine.run(plans);
  engine.check_tokens();
  check_empty(m, plans);
}

}  // namespace

TEST_CASE("R4: layer groups with very different block sizes, the smaller with a window, need what predict says") {
  const setting s{{{256}, {16, 128}}, 2000, 8, 64};
  REQUIRE(total_blocks(s) == 8 + 13);
  run_alone(s, 8 + 13);
}

TEST_CASE("R4: any request that submit accepts ends in a pool of just its blocks") {
  const auto seed = GENERATE(range(0u, 300u));
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const auto pick = [&](std::uint32_t from, std::uint32_t to) {
    return std::uniform_int_distribution<std::uint32_t>(from, to)(random);
  };
  constexpr std::uint32_t sizes[] = {1, 2, 3, 4, 6, 8, 16, 48};
  setting s;
  s.groups.push_back({sizes[pick(0, 7)]});
  for (std::uint32_t g = pick(1, 3); g != 0; --g) s.groups.push_back({sizes[pick(0, 7)], pick(1, 70)});
  s.prompt = pick(1, 400);
  s.max_tokens = pick(1, 60);
  s.step_tokens = pick(1, 80);
  run_alone(s, static_cast<std::uint32_t>(total_blocks(s)));
}
