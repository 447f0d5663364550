// SPDX-License-Identifier: Apache-2.0
// Seals by the device's body against those of the host, byte for byte.
#include <kvcache/append.hpp>
#include <kvcache/cuda/seal_blocks.hpp>
#include <kvcache/seal.hpp>

#include <cstdint>
#include <span>
#include <vector>

#include "block_support.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

/// All tail blocks full of tokens, now and then of what ranges treat apart.
void fill_tails(byte_pool& pool, std::uint32_t seed) {
  const pool_form& f = pool.form();
  const std::uint32_t rows = f.tail_blocks * f.block_size;
  const given_rows k(dtype_id::float32, rows, f.kv_heads, f.head_dim, seed, true);
  const given_rows v(dtype_id::bfloat16, rows, f.kv_heads, f.head_dim_v, seed + 1, true);
  std::vector<slot_id> slots;
  for (std::uint32_t t = 0; t < rows; ++t)
    slots.push_back(make_slot(tail_bit | t / f.block_size, t % f.block_size, f.block_size));
  k.visit([&](const auto& k_rows) {
    v.visit([&](const auto& v_rows) { append(pool.view(), k_rows, v_rows, std::span<const slot_id>(slots)); });
  });
}

device::seal_params params_of(byte_pool& pool, const std::vector<block_seal>& all) {
  device::seal_params p;
  p.kv = pool.view();
  p.seals = all.data();
  p.most = static_cast<std::uint32_t>(all.size());
  return p;
}

constexpr dtype_id tails[] = {dtype_id::bfloat16, dtype_id::float16, dtype_id::float32};

}  // namespace

TEST_CASE("device seal: codes and scales of every format that seals are the host's, and no other byte changes",
          "[cuda]") {
  std::vector<dtype_id> sealed;
  for (const dtype_id id : all_dtypes())
    if (seals(id)) sealed.push_back(id);
  std::vector<dtype_id> others = all_dtypes();
  others.push_back(rotated_of(dtype_id::int4_per_channel));
  others.push_back(rotated_of(dtype_id::bfloat16));
  std::uint32_t turn = 0;
  for (const dtype_id one : sealed)
    for (const dtype_id other : others)
      for (const bool keys : {true, false}) {
        ++turn;
        const std::uint32_t dims[][2] = {{64, 80}, {128, 33}, {96, 256}, {7, 1}, {600, 4}, {144, 200}};
        const auto& dim = dims[turn % std::size(dims)];
        const pool_form form{.k = keys ? one : other,
                             .v = keys ? other : one,
                             .block_size = block_sizes[turn / 2 % 4],
                             .kv_heads = 1 + turn % 3,
                             .head_dim = dim[0],
                             .head_dim_v = dim[1],
                             .heads_outside = turn / 3 % 2 == 0,
                             .gap = turn % 4 * 4,
                             .first = turn % 3 == 0 ? 4u : 16u,
                             .tail = tails[turn % 3]};
        byte_pool host(form);
        byte_pool fiber(form);
        fill_tails(host, turn);
        fill_tails(fiber, turn);
        REQUIRE(differences(host, fiber) == 0);
        const std::vector<block_seal> all{{0, 0, 4}, {0, 2, 1}};
        seal(host.view(), all);
        global_memory memory;
        fiber.name(memory);
        name_memory(memory, all, "seals");
        run_on_host<device::seal_blocks>(2, params_of(fiber, all), {memory, orders[turn % 3]});
        CAPTURE(name(form.k), name(form.v), name(form.tail), form.block_size, form.heads_outside, dim[0], dim[1]);
        REQUIRE(differences(host, fiber) == 0);
      }
}

TEST_CASE("device seal: as many as the device says, and none outside the pool", "[cuda]") {
  const pool_form form{.k = dtype_id::int4_per_channel, .v = dtype_id::int8_per_token, .block_size = 7};
  const std::vector<block_seal> all{{0, 0, null_block}, {0, 1, 4}, {0, 3, 2}, {0, 0, 6}, {0, 2, 5}, {0, 0, 1}};
  for (const std::uint32_t count : {0u, 2u, 5u, 6u, 60u}) {
    byte_pool host(form);
    byte_pool fiber(form);
    fill_tails(host, 3);
    fill_tails(fiber, 3);
    for (std::uint32_t i = 0; i < count && i < all.size(); ++i)
      if (i == 1 || i >= 4) seal(host.view(), std::span(&all[i], 1));
    device::seal_params p = params_of(fiber, all);
    p.count = &count;
    run_on_host<device::seal_blocks>(3, p);
    CAPTURE(count);
    CHECK(differences(host, fiber) == 0);
  }
}
