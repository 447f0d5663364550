// SPDX-License-Identifier: Apache-2.0
// A storage behind one type: the bytes have to be those of the storage itself.
#include <kvcache/any_storage.hpp>
#include <kvcache/dispatch.hpp>
#include <kvcache/quantization.hpp>

#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "pool.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

constexpr geometry shape{.layers = 2, .kv_heads = 3, .head_dim = 8, .head_dim_v = 6};

bytes everything(const kv_view& first_layer, std::uint64_t count) {
  const auto* const first = reinterpret_cast<const unsigned char*>(first_layer.k.base);
  return bytes(first, first + count);
}

static_assert(!std::is_copy_constructible_v<any_storage> && std::is_nothrow_move_constructible_v<any_storage>);

}  // namespace

TEST_CASE("any_storage does what the storage inside does, for dtypes and block sizes of run time") {
  const auto k = random_values<float>(2 * 5 * 3 * 8, 1);
  const auto v = random_values<bf16>(2 * 5 * 3 * 6, 2);
  const rows_view<const float> k_rows{k.data(), 5, 3, 8};
  const rows_view<const bf16> v_rows{v.data(), 5, 3, 6};
  for (const dtype_id id : {dtype_id::float32, dtype_id::float16, dtype_id::bfloat16}) {
    for (const std::uint32_t block_size : {1u, 7u, 16u}) {
      dispatch(
          [&](auto element) {
            using T = typename decltype(element)::type;
            using policies = bundle<T, T, hnd>;
            storage<policies> plain(shape, {.blocks = 6, .block_size = block_size});
            int live = 0;
            {
              any_storage any(storage<policies>(
                  shape, {.blocks = 6, .block_size = block_size, .allocator = marking_allocator(live)}));
              CHECK(live == 1);
              CHECK(any.geometry().head_dim_v == 6);
              CHECK(any.block_size() == block_size);
              CHECK(any.blocks() == 6);
              CHECK(any.bytes() == plain.bytes());
              CHECK(any.bytes_per_block() == plain.bytes_per_block());
              CHECK(any.view(1).k_dtype == id);

              const slot_id first = block_size;
              const std::vector<slot_id> slots{first, 3 * first, no_slot, 4 * first, 5 * first};
              const std::vector<block_copy> copies{{.layer_group = 0, .source = 1, .destination = 2, .tokens = 1}};
              plain.append(1, k_rows, v_rows, slots);
              plain.copy(copies);
              any.append(1, k_rows, v_rows, slots);
              any.copy(copies);
              CHECK(differences(everything(any.view(0), any.bytes()), snapshot(plain)) == 0);

              const std::vector<slot_id> null_slot(5, slot_id{block_size} - 1);
              CHECK_THROWS_WITH(any.append(0, k_rows, v_rows, null_slot), contains_text("of row 0 is outside"));
              CHECK_THROWS_WITH(any.view(2), contains_text("layer 2 asked for"));

              const kv_view before = any.view(0);
              any_storage moved = std::move(any);
              CHECK(moved.view(0).k.base == before.k.base);
              CHECK(live == 1);
            }
            CHECK(live == 0);
          },
          dtype_of<f32, f16, bf16>{id});
    }
  }
}

TEST_CASE("any_storage seals, copies and takes key offsets for formats that run-time names choose") {
  constexpr std::uint32_t block_size = 16;
  const auto k = random_values<float>(block_size * 3 * 8, 3);
  const auto v = random_values<float>(block_size * 3 * 6, 4);
  std::vector<float> offset;
  for (std::uint32_t i = 0; i < 3 * 8; ++i) offset.push_back(0.25f * static_cast<float>(i) - 2.0f);
  const rows_view<const float> k_rows{k.data(), block_size, 3, 8};
  const rows_view<const float> v_rows{v.data(), block_size, 3, 6};
  std::vector<slot_id> slots;
  for (std::uint32_t t = 0; t < block_size; ++t) slots.push_back(make_slot(tail_bit | 1, t, block_size));
  const std::vector<block_seal> seals{{.layer_group = 0, .tail = 1, .block = 2}};
  const std::vector<block_copy> copies{{.layer_group = 0, .source = 2, .destination = tail_bit | 0, .tokens = 5}};
  // What both kinds of storage are asked for.
  const auto use = [&](auto& pool) {
    pool.set_key_offset(1, offset);
    for (const std::uint32_t layer : {0u, 1u}) pool.append(layer, k_rows, v_rows, slots);
    pool.seal(seals);
    pool.copy(copies);
  };
  for (const dtype_id id : {dtype_id::int8_per_channel, dtype_id::int4_per_channel, dtype_id::int2_per_channel}) {
    dispatch(
        [&](auto stored) {
          using policies = bundle<typename decltype(stored)::type, int4_grouped<32>, nhd>;
          const auto make = [&] {
            return storage<policies>(shape, {.blocks = 3, .block_size = block_size, .tail_blocks = 2});
          };
          storage<policies> plain = make();
          any_storage any(make());
          CHECK(any.tail_blocks() == 2);
          CHECK(any.tail_bytes() == plain.tail_bytes());
          CHECK(any.bytes() == plain.bytes());
          CHECK(any.view(0).k_dtype == id);
          const bytes before = everything(any.view(0), any.bytes());
          use(plain);
          use(any);
          CHECK(differences(everything(any.view(0), any.bytes()), snapshot(plain)) == 0);
          CHECK(differences(everything(any.view(0), any.bytes()), before) > 0);
          CHECK(any.view(1).key_offset[0] == offset[0]);
          CHECK(any.view(0).key_offset == nullptr);

          CHECK_THROWS_WITH(any.set_key_offset(1, offset), contains_text("layer 1: it is set already"));
          CHECK_THROWS_WITH(any.set_key_offset(0, offset), contains_text("were appended"));
          CHECK_THROWS_WITH(any.seal(std::vector<block_seal>{{0, 2, 1}}), contains_text("tail block 2"));
        },
        dtype_of<int8_per_channel, int4_per_channel, int2_per_channel>{id});
  }
}
