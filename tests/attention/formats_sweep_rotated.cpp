// SPDX-License-Identifier: Apache-2.0
// Rotated formats over shapes.
#include "formats.hpp"

using namespace kvcache_test;

TEMPLATE_TEST_CASE("rotated K and V agree with the reference", "", kv_dtype<rotated<fp8_e4m3>>,
                   kv_dtype<rotated<fp8_e5m2>>, kv_dtype<rotated<int8_per_token>>, kv_dtype<rotated<int4_grouped<16>>>,
                   kv_dtype<rotated<int4_grouped<32>>>, kv_dtype<rotated<int4_grouped<64>>>,
                   kv_dtype<rotated<int4_grouped<128>>>, kv_dtype<rotated<int4_grouped_asymmetric<16>>>,
                   kv_dtype<rotated<int4_grouped_asymmetric<32>>>, kv_dtype<rotated<int4_grouped_asymmetric<64>>>,
                   kv_dtype<rotated<int4_grouped_asymmetric<128>>>, kv_dtype<rotated<int8_per_channel>>,
                   kv_dtype<rotated<int4_per_channel>>, kv_dtype<rotated<int4_per_channel_symmetric>>,
                   kv_dtype<rotated<int2_per_channel>>, kv_dtype<rotated<f32>>, kv_dtype<rotated<f16>>,
                   kv_dtype<rotated<bf16>>) {
  sweep_shapes<typename TestType::k, typename TestType::v>();
}
