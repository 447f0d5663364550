// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace replay {

struct options {
  std::string trace;
  std::vector<std::string> evictions;
  std::vector<std::uint32_t> blocks;
  std::uint32_t block_tokens = 512;
  std::uint32_t at_once = 1;
  std::string plot;  ///< PNG file to draw into, or empty
  bool json = false;
};

/// Empty after --help, which has been printed. Throws bad_input.
std::optional<options> parse_options(int argc, const char* const* argv);

}  // namespace replay
