// SPDX-License-Identifier: Apache-2.0
// Who is admitted when, what a step is made of, what is refused.
#include <kvcache/error.hpp>

#include <algorithm>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::end_reason;
using kvcache::errc;

namespace {

/// Tokens that a plan computes, by kind.
struct amounts {
  std::uint32_t decodes = 0;
  std::uint32_t prefills = 0;
  std::uint32_t prompt_tokens = 0;

  explicit amounts(const kvcache::step_plan& p) {
    for (const auto& row : p.rows) {
      (row.decodes ? decodes : prefills) += 1;
      if (!row.decodes) prompt_tokens += row.tokens;
    }
  }
};

/// Requests in the order in which their first rows come.
std::vector<std::size_t> admissions(scheduler& s, hash_engine& engine) {
  std::vector<std::size_t> order;
  while (engine.plan(s)) {
    for (const auto& row : engine.flights.front().rows) {
      const std::size_t job = engine.job_of(row.request);
      if (std::find(order.begin(), order.end(), job) == order.end()) order.push_back(job);
    }
    engine.finish(s);
  }
  return order;
}

}  // namespace

TEST_CASE("Requests of any length end with the tokens they would have alone") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u, 4u);
  CAPTURE(block_size, depth);
  manager m({.blocks = 4096 / block_size, .block_size = block_size});
  scheduler s(m, {.running = 5, .step_tokens = 24});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < 20; ++i) engine.submit(s, words(i, 1 + i * 7), 1 + i % 9);
  engine.run_to_end(s, depth);
  CHECK(s.statistics().length == 20);
  CHECK(s.statistics().generated_tokens == 93);
}

TEST_CASE("A step mixes one token of each request that generates with chunks of prompts, up to its tokens") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 4096 / block_size, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 20, .prefill_tokens = GENERATE(0u, 12u)});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < 3; ++i) engine.submit(s, words(i, 5), 50);
  engine.step(s);
  while (amounts(engine.plan(s) ? engine.flights.front() : kvcache::step_plan{}).decodes < 3) engine.finish(s);
  engine.finish(s);
  engine.submit(s, words(7, 40), 2);
  std::vector<std::uint32_t> chunks;
  for (int i = 0; i < 5; ++i) {
    REQUIRE(engine.plan(s));
    const amounts a(engine.flights.front());
    if (a.prefills != 0) {
      CHECK(a.decodes == 3);
      chunks.push_back(a.prompt_tokens);
    }
    engine.finish(s);
  }
  CHECK((chunks == std::vector<std::uint32_t>{17, 17, 6} || chunks == std::vector<std::uint32_t>{12, 12, 12, 4}));
  engine.run_to_end(s);
}

TEST_CASE("No more requests run than the limit says") {
  manager m({.blocks = 1000, .block_size = 4});
  scheduler s(m, {.running = 3, .step_tokens = 100});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < 10; ++i) engine.submit(s, words(i, 5), 4);
  std::size_t most = 0;
  while (engine.plan(s)) {
    most = std::max(most, engine.flights.front().rows.size());
    CHECK(s.running() + s.waiting() <= 10);
    engine.finish(s);
  }
  CHECK(most == 3);
  engine.check_tokens();
}

TEST_CASE("Higher priorities go first, equal ones in order of arrival") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 4096 / block_size, .block_size = block_size});
  scheduler s(m, {.running = 1, .step_tokens = 8});
  hash_engine engine(m);
  const std::vector<std::int32_t> priorities{0, 5, -3, 5, 0, 7, 5, -3, 0, 7};
  for (std::uint32_t i = 0; i < priorities.size(); ++i) engine.submit(s, words(i, 9), 2, priorities[i]);
  CHECK(admissions(s, engine) == std::vector<std::size_t>{5, 9, 1, 3, 6, 0, 4, 8, 2, 7});
}

TEST_CASE("Prompts that share a step get their chunks by priority, those that only then are admitted as well") {
  manager m({.blocks = 100, .block_size = 4});
  scheduler s(m, {.running = 4, .step_tokens = 10});
  hash_engine engine(m);
  using row = std::pair<std::size_t, std::uint32_t>;
  const auto step = [&] {
    REQUIRE(engine.plan(s));
    std::vector<row> rows;
    for (const auto& r : engine.flights.front().rows) rows.emplace_back(engine.job_of(r.request), r.tokens);
    engine.finish(s);
    return rows;
  };
  engine.submit(s, words(1, 15), 1, 0);
  CHECK(step() == std::vector<row>{{0, 10}});
  engine.submit(s, words(2, 12), 1, 9);
  engine.submit(s, words(3, 9), 1, 0);
  CHECK(step() == std::vector<row>{{1, 10}});
  CHECK(step() == std::vector<row>{{1, 2}, {0, 5}, {2, 3}});
  engine.run_to_end(s);
}

TEST_CASE("R4 a request is admitted exactly where predict says that it fits: one block decides") {
  const std::uint32_t block_size = GENERATE(2u, 4u, 16u);
  const std::uint32_t missing = GENERATE(0u, 1u);
  manager m({.blocks = 10 - missing, .block_size = block_size});
  const text cached = words(1, 4 * block_size);
  {
    scheduler warm(m);
    hash_engine engine(m);
    engine.submit(warm, cached + words(2, 1), 1);
    engine.run(warm);
  }
  REQUIRE(m.counts().evictable == 4);
  // Somebody else holds 3 blocks.
  const text other = words(9, 3 * block_size);
  const auto held = m.open({.content = other, .reserve = other.size()});
  REQUIRE(held.has_value());
  scheduler s(m, {.watermark = 0});
  const text prompt = cached + words(4, 3 * block_size);
  const auto id = s.submit({.prompt = prompt, .max_tokens = 1});
  REQUIRE(id.has_value());
  const auto expected = m.predict({.content = prompt, .reserve = prompt.size()});
  CHECK(expected.needs == 7);
  CHECK(expected.fits() == (missing == 0));
  const auto plan = s.next();
  CHECK(plan.empty() == (missing == 1));
  if (missing == 1) {
    REQUIRE(s.ended().size() == 1);
    CHECK(s.ended()[0].request == *id);
    CHECK(s.ended()[0].why == kvcache::failure{errc::out_of_blocks, 7, 6});
  } else {
    CHECK(plan.rows[0].first == 4 * block_size);
    CHECK(m.counts().available() == 0);
  }
}

TEST_CASE("An admission leaves the watermark to those that run, unless none does") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::uint32_t watermark = GENERATE(1u, 2u);
  CAPTURE(block_size, watermark);
  manager m({.blocks = 9, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = watermark});
  hash_engine engine(m);
  // One block of each is not filled by its prompt but for the last token.
  engine.submit(s, words(1, 3 * block_size), 1 + 4 * block_size);
  engine.submit(s, words(2, 4 * block_size), 1);
  REQUIRE(engine.plan(s));
  CHECK(engine.flights.front().rows.size() == 2);  // 7 blocks
  CHECK(m.counts().available() == 2);
  engine.finish(s);  // the second ends: 6 are available
  engine.submit(s, words(3, (7 - watermark) * block_size), 1);
  REQUIRE(engine.plan(s));  // the first takes one block for its next token
  CHECK(engine.flights.front().rows.size() == 1);
  engine.finish(s);
  engine.submit(s, words(4, (5 - watermark) * block_size), 1, 1);
  REQUIRE(engine.plan(s));
  CHECK(engine.flights.front().rows.size() == (block_size == 1 ? 1 : 2));
  engine.finish(s);
  engine.run_to_end(s);
  // Larger than what the watermark leaves of an empty pool.
  engine.submit(s, words(5, 9 * block_size), 1);
  engine.run_to_end(s);
}

TEST_CASE("Nobody passes a request that does not fit") {
  manager m({.blocks = 10, .block_size = 4});
  scheduler s(m, {.running = 4, .step_tokens = 100, .watermark = 0});
  hash_engine engine(m);
  engine.submit(s, words(1, 20), 8);
  engine.submit(s, words(2, 30), 2);
  engine.submit(s, words(3, 2), 2);
  CHECK(admissions(s, engine) == std::vector<std::size_t>{0, 1, 2});
}

TEST_CASE("A request larger than the pool is refused at once, with a clear message") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 7, .block_size = block_size});
  scheduler s(m);
  hash_engine engine(m);
  const text prompt = words(1, 5 * block_size);
  // The last token is never computed.
  const auto refused = s.submit({.prompt = prompt, .max_tokens = 2 * block_size + 2});
  REQUIRE_FALSE(refused.has_value());
  CHECK(refused.error() == kvcache::failure{errc::exceeds_pool, 8, 7});
  CHECK_THAT(kvcache::message(refused.error()), contains_text("8 blocks needed, the pool has 7"));
  CHECK_FALSE(s.submit({.prompt = prompt, .max_tokens = ~0u}).has_value());
  CHECK(s.statistics() == kvcache::scheduler_statistics{});
  CHECK(s.idle());
  engine.submit(s, prompt, 2 * block_size + 1);
  engine.run_to_end(s);
  CHECK(s.statistics().preemptions == 0);
}

TEST_CASE("A request without a prompt, or without a token to generate, is refused") {
  manager m({.blocks = 7, .block_size = 4});
  scheduler s(m);
  CHECK(s.submit({.prompt = {}, .max_tokens = 3}).error() == kvcache::failure{errc::empty_content, 0, 1});
  const text prompt = words(1, 3);
  CHECK(s.submit({.prompt = prompt, .max_tokens = 0}).error() == kvcache::failure{errc::empty_content, 0, 1});
}

TEST_CASE("R14 where others hold the pool, the first request fails with out_of_blocks and the next one is tried") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 10, .block_size = block_size});
  const text other = words(9, 6 * block_size);
  const auto held = m.open({.content = other, .reserve = other.size()});
  scheduler s(m);
  hash_engine engine(m);
  engine.submit(s, words(1, 5 * block_size), 1);
  engine.submit(s, words(2, 4 * block_size), 1);
  engine.submit(s, words(3, 7 * block_size), 1);
  engine.run(s);
  CHECK(engine.jobs[0].reason == end_reason::failed);
  CHECK(engine.jobs[0].why == kvcache::failure{errc::out_of_blocks, 5, 4});
  CHECK(engine.jobs[1].reason == end_reason::length);
  CHECK(engine.jobs[2].reason == end_reason::failed);
  CHECK(s.statistics().failed == 2);
  engine.check_tokens(2);
  REQUIRE(m.close(held->sequence).has_value());
  check_empty(m, s);
}

TEST_CASE("R14 a request that runs alone and finds no block fails, instead of stopping for ever") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 3u);
  manager m({.blocks = 10, .block_size = block_size});
  const text other = words(9, 6 * block_size);
  const auto held = m.open({.content = other, .reserve = other.size()});
  scheduler s(m);
  hash_engine engine(m);
  engine.submit(s, words(1, 2 * block_size), 4 * block_size);
  engine.run(s, depth);
  CHECK(engine.jobs[0].reason == end_reason::failed);
  CHECK(engine.jobs[0].why == kvcache::failure{errc::out_of_blocks, 1, 0});
  // What it had is right: the tokens of the two blocks that were left, and the one after them.
  const text prompt = words(1, 2 * block_size);
  CHECK(engine.jobs[0].generated() == alone(prompt, 2 * block_size + 1, 1000));
  REQUIRE(m.close(held->sequence).has_value());
  check_empty(m, s);
}

TEST_CASE("R13 a request counts its prompt and its hits once, at its first admission") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 12, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  const text common = words(1, 2 * block_size);
  engine.submit(s, common + words(2, block_size), 1);
  engine.run(s);
  engine.submit(s, words(4, 6 * block_size), 5 * block_size);
  engine.submit(s, common + words(3, block_size), 3 * block_size);
  engine.run_to_end(s);
  const auto& t = s.statistics();
  CHECK(t.admitted == 3);
  CHECK(t.queried_tokens == 12 * block_size);
  CHECK(t.hit_tokens == 2 * block_size);
  CHECK(t.preemptions > 0);
  CHECK(t.recomputed_tokens > 0);
  CHECK(t.prefilled_tokens + t.hit_tokens >= t.queried_tokens);
  // And so does the block manager, which opens a preempted request anew.
  CHECK(m.statistics().opened_sequences == 3);
  CHECK(m.statistics().queried_tokens == t.queried_tokens);
  CHECK(m.statistics().hit_tokens == t.hit_tokens);
}

TEST_CASE("V22 refused three times, then admitted: one record; what is computed again after a preemption is apart") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 16, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  const text common = words(1, 2 * block_size);
  engine.submit(s, common + words(2, 1), 1);
  engine.run(s);
  const text other = words(3, 1);
  const auto others = m.open({.content = other, .reserve = 6 * block_size})->sequence;
  const auto oldest = engine.submit(s, words(4, 3 * block_size), 9 * block_size, 0);
  const auto refused = engine.submit(s, common + words(5, 6 * block_size), 4 * block_size, 0);
  const auto before = s.statistics();
  for (std::uint32_t tries = 1; tries <= 3; ++tries) {
    // Whoever starts might be somebody to wait for, so the refused one is looked at again.
    engine.submit(s, words(5 + tries, 1), 1, 1);
    engine.step(s);
    CHECK_FALSE(s.progress(engine.ids[refused])->running);
    CHECK(s.statistics().examined == before.examined + 2 * tries + 1);
    CHECK(s.statistics().admitted == before.admitted + tries + 1);
    CHECK(s.statistics().queried_tokens == before.queried_tokens + 3 * block_size + tries);
    CHECK(s.statistics().hit_tokens == before.hit_tokens);
    CHECK(m.statistics().opened_sequences == s.statistics().admitted + 1);
    CHECK(m.statistics().queried_tokens == s.statistics().queried_tokens + 1);
  }
  REQUIRE(m.close(others).has_value());
  engine.run_to_end(s);
  const auto& t = s.statistics();
  CHECK(t.preemptions > 0);
  CHECK(t.admitted == 6);
  CHECK(t.queried_tokens == 2 * block_size + 1 + 3 * block_size + 8 * block_size + 3);
  CHECK(t.hit_tokens == 2 * block_size);
  CHECK(m.statistics().opened_sequences == 7);
  CHECK(m.statistics().queried_tokens == t.queried_tokens + 1);
  CHECK(m.statistics().hit_tokens == t.hit_tokens);
  CHECK(t.recomputed_tokens > 0);
  CHECK(t.prefilled_tokens >= t.queried_tokens - t.hit_tokens);
  CHECK(t.prefilled_tokens <= t.queried_tokens - t.hit_tokens + t.preemptions);
  CHECK(engine.jobs[oldest].prefilled == 3 * block_size);
  CHECK(t.prefilled_tokens + t.recomputed_tokens ==
        2 * block_size + 1 + 3 * block_size + 3 + engine.jobs[refused].prefilled);
}

TEST_CASE("A request that was refused is admitted once another one gives its blocks back, whoever else goes on") {
  manager m({.blocks = 20, .block_size = 16});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  const auto goes_on = engine.submit(s, words(1, 64), 100);
  const auto ends = engine.submit(s, words(2, 160), 3);
  const auto refused = engine.submit(s, words(3, 160), 3);
  while (!engine.jobs[ends].ended) {
    REQUIRE(engine.plan(s));
    CHECK(s.running() == 2);
    engine.finish(s);
  }
  REQUIRE(engine.plan(s));
  CHECK(s.progress(engine.ids[refused])->running);
  CHECK(s.progress(engine.ids[goes_on])->running);
  engine.run_to_end(s);
}

TEST_CASE("A refused request is not looked at again until that may have changed") {
  manager m({.blocks = 20, .block_size = 16});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  engine.submit(s, words(1, 160), 150);
  engine.submit(s, words(2, 300), 1);
  engine.step(s);
  const auto before = s.statistics().examined;
  for (int i = 0; i < 100; ++i) {
    engine.step(s);
  }
  CHECK(s.statistics().examined == before);
  engine.run_to_end(s);
}

TEST_CASE("A refused request waits for one of higher priority that starts with its prefix, and others pass it by") {
  const std::uint32_t block_size = GENERATE(2u, 4u, 16u);
  manager m({.blocks = 20, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 12, .prefill_tokens = 3, .watermark = 0});
  hash_engine engine(m);
  const text common = words(1, 8 * block_size);
  engine.submit(s, words(2, 4), 9 * block_size, 9);
  engine.step(s);
  engine.submit(s, common + words(3, 12 * block_size), 1);  // all there is
  engine.submit(s, words(4, 1), 1);
  REQUIRE(engine.plan(s));
  CHECK(s.running() == 1);
  engine.finish(s);
  engine.submit(s, common, 1, 1);
  REQUIRE(engine.plan(s));
  CHECK(s.progress(engine.ids[3])->running);
  engine.finish(s);
  // Its last chunk leaves something of a step.
  while (!engine.jobs[3].ended && engine.plan(s)) engine.finish(s);
  CHECK(engine.jobs[2].ended);
  CHECK_FALSE(s.progress(engine.ids[1])->running);
  engine.run_to_end(s);
}

TEST_CASE("Options that can never work are refused with value, limit and remedy") {
  manager m({.blocks = 7, .block_size = 4});
  CHECK_THROWS_WITH(scheduler(m, {.running = 0}), contains_text("0 requests running at once, at least 1"));
  CHECK_THROWS_WITH(scheduler(m, {.running = 9, .step_tokens = 8}), contains_text("8 tokens in a step, at least 9"));
  CHECK_THROWS_WITH(scheduler(m, {.hash_bits = 65}), contains_text("65 hash bits, at most 64"));
}

TEST_CASE("A result that cannot be is refused and changes nothing") {
  manager m({.blocks = 50, .block_size = 4});
  scheduler s(m, {.running = 4, .step_tokens = 10});
  const text prompt = words(1, 12);
  const auto id = s.submit({.prompt = prompt, .max_tokens = 5, .drafts = 2});
  const auto first = s.next();
  const auto second = s.next();
  REQUIRE((first.rows.size() == 1 && second.rows.size() == 1));
  const text token{7};
  const text too_many{7, 8, 9, 10};
  const kvcache::row_result none{}, one{.tokens = token}, four{.tokens = too_many};
  CHECK(s.finish(second, {&none, 1}).error() == kvcache::failure{errc::step_order, 2, 1});
  CHECK(s.finish(first, {}).error() == kvcache::failure{errc::beyond_length, 0, 1});
  CHECK(s.finish(first, {&one, 1}).error() == kvcache::failure{errc::beyond_length, 1, 0});
  CHECK(s.progress(*id)->computed == 0);
  REQUIRE(s.finish(first, {&none, 1}).has_value());
  CHECK(s.progress(*id)->computed == 10);
  CHECK(s.finish(first, {&none, 1}).error().code == errc::stale_id);
  CHECK(s.finish(second, {&none, 1}).error() == kvcache::failure{errc::beyond_length, 0, 1});
  REQUIRE(s.finish(second, {&one, 1}).has_value());
  CHECK(s.progress(*id)->generated == 1);
  const auto third = s.next();
  REQUIRE(third.rows[0].drafts == 2);
  CHECK(s.finish(third, {&four, 1}).error() == kvcache::failure{errc::beyond_length, 4, 3});
  CHECK(s.statistics().generated_tokens == 1);
  CHECK(s.finish({}, {}).error().code == errc::stale_id);
}

TEST_CASE("Layer groups of several block sizes: what is shared is a multiple of all of them") {
  const std::vector<kvcache::layer_group> groups{{4}, {6}};
  manager m({.blocks = 200, .layer_groups = groups});
  scheduler s(m, {.running = 4, .step_tokens = 100});
  hash_engine engine(m);  // over the first group
  const text common = words(1, 30);
  for (std::uint32_t i = 0; i < 6; ++i) engine.submit(s, common + words(2 + i, 9), 5);
  engine.run_to_end(s);
  CHECK(s.statistics().hit_tokens == 5 * 24);
  CHECK(s.statistics().prefilled_tokens == 39 + 5 * 15);
}
