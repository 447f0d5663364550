// SPDX-License-Identifier: Apache-2.0
// Several layer groups in one pool: a table each, one prefix.
#include <kvcache/blocks/layer_groups.hpp>

#include <algorithm>
#include <array>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::block_counts;
using kvcache::layer_group;
using kvcache::want;

TEST_CASE("Layer groups: a prefix's length is a multiple of what all block sizes divide") {
  const std::array some{layer_group{4}, layer_group{6}, layer_group{16}};
  const kvcache::layer_groups groups(some, {99});
  CHECK(groups.size() == 3);
  CHECK(groups.stride() == 48);
  CHECK(groups.largest() == 16);
  CHECK(groups.blocks_for(1, 13) == 3);
  CHECK(groups.blocks_for(13) == 4 + 3 + 1);
  const kvcache::layer_groups one({}, {32});
  CHECK(one.size() == 1);
  CHECK(one.stride() == 32);
  // Larger than any length, and still counted right.
  const std::array coprime{layer_group{4'000'000'007u}, layer_group{4'000'000'009u}, layer_group{3'999'999'979u}};
  CHECK(kvcache::layer_groups(coprime, {16}).stride() == kvcache::max_length + 1);
}

TEST_CASE("Layer groups each have their table, slots and arrays; open fills one after the other") {
  const std::array groups{layer_group{4}, layer_group{8}};
  manager m({.blocks = 20, .layer_groups = groups});
  const text content = words(1, 18);
  const auto s = m.open({.content = content, .reserve = 17})->sequence;
  CHECK(table(m, s, 0) == ids{1, 2, 3, 4, 5});
  CHECK(table(m, s, 1) == ids{6, 7, 8});
  const want w{s, 17};
  auto step = m.begin({&w, 1});
  CHECK(step->batch(0).block_size == 4);
  CHECK(step->batch(1).block_size == 8);
  CHECK(row(step->batch(1).tables, 0) == ids{6, 7, 8});
  CHECK(row(step->padded(1), 0) == ids{6, 7, 8});
  CHECK(step->batch(1).slots[16] == 8 * 8);
  CHECK(step->batch(0).slots[16] == 5 * 4);
  REQUIRE(step->accept().has_value());
  REQUIRE(m.retire(*step).has_value());
  REQUIRE(m.commit(s, head(content, 17)).has_value());
  CHECK(m.probe(content).tokens == 16);
}

TEST_CASE("Layer groups: a hit has to be warm in all of them") {
  const std::array groups{layer_group{4}, layer_group{6}};
  manager m({.blocks = 12, .layer_groups = groups});
  const text content = words(1, 24);
  const auto a = prompt(m, content).sequence;
  CHECK(table(m, a, 0) == ids{1, 2, 3, 4, 5, 6});
  CHECK(table(m, a, 1) == ids{7, 8, 9, 10});
  CHECK(m.probe(content).tokens == 24);
  CHECK(m.probe(head(content, 23)).tokens == 12);
  close(m, a);
  // Tails go first whatever their group, by where their tokens begin.
  const text filler = words(2, 4);
  REQUIRE(m.open({.content = filler, .reserve = 4})->sequence.index == 0);
  CHECK(m.counts().free == 0);
  const text one = words(3, 1);
  const auto next = m.open({.content = one, .reserve = 1})->sequence;
  CHECK(table(m, next, 0) == ids{6});
  CHECK(table(m, next, 1) == ids{10});
  CHECK(m.probe(content).tokens == 12);
  CHECK(m.probe(head(content, 12)).tokens == 12);
}

TEST_CASE("R5 the hits of every layer group are referenced before anything is allocated") {
  const std::uint32_t size = GENERATE(1u, 4u, 16u);
  CAPTURE(size);
  const std::array groups{layer_group{size}, layer_group{size}};
  manager m({.blocks = 8, .layer_groups = groups});
  const text first = words(1, 2 * size);
  close(m, prompt(m, first).sequence);
  CHECK(m.counts() == block_counts{.free = 4, .evictable = 4});
  const text longer = first + words(2, 2 * size);
  const auto s = m.open({.content = longer, .reserve = 4 * size});
  REQUIRE(s.has_value());
  CHECK(s->reused_tokens == 2 * size);
  CHECK(table(m, s->sequence, 0) == ids{1, 2, 5, 6});
  CHECK(table(m, s->sequence, 1) == ids{3, 4, 7, 8});
  CHECK(m.counts().available() == 0);
}

TEST_CASE("R5 V24 hits at the head of the eviction order are never taken for the same request's new blocks") {
  const std::array groups{layer_group{4}, layer_group{8}};
  for (std::uint32_t blocks = 9; blocks <= 14; ++blocks) {
    CAPTURE(blocks);
    manager m({.blocks = blocks, .layer_groups = groups});
    const text cached_text = words(1, 24);
    close(m, prompt(m, cached_text).sequence);
    const text request_text = cached_text + words(2, 8);
    const kvcache::open_request request{.content = request_text, .reserve = 32};
    const auto a = m.predict(request);
    CHECK(a.revived_blocks == 9);
    CHECK(a.new_blocks == 3);
    CHECK(a.fits() == (blocks >= 12));
    const auto s = m.open(request);
    REQUIRE(s.has_value() == a.fits());
    check_counts(m);
    if (!s) continue;
    ids all = table(m, s->sequence, 0);
    const ids other = table(m, s->sequence, 1);
    all.insert(all.end(), other.begin(), other.end());
    CHECK(all.size() == 12);
    std::sort(all.begin(), all.end());
    CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
    for (const kvcache::block_id b : all) CHECK(m.ref_count(b) == 1);
  }
}

TEST_CASE("R2 over layer groups too the latest tokens go first, and of equal ones those of the first group") {
  const bool smaller = GENERATE(false, true);
  const std::array groups{layer_group{4}, layer_group{smaller ? 2u : 4u}};
  manager m({.blocks = smaller ? 9u : 6u, .layer_groups = groups});
  const text content = words(1, 12);
  const auto a = m.open({.content = content, .reserve = 12})->sequence;
  CHECK(table(m, a, 0) == ids{1, 2, 3});
  close(m, a);
  const auto b = m.open({.content = content, .reserve = 12})->sequence;
  CHECK(table(m, b, 0) == (smaller ? ids{9, 3, 8} : ids{3, 6, 2}));
  CHECK(table(m, b, 1) == (smaller ? ids{7, 2, 6, 5, 1, 4} : ids{5, 1, 4}));
}

TEST_CASE("R7 equal content in two layer groups is two blocks") {
  const std::array groups{layer_group{4}, layer_group{4}};
  manager m({.blocks = 8, .layer_groups = groups, .hash_bits = 0});
  const auto s = prompt(m, words(1, 4)).sequence;
  CHECK(table(m, s, 0) == ids{1});
  CHECK(table(m, s, 1) == ids{2});
  CHECK(m.cached(1));
  CHECK(m.cached(2));
  const auto t = prompt(m, words(1, 4)).sequence;
  CHECK(table(m, t, 0) == ids{1});
  CHECK(table(m, t, 1) == ids{2});
}

TEST_CASE("R10 cut at any token, every layer group goes on with the right keys") {
  const std::array groups{layer_group{4}, layer_group{6}, layer_group{1}};
  for (std::uint32_t n = 0; n <= 30; ++n) {
    for (std::uint32_t again = 0; again <= n; ++again) {
      CAPTURE(n, again);
      manager m({.blocks = 200, .layer_groups = groups});
      const text content = words(1, 30);
      const auto a = prompt(m, content).sequence;
      const auto f = m.fork(a, n).value();
      REQUIRE(m.truncate(f, again).has_value());
      const text other = head(content, again) + words(2, 30);
      // In two pieces, so that the second starts anywhere in a block.
      extend(m, f, {other.begin() + again, other.begin() + again + 5});
      extend(m, f, {other.begin() + again + 5, other.end()});
      REQUIRE(m.probe(other).tokens == other.size() / 12 * 12);
      REQUIRE(m.probe(content).tokens == 24);
      check_counts(m);
    }
  }
}

TEST_CASE("R10 a tail shared in several layer groups is copied in each") {
  const std::array groups{layer_group{4}, layer_group{6}};
  manager m({.blocks = 20, .layer_groups = groups});
  const auto a = prompt(m, words(1, 9)).sequence;
  CHECK(table(m, a, 1) == ids{4, 5});
  const auto b = m.fork(a).value();
  const want w{b, 1};
  CHECK(m.blocks_needed({&w, 1}).value() == 2);
  auto step = m.begin({&w, 1});
  const std::vector<kvcache::block_copy> copies(step->copies().begin(), step->copies().end());
  CHECK(copies == std::vector<kvcache::block_copy>{{0, 3, 6, 1}, {1, 5, 7, 3}});
  step->drop();
  CHECK(table(m, b, 0) == ids{1, 2, 3});
  CHECK(table(m, b, 1) == ids{4, 5});
  const text one = words(2, 1);
  CHECK(table(m, m.open({.content = one, .reserve = 1})->sequence, 0) == ids{6});
}

TEST_CASE("a layer group of enormous blocks costs memory by its tokens, not by its block size") {
  const std::array layer_groups{kvcache::layer_group{4}, kvcache::layer_group{0x8000'0000u}};
  manager m({.blocks = 4, .layer_groups = layer_groups});
  const text content = words(1, 8);
  const auto s = m.open({.content = content});
  REQUIRE(s.has_value());
  extend(m, s->sequence, content);
  CHECK(m.cached(table(m, s->sequence, 0)[0]));
}
