// SPDX-License-Identifier: Apache-2.0
#include <kvcache/views.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "catch.hpp"

using namespace kvcache;

TEST_CASE("rows without gaps step by heads and head_dim") {
  std::vector<float> data(3 * 4 * 5);
  const rows_view<float> rows(data.data(), 3, 4, 5);
  CHECK(rows.row_stride == 20);
  CHECK(rows.head_stride == 5);
  CHECK(rows.at(2, 3) == data.data() + 2 * 20 + 3 * 5);
}

TEST_CASE("rows can be a slice of a fused matrix, and read-only") {
  std::vector<bf16> fused(10 * 100);
  const rows_view<bf16> v(fused.data() + 80, 10, 2, 10, 100, 10);
  CHECK(v.at(9, 1) == fused.data() + 9 * 100 + 90);
  const rows_view<const bf16> reading = v;
  CHECK(reading.at(9, 1) == v.at(9, 1));
}

TEST_CASE("R8 rows step beyond 2^32 elements") {
  // Addresses only: nothing is read.
  const rows_view<float> rows(reinterpret_cast<float*>(std::uintptr_t{1} << 12), 70'000, 8, 128, std::int64_t{1} << 20,
                              128);
  const auto* const first = reinterpret_cast<const std::byte*>(rows.data);
  CHECK(reinterpret_cast<const std::byte*>(rows.at(65'536, 7)) - first == 4 * ((std::int64_t{65'536} << 20) + 7 * 128));
}

TEST_CASE("content reads 32-bit ids and 64-bit units alike") {
  const std::array<std::int32_t, 4> narrow{1, 2, -1, 4};
  const std::vector<content_unit> wide{1, 2, 0xffff'ffffu, 4};
  const content_view a = narrow;
  const content_view b = wide;
  REQUIRE(a.size() == 4);
  REQUIRE(b.size() == 4);
  for (std::size_t i = 0; i < 4; ++i) CHECK(a[i] == b[i]);
  CHECK((a[2] & fingerprint_tag) == 0);
  CHECK(a.sub(1, 2).size() == 2);
  CHECK(a.sub(1, 2)[0] == 2);
  CHECK(b.sub(3, 1)[0] == 4);
  CHECK(a.sub(4, 0).empty());
  CHECK(content_view().empty());
}

TEST_CASE("padded and CSR tables show the same rows") {
  const std::array<block_id, 9> padded_blocks{5, 6, 7, 8, 0, 0, 0, 0, 0};
  const std::array<block_id, 4> csr_blocks{5, 6, 7, 8};
  const std::array<std::uint32_t, 4> offsets{0, 3, 4, 4};
  const block_tables padded = block_tables::padded(padded_blocks.data(), 3, 3);
  const block_tables csr = block_tables::csr(csr_blocks.data(), offsets);
  REQUIRE(padded.rows() == 3);
  REQUIRE(csr.rows() == 3);
  for (std::uint32_t r = 0; r < 3; ++r)
    for (std::size_t i = 0; i < csr.row(r).size(); ++i) CHECK(csr.row(r)[i] == padded.row(r)[i]);
  CHECK(csr.row(0).size() == 3);
  CHECK(csr.row(1).size() == 1);
  CHECK(csr.row(2).empty());
  CHECK(padded.row(2).size() == 3);
  CHECK(padded.row(2)[0] == null_block);
  CHECK(block_tables().rows() == 0);
}

TEST_CASE("a batch knows its rows and tokens") {
  const std::vector<std::uint32_t> offsets{0, 3, 3, 8};
  const std::vector<std::uint32_t> lengths{10, 20, 5};
  batch_view batch;
  CHECK(batch.tokens() == 0);
  CHECK(batch.rows() == 0);
  batch.query_offsets = offsets;
  batch.kv_lengths = lengths;
  CHECK(batch.tokens() == 8);
  CHECK(batch.rows() == 3);
}

TEST_CASE("attention_6 R8 a plane addresses blocks beyond 2^31 and 2^32 elements") {
  // Addresses only: nothing is read. 16 tokens x 8 heads x 128 elements of 2 bytes, K and V side by side.
  std::byte* const base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 12);
  const plane_view plane{base, 65'536, 2'048, 256};
  for (const block_id block : {65'535u, 65'536u, 131'071u, 131'072u, max_blocks}) {
    const std::uint64_t expected = (std::uint64_t{1} << 12) + std::uint64_t{block} * 65'536 + 15 * 2'048 + 7 * 256;
    CHECK(reinterpret_cast<std::uintptr_t>(plane.at(block, 15, 7)) == expected);
  }
}

TEST_CASE("R20 an entry with the tail bit leads to the tail pool, with its own strides") {
  std::array<std::byte, 64> memory{};
  std::byte* const m = memory.data();
  kv_view view;
  view.k = {m, 8, 2, 4};
  view.v = {m + 16, 8, 2, 4};
  view.k_tail = {m + 32, 16, 4, 2};
  view.v_tail = {m + 48, 16, 8, 1};
  CHECK(view.k_at(1, 1, 1) == m + 8 + 2 + 4);
  CHECK(view.v_at(1, 1, 1) == m + 16 + 8 + 2 + 4);
  CHECK(view.k_at(tail_bit | 1, 1, 1) == m + 32 + 16 + 4 + 2);
  CHECK(view.v_at(tail_bit | 0, 1, 1) == m + 48 + 8 + 1);
}
