// SPDX-License-Identifier: Apache-2.0
// Steps that begin before the tokens of the step before are known, and drafts.
#include "support.hpp"

using namespace kvcache_test;

TEST_CASE("A step may begin before the tokens of the one before are known") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 100, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 64});
  hash_engine engine(m);
  engine.submit(s, words(1, 5), 4);
  for (std::uint32_t n = 0; n < 4; ++n) {
    REQUIRE(engine.plan(s));
    const auto& row = engine.flights.back().rows[0];
    CHECK(row.first == (n == 0 ? 0 : 4 + n));
    CHECK(row.tokens == (n == 0 ? 5 : 1));
    CHECK(row.known == (n == 0 ? 5 : 0));
    CHECK(row.decodes == (n != 0));
    CHECK(engine.flights.back().number == n + 1);
  }
  CHECK_FALSE(engine.plan(s));  // the fourth token is the last, and is never computed
  engine.run_to_end(s, 4);
}

TEST_CASE("A request that turns out to have ended while its next steps are in flight leaves nothing behind") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(2u, 3u, 5u);
  const std::size_t stop_after = GENERATE(1u, 4u, 8u);
  CAPTURE(block_size, depth, stop_after);
  manager m({.blocks = 100, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 64});
  hash_engine engine(m);
  engine.submit(s, words(1, 5), 40, 0, 0, {}, no_value, stop_after);
  engine.submit(s, words(2, 7), 12);
  engine.run_to_end(s, depth);
  CHECK(s.statistics().stopped == 1);
  CHECK(s.statistics().generated_tokens == stop_after + 12);
  // What was computed beyond the end is cached for nobody.
  const text whole = engine.jobs[0].content;
  CHECK(m.probe(whole + words(9, 50)).tokens == (whole.size() - 1) / block_size * block_size);
}

TEST_CASE("Drafts: as many tokens come as were confirmed, and one more") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::uint32_t drafts = GENERATE(1u, 3u, 7u);
  const std::uint32_t good = GENERATE(0u, 2u, 3u);
  const std::size_t depth = GENERATE(1u, 2u, 3u);
  CAPTURE(block_size, drafts, good, depth);
  manager m({.blocks = 300, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 64});
  hash_engine engine(m);
  engine.good_drafts = good;
  for (std::uint32_t i = 0; i < 4; ++i) engine.submit(s, words(i, 3 + i), 30 + i, 0, i == 3 ? 0 : drafts);
  engine.run_to_end(s, depth);
  const auto& t = s.statistics();
  CHECK(t.generated_tokens == 30 + 31 + 32 + 33);
  if (good == 3) CHECK(t.decoded_tokens == 29 + 30 + 31 + 32);
  if (good == 0) CHECK(t.decoded_tokens > 3 * 29 + 32 + drafts * 3 * 20);
}

TEST_CASE("Drafts do not keep prompts out of a step, and take all of it where there are none") {
  manager m({.blocks = 300, .block_size = 4});
  scheduler s(m, {.running = 4, .step_tokens = 34});
  hash_engine engine(m);
  engine.submit(s, words(1, 3), 90, 0, 100);
  engine.step(s);
  REQUIRE(engine.plan(s));
  CHECK(engine.flights.front().rows[0].drafts == 33);
  engine.submit(s, words(2, 100), 1);
  engine.finish(s);
  REQUIRE(engine.plan(s));
  CHECK(engine.flights.front().rows[0].drafts == 16);
  CHECK(engine.flights.front().rows[1].tokens == 17);
  engine.finish(s);
  engine.run_to_end(s);
}

TEST_CASE("A request may end within its drafts, without a token after it") {
  manager m({.blocks = 30, .block_size = 4});
  scheduler s(m, {.running = 4, .step_tokens = 34});
  const text prompt = words(1, 6);
  const auto id = s.submit({.prompt = prompt, .max_tokens = 20, .drafts = 5});
  const text one{7}, three{8, 9, 10};
  const kvcache::row_result first{.tokens = one}, none_ends{.ends = true}, three_end{.tokens = three, .ends = true};
  const auto p = s.next();
  REQUIRE(s.finish(p, {&first, 1}).has_value());
  SECTION("after two drafts that were confirmed") {
    const auto q = s.next();
    REQUIRE(s.finish(q, {&three_end, 1}).has_value());
    CHECK(s.statistics().generated_tokens == 4);
    CHECK(m.probe(prompt + one + three).tokens == 8);
  }
  SECTION("at once") {
    const auto q = s.next();
    REQUIRE(s.finish(q, {&none_ends, 1}).has_value());
    CHECK(s.statistics().generated_tokens == 1);
    CHECK(m.probe(prompt + one + three).tokens == 4);
  }
  REQUIRE(s.ended().size() == 1);
  CHECK(s.ended()[0].request == *id);
  CHECK(s.ended()[0].reason == kvcache::end_reason::stopped);
  check_empty(m, s);
}
