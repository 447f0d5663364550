// SPDX-License-Identifier: Apache-2.0
// The dtypes that are compiled in: a list of pairs and not every K with every V. One source file, since most of the
// kernels' code is the same for all pairs and would be compiled again in each further one.
#include "kv_kinds.hpp"

#include "typed_kv_cache.hpp"

#include <kvcache/fp8.hpp>
#include <kvcache/quantization.hpp>

namespace engine {

const std::vector<kv_kind>& kv_kinds() {
  using namespace kvcache;
  static const std::vector<kv_kind> all{compiled_kv_kind<f32>(),
                                        compiled_kv_kind<f16>(),
                                        compiled_kv_kind<bf16>(),
                                        compiled_kv_kind<f16, bf16>(),
                                        compiled_kv_kind<bf16, f16>(),
                                        compiled_kv_kind<fp8_e4m3>(),
                                        compiled_kv_kind<fp8_e5m2>(),
                                        compiled_kv_kind<f16, fp8_e4m3>(),
                                        compiled_kv_kind<rotated<fp8_e4m3>, fp8_e4m3>(),
                                        compiled_kv_kind<int8_per_token>(),
                                        compiled_kv_kind<int8_per_channel>(),
                                        compiled_kv_kind<rotated<int8_per_token>>(),
                                        compiled_kv_kind<int8_per_token, int4_grouped<32>>(),
                                        compiled_kv_kind<int4_grouped<32>>(),
                                        compiled_kv_kind<int4_grouped_asymmetric<32>>(),
                                        compiled_kv_kind<rotated<int4_grouped<32>>>(),
                                        compiled_kv_kind<rotated<int4_grouped<32>>, int4_grouped<32>>(),
                                        compiled_kv_kind<int4_per_channel>(),
                                        compiled_kv_kind<int4_per_channel, int4_grouped<32>>(),
                                        compiled_kv_kind<int4_per_channel, int4_grouped_asymmetric<32>>(),
                                        compiled_kv_kind<int4_per_channel_symmetric, int4_grouped<32>>(),
                                        compiled_kv_kind<int2_per_channel, int4_grouped<32>>()};
  return all;
}

}  // namespace engine
