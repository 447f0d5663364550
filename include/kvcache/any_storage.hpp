// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/geometry.hpp>
#include <kvcache/storage.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

namespace kvcache {

/// A storage whose policies are chosen at run time and named in no type: an engine that reads dtype and layout from its
/// options writes its code once. Costs a virtual call for each append, copy, seal or view, nothing for each token.
///
///     any_storage pool = dispatch(
///         [&](auto k) { return any_storage(storage<engine_policies<typename decltype(k)::type>>(shape, {...})); },
///         dtype_of<f16, bf16>{options.dtype});
///
/// Owns what it was made from; moves, never copies. After a move only destruction and assignment are allowed. Errors,
/// complexity and thread safety are those of `storage`.
class any_storage {
 public:
  /// Takes over a storage, whose views stay valid.
  template <class Policies>
  explicit any_storage(storage<Policies>&& pool) : pool_(new erased<Policies>(std::move(pool))) {}
  any_storage(any_storage&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)) {}
  any_storage& operator=(any_storage&& other) noexcept {
    if (this != &other) delete std::exchange(pool_, std::exchange(other.pool_, nullptr));
    return *this;
  }
  ~any_storage() { delete pool_; }

  /// The shape that the pool was made for. O(1), as all of these.
  [[nodiscard]] const kvcache::geometry& geometry() const noexcept { return pool().geometry(); }
  /// Tokens that a block holds.
  [[nodiscard]] std::uint32_t block_size() const noexcept { return pool().block_size(); }
  /// Blocks that can hold tokens: ids 1 to blocks().
  [[nodiscard]] std::uint32_t blocks() const noexcept { return pool().blocks(); }
  /// Blocks of the tail pool; 0 where the dtype seals no blocks.
  [[nodiscard]] std::uint32_t tail_blocks() const noexcept { return pool().tail_blocks(); }
  /// Of one block over all layers, padding included; of the tail pool; and of all, the null block included.
  [[nodiscard]] std::uint64_t bytes_per_block() const noexcept { return pool().bytes_per_block(); }
  [[nodiscard]] std::uint64_t tail_bytes() const noexcept { return pool().tail_bytes(); }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return pool().bytes(); }

  /// As storage::view: what attention runs over.
  [[nodiscard]] kv_view view(std::uint32_t layer) const { return pool().view(layer); }

  /// As storage::set_key_offset: keys of `layer` are stored less `offset`, [kv_heads, head_dim].
  void set_key_offset(std::uint32_t layer, std::span<const float> offset) { pool().set_key_offset(layer, offset); }

  /// As storage::append.
  template <class K, class V>
    requires element<std::remove_const_t<K>> && element<std::remove_const_t<V>>
  void append(std::uint32_t layer, const rows_view<K>& k, const rows_view<V>& v, std::span<const slot_id> slots,
              unsigned ith = 0, unsigned nth = 1) {
    detail::append_beyond_null(pool().view(layer), k, v, slots, ith, nth);
    if (k.rows != 0) pool().note_append(layer);
  }

  /// As storage::note_append.
  void note_append(std::uint32_t layer) noexcept { pool().note_append(layer); }

  /// As storage::copy.
  void copy(std::span<const block_copy> copies) { pool().copy(copies); }

  /// As storage::seal.
  void seal(std::span<const block_seal> blocks) { pool().seal(blocks); }

 private:
  struct base {
    virtual ~base() = default;
    [[nodiscard]] virtual const kvcache::geometry& geometry() const noexcept = 0;
    [[nodiscard]] virtual std::uint32_t block_size() const noexcept = 0;
    [[nodiscard]] virtual std::uint32_t blocks() const noexcept = 0;
    [[nodiscard]] virtual std::uint32_t tail_blocks() const noexcept = 0;
    [[nodiscard]] virtual std::uint64_t bytes_per_block() const noexcept = 0;
    [[nodiscard]] virtual std::uint64_t tail_bytes() const noexcept = 0;
    [[nodiscard]] virtual std::uint64_t bytes() const noexcept = 0;
    [[nodiscard]] virtual kv_view view(std::uint32_t layer) const = 0;
    virtual void set_key_offset(std::uint32_t layer, std::span<const float> offset) = 0;
    virtual void note_append(std::uint32_t layer) noexcept = 0;
    virtual void copy(std::span<const block_copy> copies) = 0;
    virtual void seal(std::span<const block_seal> blocks) = 0;
  };

  template <class Policies>
  struct erased final : base {
    explicit erased(storage<Policies>&& from) noexcept : pool(std::move(from)) {}
    const kvcache::geometry& geometry() const noexcept override { return pool.geometry(); }
    std::uint32_t block_size() const noexcept override { return pool.block_size(); }
    std::uint32_t blocks() const noexcept override { return pool.blocks(); }
    std::uint32_t tail_blocks() const noexcept override { return pool.tail_blocks(); }
    std::uint64_t bytes_per_block() const noexcept override { return pool.bytes_per_block(); }
    std::uint64_t tail_bytes() const noexcept override { return pool.tail_bytes(); }
    std::uint64_t bytes() const noexcept override { return pool.bytes(); }
    kv_view view(std::uint32_t layer) const override { return pool.view(layer); }
    void set_key_offset(std::uint32_t layer, std::span<const float> offset) override {
      pool.set_key_offset(layer, offset);
    }
    void note_append(std::uint32_t layer) noexcept override { pool.note_append(layer); }
    void copy(std::span<const block_copy> copies) override { pool.copy(copies); }
    void seal(std::span<const block_seal> blocks) override { pool.seal(blocks); }
    storage<Policies> pool;
  };

  [[nodiscard]] base& pool() const noexcept {
    KVCACHE_ASSERT(pool_ != nullptr, "any_storage used after it was moved from");
    return *pool_;
  }

  base* pool_;  // owned; std::unique_ptr would bring <memory>, a tenth of what kvcache.hpp takes to compile
};

}  // namespace kvcache
