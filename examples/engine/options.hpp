// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "request.hpp"

#include <kvcache/dtype.hpp>

#include <cstdint>
#include <optional>
#include <string>

namespace engine {

/// The command line.
struct options {
  std::string model;
  std::string prompt;    ///< one of these four
  std::string requests;  ///< path
  std::string chats;     ///< path
  bool chat = false;

  request defaults;  ///< what a request does not say itself

  std::uint32_t block_size = 16;
  kvcache::dtype_id dtype = kvcache::dtype_id::float16;
  std::uint32_t blocks = 0;  ///< 0: as many as 8192 tokens take
  std::uint32_t max_sequences = 16;
  std::uint32_t chunk = 128;
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
