// SPDX-License-Identifier: Apache-2.0
// Reuse of the head of a cached block by copy.
#include <array>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::block_copy;
using kvcache::errc;
using kvcache::layer_group;
using kvcache::want;

namespace {

using copies = std::vector<block_copy>;

copies copies_of(const kvcache::step& s) { return {s.copies().begin(), s.copies().end()}; }

kvcache::block_manager_options with_heads(std::uint32_t blocks, std::uint32_t block_size) {
  return {.blocks = blocks, .block_size = block_size, .partial_reuse = true};
}

}  // namespace

TEST_CASE("T1 the head of a block that was committed whole is reused, by copy") {
  manager m(with_heads(8, 4));
  const text nine = words(1, 9);
  const auto a = prompt(m, nine);
  CHECK(a.reused_tokens == 0);
  CHECK(table(m, a.sequence) == ids{1, 2, 3});
  const auto b = prompt(m, nine);
  CHECK(b.reused_tokens == 8);
  CHECK(table(m, b.sequence) == ids{1, 2, 4});
  extend(m, a.sequence, words(1, 3, 9));  // the third block is whole now
  close(m, a.sequence);
  close(m, b.sequence);

  const text ten = words(1, 10);
  const kvcache::open_request request{.content = ten, .reserve = 10};
  CHECK(m.predict(request).reused_tokens == 9);
  CHECK(m.predict(request).new_blocks == 1);
  CHECK(m.predict(request).revived_blocks == 3);
  const auto c = m.open(request);
  REQUIRE(c.has_value());
  CHECK(c->reused_tokens == 9);
  const want one{c->sequence, 1};
  auto step = m.begin({&one, 1});
  REQUIRE(step.has_value());
  const ids own = table(m, c->sequence);
  CHECK(own.size() == 3);
  CHECK(own[2] != 3);
  CHECK(copies_of(*step) == copies{{0, 3, own[2], 1}});
  CHECK(step->batch().slots[0] == own[2] * 4 + 1);
  REQUIRE(step->accept().has_value());
  REQUIRE(m.retire(*step).has_value());
  CHECK(m.probe(words(1, 12)).tokens == 12);  // the source was not touched
  check_counts(m);

  const text single = words(1, 1);
  const auto d = m.open({.content = single, .reserve = 1});
  CHECK(d->reused_tokens == 0);
  CHECK(table(m, d->sequence).size() == 1);
}

TEST_CASE("T3 nine tokens miss three blocks, the same again reuses two and misses one") {
  manager m(with_heads(8, 4));
  const text nine = words(1, 9);
  const auto missed = [&] {
    const auto a = m.predict({.content = nine, .reserve = 9});
    return std::pair{a.total_blocks - a.new_blocks, a.new_blocks};
  };
  CHECK(missed() == std::pair<std::uint64_t, std::uint64_t>{0, 3});
  prompt(m, nine);
  CHECK(missed() == std::pair<std::uint64_t, std::uint64_t>{2, 1});
}

TEST_CASE("V29 48 cached tokens asked for again: 47 with the heads of blocks, 32 without") {
  const bool heads = GENERATE(false, true);
  manager m({.blocks = 10, .block_size = 16, .partial_reuse = heads});
  const text content = words(1, 48);
  close(m, prompt(m, content).sequence);
  CHECK(prompt(m, content).reused_tokens == (heads ? 47 : 32));
  CHECK(m.probe(content).tokens == 48);
}

TEST_CASE("R6 the longest head among the blocks that go on from the prefix, at any length") {
  const std::uint32_t size = GENERATE(2u, 4u, 16u);
  CAPTURE(size);
  const text common = words(1, size);
  const text long_head = common + words(2, size);
  const text short_head = common + head(words(2, size), size / 2) + words(3, size - size / 2);
  for (std::uint32_t n = size + 1; n < 2 * size; ++n) {
    manager m(with_heads(20, size));
    close(m, prompt(m, long_head).sequence);
    close(m, prompt(m, short_head).sequence);
    const text asked = head(long_head, n) + words(4, 1);
    CHECK(m.probe(asked).tokens == n);
    CHECK(prompt(m, asked).reused_tokens == n);
    // The first block of a sequence has heads as well.
    const text first = head(common, n - size) + words(5, 1);
    CHECK(m.probe(first).tokens == n - size);
    // Not under other keys.
    const std::array keys{kvcache::extra_key{kvcache::key_kind::salt, "x"}};
    CHECK(m.probe(asked, keys).tokens == 0);
  }
}

TEST_CASE("R6 R12 of blocks with equally long heads the one that was cached last is taken") {
  manager m({.blocks = 10, .block_size = 4, .partial_reuse = true});
  const text common = words(1, 7);
  close(m, prompt(m, common + words(2, 1)).sequence);
  const auto newest = prompt(m, common + words(3, 1)).sequence;
  const ids of_newest = table(m, newest);
  close(m, newest);
  const text asked = common + words(4, 3);
  const auto s = m.open({.content = asked});
  REQUIRE(s->reused_tokens == 7);
  CHECK(table(m, s->sequence) == of_newest);
}

TEST_CASE("R4 R6 room for the copy is part of what was reserved, whoever else comes to hold the block") {
  manager m(with_heads(5, 4));
  close(m, prompt(m, words(1, 8)).sequence);
  const text seven = words(1, 7);
  const kvcache::open_request request{.content = seven, .reserve = 7};
  const auto a = m.open(request);
  CHECK(a->reused_tokens == 6);
  const auto b = m.open({.content = seven});  // shares the source, holds nothing else
  CHECK(b->reused_tokens == 6);
  const text filler = words(9, 8);
  REQUIRE(m.open({.content = filler, .reserve = 8}).has_value());
  REQUIRE(m.counts().available() == 0);
  const want one{a->sequence, 1};
  CHECK(m.blocks_needed({&one, 1}).value() == 0);
  auto step = m.begin({&one, 1});
  REQUIRE(step.has_value());
  CHECK(step->copies().size() == 1);
  CHECK(table(m, a->sequence).size() == 2);
  step->drop();
  CHECK(table(m, a->sequence) == ids{1, 2, 3});
  check_counts(m);
  auto again = m.begin({&one, 1});
  REQUIRE(again.has_value());
  CHECK(table(m, a->sequence) == ids{1, 3});
}

TEST_CASE("R6 a head is left alone where its copy does not fit, and written over where nothing else is left") {
  SECTION("not even in an empty pool") {
    manager m(with_heads(2, 4));
    close(m, prompt(m, words(1, 8)).sequence);
    const text eight = head(words(1, 8), 7) + words(2, 1);
    CHECK(prompt(m, eight).reused_tokens == 4);
  }
  SECTION("opened without a reserve") {
    manager m(with_heads(2, 4));
    close(m, prompt(m, words(1, 8)).sequence);
    manager larger(with_heads(3, 4));
    close(larger, prompt(larger, words(1, 8)).sequence);
    const text six = head(words(1, 8), 6) + words(2, 1);
    const auto in_place = larger.open({.content = six});
    CHECK(in_place->reused_tokens == 6);
    const text filler = words(9, 1);
    REQUIRE(larger.open({.content = filler, .reserve = 1}).has_value());
    const want one{in_place->sequence, 1};
    CHECK(larger.blocks_needed({&one, 1}).value() == 0);
    auto step = larger.begin({&one, 1});
    REQUIRE(step.has_value());
    CHECK(step->copies().empty());
    CHECK(larger.probe(words(1, 8)).tokens == 4);
  }
}

TEST_CASE("R10 a sequence that has borrowed a tail can be forked, cut and closed before it writes") {
  manager m(with_heads(12, 4));
  close(m, prompt(m, words(1, 8)).sequence);
  const text seven = words(1, 7);
  const auto a = m.open({.content = seven, .reserve = 7})->sequence;
  const auto f = m.fork(a).value();
  const auto whole = m.fork(a, 4).value();
  const auto less = m.fork(a, 5).value();
  CHECK(table(m, f) == ids{1, 2});
  CHECK(table(m, whole) == ids{1});
  const text other = words(1, 6) + words(3, 6);
  extend(m, f, {other.begin() + 6, other.end()});
  CHECK(m.probe(other).tokens == 12);
  CHECK(m.probe(words(1, 8)).tokens == 8);
  const text third = words(1, 5) + words(4, 3);
  extend(m, less, {third.begin() + 5, third.end()});
  CHECK(m.probe(third).tokens == 8);
  REQUIRE(m.truncate(a, 5).has_value());
  const text fourth = words(1, 5) + words(5, 3);
  extend(m, a, {fourth.begin() + 5, fourth.end()});
  CHECK(m.probe(fourth).tokens == 8);
  CHECK(m.probe(words(1, 8)).tokens == 8);
  for (const auto s : {a, f, whole, less}) close(m, s);
  const auto unused = m.open({.content = seven, .reserve = 7})->sequence;
  close(m, unused);
  CHECK(m.counts().available() == 12);
}

TEST_CASE("partial reuse is refused where layer groups cut content differently") {
  const std::array groups{layer_group{4}, layer_group{8}};
  CHECK_THROWS_WITH(manager({.blocks = 8, .layer_groups = groups, .partial_reuse = true}),
                    Catch::Contains("2 block sizes"));
  const std::array equal{layer_group{4}, layer_group{4, 6}};
  manager m({.blocks = 20, .layer_groups = equal, .partial_reuse = true});
  close(m, prompt(m, words(1, 8)).sequence);
  const text asked = words(1, 7);
  const auto s = prompt(m, asked);
  CHECK(s.reused_tokens == 6);
  CHECK(m.probe(words(1, 8)).tokens == 8);
}
