// SPDX-License-Identifier: Apache-2.0
#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/geometry.hpp>
#include <kvcache/quantization.hpp>
#include <kvcache/storage.hpp>

#include <cstdint>
#include <tuple>

#include "catch.hpp"

using namespace kvcache;
using kvcache_test::contains_text;

namespace {

constexpr kv_format f16_format{dtype_id::float16, dtype_id::float16};
constexpr geometry model_8b{.layers = 32, .kv_heads = 8, .head_dim = 128};
constexpr geometry model_70b{.layers = 80, .kv_heads = 8, .head_dim = 128};
constexpr geometry model_70b_mha{.layers = 80, .kv_heads = 64, .head_dim = 128};
template <class K, class V, class Tail = bf16>
struct chosen : policies {
  static constexpr unsigned block_size = dynamic;
  using dtype = kv_dtype<K, V>;
  using tail_dtype = Tail;
};
using sealing = std::tuple<chosen<int4_per_channel, int4_grouped<32>>, chosen<fp8_e4m3, int8_per_channel>,
                           chosen<rotated<int2_per_channel>, rotated<f16>, f16>,
                           chosen<f32, int4_per_channel_symmetric, f32>, chosen<int8_per_channel, int2_per_channel>>;
constexpr std::uint64_t gib = std::uint64_t{1} << 30;

// Known at compile time.
static_assert(bytes_per_token(model_8b, f16_format) == 131'072);
static_assert(bytes_per_token_and_layer(model_70b, f16_format) == 4'096);
static_assert(bytes_per_token(model_70b, f16_format) == 327'680);
static_assert(bytes_per_token(model_70b_mha, f16_format) == 2'621'440);

}  // namespace

TEST_CASE("sizing meets the published values per token") {
  geometry g = model_8b;  // at run time as well
  CHECK(bytes_per_token(g, f16_format) == 131'072);
  g = model_70b;
  CHECK(bytes_per_token_and_layer(g, f16_format) == 4'096);
  CHECK(bytes_per_token(g, f16_format) == 327'680);
  g = model_70b_mha;
  CHECK(bytes_per_token(g, f16_format) == 2'621'440);
}

TEST_CASE("sizing counts K and V by their own dtype and dim") {
  static_assert(bytes_per_token(model_8b) == 131'072);  // bf16 unless said otherwise
  static_assert(bytes_per_token(model_8b, {dtype_id::float32, dtype_id::float16}) == 131'072 / 2 * 3);
  constexpr geometry uneven{.layers = 2, .kv_heads = 3, .head_dim = 192, .head_dim_v = 128};
  static_assert(uneven.v_dim() == 128 && model_8b.v_dim() == 128);
  static_assert(bytes_per_token_and_layer(uneven, f16_format) == 3 * (192 + 128) * 2);
  static_assert(bytes_per_token_and_layer(uneven, {dtype_id::float32, dtype_id::bfloat16}) == 3 * (192 * 4 + 128 * 2));
  SUCCEED();
}

TEST_CASE("sizing counts codes, scales and zero points of every format") {
  constexpr geometry g{.layers = 2, .kv_heads = 8, .head_dim = 128};
  const auto token = [&](dtype_id id, std::uint32_t block_size = 16) {
    return bytes_per_token(g, {id, id}, block_size) / (2 * 2 * 8);  // layers, K and V, heads
  };
  const auto block = [&](dtype_id id, std::uint32_t block_size) {
    return bytes_per_block(g, block_size, {id, id}) / (2 * 2);
  };
  CHECK(token(dtype_id::float8_e4m3) == 128);
  CHECK(token(dtype_id::float8_e5m2) == 128);
  CHECK(token(dtype_id::int8_per_token) == 130);
  CHECK(token(dtype_id::int4_grouped_16) == 64 + 16);
  CHECK(token(dtype_id::int4_grouped_32) == 64 + 8);
  CHECK(token(dtype_id::int4_grouped_64) == 64 + 4);
  CHECK(token(dtype_id::int4_grouped_128) == 64 + 2);
  CHECK(token(dtype_id::int4_grouped_asymmetric_16) == 64 + 32);
  CHECK(token(dtype_id::int4_grouped_asymmetric_128) == 64 + 4);
  CHECK(token(dtype_traits<rotated<int4_grouped<32>>>::id) == 64 + 8);
  CHECK(token(dtype_traits<rotated<bf16>>::id) == 256);
  // Per channel, a block has 256 bytes of scales, and as many of zero points, for each head.
  CHECK(token(dtype_id::int8_per_channel, 16) == 128 + 16);
  CHECK(token(dtype_id::int8_per_channel, 64) == 128 + 4);
  CHECK(token(dtype_id::int4_per_channel, 32) == 64 + 16);
  CHECK(token(dtype_id::int4_per_channel_symmetric, 32) == 64 + 8);
  CHECK(token(dtype_id::int2_per_channel, 32) == 32 + 16);
  CHECK(bytes_per_token_and_layer(g, {dtype_id::bfloat16, dtype_id::int8_per_channel}, 7) ==
        8 * 128 * 3 + (8 * 256 + 6) / 7);
  CHECK(block(dtype_id::int8_per_token, 16) == 8 * 16 * 130);
  CHECK(block(dtype_id::int8_per_token, 1) == 8 * 128 + 64);  // 16 bytes of scales, on to 64
  CHECK(block(dtype_id::int4_per_channel, 16) == 8 * (16 * 64 + 512));
  CHECK(block(dtype_id::int2_per_channel, 7) == 8 * (7 * 32 + 512));
  CHECK(block(dtype_id::int8_per_channel, 1) == 8 * (128 + 256));
  // 80 elements: five groups of 16, three of 32, two of 64; an odd length takes whole bytes.
  CHECK(scale_bytes(dtype_id::int4_grouped_16, 80) == 10);
  CHECK(scale_bytes(dtype_id::int4_grouped_32, 80) == 6);
  CHECK(scale_bytes(dtype_id::int4_grouped_asymmetric_64, 80) == 8);
  CHECK(code_bytes(dtype_id::int4_grouped_32, 33) == 17);
  CHECK(code_bytes(dtype_id::int2_per_channel, 33) == 9);
}

TEST_CASE("sizing counts whole blocks per request") {
  static_assert(blocks_for(0, 16) == 0 && blocks_for(1, 16) == 1 && blocks_for(16, 16) == 1 && blocks_for(17, 16) == 2);
  static_assert(bytes_per_block(model_8b, 16, f16_format) == 2'097'152);
  static_assert(bytes_per_request(model_8b, 1'000, 16, f16_format) == 63 * 2'097'152ull);
  static_assert(bytes_per_request(model_8b, 1'000, 1, f16_format) == 131'072'000);
  static_assert(bytes_per_request(model_8b, 0, 16, f16_format) == 0);
  SUCCEED();
}

TEST_CASE("R8 sizing passes 2^32 bytes and tokens exactly") {
  static_assert(bytes_per_request(model_70b_mha, 1'000'000'000, 16, f16_format) == 2'621'440'000'000'000ull);
  static_assert(blocks_for(std::uint64_t{1} << 40, 16) == std::uint64_t{1} << 36);
  SUCCEED();
}

TEST_CASE("sizing gives the concurrency of a budget, the null block taken off") {
  // 40 GiB of 2 MiB blocks are 20,480; one is the null block. 4,096 tokens are 256 blocks.
  static_assert(blocks_in(40 * gib, model_8b, 16, f16_format) == 20'479);
  static_assert(concurrency(40 * gib, model_8b, 4'096, 16, f16_format) == 79);
  static_assert(concurrency(40 * gib + 2'097'152, model_8b, 4'096, 16, f16_format) == 80);
  static_assert(concurrency(40 * gib, model_8b, 4'097, 16, f16_format) == 20'479 / 257);
  static_assert(blocks_in(0, model_8b, 16) == 0 && blocks_in(2'097'152, model_8b, 16) == 0);
  static_assert(concurrency(gib, model_8b, 0, 16) == 0);
  SUCCEED();
}

TEST_CASE("kv heads are sharded over ranks, and replicated when there are fewer") {
  static_assert(shard(model_70b, 1) == model_70b);
  static_assert(shard(model_70b, 4).kv_heads == 2 && shard(model_70b, 8).kv_heads == 1);
  static_assert(shard(model_70b, 16).kv_heads == 1 && shard(model_70b, 64).kv_heads == 1);
  static_assert(bytes_per_token(shard(model_70b, 8), f16_format) == 40'960);
  static_assert(bytes_per_token(shard(model_70b, 16), f16_format) == 40'960);  // two ranks hold the same head
  static_assert(shard(model_70b, 4).layers == 80 && shard(model_70b, 4).head_dim == 128);
  SUCCEED();
}

TEST_CASE("a split that does not come out even is refused by its numbers") {
  CHECK_THROWS_WITH(shard(model_70b, 3), contains_text("8 kv heads") && contains_text("3 ranks"));
  CHECK_THROWS_WITH(shard(model_70b, 12), contains_text("12 ranks"));
  CHECK_THROWS_WITH(shard(model_70b, 0), contains_text("0 ranks"));
  CHECK_THROWS_WITH(shard({.layers = 1, .kv_heads = 0, .head_dim = 64}, 4), contains_text("0 kv heads"));
}

TEST_CASE("sizing counts the padding of planes: a storage of the blocks that fit a budget fits it") {
  for (const std::uint32_t head_dim : {20u, 72u, 80u, 128u}) {
    for (const std::uint32_t block_size : {1u, 7u, 16u}) {
      const geometry g{.layers = 2, .kv_heads = 1, .head_dim = head_dim, .head_dim_v = head_dim - 12};
      constexpr kv_format format{dtype_id::float16, dtype_id::float32};
      constexpr std::uint64_t budget = 1 << 20;
      const std::uint64_t blocks = blocks_in(budget, g, block_size, format);
      CAPTURE(head_dim, block_size, blocks);
      const storage<chosen<f16, f32>> pool(g, {.blocks = static_cast<std::uint32_t>(blocks), .block_size = block_size});
      CHECK(pool.bytes() <= budget);
      CHECK(pool.bytes_per_block() == bytes_per_block(g, block_size, format));
      CHECK(pool.bytes() + pool.bytes_per_block() > budget);
    }
  }
}

TEST_CASE("sizing counts the tail pool where blocks are sealed, and nowhere else") {
  constexpr kv_format keys_wait{dtype_id::int4_per_channel, dtype_id::float8_e4m3};
  static_assert(tail_pool_bytes(model_8b, 16, 1, keys_wait) == 32ull * 16 * 8 * 128 * (2 + 1));  // fp8 as it is
  static_assert(tail_pool_bytes(model_8b, 16, 5, keys_wait, dtype_id::float32) == 5 * 32ull * 16 * 8 * 128 * (4 + 1));
  static_assert(tail_pool_bytes(model_8b, 16, 5, {dtype_id::int4_grouped_32, dtype_id::int2_per_channel}) ==
                5 * 2'097'152ull);
  static_assert(tail_pool_bytes({.layers = 2, .kv_heads = 1, .head_dim = 20}, 1, 3, keys_wait) == 2 * 3 * (64 + 64));
  static_assert(tail_pool_bytes(model_8b, 16, 5, f16_format) == 0);
  static_assert(tail_pool_bytes(model_8b, 16, 5, {dtype_id::int8_per_token, dtype_id::int4_grouped_32}) == 0);
  constexpr std::uint64_t block = bytes_per_block(model_8b, 16, keys_wait);
  constexpr std::uint64_t tail = tail_pool_bytes(model_8b, 16, 1, keys_wait);
  static_assert(bytes_per_request(model_8b, 33, 16, keys_wait) == 3 * block + tail);
  static_assert(bytes_per_request(model_8b, 0, 16, keys_wait) == 0);
  static_assert(concurrency(7 * block + 2 * tail, model_8b, 33, 16, keys_wait) == 2);
  static_assert(concurrency(7 * block + 2 * tail - 1, model_8b, 33, 16, keys_wait) == 1);
  static_assert(concurrency(3 * block + tail, model_8b, 33, 16, keys_wait) == 0);
  static_assert(blocks_in(7 * block + tail, model_8b, 16, keys_wait, tail) == 6);
  static_assert(blocks_in(tail, model_8b, 16, keys_wait, tail) == 0 && blocks_in(1, model_8b, 16, keys_wait, 2) == 0);
  SUCCEED();
}

TEMPLATE_LIST_TEST_CASE("a storage that seals blocks, sized for a budget, fits it with its tail pool", "", sealing) {
  using pool_type = storage<TestType>;
  constexpr dtype_id tail_dtype = dtype_traits<typename TestType::tail_dtype>::id;
  constexpr geometry g{.layers = 3, .kv_heads = 2, .head_dim = 40, .head_dim_v = 33};
  for (const std::uint32_t block_size : {1u, 7u, 16u}) {
    for (const std::uint64_t budget : {262'144ull, 1'000'003ull, 4'194'304ull}) {
      const auto tails = static_cast<std::uint32_t>(tail_blocks_for(2, 20, block_size));
      const std::uint64_t taken = tail_pool_bytes(g, block_size, tails, pool_type::format, tail_dtype);
      const std::uint64_t blocks = blocks_in(budget, g, block_size, pool_type::format, taken);
      CAPTURE(block_size, budget, tails, blocks);
      REQUIRE(blocks > 0);
      const pool_type pool(
          g, {.blocks = static_cast<std::uint32_t>(blocks), .block_size = block_size, .tail_blocks = tails});
      CHECK(pool.tail_bytes() == taken);
      CHECK(pool.bytes_per_block() == bytes_per_block(g, block_size, pool_type::format));
      CHECK(pool.bytes() <= budget);
      CHECK(pool.bytes() + pool.bytes_per_block() > budget);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("as many requests as a budget is said to hold fit it with their tail blocks", "", sealing) {
  using pool_type = storage<TestType>;
  constexpr dtype_id tail_dtype = dtype_traits<typename TestType::tail_dtype>::id;
  constexpr geometry g{.layers = 3, .kv_heads = 2, .head_dim = 40, .head_dim_v = 33};
  for (const std::uint32_t block_size : {1u, 7u, 16u}) {
    for (const std::uint64_t budget : {262'144ull, 1'000'003ull, 4'194'304ull}) {
      for (const std::uint64_t tokens : {1u, 16u, 50u}) {
        const std::uint64_t requests = concurrency(budget, g, tokens, block_size, pool_type::format, tail_dtype);
        const auto bytes_of = [&](std::uint64_t held) {
          return pool_type(g, {.blocks = static_cast<std::uint32_t>(held * blocks_for(tokens, block_size)),
                               .block_size = block_size,
                               .tail_blocks = static_cast<std::uint32_t>(held)})
              .bytes();
        };
        CAPTURE(block_size, budget, tokens, requests);
        REQUIRE(requests > 0);
        CHECK(bytes_of(requests) <= budget);
        CHECK(bytes_of(requests + 1) > budget);
      }
    }
  }
}
