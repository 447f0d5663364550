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

/// Whether a picture can be written there, before anything costs time. Throws bad_input where it cannot.
void check_plot(const std::string& path);
/// Draws the curves into a PNG file with gnuplot. Throws bad_input where gnuplot is not there or fails, and where the
/// file cannot be written.
void plot(const std::vector<curve>& curves, const std::string& path);

}  // namespace replay
