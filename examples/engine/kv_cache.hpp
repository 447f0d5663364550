// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "llama.hpp"

#include <kvcache/attention/cpu/thread_pool.hpp>
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/eviction/lru.hpp>

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace engine {

/// The block sizes that can be chosen: those that the tests hold against the reference.
inline constexpr std::array<std::uint32_t, 3> block_sizes{8, 16, 64};

/// Throws bad_input for any other.
void validate_block_size(std::uint32_t block_size);

struct kv_options {
  std::uint32_t block_size = 16;  ///< one of block_sizes
  std::string dtype = "f16";      ///< of K and V, or K:V
  std::uint32_t blocks = 0;
  std::uint32_t sequences = 1;    ///< at once, at most
  std::uint32_t step_tokens = 1;  ///< computed in one step, at most
  /// [layers, kv_heads, head_dim], subtracted from keys before they are stored; empty: nothing. Read when made.
  std::span<const float> key_offset{};
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

/// The dtypes that are compiled in: a name for K and V, or K:V where they differ.
[[nodiscard]] std::vector<std::string> kv_dtype_names();

/// The name as kv_dtype_names has it: `f16:f16` is `f16`. Throws bad_input where it is not compiled in.
[[nodiscard]] std::string canonical_kv_dtype(const std::string& dtype);

/// Throws kvcache::invalid_argument or bad_input where the options can never work, kvcache::system_failure where memory
/// is refused. The pool of threads has to outlive the cache.
[[nodiscard]] std::unique_ptr<kv_cache> make_kv_cache(const llama_shape& shape, const kv_options& options,
                                                      kvcache::thread_pool& workers);

}  // namespace engine
