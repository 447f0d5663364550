// SPDX-License-Identifier: Apache-2.0
// Brings the kernels: for the source file that lists dtypes, and for no other.
#pragma once

#include "kv_kinds.hpp"

#include <kvcache/attention/attention.hpp>
#include <kvcache/attention/cpu/cpu.hpp>
#include <kvcache/cache.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/geometry.hpp>
#include <kvcache/policies.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace engine {

template <class K, class V>
struct engine_policies : kvcache::policies {
  // Nothing that is done for each token depends on it, so one instantiation serves all block sizes.
  static constexpr unsigned block_size = kvcache::dynamic;
  using dtype = kvcache::kv_dtype<K, V>;
};

template <class Policies>
class typed_kv_cache final : public kv_cache {
 public:
  typed_kv_cache(const llama_shape& shape, const kv_options& options, kvcache::thread_pool& workers)
      : geometry_{.layers = shape.layers, .kv_heads = shape.kv_heads, .head_dim = shape.head_dim},
        cache_(geometry_,
               {.blocks = options.blocks, .block_size = options.block_size, .tail_blocks = tail_blocks(options)}),
        attention_(
            {.shape = {.query_heads = shape.query_heads, .kv_heads = shape.kv_heads, .head_dim = shape.head_dim}},
            workers) {
    const std::size_t size = options.key_offset.size() / shape.layers;
    for (std::uint32_t layer = 0; size != 0 && layer < shape.layers; ++layer)
      cache_.set_key_offset(layer, options.key_offset.subspan(layer * size, size));
  }

  kvcache::block_manager<kvcache::lru>& manager() noexcept override { return cache_.manager(); }

  void prepare(const kvcache::step& step) override {
    cache_.prepare(step);
    plan_ = attention_.plan(step.batch(), std::move(plan_));
    step_ = &step;
  }

  void run(std::uint32_t layer, kvcache::rows_view<const float> q, kvcache::rows_view<const float> k,
           kvcache::rows_view<const float> v, kvcache::rows_view<float> out) override {
    cache_.append(*step_, layer, k, v);
    attention_.run(plan_, cache_, layer, q, out);
  }

  std::uint64_t bytes_per_token() const noexcept override {
    return kvcache::bytes_per_token(geometry_, storage::format, cache_.block_size());
  }

 private:
  using storage = kvcache::storage<Policies>;

  static std::uint32_t tail_blocks(const kv_options& o) {
    return storage::seals_blocks
               ? static_cast<std::uint32_t>(kvcache::tail_blocks_for(o.sequences, o.step_tokens, o.block_size))
               : 0;
  }

  kvcache::geometry geometry_;
  kvcache::cache<Policies> cache_;
  kvcache::attention<Policies> attention_;
  kvcache::attention_plan plan_;
  const kvcache::step* step_ = nullptr;
};

/// A line of a list of dtypes: compiles the cache and its kernels.
template <class K, class V = K>
[[nodiscard]] kv_kind compiled_kv_kind() {
  const std::string k = kvcache::dtype_traits<K>::name;
  return {std::is_same_v<K, V> ? k : k + ":" + kvcache::dtype_traits<V>::name,
          [](const llama_shape& shape, const kv_options& options,
             kvcache::thread_pool& workers) -> std::unique_ptr<kv_cache> {
            return std::make_unique<typed_kv_cache<engine_policies<K, V>>>(shape, options, workers);
          }};
}

}  // namespace engine
