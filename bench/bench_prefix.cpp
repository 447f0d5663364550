// SPDX-License-Identifier: Apache-2.0
// What it costs to find a prefix, to cache one and to evict for it, at two sizes of the pool; where the policy takes
// part, under the default one and the dearest.
#include <benchmark/benchmark.h>
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/eviction/gittins.hpp>

#include <cstdint>
#include <numeric>
#include <vector>

namespace {

using kvcache::gittins;
using kvcache::lru;
using units = std::vector<kvcache::content_unit>;

constexpr std::uint32_t block_size = 16;
constexpr std::uint32_t request_blocks = 64;

void check(benchmark::State& state, bool good) {
  if (!good) state.SkipWithError("a call failed");
}

void pool_sizes(benchmark::internal::Benchmark* b) { b->ArgName("pool")->Arg(4'096)->Arg(1'048'576); }

/// The life of a sequence after it was opened: one step for all of its content, commit, close.
template <class Manager>
bool compute(Manager& m, kvcache::sequence_id sequence, const units& content) {
  const kvcache::want w{sequence, static_cast<std::uint32_t>(content.size())};
  auto step = m.begin({&w, 1});
  return step && step->accept() && m.commit(sequence, content) && m.retire(*step) && m.close(sequence);
}

/// Puts content of its own into every block of the pool.
template <class Manager>
bool fill(Manager& m, units& content) {
  for (std::uint32_t used = 0; used < m.capacity(); used += request_blocks) {
    ++content[0];
    const auto opened = m.open({.content = content, .reserve = content.size()});
    if (!compute(m, opened->sequence, content)) return false;
  }
  return m.counts().evictable == m.capacity();
}

units some_content() {
  units content(request_blocks * block_size);
  std::iota(content.begin(), content.end(), 1'000);
  return content;
}

/// Requests of 64 blocks of new content against a full pool: everything is keyed, and every block evicts another.
template <class Eviction>
void keyed_with_eviction(benchmark::State& state) {
  kvcache::block_manager<Eviction> m({.blocks = static_cast<std::uint32_t>(state.range(0)), .block_size = block_size});
  units content = some_content();
  check(state, fill(m, content));
  const std::uint64_t before = m.statistics().evicted_blocks;
  for (auto _ : state) {
    ++content[0];
    const auto opened = m.open({.content = content, .reserve = content.size()});
    if (!compute(m, opened->sequence, content)) return check(state, false);
  }
  const auto blocks = state.iterations() * request_blocks;
  check(state, m.statistics().evicted_blocks - before == static_cast<std::uint64_t>(blocks));
  state.SetItemsProcessed(blocks);
}
BENCHMARK_TEMPLATE(keyed_with_eviction, lru)->Apply(pool_sizes);
BENCHMARK_TEMPLATE(keyed_with_eviction, gittins)->Apply(pool_sizes);

/// Looks up 64 blocks that are cached, each time others, in a full pool: hashing and exact comparison.
template <class Eviction>
void probe(benchmark::State& state) {
  kvcache::block_manager<Eviction> m({.blocks = static_cast<std::uint32_t>(state.range(0)), .block_size = block_size});
  units content = some_content();
  const kvcache::content_unit first = content[0] + 1;
  check(state, fill(m, content));
  const std::uint64_t chains = m.capacity() / request_blocks;
  std::uint64_t next = 0;
  for (auto _ : state) {
    next = (next + 7'919) % chains;
    content[0] = first + next;
    if (m.probe(content).tokens != content.size()) return check(state, false);
  }
  state.SetItemsProcessed(state.iterations() * request_blocks);
}
BENCHMARK_TEMPLATE(probe, lru)->Apply(pool_sizes);

/// Opens a request whose 64 blocks of new content evict as many: looked up, admitted, blocks taken. The rest of its
/// life is not counted.
template <class Eviction>
void admission(benchmark::State& state) {
  kvcache::block_manager<Eviction> m({.blocks = static_cast<std::uint32_t>(state.range(0)), .block_size = block_size});
  units content = some_content();
  check(state, fill(m, content));
  const std::uint64_t before = m.statistics().evicted_blocks;
  for (auto _ : state) {
    ++content[0];
    const auto opened = m.open({.content = content, .reserve = content.size()});
    state.PauseTiming();
    if (!compute(m, opened->sequence, content)) return check(state, false);
    state.ResumeTiming();
  }
  check(state,
        m.statistics().evicted_blocks - before == static_cast<std::uint64_t>(state.iterations()) * request_blocks);
}
void admission_sizes(benchmark::internal::Benchmark* b) {
  b->ArgName("pool")->Arg(4'096)->Arg(65'536)->Unit(benchmark::kMicrosecond);
}
BENCHMARK_TEMPLATE(admission, lru)->Apply(admission_sizes);
BENCHMARK_TEMPLATE(admission, gittins)->Apply(admission_sizes);

/// Opens a request of a million tokens that are all cached, and closes it.
template <class Eviction>
void open_million_tokens(benchmark::State& state) {
  constexpr std::uint32_t tokens = 1'000'000;
  kvcache::block_manager<Eviction> m({.blocks = tokens / block_size + 1, .block_size = block_size});
  units content(tokens + 1);
  std::iota(content.begin(), content.end(), 1'000);
  const auto first = m.open({.content = content});
  const kvcache::want w{first->sequence, tokens};
  auto step = m.begin({&w, 1});
  check(state, step && step->accept() && m.commit(first->sequence, kvcache::content_view(content).sub(0, tokens)) &&
                   m.retire(*step) && m.close(first->sequence));
  for (auto _ : state) {
    const auto opened = m.open({.content = content});
    if (!(opened && opened->reused_tokens == tokens)) return check(state, false);
    state.PauseTiming();
    check(state, m.close(opened->sequence).has_value());
    state.ResumeTiming();
  }
}
BENCHMARK_TEMPLATE(open_million_tokens, lru)->Unit(benchmark::kMillisecond);
BENCHMARK_TEMPLATE(open_million_tokens, gittins)->Unit(benchmark::kMillisecond);

}  // namespace
