// SPDX-License-Identifier: Apache-2.0
// Threads: an engine's own, the pool's, and several runs at once.
#include <kvcache/attention/cpu/thread_pool.hpp>

#include <atomic>
#include <stdexcept>
#include <thread>

#include "support.hpp"

using namespace kvcache_test;

namespace {

using mine = bundle<causal, bf16>;

/// Runs the plan on `count` threads of our own, without a barrier inside a run.
template <class Policies>
void on_own_threads(const attention<Policies>& a, const attention_plan& plan, const any_scene& s, outcome& o,
                    unsigned count) {
  std::vector<std::thread> team;
  for (unsigned i = 0; i < count; ++i)
    team.emplace_back([&, i] {
      a.run(plan, s.view(), s.queries(), rows_view<float>(o.out.data(), s.rows(), s.form().query_heads(), 64), i, count,
            {}, {o.lse.data(), s.form().query_heads()});
    });
  for (std::thread& t : team) t.join();
}

outcome blank(const any_scene& s) {
  return {std::vector<float>(s.q.size(), poison_value()),
          std::vector<float>(std::size_t{s.rows()} * s.form().query_heads(), poison_value())};
}

}  // namespace

TEST_CASE("R18 threads of the engine run a plan together, many times, with the same bits") {
  const std::uint32_t block_size = GENERATE(5u, 16u, 64u);
  const scene<bf16> s({.block_size = block_size, .kv_heads = 2, .group = 2},
                      {{1, 5000}, {40, 300}, {1, 0}, {1, 700}, {300, 300}});
  const expectation e = expected<causal>(s);
  for (const cpu_isa isa : isas()) {
    const attention<mine> a({.shape = s.heads(), .threads = 4, .backend = {.isa = isa}});
    const attention_plan plan = a.plan(s.batch());
    REQUIRE(plan.state_rows() > 0);
    outcome first = blank(s);
    on_own_threads(a, plan, s, first, 1);
    CHECK(distance(first, e) < 1);
    for (unsigned round = 0; round < (thorough ? 10u : 3u); ++round) {
      outcome o = blank(s);
      on_own_threads(a, plan, s, o, 2 + round % 3);
      INFO(text(s.form(), isa) << " round " << round);
      CHECK(same_bits(o.out, first.out));
      CHECK(same_bits(o.lse, first.lse));
    }
    outcome o = blank(s);
    CHECK_THROWS_WITH(a.run(plan, s.view(), s.queries(), rows_view<float>(o.out.data(), s.rows(), 4, 64), 0, 5),
                      contains_text("of 5") && contains_text("4 threads"));
    CHECK_THROWS_WITH(a.run(plan, s.view(), s.queries(), rows_view<float>(o.out.data(), s.rows(), 4, 64), 2, 2),
                      contains_text("thread 2 of 2"));
  }
}

TEMPLATE_TEST_CASE("R18 threads of the engine run a plan over formats together, with the same bits", "",
                   (kv_dtype<int4_grouped<32>>), (kv_dtype<int4_per_channel, rotated<int4_grouped<32>>>)) {
  using k = typename TestType::k;
  using v = typename TestType::v;
  const scene<k, v> s({.kv_heads = 2, .group = 2, .tails = true}, {{1, 3000}, {40, 300}, {1, 0}, {1, 700}});
  const expectation e = expected<causal>(s);
  for (const cpu_isa isa : isas()) {
    const attention<bundle<causal, k, v>> a({.shape = s.heads(), .threads = 4, .backend = {.isa = isa}});
    const attention_plan plan = a.plan(s.batch());
    REQUIRE(plan.state_rows() > 0);
    outcome first = blank(s);
    on_own_threads(a, plan, s, first, 1);
    if (isa >= cpu_isa::avx512_dot) first.rounding = rounding_of<k, v>(s.form(), false);
    CHECK(distance(first, e) < 1);
    for (const unsigned count : {2u, 3u, 4u}) {
      outcome o = blank(s);
      on_own_threads(a, plan, s, o, count);
      INFO(text(s.form(), isa, count));
      CHECK(same_bits(o.out, first.out));
      CHECK(same_bits(o.lse, first.lse));
    }
  }
}

TEST_CASE("a thread pool runs attention, and threads share it with plans of their own") {
  const scene<bf16> s({.kv_heads = 2, .group = 2}, {{1, 3000}, {40, 300}});
  const expectation e = expected<causal>(s);
  thread_pool pool(3);
  const attention<mine> a({.shape = s.heads()}, pool);
  const attention<mine> on_default;
  std::vector<std::thread> engines;
  std::vector<double> worst(3);
  for (unsigned i = 0; i < 3; ++i)
    engines.emplace_back([&, i] {
      const attention<mine>& used = i == 2 ? on_default : a;
      attention_plan plan;
      for (int round = 0; round < 5; ++round) {
        plan = used.plan(s.batch(), std::move(plan));
        outcome o = blank(s);
        used.run(plan, s.view(), s.queries(), rows_view<float>(o.out.data(), s.rows(), 4, 64), {}, {o.lse.data(), 4});
        worst[i] = (std::max)(worst[i], distance(o, e));
      }
    });
  for (std::thread& t : engines) t.join();
  for (const double w : worst) CHECK(w < 1);
}

TEST_CASE("a thread pool calls each thread once, sleeps, wakes and passes on what is thrown") {
  for (const unsigned count : {1u, 2u, 5u}) {
    thread_pool pool(count);
    CHECK(pool.threads() == count);
    for (int round = 0; round < 50; ++round) {
      std::vector<std::atomic<int>> calls(count);
      pool.run([&](unsigned ith, unsigned nth) {
        if (nth == count) ++calls[ith];
      });
      for (const auto& c : calls) CHECK(c == 1);
      if (round % 10 == 9) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // so that threads fall asleep
    }
    CHECK_THROWS_AS(pool.run([&](unsigned ith, unsigned) {
      if (ith == count - 1) throw std::runtime_error("one thread failed");
    }),
                    std::runtime_error);
    std::atomic<unsigned> after{0};
    pool.run([&](unsigned, unsigned) { ++after; });
    CHECK(after == count);
  }
}
