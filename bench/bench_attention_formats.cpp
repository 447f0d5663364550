// SPDX-License-Identifier: Apache-2.0
// Decoding over quantised KV, against bf16 KV of the same shape in the same run: `speedup` is how many times as many
// tokens go by, `read_fraction` the bytes read over the read bandwidth.
#include <kvcache/attention/attention.hpp>
#include <kvcache/attention/cpu/cpu.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/memory/huge_page_allocator.hpp>
#include <kvcache/quantization.hpp>
#include <kvcache/storage.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include <benchmark/benchmark.h>

#include "limits.hpp"

namespace {

using namespace kvcache;
namespace limits = kvcache_bench;

constexpr std::uint32_t kv_heads = 8;
constexpr std::uint32_t kv_len = 32'768;
constexpr unsigned thread_count = 2;

thread_pool& pool() {
  static thread_pool threads(thread_count);
  return threads;
}
const limits::big_buffer& stream() {
  static const limits::big_buffer memory(std::size_t{1} << 30);
  return memory;
}
double median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

struct shape {
  std::uint32_t group;
  std::uint32_t head_dim;
  std::uint32_t block_size;
  std::uint32_t sequences;

  [[nodiscard]] std::uint32_t blocks() const { return sequences * (kv_len / block_size); }
  [[nodiscard]] std::uint32_t query_heads() const { return kv_heads * group; }
};

template <class K, class V>
struct bundle : policies {
  static constexpr unsigned block_size = dynamic;
  using dtype = kv_dtype<K, V>;
  using allocator = huge_page_allocator;
};

/// Sequences whose blocks lie anywhere in the pool, one query each.
template <class K, class V>
class workload {
  using bytes = storage<bundle<K, V>>;

 public:
  explicit workload(const shape& s)
      : shape_(s),
        bytes_({.layers = 1, .kv_heads = kv_heads, .head_dim = s.head_dim},
               {.blocks = s.blocks(), .block_size = s.block_size, .tail_blocks = bytes::seals_blocks ? 16u : 0u}),
        attention_({.shape = {.query_heads = s.query_heads(), .kv_heads = kv_heads, .head_dim = s.head_dim}}, pool()),
        table_(s.blocks()),
        lengths_(s.sequences, kv_len),
        q_(std::size_t{s.sequences} * s.query_heads() * s.head_dim),
        out_(q_.size()) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    for (bf16& x : q_) x = from_float<bf16>(normal(random));
    std::iota(table_.begin(), table_.end(), block_id{1});
    std::shuffle(table_.begin(), table_.end(), random);
    for (std::uint32_t i = 0; i <= s.sequences; ++i) offsets_.push_back(i);
    fill(random);
    plan_ = attention_.plan(batch());
    run();
  }

  void run() {
    const std::uint32_t rows = shape_.sequences;
    attention_.run(plan_, bytes_, 0, rows_view<const bf16>(q_.data(), rows, shape_.query_heads(), shape_.head_dim),
                   rows_view<bf16>(out_.data(), rows, shape_.query_heads(), shape_.head_dim));
  }
  /// That a run has to read.
  [[nodiscard]] double read_bytes() const {
    const geometry g{.layers = 1, .kv_heads = kv_heads, .head_dim = shape_.head_dim};
    return static_cast<double>(bytes_per_block(g, shape_.block_size, bytes::format)) * shape_.blocks();
  }

 private:
  [[nodiscard]] batch_view batch() const {
    return {offsets_,
            lengths_,
            block_tables::padded(table_.data(), shape_.sequences, shape_.blocks() / shape_.sequences),
            {},
            shape_.block_size};
  }

  void fill(std::mt19937& random) {
    std::normal_distribution<float> normal;
    std::vector<float> some(65'521);  // a prime, so that no two blocks are alike
    for (float& x : some) x = normal(random);
    const std::uint32_t tokens = shape_.block_size;
    std::vector<float> rows(std::size_t{tokens} * kv_heads * shape_.head_dim);
    std::vector<slot_id> slots(tokens);
    std::size_t at = 0;
    for (block_id block = 1; block <= shape_.blocks(); ++block) {
      for (float& x : rows) {
        x = some[at];
        if (++at == some.size()) at = 0;
      }
      std::iota(slots.begin(), slots.end(), make_slot(bytes::seals_blocks ? tail_bit : block, 0, tokens));
      const rows_view<const float> view(rows.data(), tokens, kv_heads, shape_.head_dim);
      bytes_.append(0, view, view, slots);
      const block_seal full{0, 0, block};
      if (bytes::seals_blocks) bytes_.seal(std::span(&full, 1));
    }
  }

  shape shape_;
  bytes bytes_;
  attention<bundle<K, V>> attention_;
  attention_plan plan_;
  std::vector<block_id> table_;
  std::vector<std::uint32_t> offsets_;
  std::vector<std::uint32_t> lengths_;
  std::vector<bf16> q_;
  std::vector<bf16> out_;
};

/// Arguments: group, head_dim, block_size.
template <class K, class V>
void decode(benchmark::State& state) {
  shape s{static_cast<std::uint32_t>(state.range(0)), static_cast<std::uint32_t>(state.range(1)),
          static_cast<std::uint32_t>(state.range(2)), 1};
  // So many sequences that codes of 4 bits are far larger than the caches.
  s.sequences = 2 * 128 / s.head_dim;
  workload<bf16, bf16> wide(s);
  workload<K, V> narrow(s);
  std::vector<double> speedup;
  std::vector<double> fraction;
  std::vector<double> wide_fraction;
  const auto timed = [](auto& work) {
    const double begin = limits::seconds();
    work.run();
    return limits::seconds() - begin;
  };
  for (auto _ : state) {
    const double limit = limits::read_bandwidth(pool(), stream());
    const double before = timed(wide);
    const double time = timed(narrow);
    const double after = timed(wide);
    state.SetIterationTime(time);
    speedup.push_back(0.5 * (before + after) / time);
    fraction.push_back(narrow.read_bytes() / time / limit);
    wide_fraction.push_back(wide.read_bytes() / (0.5 * (before + after)) / limit);
  }
  state.counters["group"] = s.group;
  state.counters["head_dim"] = s.head_dim;
  state.counters["block_size"] = s.block_size;
  state.counters["speedup"] = median(speedup);
  state.counters["read_fraction"] = median(fraction);
  state.counters["bf16_read_fraction"] = median(wide_fraction);
}

void rows(benchmark::internal::Benchmark* b) {
  for (const int group : {1, 4, 8}) b->Args({group, 128, 16});
  for (const int group : {1, 4}) b->Args({group, 128, 64});
  b->Args({4, 64, 16});
  b->Iterations(9)->UseManualTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(decode<int8_per_token, int8_per_token>)->Apply(rows);
BENCHMARK(decode<int8_per_channel, int8_per_channel>)->Apply(rows);
BENCHMARK(decode<int4_grouped<32>, int4_grouped<32>>)->Apply(rows);
BENCHMARK(decode<int4_per_channel, int4_grouped<32>>)->Apply(rows);
BENCHMARK(decode<int4_per_channel, int4_per_channel>)->Apply(rows);
BENCHMARK(decode<fp8_e4m3, fp8_e4m3>)->Apply(rows);

}  // namespace
