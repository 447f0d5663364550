// SPDX-License-Identifier: Apache-2.0
// append and copy over memory that the library does not own: other orders, gaps, a base that is barely aligned.
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "catch.hpp"
#include "pool.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

/// An engine's memory, full of marks, with a pool at 8 bytes past a 64-byte boundary.
class engine_memory {
 public:
  explicit engine_memory(std::size_t size) : bytes_(size + 128, untouched) {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    start_ = (64 - address % 64) % 64 + 8;
  }
  [[nodiscard]] std::byte* base() { return reinterpret_cast<std::byte*>(bytes_.data() + start_); }
  [[nodiscard]] const bytes& all() const { return bytes_; }
  [[nodiscard]] std::size_t start() const { return start_; }

 private:
  bytes bytes_;
  std::size_t start_ = 0;
};

constexpr std::uint32_t block_size = 4;
constexpr std::uint32_t heads = 2;
constexpr std::uint32_t dim = 6;
constexpr std::uint32_t dim_v = 10;
constexpr std::uint32_t pool_blocks = 5;

/// K and V interleaved token by token, and 24 unused bytes after each block: [block][token][K heads | V heads].
kv_view interleaved(std::byte* base) {
  constexpr std::int64_t token = heads * (dim * 4 + dim_v * 2);
  constexpr std::int64_t block = token * block_size + 24;
  kv_view view;
  view.k = {base, block, token, dim * 4};
  view.v = {base + heads * dim * 4, block, token, dim_v * 2};
  view.blocks = pool_blocks;
  view.block_size = block_size;
  view.kv_heads = heads;
  view.head_dim = dim;
  view.head_dim_v = dim_v;
  view.k_dtype = dtype_id::float32;
  view.v_dtype = dtype_id::float16;
  return view;
}

/// Head before block, and a gap after each token, in K as wide as the other head would be: [head][block][token].
kv_view heads_outermost(std::byte* base) {
  kv_view view = interleaved(base);
  view.k = {base, block_size * 48, 48, pool_blocks * block_size * 48};
  view.v = {base + heads * pool_blocks * block_size * 48, block_size * 24, 24, pool_blocks * block_size * 24};
  return view;
}

constexpr std::size_t pool_bytes = heads * pool_blocks * block_size * (48 + 24);

void expect_own(bytes& image, std::size_t start, const kv_view& view, const std::byte* base,
                const rows_view<const float>& k, const rows_view<const float>& v, const std::vector<slot_id>& slots) {
  for (std::uint32_t row = 0; row < k.rows; ++row)
    for (std::uint32_t head = 0; head < heads; ++head) {
      const auto block = static_cast<std::uint32_t>(slots[row]) / block_size;
      const auto token = static_cast<std::uint32_t>(slots[row]) % block_size;
      const auto place = [&](const plane_view& plane) {
        return start + static_cast<std::uint64_t>(plane.base - base + block * plane.block_stride +
                                                  token * plane.token_stride + head * plane.head_stride);
      };
      expect<float>(image, place(view.k), k.at(row, head), dim);
      expect<f16>(image, place(view.v), v.at(row, head), dim_v);
    }
}

}  // namespace

TEST_CASE("an engine's own pool is written through a view with any strides") {
  for (const auto make : {interleaved, heads_outermost}) {
    engine_memory memory(pool_bytes);
    const kv_view view = make(memory.base());
    const auto values = random_values<float>(1'000, 71);
    const rows_view<const float> k(values.data(), 3, heads, dim);
    const rows_view<const float> v(values.data() + 100, 3, heads, dim_v);
    const std::vector<slot_id> slots{0, 19, 6};  // the engine's block 0 is a block like others
    bytes image = memory.all();
    expect_own(image, memory.start(), view, memory.base(), k, v, slots);
    append(view, k, v, slots);
    CHECK(differences(memory.all(), image) == 0);

    // A copy of three of block 4's tokens is an append of the same rows to block 2.
    const rows_view<const float> again(values.data() + 500, 4, heads, dim);
    const rows_view<const float> again_v(values.data() + 700, 4, heads, dim_v);
    append(view, again, again_v, std::vector<slot_id>{16, 17, 18, 19});
    expect_own(image, memory.start(), view, memory.base(), again, again_v, {16, 17, 18, 19});
    rows_view<const float> three = again;
    three.rows = 3;
    expect_own(image, memory.start(), view, memory.base(), three, again_v, {8, 9, 10});
    copy(view, std::vector<block_copy>{{.layer_group = 0, .source = 4, .destination = 2, .tokens = 3}});
    CHECK(differences(memory.all(), image) == 0);
  }
}

TEST_CASE("R20 rows for a tail block go to the tail pool, and reading finds them there") {
  storage<bundle<bf16, bf16, nhd>> pool({.layers = 1, .kv_heads = 2, .head_dim = 8}, {.blocks = 3, .block_size = 4});
  storage<bundle<bf16, bf16, hnd>> tail({.layers = 1, .kv_heads = 2, .head_dim = 8}, {.blocks = 2, .block_size = 4});
  kv_view view = pool.view(0);
  view.k_tail = tail.view(0).k;
  view.v_tail = tail.view(0).v;
  view.tail_blocks = tail.view(0).blocks;

  const auto values = random_values<bf16>(64, 81);
  const rows_view<const bf16> k(values.data(), 2, 2, 8);
  const rows_view<const bf16> v(values.data() + 32, 2, 2, 8);
  const std::vector<slot_id> slots{make_slot(3, 1, 4), make_slot(tail_bit | 2, 3, 4)};
  const std::vector<slot_id> in_tail{no_slot, make_slot(2, 3, 4)};
  bytes tail_image = snapshot(tail);
  expect_rows(tail_image, tail, 0, k, v, in_tail);
  bytes pool_image = snapshot(pool);
  expect_rows(pool_image, pool, 0, k, v, {make_slot(3, 1, 4), no_slot});
  append(view, k, v, slots);
  CHECK(differences(snapshot(tail), tail_image) == 0);
  CHECK(differences(snapshot(pool), pool_image) == 0);

  for (std::uint32_t head = 0; head < 2; ++head) {
    CHECK(*reinterpret_cast<const bf16*>(view.k_at(3, 1, head)) == *k.at(0, head));
    CHECK(*reinterpret_cast<const bf16*>(view.v_at(3, 1, head)) == *v.at(0, head));
    CHECK(*reinterpret_cast<const bf16*>(view.k_at(tail_bit | 2, 3, head)) == *k.at(1, head));
    CHECK(*reinterpret_cast<const bf16*>(view.v_at(tail_bit | 2, 3, head)) == *v.at(1, head));
  }
  CHECK_THROWS_AS(append(view, k, v, std::vector<slot_id>{4, make_slot(tail_bit | 3, 0, 4)}), invalid_argument);
}

TEST_CASE("append refuses views whose ids or slots would not fit") {
  std::vector<float> values(64);
  const rows_view<const float> row{values.data(), 1, 1, 8};
  const std::vector<slot_id> slots{0};
  kv_view view;
  view.kv_heads = 1;
  view.head_dim = view.head_dim_v = 8;
  view.block_size = 16;
  view.blocks = 0xffff'ffffu;
  CHECK_THROWS_WITH(append(view, row, row, slots), contains_text("number of blocks is 4294967295"));
  view.blocks = 4;
  view.tail_blocks = 0x7fff'ffffu;
  view.block_size = 0xffff'ffffu;
  CHECK_THROWS_WITH(append(view, row, row, slots), contains_text("block_size is 4294967295"));
}
