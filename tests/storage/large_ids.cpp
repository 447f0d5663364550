// SPDX-License-Identifier: Apache-2.0
// Pools so large that 32-bit offsets wrap. They lie in a sparse file, so few pages are ever touched.
#include <kvcache/memory/mapped_file_allocator.hpp>

#include <cstdint>
#include <vector>

#include "../memory/resident.hpp"
#include "../memory/temporary_path.hpp"
#include "catch.hpp"
#include "pool.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

template <class Layout>
struct mapped : policies {
  using layout = Layout;
  using allocator = mapped_file_allocator;
};

// A block is 2 x 16 x 8 x 128 elements of 2 bytes: block 65,536 begins 2^31 elements into the layer, block 131,072
// begins 2^32 elements into it; layer 1 begins past all of them.
constexpr geometry shape{.layers = 2, .kv_heads = 8, .head_dim = 128};
constexpr std::uint32_t blocks = 131'074;
constexpr std::int64_t block_bytes = 65'536;

template <class Layout>
storage<mapped<Layout>> make(const temporary_path& path) {
  return storage<mapped<Layout>>(
      shape, {.blocks = blocks, .allocator = mapped_file_allocator(path.string(), {.reserve = false})});
}

}  // namespace

TEMPLATE_TEST_CASE("attention_6 R8 rows reach blocks beyond 2^31 and 2^32 elements, and only those", "", nhd, hnd) {
  const temporary_path path;
  auto pool = make<TestType>(path);
  REQUIRE(pool.bytes() == std::uint64_t{2} * (blocks + 1) * block_bytes);
  const std::vector<block_id> ids{1, 65'535, 65'536, 65'537, 131'071, 131'072, 131'073, 131'074};
  std::vector<bf16> k;
  std::vector<bf16> v;
  std::vector<slot_id> slots;
  for (std::uint32_t i = 0; i < ids.size(); ++i) {
    k.insert(k.end(), 8 * 128, bf16{static_cast<std::uint16_t>(0x4000 + i)});
    v.insert(v.end(), 8 * 128, bf16{static_cast<std::uint16_t>(0x5000 + i)});
    slots.push_back(make_slot(ids[i], 15, 16));
  }
  const auto rows = static_cast<std::uint32_t>(ids.size());
  pool.append(1, rows_view<const bf16>(k.data(), rows, 8, 128), rows_view<const bf16>(v.data(), rows, 8, 128), slots);

  const std::byte* const start = pool.view(0).k.base;
  const memory_order order = order_of(pool);
  for (std::uint32_t i = 0; i < ids.size(); ++i)
    for (std::uint32_t head = 0; head < 8; ++head) {
      CAPTURE(ids[i], head);
      const auto* const k_there = reinterpret_cast<const bf16*>(start + order.k_at(1, slots[i], head));
      const auto* const v_there = reinterpret_cast<const bf16*>(start + order.v_at(1, slots[i], head));
      CHECK(k_there[0].bits == 0x4000 + i);
      CHECK(k_there[127].bits == 0x4000 + i);
      CHECK(v_there[0].bits == 0x5000 + i);
      CHECK(v_there[127].bits == 0x5000 + i);
      const kv_view view = pool.view(1);
      CHECK(reinterpret_cast<const bf16*>(view.k_at(ids[i], 15, head)) == k_there);
      CHECK(reinterpret_cast<const bf16*>(view.v_at(ids[i], 15, head)) == v_there);
    }
}

TEMPLATE_TEST_CASE("attention_6 R8 R10 a copy between blocks beyond 2^32 elements", "", nhd, hnd) {
  const temporary_path path;
  auto pool = make<TestType>(path);
  const std::vector<bf16> k(8 * 128, bf16{0x4242});
  const std::vector<bf16> v(8 * 128, bf16{0x4343});
  const rows_view<const bf16> k_row(k.data(), 1, 8, 128);
  const rows_view<const bf16> v_row(v.data(), 1, 8, 128);
  pool.append(1, k_row, v_row, std::vector<slot_id>{make_slot(131'074, 0, 16)});
  pool.copy(std::vector<block_copy>{{0, 131'074, 131'072, 1}});
  const memory_order order = order_of(pool);
  const std::byte* const start = pool.view(0).k.base;
  for (std::uint32_t head = 0; head < 8; ++head) {
    const slot_id slot = make_slot(131'072, 0, 16);
    CHECK(reinterpret_cast<const bf16*>(start + order.k_at(1, slot, head))[127].bits == 0x4242);
    CHECK(reinterpret_cast<const bf16*>(start + order.v_at(1, slot, head))[127].bits == 0x4343);
  }
}

TEST_CASE("a pool larger than the memory used stays on paper") {
  const temporary_path path;
  auto pool = make<nhd>(path);
  CHECK(resident_bytes(pool.view(0).k.base, static_cast<std::size_t>(pool.bytes())) == 0);
}
