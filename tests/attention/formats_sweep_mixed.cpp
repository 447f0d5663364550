// SPDX-License-Identifier: Apache-2.0
// Formats that seal whole blocks, and K and V of different formats, over shapes.
#include "formats.hpp"

using namespace kvcache_test;

TEMPLATE_TEST_CASE("K and V in formats of scales per channel, and in two formats, agree with the reference", "",
                   kv_dtype<int8_per_channel>, kv_dtype<int4_per_channel>, kv_dtype<int4_per_channel_symmetric>,
                   kv_dtype<int2_per_channel>, (kv_dtype<int8_per_channel, int4_grouped<64>>),
                   (kv_dtype<int4_per_channel, int4_grouped<32>>),
                   (kv_dtype<rotated<int4_grouped<32>>, int8_per_token>), (kv_dtype<bf16, int4_grouped<32>>),
                   (kv_dtype<int4_grouped_asymmetric<16>, f16>), (kv_dtype<fp8_e4m3, int2_per_channel>),
                   (kv_dtype<int8_per_token, rotated<int4_per_channel>>), (kv_dtype<f32, fp8_e5m2>),
                   (kv_dtype<int4_per_channel, rotated<int4_grouped<32>>>)) {
  sweep_shapes<typename TestType::k, typename TestType::v>();
}
