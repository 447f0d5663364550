// SPDX-License-Identifier: Apache-2.0
// Fork, truncate, and writing into blocks that others hold.
#include <algorithm>
#include <array>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::block_copy;
using kvcache::block_counts;
using kvcache::block_state;
using kvcache::errc;
using kvcache::sequence_id;
using kvcache::want;

namespace {

/// One step for all of `sequences`; its copies.
std::vector<block_copy> compute_all(manager& m, const std::vector<sequence_id>& sequences, std::uint32_t tokens) {
  std::vector<want> wants;
  for (const sequence_id s : sequences) wants.push_back({s, tokens});
  const std::uint64_t needed = m.blocks_needed(wants).value();
  const std::uint32_t available = m.counts().available();
  auto step = m.begin(wants);
  REQUIRE(step.has_value());
  CHECK(m.counts().available() == available - needed);
  const std::vector<block_copy> copies(step->copies().begin(), step->copies().end());
  REQUIRE(step->accept().has_value());
  REQUIRE(m.retire(*step).has_value());
  check_counts(m);
  return copies;
}

}  // namespace

TEST_CASE("T11 R10 four beams share all until they write; the last to write needs no copy") {
  manager m({.blocks = 30, .block_size = 64});
  std::vector<sequence_id> beams{prompt(m, words(1, 575)).sequence};
  while (beams.size() < 4) beams.push_back(m.fork(beams[0]).value());
  CHECK(m.counts().referenced == 9);
  for (const sequence_id beam : beams) CHECK(table(m, beam) == ids{1, 2, 3, 4, 5, 6, 7, 8, 9});

  const auto copies = compute_all(m, beams, 1);
  CHECK(copies == std::vector<block_copy>{{0, 9, 10, 63}, {0, 9, 11, 63}, {0, 9, 12, 63}});
  CHECK(m.counts().referenced == 12);
  for (kvcache::block_id b = 1; b <= 8; ++b) CHECK(m.ref_count(b) == 4);
  for (kvcache::block_id b = 9; b <= 12; ++b) CHECK(m.ref_count(b) == 1);

  CHECK(compute_all(m, beams, 1).empty());
  CHECK(m.counts().referenced == 16);
  compute_all(m, beams, 3);
  CHECK(m.counts().referenced == 16);
  for (const sequence_id beam : beams) REQUIRE(m.truncate(beam, 576).has_value());
  CHECK(m.counts().referenced == 12);
  for (const sequence_id beam : beams) close(m, beam);
  CHECK(m.counts().available() == 30);
}

TEST_CASE("T14 cutting one of two sequences leaves the other untouched") {
  manager m({.blocks = 20, .block_size = 4});
  const text shared = words(1, 10);
  const auto a = prompt(m, shared + words(2, 8)).sequence;
  CHECK(table(m, a).size() == 5);
  const auto b = prompt(m, shared + words(3, 17));
  CHECK(b.reused_tokens == 8);
  const ids before = table(m, a);
  REQUIRE(m.truncate(b.sequence, 10).has_value());
  CHECK(table(m, b.sequence).size() == 3);
  CHECK(table(m, a) == before);
  CHECK(*m.length(a) == 18);
  CHECK(m.probe(shared + words(2, 8)).tokens == 16);
  // B goes on with other tokens: A's keys and blocks stay.
  extend(m, b.sequence, words(4, 6));
  CHECK(table(m, a) == before);
  CHECK(m.probe(shared + words(2, 8)).tokens == 16);
  CHECK(m.probe(shared + words(4, 6)).tokens == 16);
  CHECK(*m.length(b.sequence) == 16);
}

TEST_CASE("M1 two forks go on with different tokens; closing all gives the whole pool back") {
  manager m({.blocks = 10, .block_size = 1});
  const auto s = prompt(m, {0, 1, 2, 3}).sequence;
  const auto f = m.fork(s, 3).value();
  extend(m, f, {4});
  const auto g = m.fork(s, 3).value();
  extend(m, g, {5});
  CHECK(m.probe(text{0, 1, 2, 4}).tokens == 4);
  CHECK(m.probe(text{0, 1, 2, 5}).tokens == 4);
  CHECK(m.probe(text{0, 1, 2, 3}).tokens == 4);
  CHECK(m.counts().referenced == 6);
  for (const sequence_id id : {s, f, g}) close(m, id);
  CHECK(m.counts() == block_counts{.free = 4, .evictable = 6});
  CHECK(m.counts().available() == 10);
}

TEST_CASE("M1 forked before anything is committed, the same keys come out") {
  manager m({.blocks = 10, .block_size = 1});
  const text start{0, 1, 2, 3};
  const auto s = m.open({.content = start})->sequence;
  compute(m, s, 4);
  const auto f = m.fork(s, 3).value();
  compute(m, f, 1);
  const auto g = m.fork(s, 3).value();
  compute(m, g, 1);
  REQUIRE(m.commit(g, text{0, 1, 2, 5}).has_value());
  REQUIRE(m.commit(s, start).has_value());
  REQUIRE(m.commit(f, text{0, 1, 2, 4}).has_value());
  for (const std::int32_t last : {3, 4, 5}) CHECK(m.probe(text{0, 1, 2, last}).tokens == 4);
  CHECK(m.counts().referenced == 6);
  for (const sequence_id id : {g, s, f}) close(m, id);
  CHECK(m.counts().available() == 10);
  CHECK(m.counts().evictable == 6);
}

TEST_CASE("S5 probing a tree of sequences changes nothing in it") {
  manager m({.blocks = 20, .block_size = 1});
  prompt(m, {1, 2, 3, 4, 5, 6, 7, 8});
  prompt(m, {1, 2, 9, 10});
  CHECK(m.counts().referenced == 10);
  CHECK(m.probe(text{1, 2, 3, 4, 999}).tokens == 4);
  CHECK(m.probe(text{1, 2, 3, 4, 5, 6, 777}).tokens == 6);
  CHECK(m.counts().referenced == 10);
}

TEST_CASE("S1 S3 a closed chain is evictable; opening it again takes it out, closing puts it back") {
  manager m({.blocks = 10, .block_size = 1});
  close(m, prompt(m, {1, 2, 3}).sequence);
  CHECK(m.counts().evictable == 3);
  CHECK(m.probe(text{1, 2}).tokens == 2);
  const text longer{1, 2, 3, 4};
  const auto s = m.open({.content = longer})->sequence;
  CHECK(m.counts() == block_counts{.free = 7, .referenced = 3});
  close(m, s);
  CHECK(m.counts() == block_counts{.free = 7, .evictable = 3});
}

TEST_CASE("R10 writing into a shared block copies what is valid of it, and only then") {
  const std::uint32_t block_size = GENERATE(2u, 4u, 16u);
  CAPTURE(block_size);
  manager m({.blocks = 20, .block_size = block_size});
  const text content = words(1, 2 * block_size - 1);
  const auto a = prompt(m, content).sequence;
  const auto b = m.fork(a).value();
  CHECK(m.counts().referenced == 2);
  CHECK(compute_all(m, {b}, 1) == std::vector<block_copy>{{0, 2, 3, block_size - 1}});
  CHECK(table(m, a) == ids{1, 2});
  CHECK(table(m, b) == ids{1, 3});
  CHECK(compute_all(m, {a}, 1).empty());
  CHECK(table(m, a) == ids{1, 2});
}

TEST_CASE("R10 a fork at a block's end copies nothing") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 20, .block_size = block_size});
  const auto a = prompt(m, words(1, 2 * block_size)).sequence;
  const auto b = m.fork(a).value();
  const auto c = m.fork(a, block_size).value();
  CHECK(compute_all(m, {a, b, c}, 1).empty());
  CHECK(m.counts().referenced == 5);
}

TEST_CASE("R10 fork and truncate at every length touch the blocks that these lengths need") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 40, .block_size = block_size});
  const text content = words(1, 3 * block_size);
  const auto a = prompt(m, content).sequence;
  for (std::uint32_t n = 0; n <= content.size(); ++n) {
    CAPTURE(block_size, n);
    const auto f = m.fork(a, n).value();
    CHECK(table(m, f).size() == (n + block_size - 1) / block_size);
    CHECK(*m.length(f) == n);
    CHECK(*m.committed(f) == n);
    // It goes on from any length with keys of its own, and with the very same keys.
    const auto same = m.fork(a, n).value();
    extend(m, same, {content.begin() + n, content.end()});
    CHECK(table(m, same).size() == 3);
    CHECK(m.probe(content).tokens == content.size());
    const text other = head(content, n) + words(2 + static_cast<int>(n), 2 * block_size);
    extend(m, f, {other.begin() + n, other.end()});
    CHECK(m.probe(other).tokens == other.size() / block_size * block_size);
    REQUIRE(m.truncate(f, n).has_value());
    CHECK(table(m, f).size() == (n + block_size - 1) / block_size);
    const text third = head(content, n) + words(2000 / 16 + static_cast<int>(n), 2 * block_size);
    extend(m, f, {third.begin() + n, third.end()});
    CHECK(m.probe(third).tokens == third.size() / block_size * block_size);
    close(m, f);
    close(m, same);
    CHECK(m.probe(content).tokens == content.size());
    CHECK(table(m, a).size() == 3);
  }
}

TEST_CASE("R10 the last holder of a cached block writes in place, and the block and its successors are found no more") {
  manager m({.blocks = 8, .block_size = 4});
  const text content = words(1, 16);
  const auto a = prompt(m, content).sequence;
  REQUIRE(m.truncate(a, 6).has_value());
  CHECK(m.counts() == block_counts{.free = 4, .evictable = 2, .referenced = 2});
  CHECK(m.probe(content).tokens == 16);
  const want w{a, 1};
  CHECK(m.blocks_needed({&w, 1}).value() == 0);
  CHECK(compute_all(m, {a}, 1).empty());
  CHECK(table(m, a) == ids{1, 2});
  CHECK(m.counts() == block_counts{.free = 6, .referenced = 2});
  CHECK(m.probe(content).tokens == 4);
  REQUIRE(m.commit(a, words(2, 1)).has_value());
  extend(m, a, words(3, 1));
  CHECK(m.probe(head(content, 6) + words(2, 1) + words(3, 1)).tokens == 8);
  close(m, a);
  CHECK(drain(m) == ids{4, 3, 5, 6, 7, 8, 2, 1});
}

TEST_CASE("R10 the last holder copies all the same while a step in flight of another may touch the block") {
  manager m({.blocks = 8, .block_size = 4});
  const auto a = prompt(m, words(1, 6)).sequence;
  const auto b = m.fork(a).value();
  const want reads{a, 0};
  auto step = m.begin({&reads, 1});
  REQUIRE(step->accept().has_value());
  close(m, a);
  const want w{b, 1};
  CHECK(m.ref_count(2) == 1);
  CHECK(m.blocks_needed({&w, 1}).value() == 1);
  {
    auto next = m.begin({&w, 1});
    CHECK(next->copies().size() == 1);
    CHECK(m.state(2) == block_state::held);
    next->drop();
    CHECK(table(m, b) == ids{1, 2});
  }
  REQUIRE(m.retire(*step).has_value());
  CHECK(m.blocks_needed({&w, 1}).value() == 0);
  auto next = m.begin({&w, 1});
  CHECK(next->copies().empty());
}

TEST_CASE("R10 in one step no two write one block, though a fork of them is in flight elsewhere") {
  manager m({.blocks = 12, .block_size = 4});
  const auto a = prompt(m, words(1, 6)).sequence;
  const auto b = m.fork(a).value();
  const auto c = m.fork(a).value();
  const want reads{a, 0};
  auto step = m.begin({&reads, 1});
  REQUIRE(step->accept().has_value());
  // a's step is in flight, so that not even the last of the three may write into what it reads.
  const std::array wants{want{a, 1}, want{b, 1}, want{c, 1}};
  CHECK(m.blocks_needed(wants).value() == 3);
  auto next = m.begin(wants);
  CHECK(next->copies().size() == 3);
  std::vector<kvcache::slot_id> slots(next->batch().slots.begin(), next->batch().slots.end());
  std::sort(slots.begin(), slots.end());
  CHECK(std::adjacent_find(slots.begin(), slots.end()) == slots.end());
  CHECK(m.state(2) == block_state::held);
  REQUIRE(next->accept().has_value());
  REQUIRE(m.retire(*next).has_value());
  CHECK(m.counts() == block_counts{.free = 8, .referenced = 4});
}

TEST_CASE("R10 the source of a copy is not reused before the step that copies retires") {
  manager m({.blocks = 4, .block_size = 4});
  const auto a = prompt(m, words(1, 6)).sequence;
  const auto b = m.fork(a).value();
  const want w{b, 1};
  auto step = m.begin({&w, 1});
  CHECK(step->copies().front() == block_copy{0, 2, 3, 2});
  close(m, a);
  CHECK(m.state(2) == block_state::held);
  CHECK(m.counts() == block_counts{.free = 1, .referenced = 2, .held = 1});
  SECTION("accepted") {
    REQUIRE(step->accept().has_value());
    REQUIRE(m.retire(*step).has_value());
    CHECK(m.state(2) == block_state::free);
    CHECK(table(m, b) == ids{1, 3});
  }
  SECTION("dropped: it is the tail again") {
    step->drop();
    CHECK(table(m, b) == ids{1, 2});
    CHECK(m.ref_count(2) == 1);
    CHECK(m.counts() == block_counts{.free = 2, .referenced = 2});
    CHECK(m.blocks_needed({&w, 1}).value() == 0);
  }
}

TEST_CASE("Fork and truncate beyond the length, or in a step that is not accepted, are refused") {
  manager m({.blocks = 8, .block_size = 4});
  const auto a = prompt(m, words(1, 6)).sequence;
  CHECK(m.fork(a, 7).error() == kvcache::failure{errc::beyond_length, 7, 6});
  CHECK(m.truncate(a, 7).error() == kvcache::failure{errc::beyond_length, 7, 6});
  const want w{a, 1};
  auto step = m.begin({&w, 1});
  CHECK(m.truncate(a, 2).error() == kvcache::failure{errc::step_order, 3, 2});
  CHECK(m.fork(a, 2).error() == kvcache::failure{errc::step_order, 3, 2});
  REQUIRE(step->accept().has_value());
  CHECK(m.truncate(a, 2).has_value());
  CHECK(m.counts().held == 1);
  CHECK(m.fork(a, 2).has_value());
}

TEST_CASE("R8 a closed sequence is stale for every call, and stays so when its place is taken again") {
  manager m({.blocks = 8, .block_size = GENERATE(1u, 4u, 16u)});
  const auto a = prompt(m, words(1, 6)).sequence;
  close(m, a);
  const auto check_stale = [&] {
    const auto counts = m.counts();
    const kvcache::failure stale{errc::stale_id, a.index, 1};
    CHECK(m.close(a).error() == stale);
    CHECK(m.fork(a).error() == stale);
    CHECK(m.truncate(a, 0).error() == stale);
    CHECK(m.commit(a, words(1, 1)).error() == stale);
    CHECK(m.length(a).error() == stale);
    CHECK(m.committed(a).error() == stale);
    CHECK(m.table(a).error() == stale);
    std::array<kvcache::slot_id, 1> out{};
    CHECK(m.slots(a, 0, out).error() == stale);
    const want w{a, 1};
    CHECK(m.begin({&w, 1}).error() == stale);
    CHECK_FALSE(m.contains(a));
    CHECK(m.counts() == counts);
  };
  check_stale();
  const auto b = prompt(m, words(2, 6)).sequence;
  CHECK(b.index == a.index);
  CHECK(b != a);
  check_stale();
  CHECK(m.close(sequence_id{}).error().code == errc::stale_id);
  CHECK(m.close(sequence_id{12345, 0}).error() == kvcache::failure{errc::stale_id, 12345, 0});
}

TEST_CASE("Commit beyond what was accepted is refused and changes nothing") {
  manager m({.blocks = 8, .block_size = 4});
  const text content = words(1, 9);
  const auto a = m.open({.content = content})->sequence;
  compute(m, a, 5);
  const want w{a, 4};
  auto step = m.begin({&w, 1});
  CHECK(m.commit(a, content).error() == kvcache::failure{errc::beyond_length, 9, 5});
  CHECK(*m.committed(a) == 0);
  REQUIRE(m.commit(a, head(content, 5)).has_value());
  CHECK(m.commit(a, words(1, 1, 5)).error() == kvcache::failure{errc::beyond_length, 6, 5});
  REQUIRE(step->accept().has_value());
  REQUIRE(m.commit(a, words(1, 4, 5)).has_value());
  CHECK(m.probe(content).tokens == 8);
}

TEST_CASE("R4 an unreferenced block is not available while a cached successor of it is in use") {
  manager m({.blocks = 6, .block_size = 4});
  const text first = words(1, 4);
  close(m, prompt(m, first).sequence);
  REQUIRE(m.state(1) == block_state::evictable);
  // The same content again without a hit (R1), in block 2; its fork keeps that block when A's gives way to block 1.
  const auto a = m.open({.content = first})->sequence;
  compute(m, a, 8);
  CHECK(table(m, a) == ids{2, 3});
  const auto b = m.fork(a).value();
  REQUIRE(m.commit(a, first + words(2, 4)).has_value());
  CHECK(table(m, a) == ids{1, 3});
  CHECK(table(m, b) == ids{2, 3});
  close(m, a);
  CHECK(m.state(1) == block_state::held);
  CHECK(m.counts() == block_counts{.free = 3, .referenced = 2, .held = 1});
  SECTION("it goes when the successor does") {
    close(m, b);
    CHECK(m.counts() == block_counts{.free = 4, .evictable = 2});
    CHECK(drain(m) == ids{2, 4, 5, 6, 3, 1});
  }
  SECTION("it can be opened") {
    const text longer = first + words(3, 1);
    const auto c = m.open({.content = longer})->sequence;
    CHECK(m.state(1) == block_state::referenced);
    close(m, b);
    CHECK(m.state(3) == block_state::evictable);
    close(m, c);
    CHECK(m.counts().evictable == 2);
  }
  SECTION("the successor's holder copies rather than set it free by overwriting") {
    REQUIRE(m.truncate(b, 6).has_value());
    const want w{b, 1};
    CHECK(m.blocks_needed({&w, 1}).value() == 1);
    compute(m, b, 1);
    CHECK(m.counts() == block_counts{.free = 2, .evictable = 2, .referenced = 2});
    CHECK(m.probe(first + words(2, 4)).tokens == 8);
  }
  SECTION("who holds it alone copies rather than overwrite what its successor's holder needs") {
    const auto c = m.open({.content = first + words(2, 4)});
    REQUIRE(c.has_value());
    REQUIRE(c->reused_tokens == 4);
    REQUIRE(m.truncate(c->sequence, 2).has_value());
    const want w{c->sequence, 1};
    CHECK(m.blocks_needed({&w, 1}).value() == 1);
    compute(m, c->sequence, 1);
    CHECK(m.probe(first + words(2, 4)).tokens == 8);
  }
  SECTION("its other copy, committed late, gives way to it") {
    REQUIRE(m.commit(b, first + words(2, 4)).has_value());
    CHECK(table(m, b) == ids{1, 3});
    CHECK(m.counts() == block_counts{.free = 4, .referenced = 2});
  }
}
