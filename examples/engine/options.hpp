// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "request.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace engine {

/// The command line.
struct options {
  std::string model;
  std::string prompt;      ///< one of these five
  std::string requests;    ///< path
  std::string chats;       ///< path
  std::string perplexity;  ///< path
  bool chat = false;

  request defaults;  ///< what a request does not say itself

  std::uint32_t block_size = 16;
  std::vector<std::string> dtypes{"f16"};  ///< of KV; several only for perplexity
  std::uint32_t blocks = 0;                ///< 0: as many as 8192 tokens take
  std::uint32_t max_sequences = 16;
  std::uint32_t chunk = 128;
  std::uint32_t context = 2048;      ///< tokens of a window of perplexity
  std::uint64_t limit = 0;           ///< of its predictions; 0: none
  std::uint32_t calibration = 2048;  ///< tokens at the end of its text, for dtypes with an offset
  bool reuse = true;
  unsigned threads = 0;  ///< 0: all cores

  std::string json;     ///< path; "-": stdout
  std::string metrics;  ///< path
  std::uint32_t window = 100;
  bool progress = false;
};

/// Reads the command line. A number: the program ends with it (help, or a fault that has been told on stderr).
[[nodiscard]] std::optional<int> read_options(int argc, const char* const* argv, options& out);

}  // namespace engine
