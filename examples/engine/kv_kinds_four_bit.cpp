// SPDX-License-Identifier: Apache-2.0
#include "typed_kv_cache.hpp"

#include <kvcache/quantization.hpp>

namespace engine {

std::vector<kv_kind> four_bit_kv_kinds() {
  using namespace kvcache;
  return {compiled_kv_kind<int8_per_token, int4_grouped<32>>(),
          compiled_kv_kind<int4_grouped<32>>(),
          compiled_kv_kind<int4_grouped_asymmetric<32>>(),
          compiled_kv_kind<rotated<int4_grouped<32>>>(),
          compiled_kv_kind<rotated<int4_grouped<32>>, int4_grouped<32>>(),
          compiled_kv_kind<int4_per_channel>(),
          compiled_kv_kind<int4_per_channel, int4_grouped<32>>(),
          compiled_kv_kind<int4_per_channel, int4_grouped_asymmetric<32>>(),
          compiled_kv_kind<int4_per_channel_symmetric, int4_grouped<32>>(),
          compiled_kv_kind<int2_per_channel, int4_grouped<32>>()};
}

}  // namespace engine
