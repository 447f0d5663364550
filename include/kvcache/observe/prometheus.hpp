// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/requests.hpp>
#include <kvcache/observe/histogram.hpp>
#include <kvcache/observe/hit_window.hpp>
#include <kvcache/observe/prometheus_text.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
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

namespace detail {

/// Whether a server takes both for one series. To it, a label of no value is none.
[[nodiscard]] constexpr bool same_series(prometheus_labels a, prometheus_labels b) noexcept {
  const auto has_all = [](prometheus_labels has, prometheus_labels wanted) {
    for (const prometheus_label& w : wanted) {
      bool found = w.value.empty();
      for (const prometheus_label& h : has) found = found || (h.name == w.name && h.value == w.value);
      if (!found) return false;
    }
    return true;
  };
  return has_all(a, b) && has_all(b, a);
}

template <class = void>
void write_figures(prometheus_text& page, std::span<const cache_figures> caches, const time_unit& unit) {
  // A family with the samples of every cache that has some.
  const auto each = [&](std::string_view name, std::string_view help, prometheus_type type, auto&& has, auto&& write) {
    bool begun = false;
    for (std::size_t i = 0; i < caches.size(); ++i) {
      if (!has(caches[i])) continue;
      for (std::size_t j = 0; j < i; ++j)
        if (has(caches[j]) && same_series(caches[j].labels, caches[i].labels))
          raise<invalid_argument>("prometheus: caches " + std::to_string(j) + " and " + std::to_string(i) +
                                  " have the same labels and both have " + std::string(name) +
                                  ", 1 of them possible; give each a label of its own");
      if (!begun) page.family(name, help, type);
      begun = true;
      write(caches[i]);
    }
  };
  const auto family = [&](auto cache_figures::*figure, std::string_view name, std::string_view help,
                          prometheus_type type, auto&& write) {
    each(
        name, help, type, [&](const cache_figures& c) { return c.*figure != nullptr; },
        [&](const cache_figures& c) { write(c.labels, *(c.*figure)); });
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
    if (!(ratio >= 0 && ratio <= 1))
      raise<invalid_argument>("prometheus: a hit ratio of " + std::to_string(ratio) +
                              ", from 0 to 1 possible; leave out what is not known");
    return static_cast<std::uint64_t>(ratio * 1e6 + 0.5);
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
  each(
      "kvcache_predicted_hit_ratio", "Share of block uses that lru would find in a pool of another size.", gauge,
      [](const cache_figures& c) { return !c.curve.empty(); },
      [&](const cache_figures& c) {
        for (std::size_t i = 0; i < c.curve.size(); ++i) {
          const std::string blocks = std::to_string(c.curve[i].blocks);
          for (std::size_t j = 0; j < i; ++j)
            if (c.curve[j].blocks == c.curve[i].blocks)
              raise<invalid_argument>("prometheus: a curve has " + blocks +
                                      " blocks twice, 1 time possible; leave one out");
          page.sample(c.labels, {"blocks", blocks}, millionths(c.curve[i].ratio), 6);
        }
      });
}

}  // namespace detail

/// Writes the figures of some caches as a page, or once a page as a part of it. docs/observing.md says what each means.
/// Raises invalid_argument, and has written nothing then, where a figure that is given has labels that prometheus_text
/// refuses, or `state` or `blocks`, which its family adds; where two caches have the same labels and a figure both, or
/// a curve the same size twice; for hit ratios other than 0 to 1; where a time that is given has a unit whose name
/// cannot end that of a family, and for more than 19 decimals. O(caches * (histogram::buckets + caches * labels^2)).
/// Thread safe as far as the page is.
// A template, so that it is compiled only where it is called.
template <class = void>
void write_prometheus(prometheus_text& page, std::span<const cache_figures> caches, const time_unit& unit = {}) {
  if (unit.decimals > 19)
    detail::raise<invalid_argument>("prometheus: a time unit of " + std::to_string(unit.decimals) +
                                    " decimals, at most 19 possible; count in larger units");
  prometheus_text nowhere{std::span<char>{}};
  detail::write_figures(nowhere, caches, unit);  // raises what there is to raise
  detail::write_figures(page, caches, unit);
}

}  // namespace kvcache
