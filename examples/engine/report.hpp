// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "request.hpp"
#include "statistics.hpp"
#include "tokeniser.hpp"

#include <kvcache/blocks/requests.hpp>
#include <kvcache/types.hpp>

#include <cstdint>
#include <string>
#include <vector>

namespace engine {

/// What the run was: for the table's head and for the JSON.
struct run_facts {
  std::string model;
  std::string dtype;
  std::uint32_t block_size = 0;
  std::uint32_t pool_blocks = 0;
  std::uint64_t bytes_per_token = 0;  ///< of K and V, all layers
  std::uint64_t evicted_blocks = 0;
  unsigned threads = 0;
};

/// The table that ends a run, as text for a terminal.
[[nodiscard]] std::string report_table(const run_facts& facts, const serve_statistics& statistics,
                                       const std::vector<answer>& answers);

/// The same and every answer, as JSON.
[[nodiscard]] std::string report_json(const run_facts& facts, const serve_statistics& statistics,
                                      const std::vector<answer>& answers, const tokeniser& words);

/// What the cache found and holds, as a page for Prometheus.
[[nodiscard]] std::string metrics_page(const run_facts& facts, const serve_statistics& statistics,
                                       const kvcache::block_counts& counts, const kvcache::block_statistics& blocks);

/// The smallest value that at least `percent` of the values do not exceed (nearest rank); 0 of none.
[[nodiscard]] double percentile(std::vector<double> values, double percent);

}  // namespace engine
