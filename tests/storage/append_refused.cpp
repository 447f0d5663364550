// SPDX-License-Identifier: Apache-2.0
// What append refuses, in which words, and that it writes nothing then.
#include <cstdint>
#include <string>
#include <vector>

#include "catch.hpp"
#include "pool.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

constexpr geometry shape{.layers = 2, .kv_heads = 2, .head_dim = 8, .head_dim_v = 4};

/// Five rows that fit, and what a test changes about them.
struct attempt {
  std::uint32_t block_size = 16;
  storage<bundle<bf16, bf16, nhd>> pool{shape, {.blocks = 3, .block_size = block_size}};
  std::vector<float> values = random_values<float>(1'000, 1);
  std::uint32_t layer = 0;
  rows_view<const float> k{values.data(), 5, 2, 8};
  rows_view<const float> v{values.data() + 200, 5, 2, 4};
  std::vector<slot_id> slots{block_size, block_size + 1, 3 * block_size, 3 * block_size, 4 * block_size - 1};

  /// The sentence of the refusal; the bytes are as before.
  std::string refusal() {
    const bytes before = snapshot(pool);
    std::string text;
    try {
      pool.append(layer, k, v, slots);
    } catch (const invalid_argument& refused) {
      text = refused.what();
    }
    CHECK(differences(snapshot(pool), before) == 0);
    return text;
  }
};

}  // namespace

TEST_CASE("append refuses a slot outside the pool and names it, its row and the limits") {
  for (const slot_id slot : {slot_id{64}, slot_id{-2}, slot_id{1} << 40, INT64_MIN, INT64_MAX}) {
    attempt a;
    a.slots[3] = slot;
    const std::string text = a.refusal();
    CHECK_THAT(text, contains_text("slot " + std::to_string(slot) + " of row 3") && contains_text("16 to 63"));
  }
}

TEST_CASE("R3 append refuses the slots of the null block") {
  for (const std::uint32_t block_size : {1u, 7u, 16u}) {
    for (const slot_id slot : {slot_id{0}, slot_id{block_size} - 1}) {
      attempt a{block_size};
      a.slots[4] = slot;
      CHECK_THAT(a.refusal(),
                 contains_text("slot " + std::to_string(slot) + " of row 4") &&
                     contains_text(std::to_string(block_size) + " to " + std::to_string(4 * block_size - 1)));
    }
  }
}

TEST_CASE("append refuses a slot of the tail pool where there is none") {
  attempt a;
  a.slots[0] = make_slot(tail_bit | 1, 0, 16);
  CHECK_THAT(a.refusal(), contains_text("of row 0"));
}

TEST_CASE("append refuses fewer slots than rows") {
  attempt a;
  a.slots.pop_back();
  CHECK_THAT(a.refusal(), contains_text("4 slots for 5 rows"));
}

TEST_CASE("append refuses rows of another shape than the pool's") {
  attempt a;
  a.k.heads = 4;
  CHECK_THAT(a.refusal(), contains_text("number of K heads is 4, the pool's is 2"));
  a = attempt{};
  a.v.heads = 1;
  CHECK_THAT(a.refusal(), contains_text("number of V heads is 1, the pool's is 2"));
  a = attempt{};
  a.k.head_dim = 7;
  CHECK_THAT(a.refusal(), contains_text("head_dim of K is 7, the pool's is 8"));
  a = attempt{};
  a.v.head_dim = 8;
  CHECK_THAT(a.refusal(), contains_text("head_dim of V is 8, the pool's is 4"));
  a = attempt{};
  a.v.rows = 4;
  CHECK_THAT(a.refusal(), contains_text("5 rows of K, but 4 of V"));
}

TEST_CASE("append refuses a layer that the geometry does not have") {
  attempt a;
  a.layer = 2;
  CHECK_THAT(a.refusal(), contains_text("layer 2 asked for, the geometry has 2"));
}

TEST_CASE("every share of an append refuses the same rows, wherever the fault lies") {
  attempt a;
  a.slots[4] = 64;
  const bytes before = snapshot(a.pool);
  for (unsigned ith = 0; ith < 5; ++ith)
    CHECK_THROWS_WITH(a.pool.append(0, a.k, a.v, a.slots, ith, 5), contains_text("slot 64 of row 4"));
  CHECK(differences(snapshot(a.pool), before) == 0);
}

TEST_CASE("append into a view without a block size is refused") {
  attempt a;
  kv_view view = a.pool.view(0);
  view.block_size = 0;
  CHECK_THROWS_WITH(append(view, a.k, a.v, a.slots), contains_text("block_size is 0, at least 1 needed"));
}
