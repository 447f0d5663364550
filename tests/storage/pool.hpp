// SPDX-License-Identifier: Apache-2.0
// A small pool whose every byte is known before and can be looked at afterwards.
#pragma once

#include <kvcache/layout/hnd.hpp>
#include <kvcache/layout/nhd.hpp>
#include <kvcache/storage.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <random>
#include <type_traits>
#include <vector>

namespace kvcache_test {

inline constexpr unsigned char untouched = 0xa5;

/// Hands out memory full of `untouched` and counts what it has to get back.
class marking_allocator {
 public:
  static constexpr const char* name = "marking";
  static constexpr kvcache::memory_space space = kvcache::memory_space::host;

  marking_allocator() noexcept = default;
  explicit marking_allocator(int& live) noexcept : live_(&live) {}

  [[nodiscard]] void* allocate(std::size_t bytes, std::size_t alignment) {
    void* const memory = ::operator new (bytes, std::align_val_t{alignment});
    std::memset(memory, untouched, bytes);
    if (live_ != nullptr) ++*live_;
    return memory;
  }
  void deallocate(void* memory, std::size_t /*bytes*/, std::size_t alignment) noexcept {
    ::operator delete (memory, std::align_val_t{alignment});
    if (live_ != nullptr) --*live_;
  }

 private:
  int* live_ = nullptr;
};

static_assert(kvcache::memory_allocator<marking_allocator>);

template <class K, class V, class Layout>
struct bundle : kvcache::policies {
  static constexpr unsigned block_size = kvcache::dynamic;
  using dtype = kvcache::kv_dtype<K, V>;
  using layout = Layout;
  using allocator = marking_allocator;
};

using bytes = std::vector<unsigned char>;

/// A copy of every byte that the storage took.
template <class Policies>
bytes snapshot(const kvcache::storage<Policies>& pool) {
  const auto* const first = reinterpret_cast<const unsigned char*>(pool.view(0).k.base);
  return bytes(first, first + pool.bytes());
}

/// What the documentation of storage says about where bytes lie, worked out afresh: [layer][block][K plane | V plane],
/// planes on 64-byte boundaries.
struct memory_order {
  kvcache::geometry shape;
  std::uint64_t blocks_with_null = 0;
  std::uint64_t block_size = 0;
  std::uint64_t k_bytes = 0;  ///< of an element
  std::uint64_t v_bytes = 0;
  bool heads_first = false;

  [[nodiscard]] std::uint64_t k_plane() const { return up(block_size * shape.kv_heads * shape.head_dim * k_bytes); }
  [[nodiscard]] std::uint64_t v_plane() const { return up(block_size * shape.kv_heads * shape.v_dim() * v_bytes); }
  [[nodiscard]] std::uint64_t total() const { return shape.layers * blocks_with_null * (k_plane() + v_plane()); }

  [[nodiscard]] std::uint64_t k_at(std::uint64_t layer, kvcache::slot_id slot, std::uint64_t head) const {
    return block(layer, slot) + inside(slot, head, shape.head_dim) * k_bytes;
  }
  [[nodiscard]] std::uint64_t v_at(std::uint64_t layer, kvcache::slot_id slot, std::uint64_t head) const {
    return block(layer, slot) + k_plane() + inside(slot, head, shape.v_dim()) * v_bytes;
  }

 private:
  [[nodiscard]] static std::uint64_t up(std::uint64_t plane) { return (plane + 63) / 64 * 64; }
  [[nodiscard]] std::uint64_t block(std::uint64_t layer, kvcache::slot_id slot) const {
    return (layer * blocks_with_null + static_cast<std::uint64_t>(slot) / block_size) * (k_plane() + v_plane());
  }
  [[nodiscard]] std::uint64_t inside(kvcache::slot_id slot, std::uint64_t head, std::uint64_t dim) const {
    const std::uint64_t offset = static_cast<std::uint64_t>(slot) % block_size;
    return (heads_first ? head * block_size + offset : offset * shape.kv_heads + head) * dim;
  }
};

template <class Policies>
memory_order order_of(const kvcache::storage<Policies>& pool) {
  return {.shape = pool.geometry(),
          .blocks_with_null = std::uint64_t{pool.blocks()} + 1,
          .block_size = pool.block_size(),
          .k_bytes = sizeof(typename Policies::dtype::k),
          .v_bytes = sizeof(typename Policies::dtype::v),
          .heads_first = std::is_same_v<typename Policies::layout, kvcache::hnd>};
}

/// Ordinary values with, now and then, one that some conversion treats apart.
template <class T>
std::vector<T> random_values(std::size_t count, std::uint32_t seed) {
  const std::uint32_t specials[] = {0x0000'0000u, 0x8000'0000u, 0x0000'0001u, 0x3300'0001u,
                                    0x477f'f000u, 0x7f80'0000u, 0xff80'0000u, 0x7fc0'0000u};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<T> values;
  values.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    const bool special = random() % 16 == 0;
    const float x = special ? std::bit_cast<float>(specials[random() % 8]) : normal(random);
    values.push_back(kvcache::from_float<T>(x));
  }
  return values;
}

/// Writes what `values` become as elements of type To.
template <class To, class From>
void expect(bytes& image, std::uint64_t at, const From* values, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const To element = [&] {
      if constexpr (std::is_same_v<To, From>)
        return values[i];
      else
        return kvcache::from_float<To>(kvcache::to_float(values[i]));
    }();
    std::memcpy(image.data() + at + i * sizeof(To), &element, sizeof(To));
  }
}

/// The image of a pool after the rows went to their slots.
template <class Policies, class K, class V>
void expect_rows(bytes& image, const kvcache::storage<Policies>& pool, std::uint32_t layer,
                 const kvcache::rows_view<K>& k, const kvcache::rows_view<V>& v,
                 const std::vector<kvcache::slot_id>& slots) {
  const memory_order order = order_of(pool);
  for (std::uint32_t row = 0; row < k.rows; ++row) {
    if (slots[row] < 0) continue;
    for (std::uint32_t head = 0; head < k.heads; ++head) {
      expect<typename Policies::dtype::k>(image, order.k_at(layer, slots[row], head), k.at(row, head), k.head_dim);
      expect<typename Policies::dtype::v>(image, order.v_at(layer, slots[row], head), v.at(row, head), v.head_dim);
    }
  }
}

/// How many bytes differ: one number instead of two long images in a failure's text.
inline std::size_t differences(const bytes& a, const bytes& b) {
  std::size_t count = a.size() != b.size() ? a.size() + b.size() : 0;
  for (std::size_t i = 0; count == 0 && i < a.size(); ++i)
    if (a[i] != b[i]) {
      for (; i < a.size(); ++i) count += a[i] != b[i] ? 1u : 0u;
    }
  return count;
}

}  // namespace kvcache_test
