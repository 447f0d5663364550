// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>
#include <kvcache/quantization.hpp>

#include <cstdint>
#include <string>
#include <type_traits>

namespace kvcache {

/// The shape of a model's KV: what one token stores in every layer.
///
/// The functions of it that follow are O(1) and touch nothing but their arguments, so any thread may call them at any
/// time. Their sizes are exact as long as they fit 64 bits. Precondition: block sizes are at least 1.
struct geometry {
  std::uint32_t layers = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;    ///< elements of one K vector
  std::uint32_t head_dim_v = 0;  ///< elements of one V vector; 0: as many as K

  /// Elements of one V vector.
  [[nodiscard]] constexpr std::uint32_t v_dim() const noexcept { return head_dim_v != 0 ? head_dim_v : head_dim; }
  friend constexpr bool operator==(const geometry&, const geometry&) = default;
};

/// What K and V are stored in, by run-time name.
struct kv_format {
  dtype_id k = dtype_id::bfloat16;
  dtype_id v = dtype_id::bfloat16;
};

/// Raises invalid_argument where a shape can hold nothing, naming the value and the limit.
inline void validate(const geometry& g) {
  const auto refuse = [](const char* what) {
    detail::raise<invalid_argument>(std::string("geometry: ") + what +
                                    " is 0, at least 1 needed; set it from the model");
  };
  if (g.layers == 0) refuse("layers");
  if (g.kv_heads == 0) refuse("kv_heads");
  if (g.head_dim == 0) refuse("head_dim");
}

/// The part of `g` that one of `ranks` devices holds when kv heads are sharded. With fewer heads than ranks, heads
/// are replicated: each rank holds one. Raises invalid_argument where neither divides the other.
[[nodiscard]] constexpr geometry shard(const geometry& g, std::uint32_t ranks) {
  if (ranks == 0 || g.kv_heads == 0 || (g.kv_heads % ranks != 0 && ranks % g.kv_heads != 0))
    detail::raise<invalid_argument>("shard: " + std::to_string(g.kv_heads) + " kv heads cannot be split evenly over " +
                                    std::to_string(ranks) + " ranks; one number has to divide the other");
  geometry part = g;
  part.kv_heads = g.kv_heads > ranks ? g.kv_heads / ranks : 1;
  return part;
}

/// Bytes that one token takes in one layer, its share of scales included, rounded up. Where scales are per channel that
/// share depends on how many tokens a block holds; otherwise `block_size` changes nothing.
[[nodiscard]] constexpr std::uint64_t bytes_per_token_and_layer(const geometry& g, kv_format format = {},
                                                                std::uint32_t block_size = 16) noexcept {
  const auto scales = [&](dtype_id id, std::uint32_t dim) {
    const std::uint64_t bytes = std::uint64_t{g.kv_heads} * scale_bytes(id, dim);
    return seals(id) ? (bytes + block_size - 1) / block_size : bytes;
  };
  return std::uint64_t{g.kv_heads} * (code_bytes(format.k, g.head_dim) + code_bytes(format.v, g.v_dim())) +
         scales(format.k, g.head_dim) + scales(format.v, g.v_dim());
}

/// Bytes that one token takes in all layers.
[[nodiscard]] constexpr std::uint64_t bytes_per_token(const geometry& g, kv_format format = {},
                                                      std::uint32_t block_size = 16) noexcept {
  return g.layers * bytes_per_token_and_layer(g, format, block_size);
}

/// Every plane of a block - K, its scales, V, its scales - begins on a boundary of so many bytes, and takes whole
/// multiples of it.
inline constexpr std::uint64_t plane_alignment = 64;

/// Bytes of one block over all layers, the padding of its planes included.
[[nodiscard]] constexpr std::uint64_t bytes_per_block(const geometry& g, std::uint32_t block_size,
                                                      kv_format format = {}) noexcept {
  const auto padded = [](std::uint64_t bytes) {
    return (bytes + plane_alignment - 1) / plane_alignment * plane_alignment;
  };
  const auto planes = [&](std::uint32_t dim, dtype_id id) {
    const std::uint64_t tokens_of_scales = seals(id) ? 1 : block_size;
    return padded(std::uint64_t{block_size} * g.kv_heads * code_bytes(id, dim)) +
           padded(tokens_of_scales * g.kv_heads * scale_bytes(id, dim));
  };
  return g.layers * (planes(g.head_dim, format.k) + planes(g.v_dim(), format.v));
}

/// Blocks that `tokens` tokens take, the last one perhaps in part.
[[nodiscard]] constexpr std::uint64_t blocks_for(std::uint64_t tokens, std::uint32_t block_size) noexcept {
  KVCACHE_ASSERT(block_size > 0, "blocks_for: block_size is 0, at least 1 needed");
  return (tokens + block_size - 1) / block_size;
}

namespace detail {

/// How tokens lie while they wait for their block to be whole: codes at 16 bits, element types as they are.
[[nodiscard]] constexpr kv_format format_of_tails(kv_format format, dtype_id tail_dtype) noexcept {
  const auto waiting = [&](dtype_id id) { return quantization_of(id).bits == 0 ? without_rotation(id) : tail_dtype; };
  return {waiting(format.k), waiting(format.v)};
}

}  // namespace detail

/// Bytes of a tail pool of `tail_blocks` blocks over all layers, padding included: as storage::tail_bytes. 0 where
/// neither K nor V seals blocks, since such a storage has none. `tail_dtype` is the policy of that name.
[[nodiscard]] constexpr std::uint64_t tail_pool_bytes(const geometry& g, std::uint32_t block_size,
                                                      std::uint64_t tail_blocks, kv_format format = {},
                                                      dtype_id tail_dtype = dtype_id::bfloat16) noexcept {
  if (!seals(format.k) && !seals(format.v)) return 0;
  return tail_blocks * bytes_per_block(g, block_size, detail::format_of_tails(format, tail_dtype));
}

/// Bytes that a request of `tokens` tokens takes, padding and its last block's unused slots included, and where blocks
/// are sealed one block of the tail pool, since the block that is being filled waits there.
[[nodiscard]] constexpr std::uint64_t bytes_per_request(const geometry& g, std::uint64_t tokens,
                                                        std::uint32_t block_size, kv_format format = {},
                                                        dtype_id tail_dtype = dtype_id::bfloat16) noexcept {
  return blocks_for(tokens, block_size) * bytes_per_block(g, block_size, format) +
         tail_pool_bytes(g, block_size, tokens != 0 ? 1 : 0, format, tail_dtype);
}

/// Blocks, the null block apart, that a memory budget holds of which `taken_bytes` are taken otherwise, say by a tail
/// pool: a storage of so many takes no more than the rest. 0 where the rest has no room for a block beside the null
/// block.
///
///     const auto tails = tail_blocks_for(sequences, step_tokens, block_size);
///     blocks_in(budget, g, block_size, format, tail_pool_bytes(g, block_size, tails, format));
[[nodiscard]] constexpr std::uint64_t blocks_in(std::uint64_t budget_bytes, const geometry& g, std::uint32_t block_size,
                                                kv_format format = {}, std::uint64_t taken_bytes = 0) noexcept {
  const std::uint64_t block = bytes_per_block(g, block_size, format);
  KVCACHE_ASSERT(block > 0, "blocks_in: a block has 0 bytes; check the geometry and the block size");
  const std::uint64_t blocks = taken_bytes < budget_bytes ? (budget_bytes - taken_bytes) / block : 0;
  return blocks > 0 ? blocks - 1 : 0;
}

/// How many requests of `tokens` tokens a memory budget holds at once, nothing shared, and where blocks are sealed with
/// one block of the tail pool for each: a storage of so many requests' blocks and so many tail blocks takes no more. A
/// scheduler wants tail blocks for what a step fills as well: see tail_blocks_for, and blocks_in for what is left then.
/// 0 where `tokens` is 0.
[[nodiscard]] constexpr std::uint64_t concurrency(std::uint64_t budget_bytes, const geometry& g, std::uint64_t tokens,
                                                  std::uint32_t block_size, kv_format format = {},
                                                  dtype_id tail_dtype = dtype_id::bfloat16) noexcept {
  const std::uint64_t blocks = blocks_for(tokens, block_size);
  const std::uint64_t block = bytes_per_block(g, block_size, format);
  const std::uint64_t room = blocks_in(budget_bytes, g, block_size, format);
  if (blocks == 0 || room < blocks) return 0;
  const std::uint64_t request = bytes_per_request(g, tokens, block_size, format, tail_dtype);
  return (budget_bytes - block) / request;
}

static_assert(std::is_trivially_copyable_v<geometry> && std::is_trivially_copyable_v<kv_format>);

}  // namespace kvcache
