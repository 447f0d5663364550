// SPDX-License-Identifier: Apache-2.0
#include "typed_kv_cache.hpp"

#include <kvcache/fp8.hpp>
#include <kvcache/quantization.hpp>

namespace engine {

std::vector<kv_kind> eight_bit_kv_kinds() {
  using kvcache::fp8_e4m3, kvcache::fp8_e5m2, kvcache::int8_per_channel, kvcache::int8_per_token, kvcache::rotated;
  return {compiled_kv_kind<fp8_e4m3>(),
          compiled_kv_kind<fp8_e5m2>(),
          compiled_kv_kind<rotated<fp8_e4m3>, fp8_e4m3>(),
          compiled_kv_kind<int8_per_token>(),
          compiled_kv_kind<int8_per_channel>(),
          compiled_kv_kind<rotated<int8_per_token>>()};
}

}  // namespace engine
