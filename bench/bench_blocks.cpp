// SPDX-License-Identifier: Apache-2.0
// Blocks per second through the bookkeeping, at two sizes of the pool.
#include <benchmark/benchmark.h>
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/blocks/block_pool.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace {

using manager = kvcache::block_manager<kvcache::lru>;
using units = std::vector<kvcache::content_unit>;

constexpr std::uint32_t block_size = 16;
constexpr std::uint32_t request_blocks = 64;
constexpr std::int64_t small_pool = 4'096;
constexpr std::int64_t large_pool = 1'048'576;

void check(benchmark::State& state, bool good) {
  if (!good) state.SkipWithError("a call failed");
}

void pool_sizes(benchmark::internal::Benchmark* b) { b->ArgName("pool")->Arg(small_pool)->Arg(large_pool); }

/// The pool's free blocks in an order that says nothing, as after long use.
void shuffle(kvcache::block_pool& pool) {
  std::vector<kvcache::block_id> all(pool.capacity());
  static_cast<void>(pool.allocate(all));
  std::shuffle(all.begin(), all.end(), std::mt19937(7));
  static_cast<void>(pool.release(all));
}

/// Allocate 64 blocks, give them back; nothing is cached.
void unkeyed(benchmark::State& state) {
  kvcache::block_pool pool(static_cast<std::uint32_t>(state.range(0)));
  shuffle(pool);
  std::vector<kvcache::block_id> table(request_blocks);
  for (auto _ : state) {
    const bool good = pool.allocate(table) && pool.release(table);
    benchmark::DoNotOptimize(table.data());
    if (!good) return check(state, false);
  }
  state.SetItemsProcessed(state.iterations() * request_blocks);
}
BENCHMARK(unkeyed)->Apply(pool_sizes);

/// The whole pool out and back in tables of 64 blocks, so that every block's entry is touched.
void unkeyed_whole_pool(benchmark::State& state) {
  kvcache::block_pool pool(static_cast<std::uint32_t>(state.range(0)));
  shuffle(pool);
  std::vector<kvcache::block_id> all(pool.capacity());
  for (auto _ : state) {
    bool good = true;
    for (std::size_t i = 0; i < all.size(); i += request_blocks)
      good = good && pool.allocate(std::span(all).subspan(i, request_blocks));
    for (std::size_t i = 0; i < all.size(); i += request_blocks)
      good = good && pool.release(std::span(all).subspan(i, request_blocks));
    if (!good) return check(state, false);
  }
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(all.size()));
}
BENCHMARK(unkeyed_whole_pool)->Apply(pool_sizes);

/// One request of 64 blocks from open to close, nothing committed: open, begin, accept, retire, close.
void request(benchmark::State& state) {
  manager m({.blocks = static_cast<std::uint32_t>(state.range(0)), .block_size = block_size});
  const units content(request_blocks * block_size, 1);
  for (auto _ : state) {
    const auto opened = m.open({.content = content, .reserve = content.size()});
    const kvcache::want w{opened->sequence, static_cast<std::uint32_t>(content.size())};
    auto step = m.begin({&w, 1});
    const bool good = step && step->accept() && m.retire(*step) && m.close(opened->sequence);
    if (!good) return check(state, false);
  }
  state.SetItemsProcessed(state.iterations() * request_blocks);
}
BENCHMARK(request)->Apply(pool_sizes);

/// A step of 256 running decodes: begin with tables and slots, accept, retire.
void decode_step(benchmark::State& state) {
  manager m({.blocks = 262'144, .block_size = block_size});
  const units prompt(1, 1);
  std::vector<kvcache::want> wants;
  const auto start = [&] {
    wants.clear();
    for (int i = 0; i < 256; ++i) wants.push_back({m.open({.content = prompt})->sequence, 512});
    auto step = m.begin(wants);
    check(state, step && step->accept() && m.retire(*step));
    for (auto& w : wants) w.tokens = 1;
  };
  start();
  for (auto _ : state) {
    if (*m.length(wants[0].sequence) == 1'024) {
      state.PauseTiming();
      for (const auto& w : wants) check(state, m.close(w.sequence).has_value());
      start();
      state.ResumeTiming();
    }
    auto step = m.begin(wants);
    const bool good = step && step->accept() && m.retire(*step);
    if (!good) return check(state, false);
  }
  state.SetItemsProcessed(state.iterations() * 256);
}
BENCHMARK(decode_step)->Unit(benchmark::kMicrosecond);

/// Forks a sequence of so many blocks and closes the fork: time per block shared.
void fork_and_close(benchmark::State& state) {
  const auto blocks = static_cast<std::uint32_t>(state.range(0));
  manager m({.blocks = blocks + 8, .block_size = block_size});
  const units prompt(1, 1);
  const auto sequence = m.open({.content = prompt})->sequence;
  const kvcache::want w{sequence, blocks * block_size};
  auto step = m.begin({&w, 1});
  check(state, step && step->accept() && m.retire(*step));
  for (auto _ : state) {
    const auto fork = m.fork(sequence);
    if (!(fork && m.close(*fork))) return check(state, false);
  }
  state.SetItemsProcessed(state.iterations() * blocks);
}
BENCHMARK(fork_and_close)->ArgName("blocks")->Arg(64)->Arg(4'096);

/// Cuts the last token off a sequence of so many blocks: the time may not grow with them.
void truncate_one(benchmark::State& state) {
  const auto blocks = static_cast<std::uint32_t>(state.range(0));
  manager m({.blocks = blocks + 8, .block_size = block_size});
  const units prompt(1, 1);
  const auto sequence = m.open({.content = prompt})->sequence;
  const kvcache::want w{sequence, blocks * block_size};
  auto all = m.begin({&w, 1});
  check(state, all && all->accept() && m.retire(*all));
  for (auto _ : state) {
    if (!m.truncate(sequence, blocks * block_size - 1)) return check(state, false);
    state.PauseTiming();
    const kvcache::want one{sequence, 1};
    auto step = m.begin({&one, 1});
    check(state, step && step->accept() && m.retire(*step));
    state.ResumeTiming();
  }
}
BENCHMARK(truncate_one)->ArgName("blocks")->Arg(64)->Arg(4'096);

}  // namespace
