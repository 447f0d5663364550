// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/requests.hpp>
#include <kvcache/observe/histogram.hpp>
#include <kvcache/observe/hit_window.hpp>
#include <kvcache/observe/prometheus_text.hpp>
#include <kvcache/types.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kvcache {

/// What a pool of another size would find.
struct predicted_hits {
  std::uint64_t blocks = 0;
  double ratio = 0;
};

/// The figures of one cache; those that are null are left out. Owns nothing. All are plain values, so that they can be
/// published to the thread that serves them.
struct cache_figures {
  prometheus_labels labels = {};  ///< what tells it from the other caches of the page, say model and rank
  const block_counts* counts = nullptr;
  const block_statistics* statistics = nullptr;
  const hit_sums* window = nullptr;       ///< hit_window::window
  const hit_sums* again = nullptr;        ///< hit_window::again
  const std::uint64_t* storms = nullptr;  ///< storm_alarm::storms
  const histogram* age = nullptr;         ///< of observed, as all below
  const histogram* idle = nullptr;
  const histogram* gap = nullptr;
  const histogram* distances = nullptr;  ///< reuse_distances::distances
  std::span<const predicted_hits> curve = {};
};

/// The unit of the caller's time.
struct time_unit {
  std::string_view name = "requests";  ///< ends the names of families; Prometheus' base unit is "seconds"
  unsigned decimals = 0;               ///< 6: the caller counts millionths of it
};

/// Writes the figures of some caches as a page, or as part of one. docs/observing.md says what each means. Raises
/// invalid_argument for labels that prometheus_text refuses, and for `state` and `blocks`, which some families add.
/// O(caches * (histogram::buckets + labels)). Thread safe as far as the page is.
// A template, so that it is compiled only where it is called.
template <class = void>
void write_prometheus(prometheus_text& page, std::span<const cache_figures> caches, const time_unit& unit = {}) {
  // A family with the samples of every cache that has the figure.
  const auto family = [&](auto cache_figures::*figure, std::string_view name, std::string_view help,
                          prometheus_type type, auto&& write) {
    bool begun = false;
    for (const cache_figures& cache : caches) {
      if (cache.*figure == nullptr) continue;
      if (!begun) page.family(name, help, type);
      begun = true;
      write(cache.labels, *(cache.*figure));
    }
  };
  const auto number = [&](auto cache_figures::*figure, auto member, std::string_view name, std::string_view help,
                          prometheus_type type) {
    family(figure, name, help, type,
           [&](prometheus_labels labels, const auto& value) { page.sample(labels, value.*member); });
  };
  const auto distribution = [&](const histogram* cache_figures::*figure, std::string_view name, std::string_view help,
                                unsigned decimals) {
    family(figure, name, help, prometheus_type::histogram,
           [&](prometheus_labels labels, const histogram& values) { page.sample(labels, values, decimals); });
  };
  const auto in_time = [&](const histogram* cache_figures::*figure, std::string_view name, std::string_view help) {
    distribution(figure, std::string(name) += unit.name, help, unit.decimals);
  };
  const auto millionths = [](double ratio) {
    return static_cast<std::uint64_t>((ratio < 0 ? 0 : ratio > 1 ? 1 : ratio) * 1e6 + 0.5);
  };
  using enum prometheus_type;
  using figures = cache_figures;

  family(&figures::counts, "kvcache_blocks", "Blocks in each state; they add up to the capacity.", gauge,
         [&](prometheus_labels labels, const block_counts& c) {
           page.sample(labels, {"state", "free"}, c.free);
           page.sample(labels, {"state", "evictable"}, c.evictable);
           page.sample(labels, {"state", "referenced"}, c.referenced);
           page.sample(labels, {"state", "held"}, c.held);
         });
  number(&figures::statistics, &block_statistics::opened_sequences, "kvcache_opened_sequences_total",
         "Sequences opened; refused requests are not counted.", counter);
  number(&figures::statistics, &block_statistics::queried_tokens, "kvcache_queried_tokens_total",
         "Tokens of the content of opened sequences.", counter);
  number(&figures::statistics, &block_statistics::hit_tokens, "kvcache_hit_tokens_total",
         "Tokens of opened sequences that were cached.", counter);
  number(&figures::statistics, &block_statistics::evicted_blocks, "kvcache_evicted_blocks_total",
         "Cached blocks given up to make room.", counter);

  number(&figures::window, &hit_sums::requests, "kvcache_window_requests", "Requests in the hit window.", gauge);
  number(&figures::window, &hit_sums::queried, "kvcache_window_queried_tokens",
         "Tokens of the requests in the hit window.", gauge);
  number(&figures::window, &hit_sums::hit, "kvcache_window_hit_tokens",
         "Tokens of the requests in the hit window that were cached.", gauge);
  family(&figures::window, "kvcache_window_hit_ratio", "Share of the window's tokens that were cached.", gauge,
         [&](prometheus_labels labels, const hit_sums& sums) { page.sample(labels, millionths(sums.ratio()), 6); });
  number(&figures::again, &hit_sums::requests, "kvcache_readmitted_requests_total",
         "Requests admitted again after preemption.", counter);
  number(&figures::again, &hit_sums::queried, "kvcache_readmitted_queried_tokens_total",
         "Tokens of requests admitted again after preemption.", counter);
  number(&figures::again, &hit_sums::hit, "kvcache_readmitted_hit_tokens_total",
         "Tokens of requests admitted again after preemption that were cached.", counter);
  family(&figures::storms, "kvcache_hit_storms_total", "Falls of the hit ratio off a cliff.", counter,
         [&](prometheus_labels labels, std::uint64_t storms) { page.sample(labels, storms); });

  in_time(&figures::age, "kvcache_block_age_", "From stored to evicted or forgotten.");
  in_time(&figures::idle, "kvcache_block_idle_", "From the end of the last use to evicted or forgotten.");
  in_time(&figures::gap, "kvcache_reuse_gap_", "From one request that uses a cached block to the next.");
  distribution(&figures::distances, "kvcache_reuse_distance_blocks",
               "Other blocks used between two uses of one, an estimate.", 0);
  bool begun = false;
  for (const cache_figures& cache : caches)
    for (const predicted_hits& at : cache.curve) {
      if (!begun)
        page.family("kvcache_predicted_hit_ratio", "Share of block uses that lru would find in a pool of another size.",
                    gauge);
      begun = true;
      page.sample(cache.labels, {"blocks", std::to_string(at.blocks)}, millionths(at.ratio), 6);
    }
}

}  // namespace kvcache
