// SPDX-License-Identifier: Apache-2.0
// Formats whose scales are per token, and elements of 8 bits, over shapes.
#include "formats.hpp"

using namespace kvcache_test;

TEMPLATE_TEST_CASE("K and V in formats of scales per token, and in 8-bit elements, agree with the reference", "",
                   kv_dtype<fp8_e4m3>, kv_dtype<fp8_e5m2>, kv_dtype<int8_per_token>, kv_dtype<int4_grouped<16>>,
                   kv_dtype<int4_grouped<32>>, kv_dtype<int4_grouped<64>>, kv_dtype<int4_grouped<128>>,
                   kv_dtype<int4_grouped_asymmetric<16>>, kv_dtype<int4_grouped_asymmetric<32>>,
                   kv_dtype<int4_grouped_asymmetric<64>>, kv_dtype<int4_grouped_asymmetric<128>>) {
  sweep_shapes<typename TestType::k, typename TestType::v>();
}
