// SPDX-License-Identifier: Apache-2.0
// The bodies of attention's kernels against the reference in double precision.
#include "attention_support.hpp"

using namespace kvcache_test;
using namespace kvcache;

TEST_CASE("device attention: one decoded token", "[cuda]") {
  const scene<bf16> s({.block_size = 16, .kv_heads = 2, .group = 4, .head_dim = 64, .aligned = 16},
                      {{1, 77}, {1, 0}, {1, 300}});
  const outcome o = attend_on_device<causal, false, 64, 64>(s);
  CHECK(distance(o, expected<causal>(s)) < 1);
}
TEST_CASE("device attention: many rows", "[cuda]") {
  const scene<bf16> s({.block_size = 16, .kv_heads = 2, .group = 4, .head_dim = 64, .aligned = 16},
                      {{40, 77}, {1, 0}, {9, 300}});
  const outcome o = attend_on_device<causal, true, 64, 64>(s);
  CHECK(distance(o, expected<causal>(s)) < 1);
}
TEST_CASE("device attention: formats", "[cuda]") {
  const auto check = []<class K, class V>(K*, V*) {
    const scene<K, V> s({.block_size = 16, .kv_heads = 2, .group = 3, .head_dim = 64, .aligned = 16},
                        {{3, 77}, {1, 0}, {1, 200}});
    INFO(dtype_traits<K>::name << ' ' << dtype_traits<V>::name);
    CHECK(distance(attend_on_device<causal, false, 64, 64>(s), expected<causal>(s)) < 1);
    CHECK(distance(attend_on_device<causal, true, 64, 64>(s), expected<causal>(s)) < 1);
  };
  check(static_cast<f16*>(nullptr), static_cast<f16*>(nullptr));
  check(static_cast<fp8_e4m3*>(nullptr), static_cast<fp8_e5m2*>(nullptr));
  check(static_cast<int8_per_token*>(nullptr), static_cast<int8_per_token*>(nullptr));
  check(static_cast<int4_grouped<32>*>(nullptr), static_cast<int4_grouped<16>*>(nullptr));
  check(static_cast<int4_grouped_asymmetric<32>*>(nullptr), static_cast<int4_grouped_asymmetric<64>*>(nullptr));
  check(static_cast<int4_per_channel*>(nullptr), static_cast<int4_grouped<32>*>(nullptr));
  check(static_cast<int8_per_channel*>(nullptr), static_cast<int2_per_channel*>(nullptr));
  check(static_cast<rotated<int4_grouped<32>>*>(nullptr), static_cast<rotated<fp8_e4m3>*>(nullptr));
}
