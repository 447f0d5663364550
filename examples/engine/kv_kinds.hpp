// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kv_cache.hpp"

#include <memory>
#include <string>
#include <vector>

namespace engine {

/// A pair of K and V that is compiled in.
struct kv_kind {
  std::string name;
  std::unique_ptr<kv_cache> (*make)(const llama_shape& shape, const kv_options& options, kvcache::thread_pool& workers);
};

/// All of them, in the order in which they are listed to the user.
[[nodiscard]] const std::vector<kv_kind>& kv_kinds();

}  // namespace engine
