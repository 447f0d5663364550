// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU against what the machine can do: decode against the read bandwidth, prefill against the peak of
// multiply-adds. Both limits are measured in this very run, in turn with each row, so that whatever else the machine
// does weighs on both. Counters are medians over the iterations.
#include "limits.hpp"

#include <benchmark/benchmark.h>
#include <kvcache/attention/attention.hpp>
#include <kvcache/attention/cpu/cpu.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

using namespace kvcache;
namespace limits = kvcache_bench;

constexpr unsigned thread_count = 2;
constexpr std::uint32_t kv_heads = 8;
constexpr std::size_t stream_bytes = std::size_t{1} << 30;

thread_pool& pool() {
  static thread_pool threads(thread_count);
  return threads;
}

const limits::big_buffer& stream() {
  static const limits::big_buffer memory(stream_bytes);
  return memory;
}

double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x.empty() ? 0 : x[x.size() / 2];
}

/// A pool of blocks, [block, token, head, dim], K and V apart; blocks are handed out in a shuffled order.
template <class T>
struct paged {
  std::uint32_t head_dim;
  std::uint32_t block_size;
  std::uint32_t blocks;
  limits::big_buffer k;
  limits::big_buffer v;
  std::vector<block_id> table;

  paged(std::uint32_t dim, std::uint32_t size, std::uint32_t count)
      : head_dim(dim), block_size(size), blocks(count), k(bytes()), v(bytes()), table(count) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    std::vector<T> some(65'521);  // a prime, so that no two blocks are alike
    for (T& x : some) x = from_float<T>(normal(random));
    fill(k, some);
    fill(v, some);
    std::iota(table.begin(), table.end(), block_id{0});
    std::shuffle(table.begin(), table.end(), random);
  }
  [[nodiscard]] std::size_t bytes() const { return std::size_t{blocks} * block_size * kv_heads * head_dim * sizeof(T); }
  static void fill(const limits::big_buffer& to, const std::vector<T>& some) {
    for (std::size_t at = 0; at < to.size(); at += some.size() * sizeof(T))
      std::memcpy(to.data() + at, some.data(), (std::min)(some.size() * sizeof(T), to.size() - at));
  }
  [[nodiscard]] kv_view view() const {
    const std::int64_t head = std::int64_t{head_dim} * std::int64_t{sizeof(T)};
    kv_view r;
    r.k = {k.data(), head * kv_heads * block_size, head * kv_heads, head};
    r.v = {v.data(), head * kv_heads * block_size, head * kv_heads, head};
    r.blocks = blocks;
    r.block_size = block_size;
    r.kv_heads = kv_heads;
    r.head_dim = r.head_dim_v = head_dim;
    r.k_dtype = r.v_dtype = dtype_traits<T>::id;
    return r;
  }
};

template <class T, bool Invariant>
struct bundle : policies {
  using dtype = kv_dtype<T>;
  static constexpr bool batch_invariant = Invariant;
};

/// A sequence of the batch: `kv_len` tokens, the newest `queries` of them computed.
struct part {
  std::uint32_t queries;
  std::uint32_t kv_len;
};

/// Sequences of any lengths; their blocks lie anywhere in the pool.
template <class T, bool Invariant = false>
struct workload {
  paged<T> kv;
  std::uint32_t group;
  std::uint32_t rows;
  std::vector<std::uint32_t> offsets;
  std::vector<std::uint32_t> tables;
  std::vector<std::uint32_t> lengths;
  std::vector<T> q;
  std::vector<T> out;

  workload(std::uint32_t g, std::uint32_t dim, std::uint32_t block_size, const std::vector<part>& parts)
      : kv(dim, block_size, blocks_of(parts, block_size)), group(g), offsets{0}, tables{0} {
    for (const part& p : parts) {
      offsets.push_back(offsets.back() + p.queries);
      tables.push_back(tables.back() + (p.kv_len + block_size - 1) / block_size);
      lengths.push_back(p.kv_len);
    }
    rows = offsets.back();
    q.resize(std::size_t{rows} * kv_heads * g * dim);
    out.resize(q.size());
    std::mt19937 random(11);
    std::normal_distribution<float> normal;
    for (T& x : q) x = from_float<T>(normal(random));
  }
  [[nodiscard]] static std::uint32_t blocks_of(const std::vector<part>& parts, std::uint32_t block_size) {
    std::uint32_t blocks = 0;
    for (const part& p : parts) blocks += (p.kv_len + block_size - 1) / block_size;
    return blocks;
  }
  [[nodiscard]] batch_view batch() const {
    return {offsets, lengths, block_tables::csr(kv.table.data(), tables), {}, kv.block_size};
  }
  template <class Executor>
  [[nodiscard]] attention<bundle<T, Invariant>> engine(Executor& threads) const {
    return attention<bundle<T, Invariant>>(
        {.shape = {.query_heads = kv_heads * group, .kv_heads = kv_heads, .head_dim = kv.head_dim}}, threads);
  }
  [[nodiscard]] attention<bundle<T, Invariant>> engine() const { return engine(pool()); }
  void run(const attention<bundle<T, Invariant>>& a, const attention_plan& plan) {
    a.run(plan, kv.view(), rows_view<const T>(q.data(), rows, kv_heads * group, kv.head_dim),
          rows_view<T>(out.data(), rows, kv_heads * group, kv.head_dim));
  }
};

/// Bytes of K and V that a sequence of `kv_len` tokens has.
template <class T>
std::size_t kv_bytes(std::uint32_t kv_len, std::uint32_t dim) {
  return std::size_t{kv_len} * kv_heads * dim * sizeof(T) * 2;
}

template <class T, bool Invariant>
void decode_sequences(benchmark::State& state, std::uint32_t sequences) {
  const auto group = static_cast<std::uint32_t>(state.range(0));
  const auto dim = static_cast<std::uint32_t>(state.range(1));
  const auto block_size = static_cast<std::uint32_t>(state.range(2));
  const auto kv_len = static_cast<std::uint32_t>(state.range(3));
  workload<T, Invariant> work(group, dim, block_size, std::vector<part>(sequences, {1, kv_len}));
  const auto a = work.engine();
  const attention_plan plan = a.plan(work.batch());
  work.run(a, plan);

  const double bytes = static_cast<double>(kv_bytes<T>(kv_len, dim)) * sequences;
  const double flops_per_byte = 4.0 * group / (2.0 * sizeof(T));
  std::vector<double> read;
  std::vector<double> roofline;
  std::vector<double> bandwidth;
  std::vector<double> peaks;
  std::vector<double> achieved;
  std::vector<double> times;
  for (auto _ : state) {
    const double peak = (std::max)(limits::peak_flops(pool(), limits::operation::multiply_add),
                                   limits::peak_flops(pool(), limits::operation::dot));
    const double before = limits::read_bandwidth(pool(), stream());
    const double begin = limits::seconds();
    work.run(a, plan);
    const double time = limits::seconds() - begin;
    const double limit = 0.5 * (before + limits::read_bandwidth(pool(), stream()));
    state.SetIterationTime(time);
    times.push_back(time);
    bandwidth.push_back(limit);
    peaks.push_back(peak);
    achieved.push_back(bytes / time);
    read.push_back(bytes / time / limit);
    roofline.push_back(bytes / time / (std::min)(limit, peak / flops_per_byte));
  }
  state.counters["group"] = group;
  state.counters["head_dim"] = dim;
  state.counters["block_size"] = block_size;
  state.counters["kv_len"] = kv_len;
  state.counters["kv_bits"] = dtype_traits<T>::bits;
  state.counters["threads"] = thread_count;
  state.counters["sequences"] = sequences;
  state.counters["median_ms"] = median(times) * 1e3;
  state.counters["read_gb_per_s"] = median(achieved) / 1e9;
  state.counters["limit_gb_per_s"] = median(bandwidth) / 1e9;
  state.counters["peak_gflops"] = median(peaks) / 1e9;
  state.counters["read_fraction"] = median(read);
  state.counters["roofline_fraction"] = median(roofline);
}

/// Arguments: group, head_dim, block_size, kv_len. So many sequences that their KV is far larger than the caches.
template <class T, bool Invariant = false>
void decode(benchmark::State& state) {
  const std::size_t each =
      kv_bytes<T>(static_cast<std::uint32_t>(state.range(3)), static_cast<std::uint32_t>(state.range(1)));
  decode_sequences<T, Invariant>(state, static_cast<std::uint32_t>((std::max)(std::size_t{1}, stream_bytes / each)));
}

/// Arguments: group, head_dim, block_size, kv_len, sequences. The limits' 1 GiB, read before each run, leaves none of
/// the batch's KV in the caches.
template <class T>
void decode_batch(benchmark::State& state) {
  decode_sequences<T, false>(state, static_cast<std::uint32_t>(state.range(4)));
}

/// Arguments: group, head_dim, block_size, kv_len, queries: one causal chunk of `queries` tokens that ends at kv_len.
template <class T>
void prefill(benchmark::State& state) {
  const auto group = static_cast<std::uint32_t>(state.range(0));
  const auto dim = static_cast<std::uint32_t>(state.range(1));
  const auto block_size = static_cast<std::uint32_t>(state.range(2));
  const auto kv_len = static_cast<std::uint32_t>(state.range(3));
  const auto queries = static_cast<std::uint32_t>(state.range(4));
  workload<T> work(group, dim, block_size, {{queries, kv_len}});
  const auto a = work.engine();
  const attention_plan plan = a.plan(work.batch());
  work.run(a, plan);

  // Query i of the chunk sees kv_len - queries + i + 1 tokens: 2 products of head_dim multiply-adds each.
  const double pairs = static_cast<double>(queries) * (kv_len - queries) + 0.5 * queries * (queries + 1.0);
  const double flops = 4.0 * pairs * dim * kv_heads * group;
  constexpr std::array kinds{limits::operation::multiply_add, limits::operation::dot, limits::operation::matrix};
  constexpr std::array names{"fma_fraction", "dot_fraction", "matrix_fraction"};
  std::array<std::vector<double>, kinds.size()> fractions;
  std::vector<double> achieved;
  std::vector<double> times;
  for (auto _ : state) {
    std::array<double, kinds.size()> peaks;
    for (std::size_t i = 0; i < kinds.size(); ++i) peaks[i] = limits::peak_flops(pool(), kinds[i]);
    const double begin = limits::seconds();
    work.run(a, plan);
    const double time = limits::seconds() - begin;
    state.SetIterationTime(time);
    times.push_back(time);
    achieved.push_back(flops / time);
    for (std::size_t i = 0; i < kinds.size(); ++i)
      fractions[i].push_back(flops / time / (0.5 * (peaks[i] + limits::peak_flops(pool(), kinds[i]))));
  }
  state.counters["group"] = group;
  state.counters["head_dim"] = dim;
  state.counters["block_size"] = block_size;
  state.counters["kv_len"] = kv_len;
  state.counters["queries"] = queries;
  state.counters["kv_bits"] = dtype_traits<T>::bits;
  state.counters["threads"] = thread_count;
  state.counters["median_ms"] = median(times) * 1e3;
  state.counters["gflops"] = median(achieved) / 1e9;
  for (std::size_t i = 0; i < kinds.size(); ++i)
    if (limits::peak_flops(pool(), kinds[i]) > 0) state.counters[names[i]] = median(fractions[i]);
}

/// The pool's threads, and how long each had work to do.
class timed_pool {
 public:
  [[nodiscard]] static unsigned threads() { return pool().threads(); }
  template <class F>
  void run(F&& f) {
    pool().run([&](unsigned ith, unsigned nth) {
      const double begin = limits::seconds();
      f(ith, nth);
      busy[ith * std::size_t{8}] = limits::seconds() - begin;
    });
  }
  std::vector<double> busy = std::vector<double>(thread_count * std::size_t{8});
};

/// 64 sequences between 1 and 32,768 tokens, most of them short: lengths are evenly spread by their logarithm.
std::vector<part> long_tailed() {
  std::mt19937 random(5);
  std::uniform_real_distribution<double> power(0, 15);
  std::vector<part> parts(64);
  for (part& p : parts) p = {1, static_cast<std::uint32_t>(std::exp2(power(random)))};
  parts[20].kv_len = 32768;
  return parts;
}

/// Arguments: group, head_dim, 1 where every eighth sequence is a chunk of 256 tokens. `balance`: the time that threads
/// had work, over threads times the time of the run.
void mixed_batch(benchmark::State& state) {
  std::vector<part> parts = long_tailed();
  for (std::size_t i = 0; state.range(2) != 0 && i < parts.size(); i += 8)
    parts[i] = {256, (std::max)(parts[i].kv_len, 256u)};
  workload<bf16> work(static_cast<std::uint32_t>(state.range(0)), static_cast<std::uint32_t>(state.range(1)), 16,
                      parts);
  timed_pool threads;
  const auto a = work.engine(threads);
  const attention_plan plan = a.plan(work.batch());
  work.run(a, plan);
  std::vector<double> balance;
  for (auto _ : state) {
    const double begin = limits::seconds();
    work.run(a, plan);
    const double time = limits::seconds() - begin;
    state.SetIterationTime(time);
    balance.push_back(std::accumulate(threads.busy.begin(), threads.busy.end(), 0.0) / (thread_count * time));
  }
  state.counters["group"] = static_cast<double>(state.range(0));
  state.counters["head_dim"] = static_cast<double>(state.range(1));
  state.counters["sequences"] = static_cast<double>(parts.size());
  state.counters["rows"] = work.rows;
  state.counters["units"] = static_cast<double>(plan.units().size());
  state.counters["threads"] = thread_count;
  state.counters["balance"] = median(balance);
}

void decode_rows(benchmark::internal::Benchmark* b) {
  for (const int block_size : {16, 64})
    for (const int group : {1, 4, 8}) b->Args({group, 128, block_size, 32768});
  for (const int block_size : {16, 64})
    for (const int group : {1, 4, 8}) b->Args({group, 64, block_size, 32768});
}
void few_decode_rows(benchmark::internal::Benchmark* b) {
  for (const int group : {1, 4, 8}) b->Args({group, 128, 16, 32768});
}
void batch_invariant_rows(benchmark::internal::Benchmark* b) {
  for (const int group : {1, 4, 8}) b->Args({group, 128, 16, 8192});
}
void prefill_rows(benchmark::internal::Benchmark* b) {
  b->Args({4, 128, 16, 2048, 2048})
      ->Args({4, 128, 16, 8192, 512})
      ->Args({1, 128, 16, 2048, 2048})
      ->Args({4, 64, 16, 2048, 2048});
  for (const int head_dim : {64, 128})
    for (const int kv_len : {1024, 4096, 16384})
      for (const int group : {1, 4, 8}) b->Args({group, head_dim, 16, kv_len, 1024});
}
// What bench/peers holds PyTorch against.
void decode_peer_rows(benchmark::internal::Benchmark* b) {
  for (const int head_dim : {64, 128})
    for (const int group : {1, 4, 8})
      for (const int block_size : {16, 64}) {
        b->Args({group, head_dim, block_size, 32768, 1});
        b->Args({group, head_dim, block_size, 4096, 8});
      }
}
void prefill_peer_rows(benchmark::internal::Benchmark* b, std::initializer_list<int> block_sizes) {
  for (const int head_dim : {64, 128})
    for (const int kv_len : {1024, 4096})
      for (const int block_size : block_sizes) b->Args({4, head_dim, block_size, kv_len, 1024});
}
void wide_block_prefill_rows(benchmark::internal::Benchmark* b) { prefill_peer_rows(b, {64}); }
void f32_prefill_rows(benchmark::internal::Benchmark* b) { prefill_peer_rows(b, {16, 64}); }
void mixed_rows(benchmark::internal::Benchmark* b) {
  for (const int chunks : {0, 1})
    for (const int group : {1, 4, 8}) b->Args({group, 128, chunks});
}

BENCHMARK(decode<bf16>)->Apply(decode_rows)->Iterations(9)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(decode<bf16, true>)
    ->Name("batch_invariant<bf16>")
    ->Apply(batch_invariant_rows)
    ->Iterations(9)
    ->UseManualTime()
    ->Unit(benchmark::kMillisecond);
BENCHMARK(decode<f16>)->Apply(few_decode_rows)->Iterations(9)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(decode<f32>)->Apply(few_decode_rows)->Iterations(9)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(prefill<bf16>)->Apply(prefill_rows)->Iterations(9)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(decode_batch<bf16>)->Apply(decode_peer_rows)->Iterations(5)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(decode_batch<f32>)->Apply(decode_peer_rows)->Iterations(5)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(prefill<bf16>)->Apply(wide_block_prefill_rows)->Iterations(5)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(prefill<f32>)->Apply(f32_prefill_rows)->Iterations(5)->UseManualTime()->Unit(benchmark::kMillisecond);
BENCHMARK(mixed_batch)->Apply(mixed_rows)->Iterations(9)->UseManualTime()->Unit(benchmark::kMillisecond);

}  // namespace
