// SPDX-License-Identifier: Apache-2.0
#include "kv_cache.hpp"

#include "bad_input.hpp"

#include <kvcache/attention/attention.hpp>
#include <kvcache/attention/cpu/cpu.hpp>
#include <kvcache/cache.hpp>
#include <kvcache/dispatch.hpp>
#include <kvcache/geometry.hpp>
#include <kvcache/policies.hpp>

#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

namespace engine {
namespace {

template <unsigned BlockSize, class Element>
struct engine_policies : kvcache::policies {
  static constexpr unsigned block_size = BlockSize;
  using dtype = kvcache::kv_dtype<Element>;
};

template <class Policies>
class typed_kv_cache final : public kv_cache {
 public:
  typed_kv_cache(const llama_shape& shape, std::uint32_t blocks, kvcache::thread_pool& workers)
      : geometry_{.layers = shape.layers, .kv_heads = shape.kv_heads, .head_dim = shape.head_dim},
        cache_(geometry_, {.blocks = blocks}),
        attention_(
            {.shape = {.query_heads = shape.query_heads, .kv_heads = shape.kv_heads, .head_dim = shape.head_dim}},
            workers) {}

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
    constexpr kvcache::kv_format format{kvcache::dtype_traits<typename Policies::dtype::k>::id,
                                        kvcache::dtype_traits<typename Policies::dtype::v>::id};
    return kvcache::bytes_per_token(geometry_, format);
  }

 private:
  kvcache::geometry geometry_;
  kvcache::cache<Policies> cache_;
  kvcache::attention<Policies> attention_;
  kvcache::attention_plan plan_;
  const kvcache::step* step_ = nullptr;
};

}  // namespace

void validate_block_size(std::uint32_t block_size) {
  if (std::find(block_sizes.begin(), block_sizes.end(), block_size) != block_sizes.end()) return;
  std::string known;
  for (const std::uint32_t size : block_sizes) known += (known.empty() ? "" : ", ") + std::to_string(size);
  throw bad_input("block size is " + std::to_string(block_size) + ", choose one of " + known);
}

std::unique_ptr<kv_cache> make_kv_cache(const llama_shape& shape, const kv_options& options,
                                        kvcache::thread_pool& workers) {
  validate_block_size(options.block_size);
  return kvcache::dispatch(
      [&](auto block_size, auto element) -> std::unique_ptr<kv_cache> {
        using policies = engine_policies<block_size.value, typename decltype(element)::type>;
        return std::make_unique<typed_kv_cache<policies>>(shape, options.blocks, workers);
      },
      kvcache::one_of<block_sizes[0], block_sizes[1], block_sizes[2]>{options.block_size},
      kvcache::dtype_of<kvcache::f32, kvcache::f16, kvcache::bf16>{options.dtype});
}

}  // namespace engine
