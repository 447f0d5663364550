// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/attention.hpp>

#include <cstddef>
#include <cstdint>

namespace kvcache::detail::cpu {

/// Rows and dims are padded to so many floats: a multiple of every instruction set's lanes and row block.
inline constexpr std::size_t padding = 16;

[[nodiscard]] constexpr std::size_t padded(std::size_t n) noexcept { return (n + padding - 1) / padding * padding; }

/// Parts of one thread's scratch for tiles, in floats.
struct tile_scratch {
  std::size_t rows = 0;   ///< query tokens times group, padded
  std::size_t dim = 0;    ///< head_dim, padded
  std::size_t dim_v = 0;  ///< head_dim_v, padded

  constexpr tile_scratch(std::uint32_t tile_rows, const attention_shape& s) noexcept
      : rows(padded(std::size_t{tile_rows} * (s.query_heads / s.kv_heads))),
        dim(padded(s.head_dim)),
        dim_v(padded(s.head_dim_v != 0 ? s.head_dim_v : s.head_dim)) {}

  [[nodiscard]] constexpr std::size_t queries() const noexcept { return 0; }                           // [dim, rows]
  [[nodiscard]] constexpr std::size_t output() const noexcept { return dim * rows; }                   // [rows, dim_v]
  [[nodiscard]] constexpr std::size_t logits() const noexcept { return output() + rows * dim_v; }      // [chunk, rows]
  [[nodiscard]] constexpr std::size_t allowed() const noexcept { return logits() + kv_chunk * rows; }  // [chunk, rows]
  [[nodiscard]] constexpr std::size_t keys() const noexcept { return allowed() + kv_chunk * rows; }    // [chunk, dim]
  [[nodiscard]] constexpr std::size_t values() const noexcept { return keys() + kv_chunk * dim; }      // [chunk, dim_v]
  [[nodiscard]] constexpr std::size_t per_row() const noexcept { return values() + kv_chunk * dim_v; }  // [8, rows]
  [[nodiscard]] constexpr std::size_t weights() const noexcept { return per_row() + 8 * rows; }  // [rows, chunk / 2]
  [[nodiscard]] constexpr std::size_t size() const noexcept { return weights() + rows * (kv_chunk / 2); }
};

/// Tokens that decoding takes from each kv head at a time.
inline constexpr std::size_t decode_chunk = 64;
/// Decoding takes groups below this; larger ones are tiles of their own.
inline constexpr std::uint32_t decode_group = 16;

/// Parts of one thread's scratch for decoding, in floats.
struct decode_scratch {
  std::size_t heads = 0;
  std::size_t dim = 0;
  std::size_t dim_v = 0;

  constexpr explicit decode_scratch(const attention_shape& s) noexcept
      : heads(s.query_heads), dim(padded(s.head_dim)), dim_v(padded(s.head_dim_v != 0 ? s.head_dim_v : s.head_dim)) {}

  [[nodiscard]] constexpr std::size_t queries() const noexcept { return 0; }                         // [heads, dim]
  [[nodiscard]] constexpr std::size_t output() const noexcept { return heads * dim; }                // [heads, dim_v]
  [[nodiscard]] constexpr std::size_t top() const noexcept { return output() + heads * dim_v; }      // [heads, 16]
  [[nodiscard]] constexpr std::size_t total() const noexcept { return top() + heads * padding; }     // [heads, 16]
  [[nodiscard]] constexpr std::size_t slope() const noexcept { return total() + heads * padding; }   // [heads, 16]
  [[nodiscard]] constexpr std::size_t logits() const noexcept { return slope() + heads * padding; }  // [chunk, 8]
  [[nodiscard]] constexpr std::size_t distance() const noexcept {
    return logits() + decode_chunk * 8;
  }                                                                                                    // [4, chunk, 8]
  [[nodiscard]] constexpr std::size_t row() const noexcept { return distance() + decode_chunk * 32; }  // [dim or dim_v]
  [[nodiscard]] constexpr std::size_t keys() const noexcept {
    return row() + (dim > dim_v ? dim : dim_v);
  }                                                                                                    // [chunk, dim]
  [[nodiscard]] constexpr std::size_t values() const noexcept { return keys() + decode_chunk * dim; }  // [chunk, dim_v]
  [[nodiscard]] constexpr std::size_t shift() const noexcept { return values() + decode_chunk * dim_v; }  // [heads]
  [[nodiscard]] constexpr std::size_t size() const noexcept { return shift() + padded(heads); }
};

/// What decoding over codes needs beside that, in floats. Dims are padded to whole pieces of codes.
struct code_scratch {
  std::size_t heads = 0;
  std::size_t dim = 0;
  std::size_t dim_v = 0;

  constexpr explicit code_scratch(const attention_shape& s) noexcept
      : heads(s.query_heads), dim(whole(s.head_dim)), dim_v(whole(s.head_dim_v != 0 ? s.head_dim_v : s.head_dim)) {}
  [[nodiscard]] static constexpr std::size_t whole(std::size_t n) noexcept { return (n + 127) / 128 * 128; }

  [[nodiscard]] constexpr std::size_t queries() const noexcept { return 0; }             // [heads, dim]
  [[nodiscard]] constexpr std::size_t prepared() const noexcept { return heads * dim; }  // two bytes each
  [[nodiscard]] constexpr std::size_t sums() const noexcept {
    return prepared() + heads * dim / 2;
  }  // [heads, 2, dim / 4]
  [[nodiscard]] constexpr std::size_t output() const noexcept { return sums() + heads * dim / 2; }  // [heads, dim_v]
  [[nodiscard]] constexpr std::size_t units() const noexcept { return output() + heads * dim_v; }   // [heads]
  [[nodiscard]] constexpr std::size_t excess() const noexcept { return units() + padded(heads); }   // [heads]
  [[nodiscard]] constexpr std::size_t rest_units() const noexcept { return excess() + padded(heads); }  // [heads]
  [[nodiscard]] constexpr std::size_t size() const noexcept { return rest_units() + padded(heads); }
};

}  // namespace kvcache::detail::cpu
