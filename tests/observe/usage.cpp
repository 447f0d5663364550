// SPDX-License-Identifier: Apache-2.0
// What the documentation shows of figures.
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/observe/hit_window.hpp>
#include <kvcache/observe/observed.hpp>
#include <kvcache/observe/prometheus.hpp>

#include <array>
#include <string>
#include <vector>

#include "catch.hpp"

namespace {

// [page]
using manager_type = kvcache::block_manager<kvcache::observed<kvcache::lru>>;

std::string page_of(const manager_type& manager, const kvcache::hit_window& hits) {
  const auto& seen = manager.policy();
  const kvcache::block_counts counts = manager.counts();
  const kvcache::block_statistics statistics = manager.statistics();
  const std::array labels{kvcache::prometheus_label{"model", "small"}};
  const std::array curve{kvcache::predicted_hits{1000, seen.reuse().hit_ratio(1000)},
                         kvcache::predicted_hits{4000, seen.reuse().hit_ratio(4000)}};
  const std::array caches{kvcache::cache_figures{.labels = labels,
                                                 .counts = &counts,
                                                 .statistics = &statistics,
                                                 .window = &hits.window(),
                                                 .idle = &seen.idle(),
                                                 .curve = curve}};
  std::string text;
  kvcache::prometheus_text page(text);
  kvcache::write_prometheus(page, caches, {"seconds", 6});
  return text;
}
// [page]

}  // namespace

TEST_CASE("Usage: a page of figures as the documentation shows it") {
  manager_type manager({.blocks = 8, .block_size = 2});
  kvcache::hit_window hits(1000);
  const std::vector<std::int32_t> prompt{1, 2, 3, 4, 5};
  for (int i = 0; i < 2; ++i) {
    const auto opened = manager.open({.content = prompt, .reserve = prompt.size()}).value();
    hits.record({1, prompt.size(), opened.reused_tokens});
    const kvcache::want rest{opened.sequence, 5 - opened.reused_tokens};
    auto step = manager.begin({&rest, 1}).value();
    step.accept().value();
    manager.commit(opened.sequence, kvcache::content_view(prompt).sub(opened.reused_tokens, rest.tokens)).value();
    manager.retire(step).value();
    manager.close(opened.sequence).value();
  }
  const std::string page = page_of(manager, hits);
  CHECK(page.find("kvcache_window_hit_ratio{model=\"small\"} 0.4\n") != std::string::npos);
  CHECK(page.find("kvcache_hit_tokens_total{model=\"small\"} 4\n") != std::string::npos);
}
