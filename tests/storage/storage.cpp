// SPDX-License-Identifier: Apache-2.0
#include <kvcache/memory/huge_page_allocator.hpp>
#include <kvcache/storage.hpp>

#include <cstdint>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "../memory/resident.hpp"
#include "catch.hpp"
#include "pool.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

struct fixed : policies {};  // every choice the default: blocks of 16, bf16, NHD
struct run_time : policies {
  static constexpr unsigned block_size = dynamic;
};

constexpr geometry shape{.layers = 4, .kv_heads = 2, .head_dim = 64};

template <class Policies>
void refuse(const geometry& g, typename storage<Policies>::options options, const std::string& text) {
  CHECK_THROWS_AS(storage<Policies>(g, options), invalid_argument);
  CHECK_THROWS_WITH(storage<Policies>(g, options), contains_text(text));
}

/// Where the elements of a token of a head are, read through the view alone.
template <class T>
std::vector<T> read(const std::byte* first, std::uint32_t count) {
  const auto* const elements = reinterpret_cast<const T*>(first);
  return std::vector<T>(elements, elements + count);
}

}  // namespace

TEST_CASE("a storage knows its sizes") {
  const storage<fixed> pool(shape, {.blocks = 10});
  CHECK(pool.geometry() == shape);
  CHECK(pool.block_size() == 16);
  CHECK(pool.blocks() == 10);
  CHECK(pool.bytes_per_block() == bytes_per_block(shape, 16));
  CHECK(pool.bytes() == 11 * bytes_per_block(shape, 16));
  const storage<run_time> other(shape, {.blocks = 3, .block_size = 7});
  CHECK(other.block_size() == 7);
  CHECK(other.bytes() == 4 * bytes_per_block(shape, 7));
}

TEST_CASE("a block's bytes include the padding that aligns its planes") {
  constexpr geometry small{.layers = 3, .kv_heads = 1, .head_dim = 80, .head_dim_v = 33};
  // K: 80 x 2 = 160, on to 192. V: 33 x 2 = 66, on to 128.
  static_assert(storage<run_time>::bytes_per_block(small, 1) == 3 * (192 + 128));
  const storage<run_time> pool(small, {.blocks = 5, .block_size = 1});
  CHECK(pool.bytes_per_block() == 3 * 320);
  CHECK(pool.bytes() == 6 * 3 * 320);
}

TEST_CASE("every plane of every block and layer starts on 64 bytes") {
  for (const std::uint32_t block_size : {1u, 7u, 16u, 64u}) {
    const storage<run_time> pool({.layers = 3, .kv_heads = 3, .head_dim = 20, .head_dim_v = 12},
                                 {.blocks = 4, .block_size = block_size});
    for (std::uint32_t layer = 0; layer < 3; ++layer)
      for (block_id block = 0; block <= 4; ++block) {
        CHECK(reinterpret_cast<std::uintptr_t>(pool.view(layer).k_at(block, 0, 0)) % 64 == 0);
        CHECK(reinterpret_cast<std::uintptr_t>(pool.view(layer).v_at(block, 0, 0)) % 64 == 0);
      }
  }
}

TEST_CASE("a view says what a kernel has to know") {
  storage<bundle<f16, float, hnd>> pool({.layers = 2, .kv_heads = 3, .head_dim = 8, .head_dim_v = 4},
                                        {.blocks = 9, .block_size = 7});
  const kv_view view = pool.view(1);
  CHECK(view.blocks == 10);
  CHECK(view.block_size == 7);
  CHECK(view.kv_heads == 3);
  CHECK(view.head_dim == 8);
  CHECK(view.head_dim_v == 4);
  CHECK(view.k_dtype == dtype_id::float16);
  CHECK(view.v_dtype == dtype_id::float32);
  CHECK(view.tail_blocks == 0);
  CHECK(view.k_tail.base == nullptr);
  CHECK(view.v_tail.base == nullptr);
  CHECK(view.k.token_stride == 16);
  CHECK(view.k.head_stride == 7 * 16);
  CHECK(view.v.token_stride == 16);
  CHECK(view.v.head_stride == 7 * 16);
  CHECK_THROWS_WITH(pool.view(2), contains_text("layer 2 asked for, the geometry has 2"));
}

TEST_CASE("NHD and HND give the same values through the view") {
  constexpr geometry g{.layers = 2, .kv_heads = 3, .head_dim = 20, .head_dim_v = 12};
  for (const std::uint32_t block_size : {1u, 7u, 16u, 64u}) {
    storage<bundle<bf16, f16, nhd>> a(g, {.blocks = 3, .block_size = block_size});
    storage<bundle<bf16, f16, hnd>> b(g, {.blocks = 3, .block_size = block_size});
    const std::uint32_t rows = 2 * block_size;
    const std::uint32_t seed = 90 + block_size;
    INFO("seed " << seed);
    const auto k = random_values<float>(std::size_t{rows} * 3 * 20, seed);
    const auto v = random_values<float>(std::size_t{rows} * 3 * 12, seed + 1);
    std::vector<slot_id> slots;
    for (std::uint32_t r = 0; r < rows; ++r) slots.push_back(make_slot(r % 2 == 0 ? 3 : 1, r / 2, block_size));
    for (std::uint32_t layer = 0; layer < 2; ++layer) {
      const rows_view<const float> k_rows(k.data(), rows, 3, 20);
      const rows_view<const float> v_rows(v.data(), rows, 3, 12);
      a.append(layer, k_rows, v_rows, slots);
      b.append(layer, k_rows, v_rows, slots);
      for (const block_id block : {1u, 3u})
        for (std::uint32_t t = 0; t < block_size; ++t)
          for (std::uint32_t head = 0; head < 3; ++head) {
            CHECK(read<bf16>(a.view(layer).k_at(block, t, head), 20) ==
                  read<bf16>(b.view(layer).k_at(block, t, head), 20));
            CHECK(read<f16>(a.view(layer).v_at(block, t, head), 12) ==
                  read<f16>(b.view(layer).v_at(block, t, head), 12));
          }
    }
  }
}

TEST_CASE("a storage moves with its bytes and gives them back once") {
  static_assert(!std::is_copy_constructible_v<storage<fixed>> && !std::is_copy_assignable_v<storage<fixed>>);
  static_assert(std::is_nothrow_move_constructible_v<storage<fixed>> &&
                std::is_nothrow_move_assignable_v<storage<fixed>>);
  using pool_type = storage<bundle<bf16, bf16, nhd>>;
  int live = 0;
  int other_live = 0;
  {
    pool_type first(shape, {.blocks = 2, .block_size = 16, .allocator = marking_allocator(live)});
    const std::byte* const base = first.view(1).k.base;
    CHECK(live == 1);
    pool_type second = std::move(first);
    CHECK(live == 1);
    CHECK(second.view(1).k.base == base);
    pool_type third({.layers = 1, .kv_heads = 1, .head_dim = 8},
                    {.blocks = 5, .block_size = 4, .allocator = marking_allocator(other_live)});
    CHECK(other_live == 1);
    third = std::move(second);
    CHECK(other_live == 0);
    CHECK(live == 1);
    CHECK(third.view(1).k.base == base);
    CHECK(third.geometry() == shape);
    CHECK(third.blocks() == 2);
    CHECK(third.block_size() == 16);
    pool_type& itself = third;
    third = std::move(itself);
    CHECK(third.view(1).k.base == base);
  }
  CHECK(live == 0);
}

TEST_CASE("a pool of blocks that were never written is not resident") {
  struct huge : policies {
    using allocator = huge_page_allocator;
  };
  constexpr geometry large{.layers = 32, .kv_heads = 8, .head_dim = 128};  // 2 MiB a block
  const auto check = [](auto pool) {
    const auto bytes_taken = static_cast<std::size_t>(pool.bytes());
    CHECK(bytes_taken == 129 * (std::size_t{2} << 20));
    CHECK(resident_bytes(pool.view(0).k.base, bytes_taken) <= std::size_t{1} << 20);
  };
  check(storage<fixed>(large, {.blocks = 128}));
  check(storage<huge>(large, {.blocks = 128}));
}

TEST_CASE("a pool that can hold nothing is refused by value and limit") {
  refuse<fixed>({.layers = 0, .kv_heads = 2, .head_dim = 64}, {.blocks = 1}, "layers is 0, at least 1 needed");
  refuse<fixed>({.layers = 1, .kv_heads = 0, .head_dim = 64}, {.blocks = 1}, "kv_heads is 0, at least 1 needed");
  refuse<fixed>({.layers = 1, .kv_heads = 1, .head_dim = 0}, {.blocks = 1}, "head_dim is 0, at least 1 needed");
  refuse<fixed>(shape, {.blocks = 0}, "0 blocks asked for, 1 to 2147483647 possible");
  refuse<run_time>(shape, {.blocks = 1, .block_size = 0}, "block_size is 0, 1 to 4294967294 tokens possible");
  refuse<run_time>(shape, {.blocks = 1, .block_size = dynamic}, "block_size is 4294967295");
}

TEST_CASE("a pool that others own is not freed where it is refused") {
  std::vector<std::byte> memory(4096);
  for (const std::uint64_t pool_block : {0u, 64u})
    CHECK_THROWS_WITH(storage<fixed>(shape, {.blocks = 4}, memory.data(), pool_block, nullptr),
                      contains_text("the pool's blocks have " + std::to_string(pool_block)));
}

TEST_CASE("more blocks than a table can name are refused") {
  refuse<fixed>(shape, {.blocks = max_blocks + 1}, "2147483648 blocks asked for, 1 to 2147483647 possible");
}

TEST_CASE("a block size other than the policy's is refused, the same is not") {
  refuse<fixed>(shape, {.blocks = 1, .block_size = 32}, "block_size 32 asked for, the policy's is 16");
  CHECK(storage<fixed>(shape, {.blocks = 1, .block_size = 16}).block_size() == 16);
}

TEST_CASE("R8 a pool beyond 2^63 bytes is refused, not wrapped around") {
  constexpr std::uint32_t most = 0xffff'ffffu;
  refuse<fixed>({.layers = most, .kv_heads = most, .head_dim = most}, {.blocks = max_blocks},
                "4294967295 layers x 2147483647 blocks x 16 tokens");
  refuse<run_time>({.layers = 1, .kv_heads = 1, .head_dim = most}, {.blocks = 1, .block_size = most - 1}, "2^63");
  refuse<fixed>({.layers = 1u << 20, .kv_heads = 1u << 12, .head_dim = 1u << 12}, {.blocks = 1u << 20}, "2^63");
  // 2^61 bytes have an address; that nobody has so many is for the allocator to say.
  struct huge : policies {
    using allocator = huge_page_allocator;
  };
  CHECK_THROWS_AS(
      storage<huge>({.layers = 1u << 13, .kv_heads = 1u << 12, .head_dim = 1u << 12}, {.blocks = (1u << 18) - 1}),
      system_failure);
}
