// SPDX-License-Identifier: Apache-2.0
// Blocks filled with a byte.
#include <kvcache/cuda/fill_blocks.hpp>

#include <cstdint>
#include <cstring>
#include <vector>

#include "block_support.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

void expect_fill(const kv_view& view, block_id entry, int byte) {
  const bool in_tail = (entry & tail_bit) != 0;
  const block_id block = entry & ~tail_bit;
  for (const bool keys : {true, false}) {
    const dtype_id id = keys ? view.k_dtype : view.v_dtype;
    const std::uint32_t dim = keys ? view.head_dim : view.v_dim();
    const plane_view& plane = in_tail ? keys ? view.k_tail : view.v_tail : keys ? view.k : view.v;
    const plane_view& scales = keys ? view.k_scales : view.v_scales;
    const dtype_id stored = !in_tail ? id : keys ? view.k_tail_dtype() : view.v_tail_dtype();
    for (std::uint32_t head = 0; head < view.kv_heads; ++head)
      for (std::uint32_t token = 0; token < view.block_size; ++token) {
        std::memset(plane.at(block, token, head), byte, code_bytes(stored, dim));
        if (!in_tail && scales.base != nullptr) std::memset(scales.at(block, token, head), byte, scale_bytes(id, dim));
      }
  }
}

}  // namespace

TEST_CASE("device fill: every byte of the blocks, and no other", "[cuda]") {
  const std::vector<dtype_id> dtypes = all_dtypes();
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
                             .first = turn % 3 == 0 ? 4u : 16u};
        byte_pool expected(form);
        byte_pool fiber(form);
        const std::vector<block_id> blocks{5, tail_bit | 1, null_block, 2, 6, tail_bit | 3, 1};
        const std::uint32_t count = 6;  // the last one is left out
        for (const block_id entry : {block_id{5}, tail_bit | 1, block_id{2}}) expect_fill(expected.view(), entry, 0xee);
        device::fill_params p;
        p.kv = fiber.view();
        p.blocks = blocks.data();
        p.most = static_cast<std::uint32_t>(blocks.size());
        p.count = &count;
        p.byte = 0xee;
        global_memory memory;
        fiber.name(memory);
        name_memory(memory, blocks, "blocks");
        memory.add(&count, sizeof count, "count");
        run_on_host<device::fill_blocks>(2, p, {memory, orders[turn % 3]});
        CAPTURE(name(form.k), name(form.v), block_size, heads_outside, dim[0], dim[1], turn);
        REQUIRE(differences(expected, fiber) == 0);
      }
}
