// SPDX-License-Identifier: Apache-2.0
// Where the documentation of storage puts codes, scales and tails, worked out afresh, and what calls have to leave
// there.
#pragma once

#include <kvcache/quantise.hpp>
#include <kvcache/storage.hpp>
#include <kvcache/transfer.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "pool.hpp"

namespace kvcache_test {

/// [layer][block][K codes | K scales | V codes | V scales], planes on 64-byte boundaries, scales per channel once for a
/// block; behind all that [layer][tail block][K | V].
struct format_order {
  kvcache::geometry shape;
  kvcache::kv_format format;
  kvcache::dtype_id tail_dtype = kvcache::dtype_id::bfloat16;
  std::uint64_t blocks_with_null = 0;
  std::uint64_t tail_blocks = 0;
  std::uint64_t block_size = 0;
  bool heads_first = false;
  std::vector<std::uint32_t> wide_layers;

  [[nodiscard]] kvcache::dtype_id dtype(std::uint32_t layer, bool keys, bool in_tail) const {
    const bool wide = std::find(wide_layers.begin(), wide_layers.end(), layer) != wide_layers.end();
    const kvcache::dtype_id id = wide ? tail_dtype : keys ? format.k : format.v;
    if (!in_tail || kvcache::quantization_of(id).bits == 0) return id;
    return kvcache::is_rotated(id)
               ? static_cast<kvcache::dtype_id>(static_cast<std::uint8_t>(tail_dtype) | kvcache::rotated_bit)
               : tail_dtype;
  }
  [[nodiscard]] std::uint32_t dim(bool keys) const { return keys ? shape.head_dim : shape.v_dim(); }

  /// Bytes of one block of one layer.
  [[nodiscard]] std::uint64_t block_bytes(std::uint32_t layer, bool in_tail) const {
    return code_plane(layer, true, in_tail) + scale_plane(layer, true, in_tail) + code_plane(layer, false, in_tail) +
           scale_plane(layer, false, in_tail);
  }
  [[nodiscard]] std::uint64_t total() const {
    std::uint64_t sum = tails_begin();
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) sum += tail_blocks * block_bytes(layer, true);
    return sum;
  }

  /// First byte of the codes, or the elements, of a token's head in `entry` of a block table.
  [[nodiscard]] std::uint64_t codes(std::uint32_t layer, bool keys, kvcache::block_id entry, std::uint64_t token,
                                    std::uint64_t head) const {
    const bool in_tail = (entry & kvcache::tail_bit) != 0;
    const std::uint64_t before = keys ? 0 : code_plane(layer, true, in_tail) + scale_plane(layer, true, in_tail);
    return block(layer, entry) + before + inside(token, head) * head_bytes(layer, keys, in_tail);
  }
  [[nodiscard]] std::uint64_t scales(std::uint32_t layer, bool keys, kvcache::block_id entry, std::uint64_t token,
                                     std::uint64_t head) const {
    const std::uint64_t plane = codes(layer, keys, entry, 0, 0) + code_plane(layer, keys, false);
    const kvcache::dtype_id id = dtype(layer, keys, false);
    return plane + (kvcache::seals(id) ? head : inside(token, head)) * kvcache::scale_bytes(id, dim(keys));
  }

 private:
  [[nodiscard]] static std::uint64_t up(std::uint64_t plane) { return (plane + 63) / 64 * 64; }
  [[nodiscard]] std::uint64_t head_bytes(std::uint32_t layer, bool keys, bool in_tail) const {
    return kvcache::code_bytes(dtype(layer, keys, in_tail), dim(keys));
  }
  [[nodiscard]] std::uint64_t code_plane(std::uint32_t layer, bool keys, bool in_tail) const {
    return up(block_size * shape.kv_heads * head_bytes(layer, keys, in_tail));
  }
  [[nodiscard]] std::uint64_t scale_plane(std::uint32_t layer, bool keys, bool in_tail) const {
    const kvcache::dtype_id id = dtype(layer, keys, in_tail);
    return up((kvcache::seals(id) ? 1 : block_size) * shape.kv_heads * kvcache::scale_bytes(id, dim(keys)));
  }
  [[nodiscard]] std::uint64_t inside(std::uint64_t token, std::uint64_t head) const {
    return heads_first ? head * block_size + token : token * shape.kv_heads + head;
  }
  [[nodiscard]] std::uint64_t tails_begin() const {
    std::uint64_t sum = 0;
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) sum += blocks_with_null * block_bytes(layer, false);
    return sum;
  }
  [[nodiscard]] std::uint64_t block(std::uint32_t layer, kvcache::block_id entry) const {
    const bool in_tail = (entry & kvcache::tail_bit) != 0;
    std::uint64_t begin = in_tail ? tails_begin() : 0;
    for (std::uint32_t l = 0; l < layer; ++l)
      begin += (in_tail ? tail_blocks : blocks_with_null) * block_bytes(l, in_tail);
    return begin + (entry & ~kvcache::tail_bit) * block_bytes(layer, in_tail);
  }
};

template <class Policies>
format_order format_order_of(const kvcache::storage<Policies>& pool, std::vector<std::uint32_t> wide_layers = {}) {
  return {.shape = pool.geometry(),
          .format = {kvcache::dtype_traits<typename Policies::dtype::k>::id,
                     kvcache::dtype_traits<typename Policies::dtype::v>::id},
          .tail_dtype = kvcache::dtype_traits<typename Policies::tail_dtype>::id,
          .blocks_with_null = std::uint64_t{pool.blocks()} + 1,
          .tail_blocks = pool.tail_blocks(),
          .block_size = pool.block_size(),
          .heads_first = std::is_same_v<typename Policies::layout, kvcache::hnd>,
          .wide_layers = std::move(wide_layers)};
}

/// An image of a pool, and what calls make of it.
class expected_pool {
 public:
  expected_pool(format_order order, bytes image) : order_(std::move(order)), image_(std::move(image)) {}
  [[nodiscard]] const bytes& image() const { return image_; }
  [[nodiscard]] const format_order& order() const { return order_; }

  template <class T>
  void append(std::uint32_t layer, bool keys, const kvcache::rows_view<const T>& rows,
              const std::vector<kvcache::slot_id>& slots) {
    for (std::uint32_t row = 0; row < rows.rows; ++row) {
      if (slots[row] < 0) continue;
      const auto entry = static_cast<kvcache::block_id>(slots[row] / static_cast<std::int64_t>(order_.block_size));
      const auto token = static_cast<std::uint64_t>(slots[row]) % order_.block_size;
      for (std::uint32_t head = 0; head < rows.heads; ++head) {
        std::vector<float> x;
        for (std::uint32_t d = 0; d < rows.head_dim; ++d) x.push_back(kvcache::to_float(rows.at(row, head)[d]));
        const kvcache::dtype_id id = order_.dtype(layer, keys, (entry & kvcache::tail_bit) != 0);
        if (kvcache::is_rotated(id)) kvcache::rotate(x.data(), rows.head_dim);
        put(layer, keys, entry, token, head, x);
      }
    }
  }

  void seal(const kvcache::block_seal& s) {
    for (std::uint32_t layer = 0; layer < order_.shape.layers; ++layer)
      for (const bool keys : {true, false})
        for (std::uint32_t head = 0; head < order_.shape.kv_heads; ++head) seal_head_of(layer, keys, head, s);
  }

  void copy(const kvcache::block_copy& c) {
    for (std::uint32_t layer = 0; layer < order_.shape.layers; ++layer)
      for (const bool keys : {true, false})
        for (std::uint32_t head = 0; head < order_.shape.kv_heads; ++head)
          for (std::uint32_t token = 0; token < c.tokens; ++token) copy_head(layer, keys, head, token, c);
  }

 private:
  [[nodiscard]] std::byte* at(std::uint64_t offset) { return reinterpret_cast<std::byte*>(image_.data() + offset); }

  /// What a token's head of an entry holds, as floats.
  [[nodiscard]] std::vector<float> get(std::uint32_t layer, bool keys, kvcache::block_id entry, std::uint64_t token,
                                       std::uint64_t head) {
    std::vector<float> x(order_.dim(keys));
    const bool in_tail = (entry & kvcache::tail_bit) != 0;
    kvcache::read_head(
        {at(order_.codes(layer, keys, entry, token, head)),
         in_tail ? nullptr : at(order_.scales(layer, keys, entry, token, head)), order_.dtype(layer, keys, in_tail)},
        order_.dim(keys), x.data());
    return x;
  }
  void put(std::uint32_t layer, bool keys, kvcache::block_id entry, std::uint64_t token, std::uint64_t head,
           const std::vector<float>& x) {
    const kvcache::dtype_id id = kvcache::without_rotation(order_.dtype(layer, keys, (entry & kvcache::tail_bit) != 0));
    std::byte* const to = at(order_.codes(layer, keys, entry, token, head));
    if (kvcache::quantization_of(id).bits == 0)
      kvcache::convert(x.data(), x.size(), to, id);
    else
      kvcache::quantise_head(id, x.data(), static_cast<std::uint32_t>(x.size()), to,
                             at(order_.scales(layer, keys, entry, token, head)));
  }

  void seal_head_of(std::uint32_t layer, bool keys, std::uint32_t head, const kvcache::block_seal& s) {
    const kvcache::dtype_id id = kvcache::without_rotation(order_.dtype(layer, keys, false));
    const kvcache::block_id tail = s.tail | kvcache::tail_bit;
    const auto tokens = static_cast<std::uint32_t>(order_.block_size);
    if (!kvcache::seals(id)) {
      for (std::uint32_t token = 0; token < tokens; ++token)
        put(layer, keys, s.block, token, head, get(layer, keys, tail, token, head));
      return;
    }
    const std::size_t size = kvcache::code_bytes(id, order_.dim(keys));
    std::vector<std::byte> codes(size * tokens);
    kvcache::seal_head(
        id, tokens, order_.dim(keys),
        [&](std::uint32_t token, float* x) {
          const std::vector<float> from = get(layer, keys, tail, token, head);
          std::copy(from.begin(), from.end(), x);
        },
        codes.data(), static_cast<std::int64_t>(size), at(order_.scales(layer, keys, s.block, 0, head)));
    for (std::uint32_t token = 0; token < tokens; ++token)
      std::memcpy(at(order_.codes(layer, keys, s.block, token, head)), codes.data() + token * size, size);
  }

  void copy_head(std::uint32_t layer, bool keys, std::uint32_t head, std::uint32_t token,
                 const kvcache::block_copy& c) {
    const bool from_tail = (c.source & kvcache::tail_bit) != 0;
    const kvcache::dtype_id id = order_.dtype(layer, keys, from_tail);
    if (!from_tail && (c.destination & kvcache::tail_bit) != 0) {
      put(layer, keys, c.destination, token, head, get(layer, keys, c.source, token, head));
      return;
    }
    std::memcpy(at(order_.codes(layer, keys, c.destination, token, head)),
                at(order_.codes(layer, keys, c.source, token, head)), kvcache::code_bytes(id, order_.dim(keys)));
    if (kvcache::quantization_of(id).bits != 0)
      std::memcpy(at(order_.scales(layer, keys, c.destination, token, head)),
                  at(order_.scales(layer, keys, c.source, token, head)), kvcache::scale_bytes(id, order_.dim(keys)));
  }

  format_order order_;
  bytes image_;
};

}  // namespace kvcache_test
