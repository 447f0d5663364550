// SPDX-License-Identifier: Apache-2.0
// Where blocks run short: who gives them back, and what becomes of him.
#include <algorithm>

#include "support.hpp"

using namespace kvcache_test;

namespace {

/// Steps until somebody was preempted. Who, or all jobs where nobody was.
std::size_t first_victim(scheduler& s, hash_engine& engine) {
  while (s.statistics().preemptions == 0 && engine.plan(s)) {
    for (std::size_t i = 0; i < engine.jobs.size(); ++i) {
      const auto p = s.progress(engine.ids[i]);
      if (p && p->preemptions != 0) {
        CHECK_FALSE(p->running);
        engine.finish(s);
        return i;
      }
    }
    engine.finish(s);
  }
  return engine.jobs.size();
}

}  // namespace

TEST_CASE("Two half-loaded requests cannot deadlock: 7 blocks, one needs 4 + 1 more, one 3 + 1 more") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u, 3u);
  CAPTURE(block_size, depth);
  manager m({.blocks = 7, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  engine.submit(s, words(1, 4 * block_size), block_size + 1);
  engine.submit(s, words(2, 3 * block_size), block_size + 1);
  engine.run_to_end(s, depth);
  CHECK(s.statistics().length == 2);
  CHECK(s.statistics().preemptions == 1);
  CHECK(engine.jobs[0].prefilled == 4 * block_size);  // the older one gets on
  CHECK(engine.jobs[1].prefilled > 3 * block_size);
}

TEST_CASE("R13 a preempted request keeps what it has generated; computing it again is counted apart") {
  const std::uint32_t block_size = GENERATE(2u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u);
  CAPTURE(block_size, depth);
  manager m({.blocks = 12, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  engine.submit(s, words(1, 4 * block_size), 6 * block_size);
  engine.submit(s, words(2, 4 * block_size), 6 * block_size);
  engine.run_to_end(s, depth);
  const auto& t = s.statistics();
  CHECK(t.preemptions > 0);
  CHECK(t.queried_tokens == 8 * block_size);
  CHECK(t.admitted == 2);
  CHECK(t.generated_tokens == 12 * block_size);
  // The token after the last one known at a preemption comes with the prefill instead of a decode.
  CHECK(t.prefilled_tokens >= 8 * block_size);
  CHECK(t.prefilled_tokens <= 8 * block_size + 2 * t.preemptions);
  CHECK(t.recomputed_tokens > 0);
}

TEST_CASE("The lowest priority gives its blocks back") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::uint32_t lowest = GENERATE(0u, 1u, 2u);
  CAPTURE(block_size, lowest);
  manager m({.blocks = 9, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < 3; ++i)
    engine.submit(s, words(i, (3 - (i == lowest ? 0 : 1)) * block_size), 2 * block_size + 1, i == lowest ? 0 : 1);
  CHECK(first_victim(s, engine) == lowest);
  engine.run_to_end(s);
}

TEST_CASE("Of equal priorities the one with least to compute again gives its blocks back, but never the oldest") {
  const std::uint32_t block_size = GENERATE(4u, 8u, 16u);
  const std::uint32_t smallest = GENERATE(0u, 1u, 2u);
  CAPTURE(block_size, smallest);
  manager m({.blocks = 9, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < 3; ++i)
    engine.submit(s, words(i, 3 * block_size - (i == smallest ? 2 : 0)), 2 * block_size + 1);
  // Where the oldest has least to lose, it is the youngest of the other two.
  CHECK(first_victim(s, engine) == (smallest == 0 ? 2 : smallest));
  engine.run_to_end(s);
}

TEST_CASE("R11 a lent priority protects the producer from giving its blocks back") {
  const std::uint32_t block_size = GENERATE(2u, 4u, 16u);
  const bool waits = GENERATE(false, true);
  CAPTURE(block_size, waits);
  manager m({.blocks = 18, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 12, .prefill_tokens = 1, .watermark = 0});
  hash_engine engine(m);
  engine.submit(s, words(1, 2 * block_size), 6 * block_size, 9);
  engine.submit(s, words(2, 2 * block_size), 6 * block_size, 1);
  do {
    engine.step(s);
  } while (s.progress(engine.ids[1])->generated == 0);
  // The prompt takes longer than the two that generate need for the blocks that are left.
  const std::uint32_t left = m.counts().available();
  const text prompt = words(3, (left - 2) * block_size);
  engine.submit(s, prompt, 1, 0);
  engine.step(s);
  REQUIRE(s.progress(engine.ids[2])->running);
  if (waits) engine.submit(s, prompt + words(4, 1), 1, 5);
  CHECK(first_victim(s, engine) == (waits ? 1u : 2u));
  engine.run_to_end(s);
}

TEST_CASE("What a request found in the cache is not counted as its loss") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 13, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  const text common = words(1, 4 * block_size);
  engine.submit(s, common + words(2, 1), 1);
  engine.run(s);
  engine.submit(s, words(3, 3 * block_size), 3 * block_size);
  engine.submit(s, words(4, 3 * block_size), 3 * block_size);
  engine.submit(s, common + words(5, 2 * block_size), 3 * block_size);  // longer, but has computed less
  CHECK(first_victim(s, engine) == 3);
  engine.run_to_end(s);
}

TEST_CASE("Drafts cost nobody his blocks") {
  const std::uint32_t block_size = GENERATE(4u, 8u, 16u);
  manager m({.blocks = 7, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  // Ends within its third block, beyond which its drafts would reach; the other one has all the rest.
  engine.submit(s, words(1, 3 * block_size - 3), 2 * block_size, 0, 3, {}, no_value, 2);
  engine.submit(s, words(2, 4 * block_size - 2), 2);
  engine.run_to_end(s);
  CHECK(s.statistics().preemptions == 0);
  CHECK(s.statistics().decoded_tokens == 2);
}

TEST_CASE("Drafts that find no block are left out, and nobody is preempted for them") {
  const std::uint32_t block_size = GENERATE(4u, 8u, 16u);
  manager m({.blocks = 7, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  engine.submit(s, words(1, 3 * block_size), 2 * block_size, 0, 3);
  engine.submit(s, words(2, 4 * block_size - 3), 2 + 3, 0, 3);
  engine.run_to_end(s);
  CHECK(s.statistics().decoded_tokens > 0);
}

TEST_CASE(
    "With steps in flight, rows without blocks sit out, and nobody is preempted for blocks that come back anyway") {
  const std::uint32_t block_size = GENERATE(2u, 4u, 16u);
  manager m({.blocks = 9, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  engine.submit(s, words(1, 3 * block_size), 2);
  engine.submit(s, words(2, 3 * block_size), 2);
  engine.submit(s, words(3, 3 * block_size - 1), 3, 1);
  REQUIRE(engine.plan(s));
  // The second one gives its blocks back, which come with the step in flight; the first one waits for them.
  REQUIRE(engine.plan(s));
  REQUIRE(engine.flights.back().rows.size() == 1);
  CHECK(engine.job_of(engine.flights.back().rows[0].request) == 2);
  CHECK(m.counts().held == 3);
  CHECK_FALSE(engine.plan(s));
  CHECK(s.statistics().preemptions == 1);
  engine.finish(s);
  REQUIRE(engine.plan(s));
  CHECK(engine.flights.back().rows.size() == 2);
  engine.run_to_end(s, 2);
}

TEST_CASE("The last block goes to the higher priority") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::uint32_t higher = GENERATE(0u, 1u);
  CAPTURE(block_size, higher);
  manager m({.blocks = 10, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < 3; ++i) engine.submit(s, words(i, 3 * block_size), 3, i == higher ? 5 : 0);
  REQUIRE(engine.plan(s));
  engine.abort(s, 2);  // its blocks come with the step in flight
  REQUIRE(engine.plan(s));
  REQUIRE(engine.flights.back().rows.size() == 1);
  CHECK(engine.job_of(engine.flights.back().rows[0].request) == higher);
  CHECK(s.statistics().preemptions == 0);
  engine.run_to_end(s, 2);
}

TEST_CASE("A preempted request whose step is still in flight takes the token, and ends with it where it has to") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const bool ends = GENERATE(false, true);
  CAPTURE(block_size, ends);
  manager m({.blocks = 7, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  engine.submit(s, words(1, 4 * block_size), 2 * block_size);
  engine.submit(s, words(2, 3 * block_size), 2 * block_size, 0, 0, {}, no_value, ends ? 1 : 99);
  REQUIRE(engine.plan(s));
  engine.plan(s);  // neither finds a block, so that the second one gives its own back when the step has finished
  CHECK(s.progress(engine.ids[1])->preemptions == 1);
  CHECK_FALSE(s.progress(engine.ids[1])->running);
  engine.finish(s);
  if (ends)
    CHECK(engine.jobs[1].ended);
  else
    CHECK(s.progress(engine.ids[1])->generated == 1);
  engine.run_to_end(s, 2);
}

TEST_CASE("Nobody starves: under a stream of newcomers the oldest always gets on") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u);
  manager m({.blocks = 20, .block_size = block_size});
  scheduler s(m, {.running = 6, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  std::size_t oldest = 0;
  std::size_t steps_of_oldest = 0;
  for (std::uint32_t i = 0; i < 300 || !s.idle();) {
    for (; i < 300 && s.waiting() < 4; ++i)
      engine.submit(s, words(i, (1 + i * 5 % 9) * block_size), 1 + i * 7 % 8 * block_size);
    while (engine.flights.size() < depth && engine.plan(s)) {
    }
    if (!engine.flights.empty()) engine.finish(s);
    ++steps_of_oldest;
    while (oldest < engine.jobs.size() && engine.jobs[oldest].ended) {
      ++oldest;
      steps_of_oldest = 0;
    }
    REQUIRE(steps_of_oldest < 40 * block_size + 40);
  }
  engine.check_tokens();
  CHECK(s.statistics().preemptions > 20);
  check_empty(m, s);
}
