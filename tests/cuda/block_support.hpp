// SPDX-License-Identifier: Apache-2.0
// Pools for the bodies that move, quantise and fill blocks: one that the host's functions work on and one for the
// bodies, alike to the last byte before and, so the tests say, afterwards.
#pragma once

#include <kvcache/convert.hpp>
#include <kvcache/quantise.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "catch.hpp"
#include "host_context.hpp"

namespace kvcache_test {

inline constexpr std::uint32_t block_sizes[] = {1, 7, 16, 64};
inline constexpr thread_order orders[] = {thread_order::forward, thread_order::backward, thread_order::shuffled};

inline kvcache::dtype_id rotated_of(kvcache::dtype_id id) {
  return static_cast<kvcache::dtype_id>(static_cast<std::uint8_t>(id) | kvcache::rotated_bit);
}
inline bool is_element(kvcache::dtype_id id) { return kvcache::quantization_of(id).bits == 0; }

/// What K and V can be stored in, unrotated.
inline std::vector<kvcache::dtype_id> all_dtypes() {
  std::vector<kvcache::dtype_id> all;
  for (std::uint8_t i = 0; i <= static_cast<std::uint8_t>(kvcache::dtype_id::int2_per_channel); ++i)
    all.push_back(static_cast<kvcache::dtype_id>(i));
  return all;
}

struct pool_form {
  kvcache::dtype_id k = kvcache::dtype_id::bfloat16;
  kvcache::dtype_id v = kvcache::dtype_id::bfloat16;
  std::uint32_t block_size = 16;
  std::uint32_t kv_heads = 2;
  std::uint32_t head_dim = 64;
  std::uint32_t head_dim_v = 64;
  bool heads_outside = false;  ///< [head, token] and not [token, head]
  std::uint32_t gap = 0;       ///< bytes between heads that belong to nobody, a multiple of 4
  std::uint32_t first = 16;    ///< what the pool's first byte is aligned to, and to no more
  kvcache::dtype_id tail = kvcache::dtype_id::bfloat16;
  std::uint32_t blocks = 6;
  std::uint32_t tail_blocks = 3;
};

/// Every byte has a value of its own as far as that is possible. No two objects share memory.
class byte_pool {
 public:
  explicit byte_pool(const pool_form& f) : form_(f) {
    view_.blocks = f.blocks;
    view_.tail_blocks = f.tail_blocks;
    view_.block_size = f.block_size;
    view_.kv_heads = f.kv_heads;
    view_.head_dim = f.head_dim;
    view_.head_dim_v = f.head_dim_v;
    view_.k_dtype = f.k;
    view_.v_dtype = f.v;
    view_.tail_dtype = f.tail;
    std::uint64_t size = 0;
    std::uint64_t begins[6];
    kvcache::plane_view* const planes[] = {&view_.k,        &view_.v,      &view_.k_scales,
                                           &view_.v_scales, &view_.k_tail, &view_.v_tail};
    for (unsigned i = 0; i < 6; ++i) {
      const bool keys = i % 2 == 0;
      const std::uint32_t dim = keys ? f.head_dim : f.head_dim_v;
      const kvcache::dtype_id id = keys ? f.k : f.v;
      const bool scales = i == 2 || i == 3;
      const std::uint64_t head = scales ? kvcache::scale_bytes(id, dim)
                                        : kvcache::code_bytes(i < 4  ? id
                                                              : keys ? view_.k_tail_dtype()
                                                                     : view_.v_tail_dtype(),
                                                              dim);
      const std::uint32_t tokens = scales && kvcache::seals(id) ? 1 : f.block_size;
      const auto step = static_cast<std::int64_t>(head == 0 ? 0 : head + f.gap);
      planes[i]->token_stride = f.heads_outside ? step : step * f.kv_heads;
      planes[i]->head_stride = f.heads_outside ? step * tokens : step;
      if (tokens == 1 && scales) planes[i]->token_stride = 0;
      planes[i]->block_stride = (step * f.kv_heads * tokens + 15) / 16 * 16;
      begins[i] = size;
      sizes_[i] = static_cast<std::uint64_t>(planes[i]->block_stride) * (i < 4 ? f.blocks : f.tail_blocks);
      size += sizes_[i];
    }
    memory_.resize(size + 64);
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
    offset_ = (64 - at % 64) % 64 + f.first % 32;
    for (std::size_t i = 0; i < size; ++i) memory_[offset_ + i] = static_cast<std::byte>(i * 2'654'435'761u >> 13);
    for (unsigned i = 0; i < 6; ++i)
      if (sizes_[i] != 0) planes[i]->base = memory_.data() + offset_ + begins[i];
    size_ = size;
  }
  byte_pool(const byte_pool&) = delete;
  byte_pool& operator=(const byte_pool&) = delete;

  kvcache::kv_view& view() { return view_; }
  [[nodiscard]] const pool_form& form() const { return form_; }
  [[nodiscard]] std::vector<std::byte> image() const {
    return {memory_.begin() + static_cast<std::ptrdiff_t>(offset_),
            memory_.begin() + static_cast<std::ptrdiff_t>(offset_ + size_)};
  }
  /// Names what a body may touch: whole planes; what in them is nobody's is compared afterwards.
  void name(global_memory& memory) const {
    const kvcache::plane_view* const planes[] = {&view_.k,        &view_.v,      &view_.k_scales,
                                                 &view_.v_scales, &view_.k_tail, &view_.v_tail};
    const char* const names[] = {"K", "V", "K's scales", "V's scales", "K's tails", "V's tails"};
    for (unsigned i = 0; i < 6; ++i)
      if (planes[i]->base != nullptr) memory.add(planes[i]->base, sizes_[i], names[i], true);
  }

 private:
  pool_form form_;
  kvcache::kv_view view_;
  std::uint64_t sizes_[6] = {};
  std::vector<std::byte> memory_;
  std::size_t offset_ = 0;
  std::size_t size_ = 0;
};

/// How many bytes differ: one number instead of two long images in a failure's text.
inline std::size_t differences(const byte_pool& a, const byte_pool& b) {
  const auto x = a.image();
  const auto y = b.image();
  std::size_t count = x.size() != y.size() ? x.size() + y.size() : 0;
  for (std::size_t i = 0; i < x.size() && i < y.size(); ++i) count += x[i] != y[i] ? 1u : 0u;
  return count;
}

template <class T>
void name_memory(global_memory& memory, const std::vector<T>& all, const char* what) {
  if (!all.empty()) memory.add(all.data(), all.size() * sizeof(T), what);
}

/// Elements of one of the three types that rows come in, [rows, heads, dim] with gaps of poison.
class given_rows {
 public:
  /// `wild`: now and then what conversions and ranges treat apart, whole heads of one value among them.
  given_rows(kvcache::dtype_id from, std::uint32_t rows, std::uint32_t heads, std::uint32_t dim, std::uint32_t seed,
             bool wild, std::uint32_t gap = 0)
      : from_(from),
        rows_(rows),
        heads_(heads),
        dim_(dim),
        head_step_(dim + gap),
        row_step_((dim + gap) * heads + gap) {
    const std::uint32_t specials[] = {0x0000'0000u, 0x8000'0000u, 0x0000'0001u, 0x8000'0700u, 0x3300'0001u,
                                      0x477f'f000u, 0x7f80'0000u, 0xff80'0000u, 0x7fc0'0000u, 0xff81'2345u,
                                      0x7149'f2cau, 0xf149'f2cau, 0x7f7f'ffffu, 0xff7f'ffffu, 0x0800'0000u};
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    wide_.assign(std::size_t{rows} * row_step_ + 1, std::bit_cast<float>(0xffff'ffffu));
    for (std::uint32_t r = 0; r < rows; ++r)
      for (std::uint32_t h = 0; h < heads; ++h) {
        const std::uint32_t kind = random() % 8;
        const float scale = std::ldexp(1.0f, static_cast<int>(random() % 40) - 20);
        const float shift = random() % 4 == 0 ? normal(random) * 8 : 0.0f;
        const auto same = std::bit_cast<float>(specials[random() % std::size(specials)]);
        for (std::uint32_t d = 0; d < dim; ++d) {
          float x = (normal(random) + shift) * scale;
          if (wild && kind == 0) x = same;
          if (wild && kind < 5 && random() % (kind == 4 ? 3 : 24) == 0)
            x = std::bit_cast<float>(specials[random() % std::size(specials)]);
          wide_[r * row_step_ + h * head_step_ + d] = x;
        }
      }
    for (const float x : wide_) {
      halves_.push_back(kvcache::from_float<kvcache::f16>(x));
      brains_.push_back(kvcache::from_float<kvcache::bf16>(x));
    }
  }

  /// f(rows_view<const T>).
  template <class F>
  void visit(const F& f) const {
    if (from_ == kvcache::dtype_id::float32)
      f(view_of(wide_));
    else if (from_ == kvcache::dtype_id::float16)
      f(view_of(halves_));
    else
      f(view_of(brains_));
  }
  [[nodiscard]] kvcache::rows_view<const std::byte> bytes() const {
    kvcache::rows_view<const std::byte> out;
    visit([&](const auto& v) {
      out = {reinterpret_cast<const std::byte*>(v.data), v.rows, v.heads, v.head_dim, v.row_stride, v.head_stride};
    });
    return out;
  }
  void name(global_memory& memory, const char* what) const {
    if (from_ == kvcache::dtype_id::float32)
      name_memory(memory, wide_, what);
    else if (from_ == kvcache::dtype_id::float16)
      name_memory(memory, halves_, what);
    else
      name_memory(memory, brains_, what);
  }
  [[nodiscard]] kvcache::dtype_id from() const { return from_; }

 private:
  template <class T>
  [[nodiscard]] kvcache::rows_view<const T> view_of(const std::vector<T>& all) const {
    return {all.data(), rows_, heads_, dim_, row_step_, head_step_};
  }

  kvcache::dtype_id from_;
  std::uint32_t rows_;
  std::uint32_t heads_;
  std::uint32_t dim_;
  std::uint32_t head_step_;
  std::uint32_t row_step_;
  std::vector<float> wide_;
  std::vector<kvcache::f16> halves_;
  std::vector<kvcache::bf16> brains_;
};

}  // namespace kvcache_test
