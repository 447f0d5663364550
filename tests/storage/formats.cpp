// SPDX-License-Identifier: Apache-2.0
// Formats that are quantised token by token: where append leaves codes and scales, copies, pools of an engine's own.
#include <kvcache/any_storage.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/memory/mapped_file_allocator.hpp>
#include <kvcache/quantization.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "../memory/temporary_path.hpp"
#include "catch.hpp"
#include "format_pool.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

constexpr std::uint32_t block_sizes[] = {1, 7, 16, 64};

using token_bundles =
    std::tuple<bundle<int8_per_token, int4_grouped<32>, nhd>, bundle<int4_grouped<16>, fp8_e5m2, hnd>,
               bundle<fp8_e4m3, int4_grouped_asymmetric<64>, nhd>,
               bundle<rotated<int4_grouped<32>>, rotated<bf16>, hnd>,
               bundle<rotated<fp8_e4m3>, int4_grouped_asymmetric<16>, nhd>,
               bundle<int4_grouped<128>, int4_grouped_asymmetric<128>, hnd>,
               bundle<int4_grouped<64>, int4_grouped_asymmetric<32>, nhd>, bundle<f16, rotated<int8_per_token>, hnd>>;

template <class Policies>
void check_append(std::uint32_t block_size, geometry shape) {
  storage<Policies> pool(shape, {.blocks = 6, .block_size = block_size});
  CAPTURE(block_size, shape.kv_heads, shape.head_dim, shape.v_dim());
  expected_pool expected(format_order_of(pool), snapshot(pool));
  REQUIRE(pool.bytes() == expected.order().total());
  std::vector<slot_id> slots{no_slot};
  for (std::uint32_t offset = 0; offset < block_size; offset += 2)
    for (const block_id block : {5u, 1u, 4u, 2u}) slots.push_back(make_slot(block, offset, block_size));
  const auto rows = static_cast<std::uint32_t>(slots.size());
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const auto k = random_values<float>(std::size_t{rows} * shape.kv_heads * shape.head_dim, block_size + layer);
    const auto v = random_values<bf16>(std::size_t{rows} * shape.kv_heads * shape.v_dim(), block_size + layer + 9);
    const rows_view<const float> k_rows(k.data(), rows, shape.kv_heads, shape.head_dim);
    const rows_view<const bf16> v_rows(v.data(), rows, shape.kv_heads, shape.v_dim());
    pool.append(layer, k_rows, v_rows, slots);
    expected.append(layer, true, k_rows, slots);
    expected.append(layer, false, v_rows, slots);
  }
  REQUIRE(differences(snapshot(pool), expected.image()) == 0);
  const std::vector<block_copy> copies{{0, 5, 3, (block_size + 1) / 2}, {0, 1, 6, block_size}};
  pool.copy(copies);
  for (const block_copy& c : copies) expected.copy(c);
  REQUIRE(differences(snapshot(pool), expected.image()) == 0);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("R16 R20 codes and scales of each row go where they belong, copied ones too, and no other byte",
                        "", token_bundles) {
  for (const std::uint32_t block_size : block_sizes) {
    check_append<TestType>(block_size, {.layers = 2, .kv_heads = 3, .head_dim = 20});
    check_append<TestType>(block_size, {.layers = 1, .kv_heads = 2, .head_dim = 80, .head_dim_v = 33});
    check_append<TestType>(block_size, {.layers = 1, .kv_heads = 1, .head_dim = 128, .head_dim_v = 1});
  }
}

TEMPLATE_LIST_TEST_CASE("attention_14 R21 sequences in one append share no scale, and -1 writes none", "",
                        token_bundles) {
  constexpr geometry shape{.layers = 1, .kv_heads = 2, .head_dim = 48};
  for (const std::uint32_t block_size : block_sizes) {
    const auto k = random_values<float>(4 * 2 * 48, 1);
    const auto v = random_values<float>(4 * 2 * 48, 2);
    // Rows of two sequences take turns, those of the second are a thousand times as large.
    std::vector<float> large = k;
    for (std::size_t i = 0; i < large.size(); ++i)
      if (i / (2 * 48) % 2 == 1) large[i] *= 1000;
    const rows_view<const float> k_rows(large.data(), 4, 2, 48);
    const rows_view<const float> v_rows(v.data(), 4, 2, 48);
    const slot_id first = make_slot(1, 0, block_size);
    const slot_id second = make_slot(2, block_size - 1, block_size);
    const auto stored = [&](const std::vector<std::vector<slot_id>>& appends) {
      storage<TestType> pool(shape, {.blocks = 3, .block_size = block_size});
      for (const auto& slots : appends) pool.append(0, k_rows, v_rows, slots);
      return snapshot(pool);
    };
    CHECK(differences(stored({{first, second, no_slot, no_slot}}),
                      stored({{no_slot, second, no_slot, no_slot}, {first, no_slot, no_slot, no_slot}})) == 0);
    CHECK(differences(stored({{no_slot, no_slot, no_slot, no_slot}}), stored({})) == 0);
  }
}

TEST_CASE("attention_10 codes and scales follow a block stride beyond the natural one, past 2^32 bytes") {
  const temporary_path path;
  mapped_file_allocator allocator(path.string(), {.reserve = false});
  constexpr std::int64_t stride = (std::int64_t{1} << 20) + 192;
  constexpr std::uint32_t blocks = 6'000;
  constexpr std::uint32_t size = 16;
  constexpr std::size_t total = stride * blocks;
  auto* const base = static_cast<std::byte*>(allocator.allocate(total, 64));
  for (const dtype_id dtype : {dtype_id::int8_per_token, dtype_id::int4_grouped_asymmetric_32}) {
    kv_view view;
    const auto head = static_cast<std::int64_t>(code_bytes(dtype, 64));
    const auto scale = static_cast<std::int64_t>(scale_bytes(dtype, 64));
    view.k = {base, stride, 2 * head, head};
    view.k_scales = {base + 8'192, stride, scale, size * scale};  // heads outside
    view.v = {base + 16'384, stride, head, size * head};
    view.v_scales = {base + 24'576, stride, 2 * scale + 8, scale};
    view.blocks = blocks;
    view.block_size = size;
    view.kv_heads = 2;
    view.head_dim = view.head_dim_v = 64;
    view.k_dtype = view.v_dtype = dtype;
    const auto values = random_values<float>(4 * 3 * 2 * 64, 3);
    const rows_view<const float> k(values.data(), 3, 2, 64);
    const rows_view<const float> v(values.data() + 3 * 2 * 64, 3, 2, 64);
    const std::vector<block_id> ids{1, 4'097, 5'999};
    append(view, k, v,
           std::vector<slot_id>{make_slot(ids[0], 15, size), make_slot(ids[1], 3, size), make_slot(ids[2], 0, size)});
    const std::uint32_t tokens[] = {15, 3, 0};
    copy(view, std::vector<block_copy>{{0, 5'999, 4'500, 1}});
    const auto check = [&](const float* row, const plane_view& codes, const plane_view& scales, block_id block,
                           std::uint32_t token, std::uint32_t h) {
      std::vector<std::byte> wanted(code_bytes(dtype, 64));
      std::vector<std::byte> wanted_scales(scale_bytes(dtype, 64));
      quantise_head(dtype, row, 64, wanted.data(), wanted_scales.data());
      const std::byte* const at =
          codes.base + std::int64_t{block} * stride + token * codes.token_stride + h * codes.head_stride;
      const std::byte* const scales_at =
          scales.base + std::int64_t{block} * stride + token * scales.token_stride + h * scales.head_stride;
      CHECK(std::memcmp(at, wanted.data(), wanted.size()) == 0);
      CHECK(std::memcmp(scales_at, wanted_scales.data(), wanted_scales.size()) == 0);
    };
    for (std::uint32_t h = 0; h < 2; ++h) {
      for (std::uint32_t i = 0; i < 3; ++i) {
        check(k.at(i, h), view.k, view.k_scales, ids[i], tokens[i], h);
        check(v.at(i, h), view.v, view.v_scales, ids[i], tokens[i], h);
      }
      check(k.at(2, h), view.k, view.k_scales, 4'500, 0, h);
      check(v.at(2, h), view.v, view.v_scales, 4'500, 0, h);
      const stored_head k_there = view.k_head(4'097, 3, h);
      const stored_head v_there = view.v_head(4'097, 3, h);
      CHECK(k_there.dtype == dtype);
      CHECK(v_there.dtype == dtype);
      CHECK(k_there.scales == view.k_scales.at(4'097, 3, h));
      CHECK(v_there.scales == view.v_scales.at(4'097, 3, h));
      CHECK(k_there.codes == view.k.at(4'097, 3, h));
      CHECK(v_there.codes == view.v.at(4'097, 3, h));
    }
  }
  allocator.deallocate(base, total, 64);
}

TEST_CASE("attention_10 in a pool that groups share, all planes of all layers follow the pool's blocks") {
  using policies = bundle<int8_per_token, int4_per_channel, nhd>;
  constexpr geometry shape{.layers = 2, .kv_heads = 2, .head_dim = 48};
  const storage<policies> own(shape, {.blocks = 3, .block_size = 16, .tail_blocks = 1});
  const std::uint64_t block = own.bytes_per_block() + 192;
  std::vector<std::byte> memory(block * 4 + own.tail_bytes() + 64);
  std::byte* const base = memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
  const storage<policies> shared(shape, {.blocks = 3, .block_size = 16, .tail_blocks = 1}, base, block,
                                 base + 4 * block);
  CHECK(shared.bytes() == 0);
  for (std::uint32_t layer = 0; layer < 2; ++layer) {
    const kv_view view = shared.view(layer);
    const std::byte* const planes[] = {view.k.base, view.k_scales.base, view.v.base, view.v_scales.base};
    const std::uint64_t sizes[] = {16 * 2 * 48, 16 * 2 * 2, 16 * 2 * 24, 2 * 48 * 4};
    std::uint64_t at = layer * own.bytes_per_block() / 2;
    for (int i = 0; i < 4; ++i) {
      CHECK(planes[i] == base + at);
      at += (sizes[i] + 63) / 64 * 64;
    }
    for (const plane_view* plane : {&view.k, &view.k_scales, &view.v, &view.v_scales})
      CHECK(plane->block_stride == static_cast<std::int64_t>(block));
    CHECK(view.k_tail.base == base + 4 * block + layer * own.tail_bytes() / 2);
  }
}

TEST_CASE("any_storage holds formats that run-time names choose") {
  constexpr geometry shape{.layers = 1, .kv_heads = 2, .head_dim = 64};
  const auto values = random_values<float>(2 * 64, 4);
  const rows_view<const float> row(values.data(), 1, 2, 64);
  for (const dtype_id id : {dtype_id::int8_per_token, dtype_traits<rotated<int4_grouped<32>>>::id}) {
    any_storage pool = dispatch(
        [&](auto t) {
          using T = typename decltype(t)::type;
          return any_storage(storage<bundle<T, T, nhd>>(shape, {.blocks = 2, .block_size = 16}));
        },
        dtype_of<int8_per_token, rotated<int4_grouped<32>>>{id});
    CHECK(pool.view(0).k_dtype == id);
    CHECK(pool.bytes_per_block() == bytes_per_block(shape, 16, {id, id}));
    pool.append(0, row, row, std::vector<slot_id>{17});
    std::vector<float> wanted(values.begin() + 64, values.end());
    if (is_rotated(id)) rotate(wanted.data(), 64);
    std::vector<std::byte> codes(code_bytes(id, 64));
    std::vector<std::byte> scales(scale_bytes(id, 64));
    quantise_head(without_rotation(id), wanted.data(), 64, codes.data(), scales.data());
    CHECK(std::memcmp(pool.view(0).k_head(1, 1, 1).codes, codes.data(), codes.size()) == 0);
    CHECK(std::memcmp(pool.view(0).v_head(1, 1, 1).scales, scales.data(), scales.size()) == 0);
  }
}

TEST_CASE("vectors longer than 1,024 are refused where they would be quantised or rotated") {
  constexpr geometry longest{.layers = 1, .kv_heads = 1, .head_dim = 1'024, .head_dim_v = 1'025};
  const auto refuse = [&](auto which, const std::string& text) {
    using T = typename decltype(which)::type;
    CHECK_THROWS_AS(storage<T>(longest, {.blocks = 1, .block_size = 16}), invalid_argument);
    CHECK_THROWS_WITH(storage<T>(longest, {.blocks = 1, .block_size = 16}), contains_text(text));
  };
  refuse(std::type_identity<bundle<bf16, int8_per_token, nhd>>{},
         "head_dim of V is 1025, int8_per_token stores at most 1024");
  refuse(std::type_identity<bundle<bf16, rotated<bf16>, nhd>>{}, "head_dim of V is 1025, rotated_bf16 stores at most");
  CHECK(storage<bundle<int8_per_token, fp8_e4m3, nhd>>(longest, {.blocks = 1, .block_size = 16}).blocks() == 1);

  std::vector<float> values(1'032);
  kv_view view;
  view.kv_heads = 1;
  view.head_dim = view.head_dim_v = 1'032;
  view.block_size = view.blocks = 16;
  view.k_dtype = dtype_id::int4_grouped_32;
  const rows_view<const float> row(values.data(), 1, 1, 1'032);
  CHECK_THROWS_WITH(append(view, row, row, std::vector<slot_id>{16}),
                    contains_text("head_dim of K is 1032, at most 1024 possible"));
}
