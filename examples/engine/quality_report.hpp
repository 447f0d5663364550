// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "perplexity.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace engine {

/// What the measurement was: for the table's head and for the JSON.
struct quality_facts {
  std::string model;
  std::string text;  ///< path
  std::uint32_t context = 0;
  std::uint32_t chunk = 0;
  std::uint32_t block_size = 0;
  std::uint32_t calibration = 0;  ///< tokens; said where a dtype has an offset
  unsigned threads = 0;
  double seconds = 0;
};

/// The figures of all dtypes and what becomes of them along the positions, as text for a terminal. The first of
/// `measured` is the baseline.
[[nodiscard]] std::string quality_table(const quality_facts& facts, const std::vector<kv_quality>& measured);

/// The same as JSON, one record a dtype.
[[nodiscard]] std::string quality_json(const quality_facts& facts, const std::vector<kv_quality>& measured);

}  // namespace engine
