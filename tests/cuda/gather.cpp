// SPDX-License-Identifier: Apache-2.0
// Records of blocks: what they hold, and that they come back, into a pool of either layout.
#include <kvcache/cuda/gather_blocks.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "block_support.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

using device::block_record;
using device::record_of;

constexpr auto mark = std::byte{0xa5};

/// Records with room between them, all of marks at first.
struct records {
  std::int64_t stride;
  std::vector<std::byte> memory;
  std::byte* first;

  records(byte_pool& pool, std::size_t count, std::uint32_t aligned = 16) {
    const std::uint32_t size = std::max(record_of(pool.view()).size, record_of(pool.view(), true).size);
    stride = size + 16;
    memory.assign(count * static_cast<std::size_t>(stride) + 64, mark);
    const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
    first = memory.data() + (32 - at % 32) + aligned % 16;
  }
};

device::gather_params params_of(byte_pool& pool, const std::vector<block_id>& blocks, records& r) {
  device::gather_params p;
  p.kv = pool.view();
  p.blocks = blocks.data();
  p.most = static_cast<std::uint32_t>(blocks.size());
  p.staging = r.first;
  p.record_stride = r.stride;
  return p;
}
global_memory memory_of(const byte_pool& pool, const std::vector<block_id>& blocks, const records& r) {
  global_memory memory;
  pool.name(memory);
  name_memory(memory, blocks, "blocks");
  memory.add(r.memory.data(), r.memory.size(), "records", true);
  return memory;
}

/// What the documentation says that a record is, byte by byte; padding is marks.
void expect_record(const kv_view& view, block_id entry, std::byte* to) {
  const bool in_tail = (entry & tail_bit) != 0;
  const block_id block = entry & ~tail_bit;
  std::size_t at = 0;
  const auto put = [&](const plane_view& plane, std::uint32_t tokens, std::uint64_t head_bytes) {
    for (std::uint32_t token = 0; token < tokens; ++token)
      for (std::uint32_t head = 0; head < view.kv_heads; ++head, at += head_bytes)
        if (head_bytes != 0) std::memcpy(to + at, plane.at(block, token, head), head_bytes);
    at = (at + 15) / 16 * 16;
  };
  for (const bool keys : {true, false}) {
    const dtype_id id = keys ? view.k_dtype : view.v_dtype;
    const std::uint32_t dim = keys ? view.head_dim : view.v_dim();
    if (in_tail) {
      put(keys ? view.k_tail : view.v_tail, view.block_size,
          code_bytes(keys ? view.k_tail_dtype() : view.v_tail_dtype(), dim));
      continue;
    }
    put(keys ? view.k : view.v, view.block_size, code_bytes(id, dim));
    put(keys ? view.k_scales : view.v_scales, seals(id) ? 1 : view.block_size, scale_bytes(id, dim));
  }
  REQUIRE(at == record_of(view, in_tail).size);
}

}  // namespace

TEST_CASE("device gather: records are as documented, scatter brings them back into either layout", "[cuda]") {
  const std::vector<dtype_id> dtypes = all_dtypes();
  std::uint32_t turn = 0;
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    for (const std::uint32_t block_size : block_sizes)
      for (const bool heads_outside : {false, true}) {
        ++turn;
        const std::uint32_t dims[][2] = {{64, 80}, {128, 33}, {96, 256}, {7, 1}, {20, 4}};
        const auto& dim = dims[turn % std::size(dims)];
        pool_form form{.k = dtypes[i],
                       .v = dtypes[(i + 4 + turn % 9) % dtypes.size()],
                       .block_size = block_size,
                       .kv_heads = 1 + turn % 3,
                       .head_dim = dim[0],
                       .head_dim_v = dim[1],
                       .heads_outside = heads_outside,
                       .gap = turn % 4 == 1 ? 12u : 0u,
                       .first = turn % 3 == 0 ? 4u : 16u};
        CAPTURE(name(form.k), name(form.v), block_size, heads_outside, dim[0], dim[1], turn);
        byte_pool pool(form);
        const byte_pool before(form);
        const std::vector<block_id> blocks{4, tail_bit | 2, null_block, 1, 6, tail_bit | 3, 5};
        records found(pool, blocks.size(), turn % 5 == 0 ? 8 : 16);
        records expected(pool, blocks.size(), turn % 5 == 0 ? 8 : 16);
        for (const std::size_t r : {0u, 1u, 3u, 6u})
          expect_record(pool.view(), blocks[r], expected.first + static_cast<std::int64_t>(r) * expected.stride);
        run_on_host<device::gather_blocks>(2, params_of(pool, blocks, found),
                                           {memory_of(pool, blocks, found), orders[turn % 3]});
        const auto begin = [](const records& r) { return r.first; };
        const std::size_t size = blocks.size() * static_cast<std::size_t>(found.stride);
        REQUIRE(std::memcmp(begin(found), begin(expected), size) == 0);
        REQUIRE(differences(pool, before) == 0);

        // Into other blocks of a pool of the other layout, from which the records are the same.
        form.heads_outside = !heads_outside;
        form.gap = turn % 3 == 1 ? 4 : 0;
        byte_pool other(form);
        std::vector<block_id> used{2, tail_bit | 0, null_block, 5, null_block, null_block, 1};
        run_on_host<device::scatter_blocks>(2, params_of(other, used, found),
                                            {memory_of(other, used, found), orders[(turn + 1) % 3]});
        REQUIRE(std::memcmp(begin(found), begin(expected), size) == 0);
        records again(other, blocks.size(), turn % 5 == 0 ? 8 : 16);
        run_on_host<device::gather_blocks>(2, params_of(other, used, again),
                                           {memory_of(other, used, again), orders[turn % 3]});
        REQUIRE(std::memcmp(begin(again), begin(expected), size) == 0);
        // What has not been named, and what lies between heads, is as it was.
        byte_pool restored(form);
        records was(restored, blocks.size());
        run_on_host<device::gather_blocks>(1, params_of(restored, used, was));
        run_on_host<device::scatter_blocks>(1, params_of(other, used, was));
        REQUIRE(differences(other, restored) == 0);
      }
}

TEST_CASE("device gather: as many blocks as the device says", "[cuda]") {
  const pool_form form{.k = dtype_id::int8_per_token, .v = dtype_id::bfloat16, .block_size = 7};
  byte_pool pool(form);
  const std::vector<block_id> blocks{3, 1, 2};
  for (const std::uint32_t count : {0u, 1u, 3u, 50u}) {
    records found(pool, blocks.size());
    records expected(pool, blocks.size());
    for (std::uint32_t r = 0; r < count && r < 3; ++r)
      expect_record(pool.view(), blocks[r], expected.first + r * expected.stride);
    device::gather_params p = params_of(pool, blocks, found);
    p.count = &count;
    run_on_host<device::gather_blocks>(2, p);
    CAPTURE(count);
    CHECK(std::memcmp(found.first, expected.first, 3 * static_cast<std::size_t>(found.stride)) == 0);
  }
}

TEST_CASE("device gather: the size of a record is known when a program is compiled", "[cuda]") {
  constexpr kv_view view = [] {
    kv_view v;
    v.block_size = 16;
    v.kv_heads = 8;
    v.head_dim = 128;
    v.k_dtype = dtype_id::int8_per_channel;
    v.v_dtype = dtype_id::int4_grouped_32;
    return v;
  }();
  static_assert(record_of(view) == block_record{.k_scales = 16 * 8 * 128,
                                                .v = 16 * 8 * 128 + 8 * 256,
                                                .v_scales = 16 * 8 * 128 + 8 * 256 + 16 * 8 * 64,
                                                .size = 16 * 8 * 128 + 8 * 256 + 16 * 8 * 64 + 16 * 8 * 8});
  static_assert(record_of(view, true) == block_record{.k_scales = 16 * 8 * 256,
                                                      .v = 16 * 8 * 256,
                                                      .v_scales = 2 * 16 * 8 * 256,
                                                      .size = 2 * 16 * 8 * 256});
  SUCCEED();
}
