// SPDX-License-Identifier: Apache-2.0
// What submit accepts ends, in a pool that is just large enough for it.
#include <kvcache/blocks/layer_groups.hpp>

#include <algorithm>
#include <random>
#include <vector>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::layer_group;

namespace {

struct setting {
  std::vector<layer_group> groups;
  std::vector<std::size_t> prompts;  // lengths; all begin alike
  std::size_t alike = 0;
  std::uint32_t max_tokens = 1;
  std::uint32_t drafts = 0;
  std::uint32_t step_tokens = 0;
  std::size_t depth = 1;  // steps in flight at once
  bool partial_reuse = false;
};

/// Of the largest request.
std::uint32_t total_blocks(const setting& s) {
  const manager any({.blocks = 1, .layer_groups = s.groups});
  const text first = words(1, 1);
  const std::size_t longest = *std::max_element(s.prompts.begin(), s.prompts.end());
  return static_cast<std::uint32_t>(
      any.predict({.content = first, .reserve = longest + s.max_tokens - 1, .chunk = s.step_tokens}).total_blocks);
}

void run(const setting& s, std::uint32_t blocks) {
  manager m({.blocks = blocks, .layer_groups = s.groups, .partial_reuse = s.partial_reuse});
  scheduler plans(m, {.running = 4, .step_tokens = s.step_tokens, .watermark = 0});
  std::vector<std::uint32_t> windows;
  for (const layer_group& g : s.groups) windows.push_back(g.window);
  hash_engine engine(m, 1000, windows);
  for (std::size_t i = 0; i < s.prompts.size(); ++i) {
    const std::size_t alike = std::min(s.alike, s.prompts[i]);
    engine.submit(plans, words(1, alike) + words(2 + i, s.prompts[i] - alike), s.max_tokens, 0, s.drafts);
  }
  engine.run(plans, s.depth);
  engine.check_tokens();
  check_empty(m, plans);
}

}  // namespace

TEST_CASE("R4: layer groups with very different block sizes, the smaller with a window, need what predict says") {
  const setting s{{{256}, {16, 128}}, {2000}, 0, 8, 0, 64};
  REQUIRE(total_blocks(s) == 8 + 13);
  run(s, 8 + 13);
}

TEST_CASE("R4: all requests that submit accepts end in a pool of just the blocks of the largest") {
  const auto seed = GENERATE(range(0u, 400u));
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const auto pick = [&](std::uint32_t from, std::uint32_t to) {
    return std::uniform_int_distribution<std::uint32_t>(from, to)(random);
  };
  constexpr std::uint32_t sizes[] = {1, 2, 3, 4, 6, 8, 16, 48};
  setting s;
  s.partial_reuse = pick(0, 2) == 0;
  const std::uint32_t one_size = sizes[pick(0, 7)];
  const auto size = [&] { return s.partial_reuse ? one_size : sizes[pick(0, 7)]; };
  s.groups.push_back({size()});
  for (std::uint32_t g = pick(0, 3); g != 0; --g) s.groups.push_back({size(), pick(1, 70)});
  for (std::uint32_t r = pick(1, 4); r != 0; --r) s.prompts.push_back(pick(1, 300));
  s.alike = pick(0, 1) == 0 ? 0 : pick(1, 200);
  s.max_tokens = pick(1, 60);
  s.drafts = pick(0, 1) == 0 ? 0 : pick(1, 3);
  s.step_tokens = pick(4, 80);
  s.depth = pick(1, 3);
  run(s, total_blocks(s));
}
