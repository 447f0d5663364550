// SPDX-License-Identifier: Apache-2.0
// Time of an eviction policy alone, at two sizes of the pool: a block is evicted, comes back with other content, is
// referenced and released. A third of what is referenced is cached. B/block is what its constructor allocates, of which
// 340 KB of gittins do not depend on the pool.
#include <benchmark/benchmark.h>
#include <kvcache/eviction/arc.hpp>
#include <kvcache/eviction/gittins.hpp>
#include <kvcache/eviction/lfu.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/eviction/lru_k.hpp>
#include <kvcache/eviction/priority.hpp>
#include <kvcache/eviction/s3fifo.hpp>
#include <kvcache/eviction/tiny_lfu.hpp>
#include <kvcache/observe/observed.hpp>

#include <array>
#include <cstdint>
#include <random>
#include <vector>

#include "../tests/support/counting_new.hpp"

namespace {

using kvcache::block_id;

constexpr std::size_t request_blocks = 16;

/// A policy and what it is told, without an index: contents are numbers, each with a block or none.
template <class Policy>
class pool {
 public:
  explicit pool(block_id blocks) : policy_(blocks), contents_(blocks + 1) {
    for (block_id b = 1; b <= blocks; ++b) take(b, next_++);
  }
  /// A request of new blocks, then one that finds blocks cached.
  void requests(block_id seed) {
    std::array<std::uint64_t, request_blocks> fresh;
    for (auto& content : fresh) content = next_++ * 0x9e3779b97f4a7c15u;
    if constexpr (kvcache::told_of_requests<Policy>) policy_.open(fresh, 0, 16);
    for (std::size_t i = 0; i < request_blocks; ++i) {
      const block_id gone = policy_.victim();
      if constexpr (kvcache::told_of_evictions<Policy>)
        policy_.evict(gone);
      else
        policy_.erase(gone);
      blocks_[i] = gone;
      reference(gone, fresh[i]);
    }
    for (std::size_t i = request_blocks; i-- > 0;) policy_.insert(blocks_[i]);
    for (std::size_t i = 0; i < request_blocks / 2; ++i) {
      const block_id hit = 1 + (seed + static_cast<block_id>(i) * 7'919) % static_cast<block_id>(contents_.size() - 1);
      policy_.erase(hit);
      reference(hit, contents_[hit]);
      policy_.insert(hit);
    }
  }

 private:
  void reference(block_id block, std::uint64_t content) {
    contents_[block] = content;
    if constexpr (kvcache::told_of_references<Policy>) policy_.reference(block, content, kvcache::null_block);
  }
  void take(block_id block, std::uint64_t content) {
    reference(block, content * 0x9e3779b97f4a7c15u);
    policy_.insert(block);
  }

  Policy policy_;
  std::vector<std::uint64_t> contents_;  // by block
  std::uint64_t next_ = 1;
  std::array<block_id, request_blocks> blocks_{};
};

template <class Policy>
void turnover(benchmark::State& state) {
  const auto blocks = static_cast<block_id>(state.range(0));
  const std::uint64_t before = allocated_bytes;
  static_cast<void>(Policy(blocks));
  state.counters["B/block"] = static_cast<double>(allocated_bytes - before) / blocks;
  pool<Policy> all(blocks);
  std::minstd_rand random(1);
  for (auto _ : state) all.requests(static_cast<block_id>(random()));
  state.SetItemsProcessed(state.iterations() * static_cast<std::int64_t>(request_blocks + request_blocks / 2));
}
void pool_sizes(benchmark::internal::Benchmark* b) { b->ArgName("pool")->Arg(4'096)->Arg(1'048'576); }

BENCHMARK(turnover<kvcache::lru>)->Apply(pool_sizes);
BENCHMARK(turnover<kvcache::observed<kvcache::lru>>)->Apply(pool_sizes);
BENCHMARK(turnover<kvcache::lfu>)->Apply(pool_sizes);
BENCHMARK(turnover<kvcache::lru_k>)->Apply(pool_sizes);
BENCHMARK(turnover<kvcache::arc>)->Apply(pool_sizes);
BENCHMARK(turnover<kvcache::s3fifo>)->Apply(pool_sizes);
BENCHMARK(turnover<kvcache::tiny_lfu>)->Apply(pool_sizes);
BENCHMARK(turnover<kvcache::priority>)->Apply(pool_sizes);
BENCHMARK(turnover<kvcache::gittins>)->Apply(pool_sizes);

}  // namespace
