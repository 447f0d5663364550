// SPDX-License-Identifier: Apache-2.0
// Formats with scales per channel: tokens wait in the tail pool, whole blocks are sealed, sealed ones copied and
// reopened.
#include <kvcache/fp8.hpp>
#include <kvcache/quantization.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "catch.hpp"
#include "format_pool.hpp"
#include "how_far.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

constexpr std::uint32_t block_sizes[] = {1, 7, 16, 64};

struct tails_of_f16 : bundle<rotated<int8_per_channel>, int4_per_channel, hnd> {
  using tail_dtype = f16;
};
struct tails_of_f32 : bundle<int4_per_channel, rotated<int8_per_token>, nhd> {
  using tail_dtype = f32;
};
using sealed_bundles =
    std::tuple<bundle<int8_per_channel, int4_grouped<32>, nhd>, bundle<int4_per_channel, int8_per_token, hnd>,
               bundle<int2_per_channel, int4_per_channel_symmetric, nhd>, bundle<rotated<int4_per_channel>, bf16, hnd>,
               bundle<fp8_e4m3, int8_per_channel, nhd>, bundle<rotated<f16>, int4_per_channel, nhd>, tails_of_f16,
               tails_of_f32>;

constexpr geometry shape{.layers = 3, .kv_heads = 2, .head_dim = 40, .head_dim_v = 33};

/// `count` tokens, appended `chunk` at a time, from the pool's first tail block on.
template <class Policies>
void append_tokens(storage<Policies>& pool, expected_pool* expected, std::uint32_t count,
                   const std::vector<std::uint32_t>& chunks) {
  const geometry& g = pool.geometry();
  const auto k = random_values<float>(std::size_t{count} * g.kv_heads * g.head_dim, 7);
  const auto v = random_values<float>(std::size_t{count} * g.kv_heads * g.v_dim(), 8);
  for (std::uint32_t layer = 0; layer < g.layers; ++layer) {
    std::uint32_t first = 0;
    for (const std::uint32_t chunk : chunks) {
      const rows_view<const float> k_rows(k.data() + std::size_t{first} * g.kv_heads * g.head_dim, chunk, g.kv_heads,
                                          g.head_dim);
      const rows_view<const float> v_rows(v.data() + std::size_t{first} * g.kv_heads * g.v_dim(), chunk, g.kv_heads,
                                          g.v_dim());
      std::vector<slot_id> slots;
      for (std::uint32_t t = first; t < first + chunk; ++t)
        slots.push_back(make_slot(tail_bit | (t / pool.block_size()), t % pool.block_size(), pool.block_size()));
      pool.append(layer, k_rows, v_rows, slots);
      if (expected != nullptr) {
        expected->append(layer, true, k_rows, slots);
        expected->append(layer, false, v_rows, slots);
      }
      first += chunk;
    }
  }
}

template <class Policies>
void refuse(const geometry& g, typename storage<Policies>::options options, const std::string& text) {
  CHECK_THROWS_AS(storage<Policies>(g, options), invalid_argument);
  CHECK_THROWS_WITH(storage<Policies>(g, options), contains_text(text));
  CHECK_THROWS_WITH(storage<Policies>::footprint_of(g, options), contains_text(text));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE(
    "R20 tokens wait at 16 bits, a seal stores their block, copies follow, a copy to a tail reopens", "",
    sealed_bundles) {
  for (const std::uint32_t block_size : block_sizes)
    for (const std::vector<std::uint32_t>& wide : {std::vector<std::uint32_t>{}, std::vector<std::uint32_t>{1}}) {
      storage<TestType> pool(shape, {.blocks = 5, .block_size = block_size, .tail_blocks = 4, .wide_layers = wide});
      CAPTURE(block_size, wide);
      expected_pool expected(format_order_of(pool, wide), snapshot(pool));
      REQUIRE(pool.bytes() == expected.order().total());
      append_tokens(pool, &expected, 3 * block_size, {block_size, 2 * block_size});
      REQUIRE(differences(snapshot(pool), expected.image()) == 0);

      const std::vector<block_seal> seals{{0, 0, 4}, {0, 2, 1}};
      pool.seal(seals);
      for (const block_seal& s : seals) expected.seal(s);
      REQUIRE(differences(snapshot(pool), expected.image()) == 0);

      const std::uint32_t some = (block_size + 1) / 2;
      const std::vector<block_copy> copies{{0, 4, 2, block_size},       // a sealed block
                                           {0, 1, tail_bit | 3, some},  // reopened
                                           {0, tail_bit | 1, tail_bit | 0, some}};
      pool.copy(copies);
      for (const block_copy& c : copies) expected.copy(c);
      REQUIRE(differences(snapshot(pool), expected.image()) == 0);
    }
}

TEMPLATE_LIST_TEST_CASE("attention_13 R20 200 tokens at once or 32 and then one by one seal to the same bytes", "",
                        sealed_bundles) {
  for (const std::uint32_t block_size : block_sizes) {
    const std::uint32_t whole = 200 / block_size;
    const auto stored = [&](const std::vector<std::uint32_t>& chunks) {
      storage<TestType> pool(shape, {.blocks = whole, .block_size = block_size, .tail_blocks = whole + 1});
      append_tokens(pool, nullptr, 200, chunks);
      std::vector<block_seal> seals;
      for (std::uint32_t b = 0; b < whole; ++b) seals.push_back({0, b, whole - b});
      pool.seal(seals);
      return snapshot(pool);
    };
    std::vector<std::uint32_t> one_by_one{32};
    one_by_one.insert(one_by_one.end(), 168, 1);
    CHECK(differences(stored({200}), stored(one_by_one)) == 0);
  }
}

TEMPLATE_LIST_TEST_CASE("attention_14 R21 sequences in one append share no scale once they are sealed, -1 writes none",
                        "", sealed_bundles) {
  for (const std::uint32_t block_size : block_sizes) {
    CAPTURE(block_size);
    // Rows of two sequences take turns, each fills a tail block of its own; those of the second are a thousand times as
    // large. Between them lie rows that go nowhere.
    const std::uint32_t rows = 3 * block_size;
    auto k = random_values<float>(std::size_t{rows} * 2 * 40, 21);
    auto v = random_values<float>(std::size_t{rows} * 2 * 33, 22);
    for (std::size_t i = 0; i < k.size(); ++i)
      if (i / (2 * 40) % 3 == 1) k[i] *= 1000;
    for (std::size_t i = 0; i < v.size(); ++i)
      if (i / (2 * 33) % 3 == 1) v[i] *= 1000;
    const rows_view<const float> k_rows(k.data(), rows, 2, 40);
    const rows_view<const float> v_rows(v.data(), rows, 2, 33);
    const auto slots_of = [&](bool first, bool second) {
      std::vector<slot_id> slots(rows, no_slot);
      for (std::uint32_t t = 0; t < block_size; ++t) {
        if (first) slots[3 * t] = make_slot(tail_bit | 2, t, block_size);
        if (second) slots[3 * t + 1] = make_slot(tail_bit | 0, t, block_size);
      }
      return slots;
    };
    const auto stored = [&](const std::vector<std::vector<slot_id>>& appends, const std::vector<block_seal>& seals) {
      storage<TestType> pool(shape, {.blocks = 2, .block_size = block_size, .tail_blocks = 3});
      expected_pool expected(format_order_of(pool), snapshot(pool));
      for (std::uint32_t layer = 0; layer < shape.layers; ++layer)
        for (const auto& slots : appends) {
          pool.append(layer, k_rows, v_rows, slots);
          expected.append(layer, true, k_rows, slots);
          expected.append(layer, false, v_rows, slots);
        }
      pool.seal(seals);
      for (const block_seal& s : seals) expected.seal(s);
      CHECK(differences(snapshot(pool), expected.image()) == 0);
      return snapshot(pool);
    };
    const std::vector<block_seal> both{{0, 2, 1}, {0, 0, 2}};
    const bytes together = stored({slots_of(true, true)}, both);
    CHECK(differences(together, stored({slots_of(false, true), slots_of(true, false)}, both)) == 0);
    CHECK(differences(together, stored({slots_of(true, false)}, both)) != 0);
    const bytes nothing = stored({}, {});
    CHECK(differences(stored({slots_of(false, false)}, {}), nothing) == 0);
  }
}

TEST_CASE("R20 a block that is reopened and sealed again loses no more than it had lost") {
  // bf16 holds what a code says to 2^-8 of it. No channel's range grows by more than that, so the second scale, bf16 as
  // well, is at most the next one after the first, 2^-7 above it. What is read then is half of it, or 2^-16 more, from
  // what bf16 held.
  storage<bundle<int8_per_channel, int8_per_channel, nhd>> pool(shape,
                                                                {.blocks = 2, .block_size = 16, .tail_blocks = 1});
  append_tokens(pool, nullptr, 16, {16});
  pool.seal(std::vector<block_seal>{{0, 0, 1}});
  pool.copy(std::vector<block_copy>{{0, 1, tail_bit, 16}});
  pool.seal(std::vector<block_seal>{{0, 0, 2}});
  const kv_view view = pool.view(0);
  for (std::uint32_t token = 0; token < 16; ++token) {
    float once[40];
    float twice[40];
    read_head(view.k_head(1, token, 1), 40, once);
    read_head(view.k_head(2, token, 1), 40, twice);
    for (std::uint32_t d = 0; d < 40; ++d) {
      bf16 scale;
      std::memcpy(&scale, view.k_head(1, token, 1).scales + d * sizeof scale, sizeof scale);
      const double most_scale = static_cast<double>(to_float(scale)) * (1 + 0x1p-7);
      const double allowed = std::fabs(static_cast<double>(once[d])) * 0x1p-8 + most_scale * (0.5 + 0x1p-16);
      CHECK(how_far(twice[d], static_cast<double>(once[d]), allowed) <= 1);
    }
  }
}

TEST_CASE("R20 keys longer than what can be quantised are copied to a tail as they are") {
  storage<bundle<f32, int8_per_channel, nhd>> pool({.layers = 1, .kv_heads = 1, .head_dim = 1'500, .head_dim_v = 16},
                                                   {.blocks = 1, .block_size = 2, .tail_blocks = 2});
  const auto values = random_values<float>(2 * 1'500, 11);
  const rows_view<const float> k(values.data(), 2, 1, 1'500);
  const rows_view<const float> v(values.data(), 2, 1, 16);
  pool.append(0, k, v, std::vector<slot_id>{make_slot(tail_bit, 0, 2), make_slot(tail_bit, 1, 2)});
  pool.seal(std::vector<block_seal>{{0, 0, 1}});
  pool.copy(std::vector<block_copy>{{0, 1, tail_bit | 1, 2}});
  for (std::uint32_t token = 0; token < 2; ++token) {
    CHECK(std::memcmp(pool.view(0).k_at(1, token, 0), k.at(token, 0), 1'500 * 4) == 0);
    CHECK(std::memcmp(pool.view(0).k_at(tail_bit | 1, token, 0), k.at(token, 0), 1'500 * 4) == 0);
  }
}

TEST_CASE("R20 slots of blocks that are sealed as a whole are refused, those of the tail pool taken") {
  storage<bundle<bf16, int4_per_channel, nhd>> pool(shape, {.blocks = 2, .block_size = 16, .tail_blocks = 2});
  const bytes before = snapshot(pool);
  const std::vector<float> values(2 * 40);
  const rows_view<const float> k(values.data(), 1, 2, 40);
  const rows_view<const float> v(values.data(), 1, 2, 33);
  CHECK_THROWS_WITH(pool.append(0, k, v, std::vector<slot_id>{33}),
                    contains_text("slot 33 of row 0 is in block 2, which int4_per_channel seals as a whole"));
  CHECK_THROWS_WITH(pool.append(0, k, v, std::vector<slot_id>{make_slot(tail_bit | 2, 0, 16)}),
                    contains_text("of row 0 is outside the pool's"));
  CHECK(differences(snapshot(pool), before) == 0);
  pool.append(0, k, v, std::vector<slot_id>{make_slot(tail_bit | 1, 15, 16)});
  CHECK(differences(snapshot(pool), before) == 2 * (40 + 33) * 2);
}

TEST_CASE("R10 copies and seals that name no block of their pool are refused, and nothing is written") {
  storage<bundle<int4_per_channel, int8_per_channel, hnd>> pool(shape,
                                                                {.blocks = 3, .block_size = 16, .tail_blocks = 2});
  append_tokens(pool, nullptr, 16, {16});
  const bytes before = snapshot(pool);
  const auto refuse_seal = [&](block_seal wrong, const std::string& text) {
    CHECK_THROWS_AS(pool.seal(std::vector<block_seal>{{0, 0, 1}, wrong}), invalid_argument);
    CHECK_THROWS_WITH(pool.seal(std::vector<block_seal>{{0, 0, 1}, wrong}), contains_text(text));
    CHECK(differences(snapshot(pool), before) == 0);
  };
  refuse_seal({0, 2, 1}, "tail block 2, the pool's are fewer than 2");
  refuse_seal({0, 0, 0}, "block 0");
  refuse_seal({0, 0, 4}, "block 4, the pool's are fewer than 4");
  const auto refuse_copy = [&](block_copy wrong, const std::string& text) {
    CHECK_THROWS_WITH(pool.copy(std::vector<block_copy>{{0, 1, 2, 16}, wrong}), contains_text(text));
    CHECK(differences(snapshot(pool), before) == 0);
  };
  refuse_copy({0, tail_bit | 0, 2, 1}, "from the tail pool to block 2");
  refuse_copy({0, tail_bit | 2, tail_bit | 0, 1}, "source is tail block 2");
  refuse_copy({0, 1, tail_bit | 2, 1}, "destination is tail block 2");
}

TEST_CASE("a tail pool is needed where blocks are sealed, and refused elsewhere") {
  using sealed = bundle<int4_per_channel, bf16, nhd>;
  using plain = bundle<int8_per_token, bf16, nhd>;
  refuse<sealed>(shape, {.blocks = 2, .block_size = 16},
                 "tail_blocks is 0, 1 to 2147483647 possible where int4_per_channel");
  refuse<sealed>(shape, {.blocks = 2, .block_size = 16, .tail_blocks = tail_bit}, "tail_blocks is 2147483648");
  refuse<plain>(shape, {.blocks = 2, .block_size = 16, .tail_blocks = 1}, "tail_blocks is 1, 0 possible");
  static_assert(storage<sealed>::seals_blocks && !storage<plain>::seals_blocks);
}

TEST_CASE("wide layers are named once, in rising order, and lie as the tail pool does") {
  using plain = bundle<int8_per_token, int4_grouped<32>, nhd>;
  const std::vector<std::uint32_t> beyond{3};
  const std::vector<std::uint32_t> falling{2, 1};
  const std::vector<std::uint32_t> twice{1, 1};
  refuse<plain>(shape, {.blocks = 2, .block_size = 16, .wide_layers = beyond},
                "wide_layers names layer 3 of 3 at place 0");
  refuse<plain>(shape, {.blocks = 2, .block_size = 16, .wide_layers = falling}, "layer 1 of 3 at place 1");
  refuse<plain>(shape, {.blocks = 2, .block_size = 16, .wide_layers = twice}, "layer 1 of 3 at place 1");

  const std::vector<std::uint32_t> wide{0, 2};
  storage<plain> pool(shape, {.blocks = 2, .block_size = 16, .wide_layers = wide});
  CHECK(pool.view(0).k_dtype == dtype_id::bfloat16);
  CHECK(pool.view(0).v_scales.base == nullptr);
  CHECK(pool.view(1).k_dtype == dtype_id::int8_per_token);
  CHECK(pool.view(2).v_dtype == dtype_id::bfloat16);
  CHECK(pool.bytes_per_block() == storage<plain>::bytes_per_block(shape, 16, 2));
  const std::uint64_t narrow =
      2 * 16 * 40 + 2 * 16 * 2 + 1'088 /* of 544 codes, 17 bytes a head */ / 2 + 32 /* on to 64 */ + 2 * 16 * 4;
  CHECK(storage<plain>::bytes_per_block({.layers = 1, .kv_heads = 2, .head_dim = 40, .head_dim_v = 33}, 16) == narrow);
  const std::uint64_t bf16_layer = 2 * 16 * 40 * 2 + 2 * 16 * 33 * 2;
  CHECK(pool.bytes_per_block() == 2 * bf16_layer + narrow);
  // Rows of layer 1 stay where they are when others are wide.
  expected_pool expected(format_order_of(pool, wide), snapshot(pool));
  const auto values = random_values<float>(2 * 2 * 40, 9);
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    const rows_view<const float> k(values.data(), 2, 2, 40);
    const rows_view<const float> v(values.data(), 2, 2, 33);
    pool.append(layer, k, v, std::vector<slot_id>{16, 47});
    expected.append(layer, true, k, {16, 47});
    expected.append(layer, false, v, {16, 47});
  }
  CHECK(differences(snapshot(pool), expected.image()) == 0);
}

TEST_CASE("a footprint is what the storage takes") {
  using sealed = bundle<int4_per_channel, rotated<int8_per_channel>, hnd>;
  for (const std::uint32_t block_size : block_sizes) {
    const std::vector<std::uint32_t> wide{2};
    const storage<sealed> pool(shape, {.blocks = 5, .block_size = block_size, .tail_blocks = 3, .wide_layers = wide});
    const storage_footprint taken = storage<sealed>::footprint_of(
        shape, {.blocks = 5, .block_size = block_size, .tail_blocks = 3, .wide_layers = wide});
    CHECK(taken.block == pool.bytes_per_block());
    CHECK(taken.tails == pool.tail_bytes());
    CHECK(pool.bytes() == 6 * taken.block + taken.tails);
    const auto up = [](std::uint64_t bytes) { return (bytes + 63) / 64 * 64; };
    CHECK(taken.tails ==
          3 * 3 * (up(std::uint64_t{2} * 2 * 40 * block_size) + up(std::uint64_t{2} * 2 * 33 * block_size)));
  }
}

TEST_CASE("R8 quantised pools beyond 2^63 bytes are refused, tail pools too") {
  using sealed = bundle<int4_per_channel, int2_per_channel, nhd>;
  constexpr std::uint32_t most = 0xffff'ffffu;
  refuse<sealed>({.layers = most, .kv_heads = most, .head_dim = 1'024},
                 {.blocks = max_blocks, .block_size = 16, .tail_blocks = 1}, "2^63");
  refuse<sealed>({.layers = 1, .kv_heads = most, .head_dim = 1'024},
                 {.blocks = 1, .block_size = most - 1, .tail_blocks = 1}, "2^63");
  refuse<sealed>({.layers = 1u << 10, .kv_heads = 1u << 10, .head_dim = 1'024},
                 {.blocks = 2, .block_size = 1u << 10, .tail_blocks = max_blocks}, "2^63");
  using token = bundle<int8_per_token, int4_grouped<16>, nhd>;
  refuse<token>({.layers = 1u << 20, .kv_heads = 1u << 20, .head_dim = 1'024}, {.blocks = 1u << 20, .block_size = 16},
                "2^63");
}

TEST_CASE("wide layers are refused where all layers are wide") {
  using plain = bundle<f16, bf16, nhd>;
  const std::vector<std::uint32_t> wide{1};
  refuse<plain>(shape, {.blocks = 2, .block_size = 16, .wide_layers = wide},
                "wide_layers names 1 layers, 0 possible where f16 and bf16");
}
