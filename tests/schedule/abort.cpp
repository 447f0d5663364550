// SPDX-License-Identifier: Apache-2.0
// A request can be aborted in every state, and nothing of it stays.
#include "support.hpp"

using namespace kvcache_test;
using kvcache::errc;

namespace {

/// Aborts job 1, goes on, and expects the others to end as if it had not been.
void abort_and_go_on(scheduler& s, hash_engine& engine, std::size_t depth = 1) {
  engine.abort(s, 1);
  CHECK_FALSE(s.contains(engine.ids[1]));
  CHECK(s.abort(engine.ids[1]).error().code == errc::stale_id);
  CHECK(s.progress(engine.ids[1]).error().code == errc::stale_id);
  CHECK(s.tokens(engine.ids[1]).error().code == errc::stale_id);
  engine.run_to_end(s, depth);
  CHECK(s.statistics().aborted == 1);
}

}  // namespace

TEST_CASE("Abort a request that waits, and one in the middle of the queue") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::uint32_t waiting = GENERATE(2u, 7u);
  manager m({.blocks = 100, .block_size = block_size});
  scheduler s(m, {.running = 1, .step_tokens = 40});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < waiting; ++i) engine.submit(s, words(i, 10), 3);
  abort_and_go_on(s, engine);
}

TEST_CASE("Abort a request that waits for its producer") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::uint32_t waiting = GENERATE(2u, 7u);
  manager m({.blocks = 100, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 3 * block_size + 5, .prefill_tokens = 3 * block_size});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < waiting; ++i) engine.submit(s, words(1, 9 * block_size) + words(2 + i, 3), 3);
  engine.step(s);
  abort_and_go_on(s, engine);
}

TEST_CASE("Abort a request in the middle of its prompt, with and without a step in flight") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u, 3u);
  manager m({.blocks = 100, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 2 * block_size + 5});
  hash_engine engine(m);
  engine.submit(s, words(1, 2), 3);
  engine.submit(s, words(2, 9 * block_size), 3);
  engine.submit(s, words(3, 5), 3);
  while (engine.flights.size() < depth) REQUIRE(engine.plan(s));
  if (depth == 1) engine.finish(s);
  CHECK(s.progress(engine.ids[1])->running);
  abort_and_go_on(s, engine, depth);
}

TEST_CASE("Abort a request that generates, with and without a step in flight") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u, 3u);
  const std::uint32_t drafts = GENERATE(0u, 3u);
  manager m({.blocks = 200, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 64});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < 3; ++i) engine.submit(s, words(i, 5), 30, 0, drafts);
  for (int i = 0; i < 5; ++i) {
    while (engine.flights.size() < depth && engine.plan(s)) {
    }
    engine.finish(s);
  }
  if (depth > 1) engine.plan(s);
  CHECK(s.progress(engine.ids[1])->generated > 0);
  abort_and_go_on(s, engine, depth);
}

TEST_CASE("Abort a request that was preempted, with and without a step in flight") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u);
  manager m({.blocks = 7, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 4096, .watermark = 0});
  hash_engine engine(m);
  engine.submit(s, words(1, 4 * block_size), 2 * block_size);
  engine.submit(s, words(2, 3 * block_size), 2 * block_size);
  while (s.statistics().preemptions == 0) {
    while (engine.flights.size() < depth && engine.plan(s)) {
    }
    if (s.statistics().preemptions == 0) engine.finish(s);
  }
  CHECK_FALSE(s.progress(engine.ids[1])->running);
  abort_and_go_on(s, engine, depth);
}

TEST_CASE("Abort all while steps are in flight: all blocks come back when those have finished") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 200, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 32});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < 12; ++i) engine.submit(s, words(i / 3, 20), 9);
  for (int i = 0; i < 3; ++i) REQUIRE(engine.plan(s));
  for (std::size_t i = 0; i < engine.jobs.size(); ++i) engine.abort(s, i);
  CHECK(s.idle());
  CHECK(s.running() == 0);
  CHECK(m.counts().held > 0);
  while (!engine.flights.empty()) engine.finish(s);
  CHECK_FALSE(engine.plan(s));
  check_empty(m, s);
}

TEST_CASE("An id of a request that ended names no later one") {
  manager m({.blocks = 20, .block_size = 4});
  scheduler s(m);
  hash_engine engine(m);
  engine.submit(s, words(1, 3), 1);
  engine.run(s);
  engine.submit(s, words(2, 3), 1);
  CHECK(engine.ids[0].index == engine.ids[1].index);
  CHECK(s.abort(engine.ids[0]).error() == kvcache::failure{errc::stale_id, engine.ids[0].index, 1});
  CHECK(s.abort({.index = 77}).error().code == errc::stale_id);
  CHECK(s.contains(engine.ids[1]));
  engine.run(s);
}

TEST_CASE("A scheduler that goes away leaves nothing open") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 100, .block_size = block_size});
  {
    scheduler s(m, {.running = 8, .step_tokens = 16});
    hash_engine engine(m);
    for (std::uint32_t i = 0; i < 6; ++i) engine.submit(s, words(i / 2, 12), 9);
    for (int i = 0; i < 4; ++i) REQUIRE(engine.plan(s));
    engine.finish(s);
    CHECK(m.steps_in_flight() == 3);
  }
  CHECK(m.steps_in_flight() == 0);
  CHECK(m.counts().available() == m.capacity());
}
