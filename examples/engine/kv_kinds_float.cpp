// SPDX-License-Identifier: Apache-2.0
#include "typed_kv_cache.hpp"

namespace engine {

std::vector<kv_kind> float_kv_kinds() {
  using kvcache::bf16, kvcache::f16, kvcache::f32;
  return {compiled_kv_kind<f32>(), compiled_kv_kind<f16>(), compiled_kv_kind<bf16>(), compiled_kv_kind<f16, bf16>(),
          compiled_kv_kind<bf16, f16>()};
}

}  // namespace engine
