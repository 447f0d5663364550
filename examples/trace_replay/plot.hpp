// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace replay {

/// Hit ratios of one policy over capacities.
struct curve {
  std::string name;
  std::vector<std::uint32_t> blocks;
  std::vector<double> hit_ratio;
};

/// Draws the curves into a PNG file with gnuplot. Throws bad_input where gnuplot is not there or fails.
void plot(const std::vector<curve>& curves, const std::string& path);

}  // namespace replay
