// SPDX-License-Identifier: Apache-2.0
// What formats lose and what they cost. First a table: bytes per element, and how far what is read lies from what was
// stored, over 4,096 rows of 128, Gaussian, with biased channels, and with these less the mean of others. The same
// numbers are counters of the benchmarks error/FORMAT. Then append, seal and reading, in nanoseconds an element, beside
// an append at 16 bits and a memcpy of the same rows in the same run.
#include <benchmark/benchmark.h>
#include <kvcache/fp8.hpp>
#include <kvcache/key_offset.hpp>
#include <kvcache/quantise.hpp>
#include <kvcache/storage.hpp>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace {

using namespace kvcache;

constexpr std::uint32_t dim = 128;
constexpr std::uint32_t error_rows = 4'096;
constexpr std::uint32_t block_size = 32;
constexpr std::uint32_t kv_heads = 8;
constexpr std::uint32_t blocks = 32;
constexpr std::uint32_t tokens = blocks * block_size;

/// Unit Gaussian; with `biased`, Gaussian of sigma 4 around 12 or -12 in four channels.
std::vector<float> rows_of(std::uint32_t rows, bool biased, std::uint32_t seed = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> x(std::size_t{rows} * dim);
  for (float& y : x) y = normal(random);
  constexpr std::uint32_t channels[] = {5, 37, 70, 101};
  for (std::uint32_t r = 0; biased && r < rows; ++r)
    for (std::uint32_t i = 0; i < 4; ++i) {
      float& y = x[std::size_t{r} * dim + channels[i]];
      y = y * 4 + (i % 2 == 0 ? 12.0f : -12.0f);
    }
  return x;
}

/// A block of `block_size` rows to and from a format.
struct stored_block {
  explicit stored_block(dtype_id id)
      : dtype(id), size(code_bytes(id, dim)), codes(size * block_size), scales(scale_bytes(id, dim) * block_size + 1) {}

  void write(const float* rows) {
    const dtype_id stored = without_rotation(dtype);
    if (seals(stored)) {
      seal_head(
          stored, block_size, dim, [&](std::uint32_t t, float* x) { read(rows, t, x); }, codes.data(),
          static_cast<std::int64_t>(size), scales.data());
      return;
    }
    float x[dim];
    for (std::uint32_t t = 0; t < block_size; ++t) {
      read(rows, t, x);
      if (quantization_of(stored).bits == 0)
        convert(x, dim, codes.data() + t * size, stored);
      else
        quantise_head(stored, x, dim, codes.data() + t * size, scales_of(t));
    }
  }
  /// Row t as it is stored, rotated or not.
  void read_stored(std::uint32_t t, float* x) { read_head({codes.data() + t * size, scales_of(t), dtype}, dim, x); }

  dtype_id dtype;
  std::size_t size;
  std::vector<std::byte> codes;
  std::vector<std::byte> scales;

 private:
  void read(const float* rows, std::uint32_t t, float* x) const {
    std::memcpy(x, rows + t * dim, dim * sizeof(float));
    if (is_rotated(dtype)) rotate(x, dim);
  }
  [[nodiscard]] std::byte* scales_of(std::uint32_t t) {
    return scales.data() + (seals(dtype) ? 0 : t * scale_bytes(dtype, dim));
  }
};

struct format_error {
  double relative_rms = 0;
  double most = 0;
};

/// `offset` is subtracted before rows are stored, and added when they are read.
format_error error_of(dtype_id dtype, const std::vector<float>& rows, const std::vector<float>& offset) {
  stored_block block(dtype);
  std::vector<float> shifted(rows);
  for (std::size_t i = 0; i < shifted.size(); ++i) shifted[i] -= offset[i % dim];
  double sum = 0;
  double whole = 0;
  format_error e;
  for (std::size_t first = 0; first < rows.size(); first += std::size_t{block_size} * dim) {
    block.write(shifted.data() + first);
    for (std::uint32_t t = 0; t < block_size; ++t) {
      float x[dim];
      block.read_stored(t, x);
      if (is_rotated(dtype)) rotate(x, dim);
      for (std::uint32_t d = 0; d < dim; ++d) {
        const double wanted = static_cast<double>(rows[first + t * dim + d]);
        const double difference = static_cast<double>(x[d] + offset[d]) - wanted;
        sum += difference * difference;
        whole += wanted * wanted;
        e.most = std::fmax(e.most, std::abs(difference));
      }
    }
  }
  e.relative_rms = std::sqrt(sum / whole);
  return e;
}

double bytes_per_element(dtype_id dtype) {
  const double scales = static_cast<double>(scale_bytes(dtype, dim)) / (seals(dtype) ? block_size : 1);
  return (static_cast<double>(code_bytes(dtype, dim)) + scales) / dim;
}

template <class T>
struct pool_policies : policies {
  static constexpr unsigned block_size = ::block_size;
  using dtype = kv_dtype<T>;
};

/// `tokens` rows of bf16 for K and V, and a pool that holds them.
template <class T>
struct filled {
  using pool_type = storage<pool_policies<T>>;
  static constexpr std::uint32_t tails = pool_type::seals_blocks ? blocks : 0;

  filled()
      : pool({.layers = 1, .kv_heads = kv_heads, .head_dim = dim}, {.blocks = blocks, .tail_blocks = tails}),
        values(std::size_t{tokens} * kv_heads * dim) {
    const std::vector<float> rows = rows_of(tokens * kv_heads, false);
    convert(rows.data(), rows.size(), values.data());
    for (std::uint32_t t = 0; t < tokens; ++t) {
      const block_id block = t / block_size;
      slots.push_back(make_slot(tails != 0 ? tail_bit | block : block + 1, t % block_size, block_size));
    }
  }
  void append() {
    const rows_view<const bf16> rows(values.data(), tokens, kv_heads, dim);
    pool.append(0, rows, rows, slots);
  }
  void seal() {
    std::vector<block_seal> all;
    for (std::uint32_t b = 0; b < blocks; ++b) all.push_back({0, b, b + 1});
    pool.seal(all);
  }

  pool_type pool;
  std::vector<bf16> values;
  std::vector<slot_id> slots;
};

constexpr double elements = 2.0 * tokens * kv_heads * dim;  // K and V

/// What the elements take, each of `bytes` bytes: GB/s of K and V as the caller holds them.
void speed(benchmark::State& state, double bytes) {
  const double all = elements * static_cast<double>(state.iterations());
  state.counters["time/element"] = benchmark::Counter(all, benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
  state.counters["GB/s"] = benchmark::Counter(all * bytes * 1e-9, benchmark::Counter::kIsRate);
}

template <class T>
void add(const std::vector<float>& gaussian, const std::vector<float>& biased, const std::vector<float>& mean) {
  constexpr dtype_id id = dtype_traits<T>::id;
  const std::string name = kvcache::name(id);
  const std::vector<float> nothing(dim);
  const format_error plain = error_of(id, gaussian, nothing);
  const format_error far = error_of(id, biased, nothing);
  const format_error centred = error_of(id, biased, mean);
  std::fprintf(stderr, "%-28s %8.4f %9.3f %% %9.3f %% %9.3f %% %9.4f %9.4f %9.4f\n", name.c_str(),
               bytes_per_element(id), 100 * plain.relative_rms, 100 * far.relative_rms, 100 * centred.relative_rms,
               plain.most, far.most, centred.most);
  benchmark::RegisterBenchmark(("error/" + name).c_str(), [=](benchmark::State& state) {
    for (auto _ : state) benchmark::DoNotOptimize(plain.most);
    state.counters["bytes/element"] = bytes_per_element(id);
    state.counters["gaussian_rms"] = plain.relative_rms;
    state.counters["biased_rms"] = far.relative_rms;
    state.counters["less_mean_rms"] = centred.relative_rms;
    state.counters["gaussian_max"] = plain.most;
    state.counters["biased_max"] = far.most;
  })->Iterations(1);
  benchmark::RegisterBenchmark(("append/" + name).c_str(), [](benchmark::State& state) {
    filled<T> f;
    for (auto _ : state) f.append();
    speed(state, sizeof(bf16));
  });
  if constexpr (filled<T>::tails != 0)
    benchmark::RegisterBenchmark(("seal/" + name).c_str(), [](benchmark::State& state) {
      filled<T> f;
      f.append();
      for (auto _ : state) f.seal();
      speed(state, sizeof(bf16));
    });
  benchmark::RegisterBenchmark(("read/" + name).c_str(), [](benchmark::State& state) {
    filled<T> f;
    f.append();
    if (filled<T>::tails != 0) f.seal();
    const kv_view view = f.pool.view(0);
    float x[dim];
    for (auto _ : state)
      for (block_id block = 1; block <= blocks; ++block)
        for (std::uint32_t t = 0; t < block_size; ++t)
          for (std::uint32_t head = 0; head < kv_heads; ++head) {
            read_head(view.k_head(block, t, head), dim, x);
            benchmark::DoNotOptimize(x);
            read_head(view.v_head(block, t, head), dim, x);
            benchmark::DoNotOptimize(x);
          }
    speed(state, bytes_per_element(id));
  });
}

template <class... Types>
void add_all() {
  const std::vector<float> gaussian = rows_of(error_rows, false);
  const std::vector<float> biased = rows_of(error_rows, true);
  key_mean mean(1, dim);
  const std::vector<float> others = rows_of(error_rows, true, 2);
  mean.add(rows_view<const float>(others.data(), error_rows, 1, dim));
  std::fprintf(stderr, "%-28s %8s %11s %11s %11s %9s %9s %9s\n", "format", "bytes", "gaussian", "biased", "less mean",
               "max", "biased", "less mean");
  (add<Types>(gaussian, biased, mean.mean()), ...);
}

void copy_rows(benchmark::State& state) {
  filled<bf16> f;
  std::vector<bf16> to(f.values.size());
  for (auto _ : state)
    for (int twice = 0; twice < 2; ++twice) {
      std::memcpy(to.data(), f.values.data(), to.size() * sizeof(bf16));
      benchmark::DoNotOptimize(to.data());
      benchmark::ClobberMemory();
    }
  speed(state, sizeof(bf16));
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  benchmark::RegisterBenchmark("memcpy/bf16", copy_rows);
  add_all<bf16, f16, fp8_e4m3, fp8_e5m2, int8_per_token, int8_per_channel, int4_grouped<16>, int4_grouped<32>,
          int4_grouped<64>, int4_grouped<128>, int4_grouped_asymmetric<16>, int4_grouped_asymmetric<32>,
          int4_grouped_asymmetric<64>, int4_grouped_asymmetric<128>, int4_per_channel, int4_per_channel_symmetric,
          int2_per_channel, rotated<bf16>, rotated<fp8_e4m3>, rotated<fp8_e5m2>, rotated<int8_per_token>,
          rotated<int8_per_channel>, rotated<int4_grouped<32>>, rotated<int4_per_channel>, rotated<int2_per_channel>>();
  benchmark::RunSpecifiedBenchmarks();
}
