// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "llama.hpp"

#include <kvcache/attention/cpu/thread_pool.hpp>
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/eviction/lru.hpp>

#include <array>
#include <cstdint>
#include <memory>

namespace engine {

/// The block sizes that are compiled in.
inline constexpr std::array<std::uint32_t, 3> block_sizes{8, 16, 64};

/// Throws bad_input for any other.
void validate_block_size(std::uint32_t block_size);

struct kv_options {
  std::uint32_t block_size = 16;  ///< one of block_sizes
  kvcache::dtype_id dtype = kvcache::dtype_id::float16;
  std::uint32_t blocks = 0;
};

/// kvcache::cache and kvcache::attention with block size and dtype chosen at run time. Bookkeeping depends on neither,
/// so the scheduler sees it as it is; behind the virtual calls lie the bytes.
class kv_cache : public attention_call {
 public:
  virtual ~kv_cache() = default;

  [[nodiscard]] virtual kvcache::block_manager<kvcache::lru>& manager() noexcept = 0;

  /// Between begin and the forward pass: carries out the step's copies and plans its attention. The step has to stay
  /// until the pass is over.
  virtual void prepare(const kvcache::step& step) = 0;

  /// Of K and V in all layers.
  [[nodiscard]] virtual std::uint64_t bytes_per_token() const noexcept = 0;
};

/// Throws kvcache::invalid_argument or bad_input where the options can never work, kvcache::system_failure where memory
/// is refused. The pool of threads has to outlive the cache.
[[nodiscard]] std::unique_ptr<kv_cache> make_kv_cache(const llama_shape& shape, const kv_options& options,
                                                      kvcache::thread_pool& workers);

}  // namespace engine
