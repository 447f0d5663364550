// SPDX-License-Identifier: Apache-2.0
// What scheduling costs: a step of running decodes, whole and without the block manager's part; admission into a full
// pool; waiting requests in great number.
#include <benchmark/benchmark.h>
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/schedule/scheduler.hpp>

#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

namespace {

using manager = kvcache::block_manager<kvcache::lru>;
using scheduler = kvcache::scheduler<manager>;
using units = std::vector<kvcache::content_unit>;

constexpr std::uint32_t block_size = 16;
constexpr std::uint32_t request_blocks = 64;
constexpr std::uint32_t decodes = 256;

void check(benchmark::State& state, bool good) {
  if (!good) state.SkipWithError("a call failed");
}

/// Plans a step and finishes it, one token for each row that samples.
bool step(scheduler& s, std::vector<kvcache::row_result>& results) {
  static constexpr kvcache::content_unit token = 7;
  const auto plan = s.next();
  results.resize(plan.rows.size());
  for (std::size_t i = 0; i < results.size(); ++i)
    results[i].tokens = plan.rows[i].samples ? kvcache::content_view(&token, 1) : kvcache::content_view();
  return !plan.empty() && s.finish(plan, results);
}

/// A step of 256 running decodes: next with tables and slots, finish. Others wait, for a place among those that run.
void decode_step(benchmark::State& state) {
  manager m({.blocks = 262'144, .block_size = block_size});
  scheduler s(m, {.running = decodes, .step_tokens = 1'024 * decodes});
  std::vector<kvcache::row_result> results;
  units prompt(512);
  const auto start = [&] {
    while (s.waiting() + s.running() < decodes + static_cast<std::size_t>(state.range(0))) {
      ++prompt[0];
      check(state, s.submit({.prompt = prompt, .max_tokens = 513}).has_value());
    }
    do {
      check(state, step(s, results));
    } while (s.running() < decodes);
  };
  start();
  for (auto _ : state) {
    if (!step(s, results)) return check(state, false);
    if (s.running() < decodes) {
      state.PauseTiming();
      start();
      state.ResumeTiming();
    }
  }
  state.SetItemsProcessed(state.iterations() * decodes);
}
BENCHMARK(decode_step)->ArgName("waiting")->Arg(0)->Arg(10'000)->Unit(benchmark::kMicrosecond);

/// The same calls of the block manager alone: begin, accept, commit of whole blocks, retire. What decode_step takes
/// beyond this is the scheduler's own.
void decode_step_without_scheduler(benchmark::State& state) {
  manager m({.blocks = 262'144, .block_size = block_size});
  std::vector<kvcache::want> wants;
  units prompt(512);
  const units more(block_size, 7);
  std::uint32_t length = 0;
  const auto start = [&] {
    for (const auto& w : wants) check(state, m.close(w.sequence).has_value());
    wants.clear();
    for (std::uint32_t i = 0; i < decodes; ++i) {
      ++prompt[0];
      wants.push_back({m.open({.content = prompt, .reserve = prompt.size()})->sequence, 512});
    }
    auto all = m.begin(wants);
    check(state, all && all->accept());
    for (const auto& w : wants) check(state, m.commit(w.sequence, prompt).has_value());
    check(state, m.retire(*all).has_value());
    for (auto& w : wants) w.tokens = 1;
    length = 512;
  };
  start();
  for (auto _ : state) {
    auto begun = m.begin(wants);
    bool good = begun && begun->accept();
    if (++length % block_size == 0)
      for (const auto& w : wants) good = good && m.commit(w.sequence, more);
    good = good && m.retire(*begun);
    if (!good) return check(state, false);
    if (length == 1'024) {
      state.PauseTiming();
      start();
      state.ResumeTiming();
    }
  }
  state.SetItemsProcessed(state.iterations() * decodes);
}
BENCHMARK(decode_step_without_scheduler)->Unit(benchmark::kMicrosecond);

/// A request of 64 blocks of new content is planned in a full pool: looked up, admitted by evicting 64 blocks, its
/// content claimed, its first step begun. The rest of its life is not counted.
void admission(benchmark::State& state) {
  manager m({.blocks = static_cast<std::uint32_t>(state.range(0)), .block_size = block_size});
  scheduler s(m, {.running = 16, .step_tokens = 2'048});
  std::vector<kvcache::row_result> results;
  units prompt(request_blocks * block_size);
  std::iota(prompt.begin(), prompt.end(), 1'000);
  const auto submit = [&] {
    ++prompt[0];
    check(state, s.submit({.prompt = prompt, .max_tokens = 1}).has_value());
  };
  while (m.counts().free != 0) {
    submit();
    check(state, step(s, results));
  }
  static constexpr kvcache::content_unit token = 7;
  const std::uint64_t before = m.statistics().evicted_blocks;
  for (auto _ : state) {
    state.PauseTiming();
    submit();
    state.ResumeTiming();
    const auto plan = s.next();
    state.PauseTiming();
    const kvcache::row_result result{.tokens = {&token, 1}};
    const bool good = plan.rows.size() == 1 && s.finish(plan, {&result, 1});
    if (!good) return check(state, false);
    state.ResumeTiming();
  }
  check(state,
        m.statistics().evicted_blocks - before == static_cast<std::uint64_t>(state.iterations()) * request_blocks);
}
BENCHMARK(admission)->ArgName("pool")->Arg(4'096)->Arg(65'536)->Unit(benchmark::kMicrosecond);

/// The whole life of such a request: submit, next, finish.
void one_request(benchmark::State& state) {
  manager m({.blocks = static_cast<std::uint32_t>(state.range(0)), .block_size = block_size});
  scheduler s(m, {.running = 16, .step_tokens = 2'048});
  std::vector<kvcache::row_result> results;
  units prompt(request_blocks * block_size);
  std::iota(prompt.begin(), prompt.end(), 1'000);
  for (auto _ : state) {
    ++prompt[0];
    const bool good = s.submit({.prompt = prompt, .max_tokens = 1}) && step(s, results);
    if (!good) return check(state, false);
  }
}
BENCHMARK(one_request)->ArgName("pool")->Arg(4'096)->Arg(65'536)->Unit(benchmark::kMicrosecond);

/// A request joins so many that wait: submit and abort.
void join_the_queue(benchmark::State& state) {
  manager m({.blocks = 4'096, .block_size = block_size});
  scheduler s(m);
  const units prompt(64, 5);
  for (std::int64_t i = 0; i < state.range(0); ++i) check(state, s.submit({.prompt = prompt}).has_value());
  for (auto _ : state) {
    const auto id = s.submit({.prompt = prompt, .priority = 1});
    const bool good = id && s.abort(*id);
    if (!good) return check(state, false);
  }
}
BENCHMARK(join_the_queue)->ArgName("waiting")->Arg(100)->Arg(10'000);

}  // namespace
