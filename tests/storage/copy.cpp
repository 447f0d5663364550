// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "catch.hpp"
#include "pool.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

using copied_bundles = std::tuple<bundle<f32, f32, nhd>, bundle<bf16, bf16, nhd>, bundle<f16, f32, nhd>,
                                  bundle<f32, f32, hnd>, bundle<bf16, bf16, hnd>, bundle<f16, f32, hnd>>;

/// Every byte of the pool gets a value of its own as far as that is possible.
template <class Policies>
void fill(storage<Policies>& pool) {
  auto* const first = reinterpret_cast<unsigned char*>(pool.view(0).k.base);
  for (std::uint64_t i = 0; i < pool.bytes(); ++i) first[i] = static_cast<unsigned char>(i * 2'654'435'761u >> 13);
}

/// The image after one copy, byte by byte from the documented memory order.
template <class Policies>
void expect_copy(bytes& image, const storage<Policies>& pool, const block_copy& c) {
  const memory_order order = order_of(pool);
  const geometry& g = pool.geometry();
  for (std::uint32_t layer = 0; layer < g.layers; ++layer)
    for (std::uint32_t head = 0; head < g.kv_heads; ++head)
      for (std::uint32_t t = 0; t < c.tokens; ++t) {
        const slot_id from = make_slot(c.source, t, pool.block_size());
        const slot_id to = make_slot(c.destination, t, pool.block_size());
        for (std::uint64_t b = 0; b < g.head_dim * order.k_bytes; ++b)
          image[order.k_at(layer, to, head) + b] = image[order.k_at(layer, from, head) + b];
        for (std::uint64_t b = 0; b < g.v_dim() * order.v_bytes; ++b)
          image[order.v_at(layer, to, head) + b] = image[order.v_at(layer, from, head) + b];
      }
}

constexpr geometry shape{.layers = 3, .kv_heads = 2, .head_dim = 10, .head_dim_v = 6};

}  // namespace

TEMPLATE_LIST_TEST_CASE("R10 a copy moves the first tokens of every layer and no other byte", "", copied_bundles) {
  for (const std::uint32_t block_size : {1u, 7u, 16u, 64u})
    for (const std::uint32_t heads : {1u, 2u, 5u})
      for (const std::uint32_t tokens : {0u, 1u, block_size / 2, block_size - 1, block_size}) {
        geometry g = shape;
        g.kv_heads = heads;
        storage<TestType> pool(g, {.blocks = 4, .block_size = block_size});
        fill(pool);
        bytes image = snapshot(pool);
        const std::vector<block_copy> copies{{.layer_group = 0, .source = 4, .destination = 2, .tokens = tokens}};
        expect_copy(image, pool, copies[0]);
        pool.copy(copies);
        CAPTURE(block_size, heads, tokens);
        REQUIRE(differences(snapshot(pool), image) == 0);
      }
}

TEMPLATE_LIST_TEST_CASE("R10 copies are carried out in the given order", "", copied_bundles) {
  const std::vector<std::vector<block_copy>> orders{
      {{0, 1, 2, 16}, {0, 2, 3, 16}},              // block 3 gets what block 1 held
      {{0, 2, 3, 16}, {0, 1, 2, 16}},              // and here what block 2 held
      {{0, 1, 2, 9}, {0, 2, 1, 12}, {0, 3, 3, 5}}  // to and fro, and onto itself
  };
  for (const auto& copies : orders) {
    storage<TestType> pool(shape, {.blocks = 3, .block_size = 16});
    fill(pool);
    bytes image = snapshot(pool);
    for (const block_copy& c : copies) expect_copy(image, pool, c);
    pool.copy(copies);
    CHECK(differences(snapshot(pool), image) == 0);
  }
}

TEST_CASE("R10 a refused copy names value and limit and leaves every block alone") {
  storage<bundle<bf16, bf16, hnd>> pool(shape, {.blocks = 3, .block_size = 16});
  fill(pool);
  const bytes before = snapshot(pool);
  const auto refuse = [&](const block_copy& wrong, const std::string& value, const std::string& limit) {
    const std::vector<block_copy> copies{{0, 1, 2, 16}, wrong};
    CHECK_THROWS_AS(pool.copy(copies), invalid_argument);
    CHECK_THROWS_WITH(pool.copy(copies), contains_text(value) && contains_text(limit));
    CHECK(differences(snapshot(pool), before) == 0);
  };
  refuse({0, 4, 2, 1}, "source is block 4", "1 to 3");
  refuse({0, 0, 2, 1}, "source is block 0", "1 to 3");
  refuse({0, 1, 4, 1}, "destination is block 4", "1 to 3");
  refuse({0, 1, 0, 1}, "destination is block 0", "1 to 3");
  refuse({0, 1, tail_bit | 1, 1}, "destination is tail block 1", "fewer than 0");
  refuse({0, 1, 2, 17}, "tokens to copy are 17", "a block holds 16");
}

TEST_CASE("R10 copying nothing is no error") {
  storage<bundle<bf16, bf16, nhd>> pool(shape, {.blocks = 1, .block_size = 16});
  fill(pool);
  const bytes before = snapshot(pool);
  pool.copy({});
  CHECK(differences(snapshot(pool), before) == 0);
}
