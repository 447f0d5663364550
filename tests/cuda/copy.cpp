// SPDX-License-Identifier: Apache-2.0
// Copies by the device's body against those of the host, byte for byte.
#include <kvcache/append.hpp>
#include <kvcache/copy.hpp>
#include <kvcache/cuda/copy_blocks.hpp>
#include <kvcache/seal.hpp>

#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "block_support.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

/// Blocks 1 and 2 and the tail pool full of tokens as they are stored.
void fill_pool(byte_pool& pool) {
  const pool_form& f = pool.form();
  const bool sealed = seals(f.k) || seals(f.v);
  const std::uint32_t rows = (f.tail_blocks + 2) * f.block_size;
  const given_rows k(dtype_id::float32, rows, f.kv_heads, f.head_dim, 3, false);
  const given_rows v(dtype_id::bfloat16, rows, f.kv_heads, f.head_dim_v, 4, false);
  std::vector<slot_id> slots;
  for (std::uint32_t t = 0; t < rows; ++t) {
    const std::uint32_t block = t / f.block_size;
    const bool in_tail = block < f.tail_blocks;
    const block_id entry = in_tail ? tail_bit | block : block - f.tail_blocks + 1;
    slots.push_back(in_tail || !sealed ? make_slot(entry, t % f.block_size, f.block_size) : no_slot);
  }
  k.visit([&](const auto& k_rows) {
    v.visit([&](const auto& v_rows) { append(pool.view(), k_rows, v_rows, std::span<const slot_id>(slots)); });
  });
  const std::vector<block_seal> all{{0, 0, 1}, {0, 2, 2}};
  if (sealed) seal(pool.view(), all);
}

device::copy_params params_of(byte_pool& pool, const std::vector<block_copy>& all) {
  device::copy_params p;
  p.kv = pool.view();
  p.copies = all.data();
  p.most = static_cast<std::uint32_t>(all.size());
  return p;
}

/// Counts stores by their width.
struct counting_context : host_context {
  counting_context(host_context&& c, std::uint64_t& narrow, std::uint64_t& wide)
      : host_context(std::move(c)), narrow_(&narrow), wide_(&wide) {}
  template <class T>
  void store(T* to, std::type_identity_t<T> x) const {
    ++*(sizeof(T) == 16 ? wide_ : narrow_);
    host_context::store(to, x);
  }
  std::uint64_t* narrow_;
  std::uint64_t* wide_;
};

}  // namespace

TEST_CASE("R10 device copy: the first tokens of each plane, and no other byte", "[cuda]") {
  std::vector<dtype_id> dtypes = all_dtypes();
  dtypes.push_back(rotated_of(dtype_id::int4_per_channel));
  dtypes.push_back(rotated_of(dtype_id::bfloat16));
  constexpr dtype_id tails[] = {dtype_id::bfloat16, dtype_id::float16, dtype_id::float32};
  std::uint32_t turn = 0;
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    for (const std::uint32_t block_size : block_sizes)
      for (const bool heads_outside : {false, true}) {
        ++turn;
        const std::uint32_t dims[][2] = {{64, 80}, {128, 33}, {96, 256}, {7, 1}, {20, 4}};
        const auto& dim = dims[turn % std::size(dims)];
        const pool_form form{.k = dtypes[i],
                             .v = dtypes[(i + 4 + turn % 9) % dtypes.size()],
                             .block_size = block_size,
                             .kv_heads = 1 + turn % 3,
                             .head_dim = dim[0],
                             .head_dim_v = dim[1],
                             .heads_outside = heads_outside,
                             .gap = turn % 4 == 1 ? 12u : 0u,
                             .first = turn % 3 == 0 ? 4u : 16u,
                             .tail = tails[turn % 3]};
        byte_pool host(form);
        byte_pool fiber(form);
        fill_pool(host);
        fill_pool(fiber);
        // Within the pool, reopened, within the tail pool; all tokens, some, one and none.
        const std::uint32_t some = (block_size + 1) / 2;
        const std::vector<block_copy> all{{0, 1, 3, block_size},
                                          {0, 2, 4, some},
                                          {0, 2, 5, turn % 2},
                                          {0, 1, tail_bit | 1, turn % 2 == 0 ? some : block_size},
                                          {0, tail_bit | 0, tail_bit | 2, turn % 2 == 0 ? block_size : some}};
        copy(host.view(), all);
        global_memory memory;
        fiber.name(memory);
        name_memory(memory, all, "copies");
        run_on_host<device::copy_blocks>(2, params_of(fiber, all), {memory, orders[turn % 3]});
        CAPTURE(name(form.k), name(form.v), name(form.tail), block_size, heads_outside, dim[0], dim[1], turn);
        REQUIRE(differences(host, fiber) == 0);
      }
}

TEST_CASE("R10 device copy: 16 bytes at a time where everything is aligned to that", "[cuda]") {
  for (const bool heads_outside : {false, true}) {
    const pool_form form{.k = dtype_id::int4_grouped_32, .v = dtype_id::bfloat16, .heads_outside = heads_outside};
    byte_pool pool(form);
    const std::vector<block_copy> all{{0, 1, 3, 16}, {0, 2, 4, 8}};
    std::uint64_t narrow = 0;
    std::uint64_t wide = 0;
    run_on_host<device::copy_blocks>(2, params_of(pool, all), {},
                                     [&](host_context&& c) { return counting_context(std::move(c), narrow, wide); });
    CHECK(narrow == 0);
    CHECK(wide == (16 + 8) * 2 * (32 + 4 + 128) / 16);
  }
}

TEST_CASE("device copy: as many as the device says, and none that the host refuses", "[cuda]") {
  const pool_form form{.k = dtype_id::int8_per_channel, .v = dtype_id::bfloat16, .block_size = 7};
  const std::vector<block_copy> all{{0, 1, 3, 5},
                                    {0, 0, 0, 7},
                                    {0, 0, 2, 7},
                                    {0, 1, null_block, 7},
                                    {0, 6, 2, 7},
                                    {0, 1, 6, 7},
                                    {0, tail_bit | 3, tail_bit | 1, 7},
                                    {0, 1, tail_bit | 3, 7},
                                    {0, tail_bit | 0, 2, 7},
                                    {0, 1, 2, 8},
                                    {0, 4, 4, 7},
                                    {0, 2, 5, 7}};
  for (const std::uint32_t count : {0u, 1u, 11u, 12u, 90u}) {
    byte_pool host(form);
    byte_pool fiber(form);
    fill_pool(host);
    fill_pool(fiber);
    if (count > 0) copy(host.view(), std::span(all).first(1));
    if (count > 11) copy(host.view(), std::span(all).last(1));
    device::copy_params p = params_of(fiber, all);
    p.count = &count;
    run_on_host<device::copy_blocks>(3, p);
    CAPTURE(count);
    CHECK(differences(host, fiber) == 0);
  }
}
