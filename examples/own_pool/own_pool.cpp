// SPDX-License-Identifier: Apache-2.0
// Shows an engine that keeps its own KV pool and bookkeeping, and only borrows attention: a `kv_view` says where the
// engine's bytes lie, a `batch_view` which of its blocks a sequence uses. Nothing is copied or registered.

#include <kvcache/attention/cpu/cpu.hpp>
#include <kvcache/attention/reference.hpp>
#include <kvcache/kvcache.hpp>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

namespace {

struct mine : kvcache::policies {
  static constexpr unsigned block_size = kvcache::dynamic;
  using dtype = kvcache::kv_dtype<float>;
};

/// The engine's pool of one layer: all K first, then all V, [block][head][token][dim]. Any order with strides will do.
class engine_pool {
 public:
  static constexpr unsigned blocks = 32, block_size = 8, kv_heads = 2, head_dim = 64;

  engine_pool() : floats_(2 * plane_floats) {}

  float* k(unsigned block, unsigned head, unsigned token) { return floats_.data() + offset(block, head, token); }
  float* v(unsigned block, unsigned head, unsigned token) { return k(block, head, token) + plane_floats; }

  kvcache::kv_view view() {
    kvcache::kv_view seen;
    seen.k = {reinterpret_cast<std::byte*>(floats_.data()), offset(1, 0, 0) * bytes, offset(0, 0, 1) * bytes,
              offset(0, 1, 0) * bytes};
    seen.v = seen.k;
    seen.v.base += plane_floats * bytes;
    seen.blocks = blocks;
    seen.block_size = block_size;
    seen.kv_heads = kv_heads;
    seen.head_dim = seen.head_dim_v = head_dim;
    seen.k_dtype = seen.v_dtype = kvcache::dtype_id::float32;
    return seen;
  }

 private:
  static constexpr std::int64_t bytes = sizeof(float);
  static constexpr std::int64_t plane_floats = std::int64_t{blocks} * kv_heads * block_size * head_dim;
  static constexpr std::int64_t offset(unsigned block, unsigned head, unsigned token) {
    return ((std::int64_t{block} * kv_heads + head) * block_size + token) * head_dim;
  }
  std::vector<float> floats_;
};

}  // namespace

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> gaussian;
  const auto fill = [&](float* first, unsigned count) {
    for (unsigned i = 0; i < count; ++i) first[i] = gaussian(random);
  };

  // Two sequences out of the engine's own tables: 19 tokens in blocks 5, 3, 9 and 6 tokens in block 4.
  engine_pool pool;
  const std::vector<kvcache::block_id> blocks{5, 3, 9, 4};
  const std::vector<std::uint32_t> table_offsets{0, 3, 4};
  const std::vector<std::uint32_t> kv_lengths{19, 6};
  for (const kvcache::block_id block : blocks)
    for (unsigned head = 0; head < engine_pool::kv_heads; ++head)
      for (unsigned token = 0; token < engine_pool::block_size; ++token) {
        fill(pool.k(block, head, token), engine_pool::head_dim);
        fill(pool.v(block, head, token), engine_pool::head_dim);
      }

  // The first decodes one token, the second prefills its newest four: five rows, one call.
  const std::vector<std::uint32_t> query_offsets{0, 1, 5};
  kvcache::batch_view batch;
  batch.query_offsets = query_offsets;
  batch.kv_lengths = kv_lengths;
  batch.tables = kvcache::block_tables::csr(blocks.data(), table_offsets);
  batch.block_size = engine_pool::block_size;

  constexpr unsigned query_heads = 6, rows = 5;
  std::vector<float> q(rows * query_heads * engine_pool::head_dim), out(q.size());
  fill(q.data(), static_cast<unsigned>(q.size()));
  const kvcache::rows_view<const float> queries(q.data(), rows, query_heads, engine_pool::head_dim);

  kvcache::attention<mine> attention;
  const auto plan = attention.plan(batch);
  attention.run(plan, pool.view(), queries,
                kvcache::rows_view<float>(out.data(), rows, query_heads, engine_pool::head_dim));

  std::vector<double> expected(q.size());
  kvcache::reference_attention<mine::variant>(
      batch, pool.view(), queries,
      kvcache::rows_view<double>(expected.data(), rows, query_heads, engine_pool::head_dim));
  double worst = 0;
  for (std::size_t i = 0; i < out.size(); ++i) worst = std::fmax(worst, std::fabs(out[i] - expected[i]));
  std::printf("%u query rows over the engine's own pool; largest difference to double precision %.1e\n", rows, worst);
  return worst < 1e-5 ? 0 : 1;
}
