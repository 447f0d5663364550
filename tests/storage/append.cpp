// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <tuple>
#include <vector>

#include "catch.hpp"
#include "pool.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

constexpr std::uint32_t block_sizes[] = {1, 7, 16, 64};

/// Rows for every layer, in slots that jump about in the pool; every third block stays unused.
template <class Policies, class K, class V>
void check_append(std::uint32_t block_size, geometry shape) {
  storage<Policies> pool(shape, {.blocks = 6, .block_size = block_size});
  CAPTURE(block_size, shape.kv_heads, shape.head_dim, shape.head_dim_v);
  std::vector<slot_id> slots;
  for (std::uint32_t offset = 0; offset < block_size; offset += 2)
    for (const block_id block : {5u, 1u, 4u, 2u}) slots.push_back(make_slot(block, offset, block_size));
  const auto rows = static_cast<std::uint32_t>(slots.size());
  bytes image = snapshot(pool);
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const std::uint32_t seed = 100 * block_size + layer;
    INFO("seed " << seed);
    const auto k = random_values<K>(std::size_t{rows} * shape.kv_heads * shape.head_dim, seed);
    const auto v = random_values<V>(std::size_t{rows} * shape.kv_heads * shape.v_dim(), seed + 50);
    const rows_view<const K> k_rows(k.data(), rows, shape.kv_heads, shape.head_dim);
    const rows_view<const V> v_rows(v.data(), rows, shape.kv_heads, shape.v_dim());
    pool.append(layer, k_rows, v_rows, slots);
    expect_rows(image, pool, layer, k_rows, v_rows, slots);
  }
  REQUIRE(differences(snapshot(pool), image) == 0);
}

template <class Policies, class K, class V>
void check_all_sizes() {
  for (const std::uint32_t block_size : block_sizes) {
    check_append<Policies, K, V>(block_size, {.layers = 2, .kv_heads = 3, .head_dim = 20});
    check_append<Policies, K, V>(block_size, {.layers = 1, .kv_heads = 2, .head_dim = 48, .head_dim_v = 33});
  }
}

using all_bundles =
    std::tuple<bundle<f32, f32, nhd>, bundle<f16, f16, nhd>, bundle<bf16, bf16, nhd>, bundle<f16, f32, nhd>,
               bundle<f32, f32, hnd>, bundle<f16, f16, hnd>, bundle<bf16, bf16, hnd>, bundle<bf16, f16, hnd>>;

/// K and V of `rows` tokens inside one matrix whose rows are [q | k | v], as a fused projection leaves them.
struct fused_rows {
  static constexpr std::uint32_t query_heads = 4;
  static constexpr std::uint32_t kv_heads = 2;
  static constexpr std::uint32_t head_dim = 24;
  static constexpr std::uint32_t width = (query_heads + 2 * kv_heads) * head_dim;

  fused_rows(std::uint32_t rows, std::uint32_t seed)
      : matrix(random_values<float>(std::size_t{rows} * width, seed)),
        k(matrix.data() + query_heads * head_dim, rows, kv_heads, head_dim, width, head_dim),
        v(matrix.data() + (query_heads + kv_heads) * head_dim, rows, kv_heads, head_dim, width, head_dim) {}

  std::vector<float> matrix;
  rows_view<float> k;
  rows_view<float> v;
};

constexpr geometry fused_shape{.layers = 1, .kv_heads = fused_rows::kv_heads, .head_dim = fused_rows::head_dim};

}  // namespace

TEMPLATE_LIST_TEST_CASE("R16 append writes each row to its slot, converted, and no other byte", "", all_bundles) {
  check_all_sizes<TestType, float, float>();
  check_all_sizes<TestType, f16, f16>();
  check_all_sizes<TestType, bf16, bf16>();
  check_all_sizes<TestType, bf16, float>();
}

TEMPLATE_LIST_TEST_CASE("R20 stored bytes do not depend on how tokens were chunked", "", all_bundles) {
  constexpr geometry shape{.layers = 1, .kv_heads = 3, .head_dim = 18, .head_dim_v = 10};
  constexpr std::uint32_t tokens = 200;
  for (const std::uint32_t block_size : block_sizes) {
    const std::uint32_t seed = block_size;
    INFO("seed " << seed);
    const auto k = random_values<float>(std::size_t{tokens} * 3 * 18, seed);
    const auto v = random_values<float>(std::size_t{tokens} * 3 * 10, seed + 1);
    std::vector<slot_id> slots;
    for (std::uint32_t t = 0; t < tokens; ++t) slots.push_back(block_size + t);

    const auto stored = [&](const std::vector<std::uint32_t>& chunks) {
      storage<TestType> pool(shape, {.blocks = tokens / block_size + 1, .block_size = block_size});
      std::uint32_t first = 0;
      for (const std::uint32_t count : chunks) {
        pool.append(0, rows_view<const float>(k.data() + first * 3 * 18, count, 3, 18),
                    rows_view<const float>(v.data() + first * 3 * 10, count, 3, 10),
                    std::span<const slot_id>(slots).subspan(first, count));
        first += count;
      }
      REQUIRE(first == tokens);
      return snapshot(pool);
    };
    const bytes at_once = stored({tokens});
    CHECK(differences(stored({32, 100, 1, 67}), at_once) == 0);
    CHECK(differences(stored(std::vector<std::uint32_t>(tokens, 1)), at_once) == 0);
  }
}

TEMPLATE_TEST_CASE("append takes slices of a fused QKV matrix", "", nhd, hnd) {
  storage<bundle<bf16, f16, TestType>> pool(fused_shape, {.blocks = 4, .block_size = 7});
  const fused_rows rows(5, 11);
  const std::vector<slot_id> slots{7, 8, 20, 34, 9};
  bytes image = snapshot(pool);
  expect_rows(image, pool, 0, rows.k, rows.v, slots);
  pool.append(0, rows.k, rows.v, slots);
  CHECK(differences(snapshot(pool), image) == 0);
}

TEMPLATE_TEST_CASE("append takes K and V with heads in any order and strides of their own", "", nhd, hnd) {
  storage<bundle<f16, f16, TestType>> pool({.layers = 2, .kv_heads = 3, .head_dim = 16},
                                           {.blocks = 3, .block_size = 4});
  // K is [heads, rows, head_dim]; V has its heads backwards and a gap after each row.
  const auto k = random_values<float>(3 * 5 * 16, 21);
  const auto v = random_values<bf16>(5 * 60, 22);
  const rows_view<const float> k_rows(k.data(), 5, 3, 16, 16, 5 * 16);
  const rows_view<const bf16> v_rows(v.data() + 2 * 17, 5, 3, 16, 60, -17);
  const std::vector<slot_id> slots{4, 5, 6, 7, 12};
  bytes image = snapshot(pool);
  expect_rows(image, pool, 1, k_rows, v_rows, slots);
  pool.append(1, k_rows, v_rows, slots);
  CHECK(differences(snapshot(pool), image) == 0);
}

TEMPLATE_TEST_CASE("attention_14 R21 a slot of -1 is not written", "", nhd, hnd) {
  storage<bundle<bf16, bf16, TestType>> pool(fused_shape, {.blocks = 3, .block_size = 16});
  const fused_rows rows(4, 31);
  bytes image = snapshot(pool);
  pool.append(0, rows.k, rows.v, std::vector<slot_id>(4, no_slot));
  CHECK(differences(snapshot(pool), image) == 0);

  const std::vector<slot_id> slots{no_slot, 16, no_slot, 63};
  expect_rows(image, pool, 0, rows.k, rows.v, slots);
  pool.append(0, rows.k, rows.v, slots);
  CHECK(differences(snapshot(pool), image) == 0);
}

TEST_CASE("attention_14 R21 two sequences in one append share no byte") {
  storage<bundle<f16, f16, hnd>> pool(fused_shape, {.blocks = 4, .block_size = 16});
  const fused_rows together(6, 41);
  const std::vector<slot_id> both{16, 17, 18, 48, 49, 50};  // a sequence in block 1, another in block 3
  bytes image = snapshot(pool);
  pool.append(0, together.k, together.v, both);

  storage<bundle<f16, f16, hnd>> apart(fused_shape, {.blocks = 4, .block_size = 16});
  const std::vector<slot_id> only_first{16, 17, 18, no_slot, no_slot, no_slot};
  apart.append(0, together.k, together.v, only_first);
  const memory_order order = order_of(pool);
  const std::uint64_t block = order.k_plane() + order.v_plane();
  const bytes mixed = snapshot(pool);
  const bytes alone = snapshot(apart);
  CHECK(bytes(mixed.begin(), mixed.begin() + static_cast<std::ptrdiff_t>(3 * block)) ==
        bytes(alone.begin(), alone.begin() + static_cast<std::ptrdiff_t>(3 * block)));
  CHECK(differences(mixed, image) > 0);
}

TEST_CASE("append takes more slots than rows, and no rows at all") {
  storage<bundle<bf16, bf16, nhd>> pool(fused_shape, {.blocks = 2, .block_size = 16});
  const fused_rows rows(2, 51);
  bytes image = snapshot(pool);
  pool.append(0, rows_view<float>(), rows_view<float>(), {});
  CHECK(differences(snapshot(pool), image) == 0);
  const std::vector<slot_id> slots{20, 21, 22, 23};
  expect_rows(image, pool, 0, rows.k, rows.v, slots);
  pool.append(0, rows.k, rows.v, slots);
  CHECK(differences(snapshot(pool), image) == 0);
}

TEST_CASE("a share of an append writes its rows and no others") {
  const fused_rows rows(10, 61);
  std::vector<slot_id> slots;
  for (slot_id s = 20; s < 30; ++s) slots.push_back(s);
  for (const unsigned nth : {1u, 2u, 3u, 10u, 16u}) {
    storage<bundle<f16, f16, nhd>> pool(fused_shape, {.blocks = 2, .block_size = 16});
    std::vector<int> written(10);
    bytes before = snapshot(pool);
    for (unsigned ith = 0; ith < nth; ++ith) {
      pool.append(0, rows.k, rows.v, slots, ith, nth);
      const bytes after = snapshot(pool);
      const memory_order order = order_of(pool);
      for (std::uint32_t row = 0; row < 10; ++row) {
        const auto k = order.k_at(0, slots[row], 0);
        const auto v = order.v_at(0, slots[row], 0);
        const bool changed_k = before[k] != after[k] || before[k + 1] != after[k + 1];
        const bool changed_v = before[v] != after[v] || before[v + 1] != after[v + 1];
        CHECK(changed_k == changed_v);
        written[row] += changed_k ? 1 : 0;
      }
      before = after;
    }
    CAPTURE(nth);
    CHECK(written == std::vector<int>(10, 1));
  }
}
