// SPDX-License-Identifier: Apache-2.0
// Which blocks a request finds, which it takes, and in which order blocks go.
#include "support.hpp"

using namespace kvcache_test;
using kvcache::block_counts;
using kvcache::block_state;
using kvcache::errc;

namespace {

struct v1 {
  manager m{{.blocks = 10, .block_size = 16}};
  text common = words(1, 48);
  kvcache::opened a = prompt(m, common + words(2, 7));
  kvcache::opened b = prompt(m, common + words(3, 5));

  kvcache::opened open_c() {
    close(m, a.sequence);
    close(m, b.sequence);
    return prompt(m, common + words(4, 6));
  }
};

}  // namespace

TEST_CASE("V1 two requests share the blocks of their common head") {
  v1 s;
  CHECK(table(s.m, s.a.sequence) == ids{1, 2, 3, 4});
  CHECK(s.a.reused_tokens == 0);
  CHECK(table(s.m, s.b.sequence) == ids{1, 2, 3, 5});
  CHECK(s.b.reused_tokens == 48);
  for (const kvcache::block_id b : {1u, 2u, 3u}) CHECK(s.m.ref_count(b) == 2);
  CHECK(s.m.counts().available() == 5);
  CHECK(s.m.statistics() == kvcache::block_statistics{.opened_sequences = 2, .queried_tokens = 108, .hit_tokens = 48});
}

TEST_CASE("V1 released blocks go in the order tails, never used, shared heads from their end") {
  v1 s;
  close(s.m, s.a.sequence);
  close(s.m, s.b.sequence);
  CHECK(s.m.counts() == block_counts{.free = 7, .evictable = 3});
  CHECK(drain(s.m) == ids{5, 4, 6, 7, 8, 9, 10, 3, 2, 1});
}

TEST_CASE("V1 a third request finds the head and takes the front of the order") {
  v1 s;
  const auto c = s.open_c();
  CHECK(c.reused_tokens == 48);
  CHECK(table(s.m, c.sequence) == ids{1, 2, 3, 5});
  CHECK(s.m.counts().available() == 6);
}

TEST_CASE("V1 a request of ten blocks that shares nothing takes the whole pool, cached blocks last") {
  v1 s;
  close(s.m, s.open_c().sequence);
  const auto d = prompt(s.m, words(5, 160));
  CHECK(d.reused_tokens == 0);
  CHECK(table(s.m, d.sequence) == ids{5, 4, 6, 7, 8, 9, 10, 3, 2, 1});
  CHECK(s.m.counts().available() == 0);
  CHECK(s.m.statistics().evicted_blocks == 3);
}

TEST_CASE("V2 order after two releases, and a hit that leaves the rest of a chain behind") {
  const auto run = [](int stage) {
    manager m({.blocks = 10, .block_size = 16});
    const text long_text = words(1, 87);
    const auto a = prompt(m, long_text);
    CHECK(table(m, a.sequence) == ids{1, 2, 3, 4, 5, 6});
    const auto b = prompt(m, words(2, 48));
    CHECK(table(m, b.sequence) == ids{7, 8, 9});
    CHECK(m.counts().available() == 1);
    close(m, a.sequence);
    if (stage == 0) return drain(m);
    close(m, b.sequence);
    if (stage == 1) return drain(m);
    const auto c = prompt(m, head(long_text, 35));
    CHECK(c.reused_tokens == 32);
    CHECK(m.counts().available() == 7);
    return table(m, c.sequence);
  };
  CHECK(run(0) == ids{6, 10, 5, 4, 3, 2, 1});
  CHECK(run(1) == ids{6, 10, 5, 4, 3, 2, 1, 9, 8, 7});
  CHECK(run(2) == ids{1, 2, 6});
}

TEST_CASE("V3 a cached block that is taken for other tokens has no key left") {
  manager m({.blocks = 1, .block_size = 16});
  const text content = words(1, 16);
  close(m, prompt(m, content).sequence);
  REQUIRE(m.state(1) == block_state::evictable);
  REQUIRE(m.probe(content).tokens == 16);
  const auto other = prompt(m, words(2, 15));
  CHECK(table(m, other.sequence) == ids{1});
  CHECK_FALSE(m.cached(1));
  CHECK(m.probe(content).tokens == 0);
}

TEST_CASE("V4 R5 a request that hits the next block to be evicted takes the other one as its new block") {
  manager m({.blocks = 2, .block_size = 16});
  const text first = words(1, 16);
  const auto a = prompt(m, first);
  const auto b = prompt(m, words(2, 16));
  close(m, a.sequence);
  close(m, b.sequence);
  const auto c = prompt(m, first + words(3, 16));
  CHECK(c.reused_tokens == 16);
  CHECK(table(m, c.sequence) == ids{1, 2});
}

TEST_CASE("V6 R5 a request that is one block short leaves counts, references, order and statistics as before") {
  const auto run = [](bool with_refusal) {
    manager m({.blocks = 10, .block_size = 16});
    const text head_text = words(1, 48);
    const text b_text = head_text + words(2, 48);
    const auto a = prompt(m, head_text);
    const auto b = prompt(m, b_text);
    CHECK(b.reused_tokens == 48);
    close(m, b.sequence);
    CHECK(table(m, a.sequence) == ids{1, 2, 3});
    for (const kvcache::block_id block : {1u, 2u, 3u}) CHECK(m.ref_count(block) == 1);
    for (const kvcache::block_id block : {4u, 5u, 6u}) CHECK(m.ref_count(block) == 0);
    prompt(m, words(3, 32));
    CHECK(m.counts().available() == 5);
    if (with_refusal) {
      const auto counts = m.counts();
      const auto statistics = m.statistics();
      const text d = b_text + words(4, 48);
      const kvcache::open_request request{.content = d, .reserve = d.size()};
      CHECK(m.predict(request).reused_tokens == 96);
      CHECK(m.predict(request).needs == 6);
      CHECK_FALSE(m.predict(request).fits());
      CHECK(m.open(request).error() == kvcache::failure{errc::out_of_blocks, 6, 5});
      CHECK(m.counts() == counts);
      CHECK(m.statistics() == statistics);
      for (const kvcache::block_id block : {1u, 2u, 3u}) CHECK(m.ref_count(block) == 1);
      for (const kvcache::block_id block : {4u, 5u, 6u}) CHECK(m.state(block) == block_state::evictable);
    }
    // A refused request takes no place either: the next sequence is the same one.
    const text probe_text = words(5, 1);
    const auto next = m.open({.content = probe_text});
    return std::pair(next->sequence, drain(m));
  };
  const auto plain = run(false);
  CHECK(plain.second == ids{9, 10, 6, 5, 4});
  CHECK(run(true) == plain);
}

TEST_CASE("V8 a reset is refused while a block is in use; afterwards nothing is found and every block is free") {
  const std::uint32_t size = GENERATE(1u, 4u, 16u);
  CAPTURE(size);
  manager m({.blocks = 8, .block_size = size});
  const text content = words(1, 3 * size);
  const kvcache::extra_key salt{kvcache::key_kind::salt, "s"};
  close(m, prompt(m, content, {&salt, 1}).sequence);
  const auto a = prompt(m, content).sequence;
  CHECK(m.reset().error() == kvcache::failure{errc::in_use, 3, 0});
  CHECK(m.probe(content).tokens == 3 * size);

  // A step in flight holds what was closed.
  const kvcache::want w{a, 1};
  auto step = m.begin({&w, 1});
  REQUIRE(step->accept().has_value());
  close(m, a);
  CHECK(m.reset().error() == kvcache::failure{errc::in_use, 4, 0});
  REQUIRE(m.retire(*step).has_value());

  const auto before = m.statistics();
  REQUIRE(m.reset().has_value());
  CHECK(m.statistics() == before);
  CHECK(m.counts() == block_counts{.free = 8});
  CHECK(m.probe(content).tokens == 0);
  CHECK(m.probe(content, {&salt, 1}).tokens == 0);
  for (kvcache::block_id b = 1; b <= 8; ++b) CHECK_FALSE(m.cached(b));
  CHECK(m.reset().has_value());
  CHECK(prompt(m, content).reused_tokens == 0);
  CHECK(m.probe(content).tokens == 3 * size);
}

TEST_CASE("V8 blocks of another generation of weights are out of reach at once") {
  manager m({.blocks = 8, .block_size = 4});
  const text content = words(1, 12);
  const kvcache::extra_key old_weights{kvcache::key_kind::generation, "1"};
  const kvcache::extra_key new_weights{kvcache::key_kind::generation, "2"};
  close(m, prompt(m, content, {&old_weights, 1}).sequence);
  CHECK(m.probe(content, {&new_weights, 1}).tokens == 0);
  CHECK(prompt(m, content, {&new_weights, 1}).reused_tokens == 0);
  CHECK(m.probe(content, {&old_weights, 1}).tokens == 12);
}

TEST_CASE("V11 a decode takes a new block when the last is full, and only full blocks are cached") {
  manager m({.blocks = 10, .block_size = 16});
  const text all = words(1, 78);
  const auto s = prompt(m, head(all, 55)).sequence;
  CHECK(table(m, s).size() == 4);
  extend(m, s, words(1, 4, 55));
  CHECK(table(m, s).size() == 4);
  extend(m, s, words(1, 19, 59));
  const ids blocks = table(m, s);
  REQUIRE(blocks.size() == 5);
  CHECK(m.cached(blocks[3]));
  CHECK_FALSE(m.cached(blocks[4]));
  CHECK(m.probe(all).tokens == 64);
}

TEST_CASE("V29 R1 the last token is always computed: of 48 cached tokens two blocks are reused") {
  manager m({.blocks = 10, .block_size = 16});
  const text content = words(1, 48);
  close(m, prompt(m, content).sequence);
  CHECK(m.predict({.content = content, .reserve = 48}).reused_tokens == 32);
  CHECK(m.probe(content).tokens == 48);
  const auto again = m.open({.content = content, .reserve = 48});
  REQUIRE(again.has_value());
  CHECK(again->reused_tokens == 32);
  CHECK(table(m, again->sequence).size() == 3);
}

TEST_CASE("R1 reuse never covers the last token, at any length and block size") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  CAPTURE(block_size);
  manager m({.blocks = 100, .block_size = block_size});
  const text all = words(1, 3 * block_size + 1);
  close(m, prompt(m, all).sequence);
  for (std::uint32_t n = 1; n <= all.size(); ++n) {
    CAPTURE(n);
    const text content = head(all, n);
    const auto s = m.open({.content = content});
    REQUIRE(s.has_value());
    CHECK(s->reused_tokens == (n - 1) / block_size * block_size);
    CHECK(m.probe(content).tokens == n / block_size * block_size);
    close(m, s->sequence);
  }
}

TEST_CASE("R2 a released chain is evicted from its tail, uncached tail first") {
  const std::uint32_t block_size = GENERATE(2u, 4u, 16u);
  manager m({.blocks = 4, .block_size = block_size});
  const auto s = prompt(m, words(1, 4 * block_size - 1)).sequence;
  CHECK(table(m, s) == ids{1, 2, 3, 4});
  close(m, s);
  CHECK(drain(m) == ids{4, 3, 2, 1});
}

TEST_CASE("R2 of uncached blocks the tail goes first too, ahead of free blocks of before") {
  manager m({.blocks = 6, .block_size = 4});
  const text content = words(1, 12);
  const auto s = m.open({.content = content, .reserve = 12})->sequence;
  CHECK(table(m, s) == ids{1, 2, 3});
  close(m, s);
  CHECK(drain(m) == ids{3, 2, 1, 4, 5, 6});
}

TEST_CASE("A touched chain is the newest again") {
  manager m({.blocks = 5, .block_size = 4});
  const text first = words(1, 8);
  const auto a = prompt(m, first).sequence;
  const auto b = prompt(m, words(2, 8)).sequence;
  close(m, a);
  close(m, b);
  const text longer = first + words(3, 1);
  close(m, m.open({.content = longer})->sequence);
  CHECK(drain(m) == ids{5, 4, 3, 2, 1});
}

TEST_CASE("R8 looking does not touch: probe and predict change no order and no statistic") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  CAPTURE(block_size);
  const auto run = [&](bool look) {
    manager m({.blocks = 4, .block_size = block_size});
    const text first = words(1, 2 * block_size);
    const text second = words(2, 2 * block_size);
    const auto a = prompt(m, first).sequence;
    const auto b = prompt(m, second).sequence;
    close(m, a);
    close(m, b);
    const auto before = m.statistics();
    if (look) {
      const text longer = first + second;
      CHECK(m.probe(longer).tokens == 2 * block_size);
      CHECK(m.predict({.content = longer, .reserve = 4 * block_size}).reused_tokens == 2 * block_size);
    }
    CHECK(m.statistics() == before);
    return drain(m);
  };
  CHECK(run(true) == ids{2, 1, 4, 3});
  CHECK(run(false) == ids{2, 1, 4, 3});
}

TEST_CASE("R4 a hit on an evictable block consumes capacity: predictor and allocator agree to the block") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  // Three cached blocks, unreferenced, and `others` of another request that stays: hits 3, new 2, needs 5.
  for (std::uint32_t blocks = 5; blocks <= 10; ++blocks) {
    CAPTURE(block_size, blocks);
    manager m({.blocks = blocks, .block_size = block_size});
    const text cached_text = words(1, 3 * block_size);
    const text stays = words(2, 2 * block_size);
    close(m, prompt(m, cached_text).sequence);
    prompt(m, stays);
    const text request_text = cached_text + words(3, 2 * block_size);
    const kvcache::open_request request{.content = request_text, .reserve = request_text.size()};
    const kvcache::admission a = m.predict(request);
    CHECK(a.needs == a.new_blocks + a.revived_blocks);
    CHECK(a.available == blocks - 2);
    CHECK(a.total_blocks == 5);
    const std::uint32_t available = m.counts().available();
    const auto opened = m.open(request);
    CHECK(opened.has_value() == a.fits());
    CHECK(opened.has_value() == (blocks >= 7));
    CHECK(m.counts().available() == (opened ? available - a.needs : available));
    if (opened) CHECK(opened->reused_tokens == a.reused_tokens);
    check_counts(m);
  }
}

TEST_CASE("R4 a hit on a block in use consumes nothing") {
  manager m({.blocks = 4, .block_size = 4});
  const text content = words(1, 12);
  prompt(m, content);
  const text longer = content + words(2, 4);
  const kvcache::admission a = m.predict({.content = longer, .reserve = 16});
  CHECK(a.reused_tokens == 12);
  CHECK(a.revived_blocks == 0);
  CHECK(a.needs == 1);
  CHECK(m.open({.content = longer, .reserve = 16}).has_value());
  CHECK(m.counts().available() == 0);
}

TEST_CASE("R6 only full blocks of committed tokens can be found") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 20, .block_size = block_size});
  const text content = words(1, 4 * block_size);
  const auto s = m.open({.content = content})->sequence;
  compute(m, s, 4 * block_size);
  CHECK(m.probe(content).tokens == 0);
  for (std::uint32_t n = 1; n <= content.size(); ++n) {
    REQUIRE(m.commit(s, text{content[n - 1]}).has_value());
    CHECK(m.probe(content).tokens == n / block_size * block_size);
  }
  CHECK(*m.committed(s) == content.size());
}

TEST_CASE("R14 with nothing admitted and nothing in flight a request that cannot be held fails at once") {
  manager m({.blocks = 3, .block_size = 4});
  const text fits = words(1, 12);
  const text too_long = words(1, 13);
  CHECK(m.open({.content = too_long, .reserve = 13}).error() == kvcache::failure{errc::exceeds_pool, 4, 3});
  CHECK(m.open({.content = too_long}).error() == kvcache::failure{errc::exceeds_pool, 4, 3});
  CHECK_FALSE(m.predict({.content = too_long}).fits());
  const auto s = m.open({.content = fits, .reserve = 12})->sequence;
  const kvcache::want w{s, 13};
  CHECK(m.begin({&w, 1}).error() == kvcache::failure{errc::exceeds_pool, 4, 3});
  const text one = words(2, 1);
  const auto t = m.open({.content = one})->sequence;
  const kvcache::want second{t, 1};
  CHECK(m.begin({&second, 1}).error() == kvcache::failure{errc::out_of_blocks, 1, 0});
  CHECK(m.blocks_needed({&second, 1}).value() == 1);
}

TEST_CASE("R13 a request that is opened again after it lost its blocks is no second one") {
  manager m({.blocks = 10, .block_size = 4});
  const text content = words(1, 9);
  close(m, prompt(m, content).sequence);
  const auto once = m.statistics();
  CHECK(once.opened_sequences == 1);
  CHECK(once.queried_tokens == 9);
  const auto again = m.open({.content = content, .counted = true});
  REQUIRE(again.has_value());
  CHECK(again->reused_tokens == 8);
  CHECK(m.statistics() == once);
}
