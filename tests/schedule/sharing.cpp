// SPDX-License-Identifier: Apache-2.0
// A prefix that is being computed is waited for, by content and keys, and by nobody whom it would not help.
#include <kvcache/blocks/extra_key.hpp>
#include <kvcache/eviction/priority.hpp>

#include <algorithm>
#include <array>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::extra_key;
using kvcache::key_kind;

namespace {

using jobs = std::vector<std::size_t>;

/// Others take all that is available and give it back.
void lose_unused(manager& m) {
  const text one = words(99, 1);
  std::vector<kvcache::sequence_id> others;
  // Of one group a block and of the other one or two.
  std::uint64_t reserve = m.counts().available() % 2 == 0 ? 1 : m.block_size(0);
  for (; const auto opened = m.open({.content = one, .reserve = reserve}); reserve = 1)
    others.push_back(opened->sequence);
  REQUIRE(m.counts().available() == 0);
  for (const auto other : others) REQUIRE(m.close(other).has_value());
}

}  // namespace

TEST_CASE("R11 10,000 requests with one 2,000-token prompt prefill 2,000 + 9,999 x 16 tokens at block 16, or + 9,999") {
  const std::uint32_t block_size = GENERATE(8u, 16u, 50u);
  const std::size_t depth = GENERATE(1u, 2u);
  const bool heads = GENERATE(false, true);
  const std::uint32_t step_tokens = GENERATE(2048u, 300u);
  CAPTURE(block_size, depth, heads, step_tokens);
  manager m({.blocks = 65'536, .block_size = block_size, .partial_reuse = heads});
  scheduler s(m, {.running = 256, .step_tokens = step_tokens});
  const text prompt = words(1, 2000);
  for (int i = 0; i < 10'000; ++i) REQUIRE(s.submit({.prompt = prompt, .max_tokens = 2}).has_value());
  std::deque<kvcache::step_plan> flights;
  std::vector<kvcache::row_result> results;
  const text token{5};
  std::uint64_t most_examined = 0;
  for (;;) {
    while (flights.size() < depth) {
      const std::uint64_t before = s.statistics().examined;
      const auto p = s.next();
      most_examined = std::max(most_examined, s.statistics().examined - before);
      if (p.empty()) break;
      flights.push_back(p);
    }
    if (flights.empty()) break;
    results.clear();
    for (const auto& row : flights.front().rows) {
      results.emplace_back();
      if (row.samples) results.back().tokens = token;
    }
    REQUIRE(s.finish(flights.front(), results).has_value());
    flights.pop_front();
  }
  CHECK(s.statistics().length == 10'000);
  CHECK(s.statistics().prefilled_tokens == 2'000 + 9'999 * (heads ? 1 : block_size));
  CHECK(s.statistics().recomputed_tokens == 0);
  // However many wait, a step looks at as many as may run.
  CHECK(most_examined <= 256);
  CHECK(s.statistics().examined <= 3 * 10'000);
  check_empty(m, s);
}

TEST_CASE("Retention goes with a request, and is refused at once where it cannot be") {
  using prioritised = kvcache::block_manager<kvcache::priority>;
  prioritised m({.blocks = 5, .block_size = 4});
  kvcache::scheduler<prioritised> s(m, {.running = 1, .step_tokens = 64, .watermark = 0});
  const auto serve = [&](const text& prompt, std::span<const kvcache::retention_range> retention) {
    REQUIRE(s.submit({.prompt = prompt, .max_tokens = 1, .retention = retention}).has_value());
    const auto p = s.next();
    const text token{5};
    const kvcache::row_result result{.tokens = token};
    REQUIRE(s.finish(p, {&result, 1}).has_value());
  };
  const std::array high{kvcache::retention_range{.priority = 90}};
  serve(words(1, 8), high);
  serve(words(2, 8), {});
  serve(words(3, 12), {});
  CHECK(m.probe(words(1, 8)).tokens == 8);
  CHECK(m.probe(words(2, 8)).tokens == 0);
  const std::array reversed{kvcache::retention_range{.first = 5, .end = 4}};
  const text prompt = words(1, 4);
  CHECK(s.submit({.prompt = prompt, .retention = reversed}).error().code == kvcache::errc::bad_range);
  CHECK(s.idle());
}

TEST_CASE("R11 a request waits for the prefix that another one computes, then reuses it; others pass it by") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u);
  const unsigned hash_bits = GENERATE(64u, 3u, 0u);
  CAPTURE(block_size, depth, hash_bits);
  manager m({.blocks = 4096 / block_size, .block_size = block_size, .hash_bits = hash_bits});
  scheduler s(
      m, {.running = 8, .step_tokens = 2 * block_size + 8, .prefill_tokens = 2 * block_size, .hash_bits = hash_bits});
  hash_engine engine(m);
  const text common = words(1, 5 * block_size);
  engine.submit(s, common + words(2, 1), 1);               // 0 produces it
  engine.submit(s, common + words(3, block_size), 1);      // 1 waits for all of it
  engine.submit(s, words(4, 3), 1);                        // 2 passes
  engine.submit(s, common + words(5, 2 * block_size), 1);  // 3 waits
  engine.run_to_end(s, depth);
  CHECK(engine.jobs[0].prefilled == 5 * block_size + 1);
  CHECK(engine.jobs[1].first_at == 5 * block_size);
  CHECK(engine.jobs[1].prefilled == block_size);
  CHECK(engine.jobs[2].prefilled == 3);
  CHECK(engine.jobs[3].first_at == 5 * block_size);
  CHECK(engine.jobs[3].prefilled == 2 * block_size);
}

TEST_CASE("R11 who waits does not wait longer than for what it shares") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 400, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 2 * block_size + 8, .prefill_tokens = 2 * block_size});
  hash_engine engine(m);
  const text common = words(1, 3 * block_size);
  engine.submit(s, common + words(2, 20 * block_size), 1);
  engine.submit(s, common + words(3, 1), 1, 1);  // of higher priority, so that it gets a share of a step
  REQUIRE(engine.plan(s));                       // it comes first, so it produces
  CHECK(engine.oldest() == jobs{1});
  engine.finish(s);
  CHECK(engine.step(s) == jobs{1});  // and the other waits
  REQUIRE(engine.plan(s));
  CHECK(engine.oldest() == jobs{0});
  CHECK(engine.jobs[0].first_at == 3 * block_size);
  engine.submit(s, head_of(engine.jobs[0].content, 5 * block_size) + words(4, 1), 1, 1);
  engine.finish(s);
  CHECK(engine.step(s) == jobs{2, 0});  // 5 of 23 blocks are there
  engine.run_to_end(s);
}

TEST_CASE("R11 R1 nobody waits for a block that would not spare him anything") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 400, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 100 * block_size});
  hash_engine engine(m);
  const text one_block = words(1, block_size);
  // All but the last token are of use: none of a block. So all three are computed at once.
  for (int i = 0; i < 3; ++i) engine.submit(s, one_block, 1);
  CHECK(engine.step(s) == jobs{0, 1, 2});
  engine.run_to_end(s);
  CHECK(s.statistics().hit_tokens == 0);
}

TEST_CASE("R11 R1 who waits does not wait for the block that holds its own last token") {
  const std::uint32_t block_size = GENERATE(2u, 4u, 16u);
  manager m({.blocks = 400, .block_size = block_size});
  scheduler s(m, {.running = 4, .step_tokens = 2 * block_size + 4, .prefill_tokens = 2 * block_size});
  hash_engine engine(m);
  const text prompt = words(1, 9 * block_size);
  engine.submit(s, prompt, 1);
  engine.step(s);
  engine.submit(s, head_of(prompt, 5 * block_size), 1, 1);
  CHECK(engine.step(s) == jobs{0});
  CHECK(engine.step(s) == jobs{1, 0});  // 4 blocks are there
  engine.run_to_end(s);
}

TEST_CASE("R11 only what is equal in content and keys is waited for") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const unsigned hash_bits = GENERATE(64u, 0u);
  manager m({.blocks = 400, .block_size = block_size, .hash_bits = hash_bits});
  scheduler s(m, {.running = 8, .step_tokens = 100 * block_size, .hash_bits = hash_bits});
  hash_engine engine(m);
  const text prompt = words(1, 3 * block_size);
  text other = prompt;
  other[0] += 1;  // the second block is equal, what stands before it is not
  const std::array a{extra_key{key_kind::adapter, "x"}, extra_key{key_kind::salt, "y"}};
  const std::array same{extra_key{key_kind::salt, "y"}, extra_key{key_kind::adapter, "x"},
                        extra_key{key_kind::salt, "y"}};
  const std::array b{extra_key{key_kind::salt, "x"}};
  engine.submit(s, prompt, 1);
  engine.submit(s, other, 1);
  engine.submit(s, prompt, 1, 0, 0, a, 1);
  engine.submit(s, prompt, 1, 0, 0, b, 2);
  engine.submit(s, prompt, 1, 0, 0, same, 1);
  engine.submit(s, prompt, 1, 0, 0, b, 2);
  CHECK(engine.step(s) == jobs{0, 1, 2, 3});
  CHECK(engine.step(s) == jobs{4, 5});
  engine.check_tokens();
  CHECK(engine.jobs[4].prefilled == block_size);
  CHECK(engine.jobs[5].prefilled == block_size);
}

TEST_CASE("R11 where the producer is aborted the oldest waiter takes over") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t in_flight = GENERATE(0u, 1u);
  CAPTURE(block_size, in_flight);
  manager m({.blocks = 400, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 2 * block_size + 8, .prefill_tokens = 2 * block_size});
  hash_engine engine(m);
  const text common = words(1, 6 * block_size);
  for (std::uint32_t i = 0; i < 4; ++i) engine.submit(s, common + words(2 + i, 1), 1);
  REQUIRE(engine.plan(s));
  CHECK(engine.oldest() == jobs{0});
  if (in_flight == 0) engine.finish(s);
  engine.abort(s, 0);
  REQUIRE(engine.plan(s));
  if (in_flight == 1) engine.finish(s);
  CHECK(engine.oldest() == jobs{1});
  // What the producer had finished is not computed again.
  CHECK(engine.jobs[1].first_at == (in_flight == 0 ? 2 * block_size : 0));
  engine.finish(s);
  engine.run_to_end(s);
  CHECK(engine.jobs[2].first_at == 6 * block_size);
  CHECK(engine.jobs[3].first_at == 6 * block_size);
}

TEST_CASE(
    "R11 where the producer is preempted somebody else takes over, and nothing is lost or computed twice at once") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 17, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 12, .prefill_tokens = 4, .watermark = 0});
  hash_engine engine(m);
  engine.submit(s, words(1, 5 * block_size), 6 * block_size, 5);
  do {
    engine.step(s);
  } while (s.progress(engine.ids[0])->generated == 0);
  // 11 blocks beside the 6 that the first one has by now; it goes on growing while the prompt is computed.
  const text common = words(2, 10 * block_size);
  engine.submit(s, common + words(3, 1), 1, 0);
  engine.submit(s, common + words(4, 1), 1, 0);
  bool together = false;
  while (engine.plan(s)) {
    const jobs now = engine.oldest();
    together = together || (std::count(now.begin(), now.end(), 1u) != 0 &&
                            std::count(now.begin(), now.end(), 2u) != 0 && !engine.flights.front().rows.back().samples);
    engine.finish(s);
  }
  CHECK(s.statistics().preemptions > 0);
  CHECK_FALSE(together);
  engine.check_tokens();
  check_empty(m, s);
}

TEST_CASE("R11 who waits lends its priority to the producer, as long as it waits") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 400, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 2 * block_size + 6, .prefill_tokens = 2 * block_size});
  hash_engine engine(m);
  const text common = words(1, 20 * block_size);
  engine.submit(s, common + words(2, 1), 1, 0);
  CHECK(engine.step(s) == jobs{0});
  engine.submit(s, words(3, 20 * block_size), 1, 3);
  CHECK(engine.step(s) == jobs{1});
  engine.submit(s, common + words(4, 1), 1, 9);
  engine.submit(s, common + words(5, 1), 1, 7);
  CHECK(engine.step(s) == jobs{0});
  CHECK(s.progress(engine.ids[0])->priority == 9);
  engine.abort(s, 2);
  CHECK(s.progress(engine.ids[0])->priority == 0);
  CHECK(engine.step(s) == jobs{0});  // the other one comes first now, and lends what it has
  CHECK(s.progress(engine.ids[0])->priority == 7);
  engine.abort(s, 3);
  CHECK(s.progress(engine.ids[0])->priority == 0);
  CHECK(engine.step(s) == jobs{1});
  engine.submit(s, head_of(common, 10 * block_size) + words(6, 1), 1, 5);  // waits for a part only
  CHECK(engine.step(s) == jobs{0});
  CHECK(s.progress(engine.ids[0])->priority == 5);
  CHECK(engine.step(s) == jobs{0});
  CHECK(engine.step(s) == jobs{4, 1});  // 10 of 20 blocks are there
  CHECK(s.progress(engine.ids[0])->priority == 0);
  engine.run_to_end(s);
}

TEST_CASE("R11 a chain of requests, each going on where the one before ends: one produces at a time") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u);
  manager m({.blocks = 400, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 100 * block_size});
  hash_engine engine(m);
  const text all = words(1, 30 * block_size);
  for (std::uint32_t i = 1; i <= 6; ++i) engine.submit(s, head_of(all, 5 * i * block_size) + words(1 + i, 1), 1);
  engine.run_to_end(s, depth);
  CHECK(s.statistics().prefilled_tokens == 30 * block_size + 6);
}

TEST_CASE("R11 who waits waits past a hole: what the producer's window has left behind may be gone already") {
  const std::uint32_t block_size = GENERATE(4u, 16u);
  const std::uint32_t window_block = GENERATE(1u, 2u);  // of them in a block that sees all
  const std::uint32_t shared = GENERATE(8u, 5u);
  CAPTURE(block_size, window_block, shared);
  const std::array groups{kvcache::layer_group{block_size}, kvcache::layer_group{block_size / window_block, 3}};
  manager m({.blocks = 200, .layer_groups = groups});
  // Chunks do not end with a block, so that the window has let go of all blocks that are whole.
  scheduler s(m, {.running = 4, .step_tokens = 2 * block_size + 3, .watermark = 0});
  hash_engine engine(m, 1000, {groups[0].window, groups[1].window});
  const text common = words(1, 8 * block_size);
  engine.submit(s, common + words(2, 1), 1);
  CHECK(engine.step(s) == jobs{0});
  lose_unused(m);
  CHECK(m.probe(common).tokens == 0);

  const text prompt = head_of(common, shared * block_size) + words(3, 2);
  engine.submit(s, prompt, 1, 9);
  CHECK(engine.step(s) == jobs{0});
  CHECK_FALSE(s.progress(engine.ids[1])->running);
  std::uint32_t reused = shared * block_size;
  SECTION("what follows the hole is reused") {
    if (shared == 8) CHECK(s.progress(engine.ids[0])->priority == 9);
  }
  SECTION("another hole when the wait is over: nothing is there to reuse, and nobody to wait for") {
    while (s.progress(engine.ids[0]).has_value() && s.progress(engine.ids[0])->priority == 9) engine.step(s);
    lose_unused(m);
    reused = m.probe(prompt).tokens;
    CHECK(reused == 0);
  }
  engine.run_to_end(s);
  CHECK(engine.jobs[1].first_at == reused);
  CHECK(engine.jobs[1].prefilled == prompt.size() - reused);
  CHECK(engine.jobs[0].prefilled == 8 * block_size + 1);
  CHECK(s.statistics().hit_tokens == reused);
  CHECK(s.statistics().queried_tokens == 8 * block_size + 1 + prompt.size());
  CHECK(s.statistics().prefilled_tokens == 8 * block_size + 1 + prompt.size() - reused);
  CHECK(m.statistics().hit_tokens == reused);
}
