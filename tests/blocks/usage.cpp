// SPDX-License-Identifier: Apache-2.0
// What the documentation shows of layer groups, retention and events.
#include <kvcache/eviction/priority.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "support.hpp"

using namespace kvcache_test;

namespace {

// [layer_groups]
// Layers that see all tokens and layers that see the newest 128, in one pool. The first 64 tokens of the prompt stay
// longer than others; what follows is forgotten once it was unused for an hour, in the caller's seconds.
auto serve(const std::vector<std::int32_t>& prompt) {
  const std::array groups{kvcache::layer_group{.block_size = 16},
                          kvcache::layer_group{.block_size = 16, .window = 128}};
  kvcache::block_manager<kvcache::priority> manager({.blocks = 1000, .layer_groups = groups, .events = 4096});
  const std::array worth{kvcache::retention_range{.first = 0, .end = 64, .priority = 90},
                         kvcache::retention_range{.first = 64, .time_to_live = 3600}};
  const auto opened =
      manager.open({.content = prompt, .reserve = prompt.size(), .chunk = 512, .retention = worth}).value();
  for (std::uint32_t done = opened.reused_tokens; done < prompt.size();) {
    const kvcache::want chunk{opened.sequence, std::min(512u, static_cast<std::uint32_t>(prompt.size()) - done)};
    auto step = manager.begin({&chunk, 1}).value();
    // ... step.batch(0) for the layers that see all, step.batch(1) for the others
    step.accept().value();
    manager.commit(opened.sequence, kvcache::content_view(prompt).sub(done, chunk.tokens)).value();
    manager.retire(step).value();
    done += chunk.tokens;
  }
  manager.close(opened.sequence).value();
  const kvcache::prefix_match soon = manager.probe(prompt);
  manager.advance(3601);
  return std::array{soon.tokens, manager.probe(prompt).tokens};
}
// [layer_groups]

// [events]
// Brings a consumer up to date with what is cached; `known` is the number of the last event that it has seen.
template <class Manager, class Consumer>
std::uint64_t catch_up(const Manager& manager, Consumer& consumer, std::uint64_t known) {
  std::array<kvcache::cache_event, 64> news;
  for (;;) {
    const kvcache::event_reading read = manager.events().read(known, news);
    if (read.lost != 0) {  // too slow: what is cached now, and on from there
      consumer.forget();
      known = manager.visit_cached([&](const kvcache::cache_event& e) { consumer.hear(e); });
      continue;
    }
    if (read.events == 0) return known;
    for (std::size_t i = 0; i < read.events; ++i) consumer.hear(news[i]);
    known = news[read.events - 1].number;
  }
}
// [events]

struct counter {
  void forget() { cached = 0; }
  void hear(const kvcache::cache_event& e) {
    switch (e.kind) {
      case kvcache::cache_event_kind::stored: ++cached; break;
      case kvcache::cache_event_kind::removed: --cached; break;
      case kvcache::cache_event_kind::cleared: cached = 0; break;
    }
  }
  int cached = 0;
};

}  // namespace

TEST_CASE("Usage: layer groups and retention as the documentation shows them") {
  const auto found = serve(words(1, 1600));
  CHECK(found[0] == 1600);
  CHECK(found[1] == 64);
}

TEST_CASE("Usage: a consumer of events as the documentation shows it, in time and too slow") {
  const std::size_t events = GENERATE(4u, 1000u);
  manager m({.blocks = 100, .block_size = 4, .events = events});
  counter consumer;
  std::uint64_t known = 0;
  for (int topic = 0; topic < 50; ++topic) {
    close(m, prompt(m, words(topic, 40)).sequence);
    if (topic % 3 == 0) known = catch_up(m, consumer, known);
  }
  known = catch_up(m, consumer, known);
  CHECK(known == m.events().newest());
  CHECK(consumer.cached == static_cast<int>(m.counts().evictable));
}
