// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "models.hpp"

#include <kvcache/geometry.hpp>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace sizing {

/// What the user gave cannot be used; the text names value and limit.
class bad_input : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct options {
  std::vector<model> chosen;  ///< rows of the first table
  bool all_models = false;    ///< nothing was chosen: a row that cannot be is shown, not refused
  kvcache::kv_format format{kvcache::dtype_id::float16, kvcache::dtype_id::float16};
  std::uint64_t memory = 0;  ///< bytes for KV on each rank
  std::uint64_t tokens = 0;  ///< of one request
  std::uint32_t block_size = 0;
  std::uint32_t ranks = 0;
  bool json = false;
};

/// Empty after --help, which has been printed. Throws bad_input.
std::optional<options> parse_options(int argc, const char* const* argv);

}  // namespace sizing
