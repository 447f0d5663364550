// SPDX-License-Identifier: Apache-2.0
// The dtypes that are compiled in. Kernels are large code for each pair of K and V, so there is a list of pairs and not
// every K with every V, and the lists are spread over source files, each with a few.
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

/// f32, f16, bf16.
[[nodiscard]] std::vector<kv_kind> float_kv_kinds();
/// fp8 and codes of 8 bits.
[[nodiscard]] std::vector<kv_kind> eight_bit_kv_kinds();
/// Codes of 4 and 2 bits.
[[nodiscard]] std::vector<kv_kind> four_bit_kv_kinds();

}  // namespace engine
