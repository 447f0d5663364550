// SPDX-License-Identifier: Apache-2.0
// What the page about quantisation shows.
#include <kvcache/kvcache.hpp>
#include <kvcache/quantization.hpp>

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "catch.hpp"

// [formats]
struct quantised : kvcache::policies {
  using dtype = kvcache::kv_dtype<kvcache::rotated<kvcache::int4_grouped<32>>,  // K
                                  kvcache::int8_per_token>;                     // V
};

/// The first and the last layer at 16 bits, the others quantised.
kvcache::storage<quantised> make_pool(const kvcache::geometry& model, std::uint32_t blocks) {
  const std::array<std::uint32_t, 2> wide{0, model.layers - 1};
  return kvcache::storage<quantised>(model, {.blocks = blocks, .wide_layers = wide});
}
// [formats]

// [key_offset]
/// Each layer's keys less the mean of those that it had over some text. Before anything is appended.
void take_means(kvcache::storage<quantised>& pool, const std::vector<kvcache::key_mean>& means) {
  for (std::uint32_t layer = 0; layer < means.size(); ++layer) pool.set_key_offset(layer, means[layer].mean());
}
// [key_offset]

TEST_CASE("the means of the page are taken from the keys of their layers") {
  const kvcache::geometry model{.layers = 2, .kv_heads = 2, .head_dim = 64};
  auto pool = make_pool(model, 3);
  std::vector<kvcache::key_mean> means(2, {2, 64});
  const std::vector<float> keys(2 * 64, 3.0f);
  means[1].add(kvcache::rows_view<const float>(keys.data(), 1, 2, 64));
  take_means(pool, means);
  CHECK(pool.view(0).key_offset[0] == 0.0f);
  CHECK(pool.view(1).key_offset[127] == 3.0f);
}

TEST_CASE("the pool of the page stores what it says") {
  const kvcache::geometry model{.layers = 4, .kv_heads = 2, .head_dim = 64};
  auto pool = make_pool(model, 3);
  CHECK(pool.view(0).k_dtype == kvcache::dtype_id::bfloat16);
  CHECK(pool.view(1).k_dtype == kvcache::dtype_traits<kvcache::rotated<kvcache::int4_grouped<32>>>::id);
  CHECK(pool.view(2).v_dtype == kvcache::dtype_id::int8_per_token);
  CHECK(pool.view(3).v_dtype == kvcache::dtype_id::bfloat16);
  const std::vector<float> values(2 * 64, 1.0f);
  const kvcache::rows_view<const float> row(values.data(), 1, 2, 64);
  pool.append(1, row, row, std::vector<kvcache::slot_id>{17});
  float read[64];
  kvcache::read_head(pool.view(1).v_head(1, 1, 1), 64, read);
  CHECK(std::abs(read[63] - 1.0f) < 0.01f);
}
