// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/geometry.hpp>
#include <kvcache/storage.hpp>
#include <kvcache/views.hpp>

#include <cstdint>
#include <span>
#include <utility>

namespace kvcache {

/// An engine's KV cache: `block_manager` says who holds which block, `storage` holds the bytes. The cache only joins
/// them, so each can be used alone and everything about a sequence is asked from `manager()`.
///
/// A step, in order: begin, prepare, for each layer append and attention, accept, commit once ids are known, retire
/// once the step's work is done. Steps may overlap and end in order.
///
/// Thread safety: bookkeeping (everything but `append` and `view`) is for one thread at a time; `append` and attention
/// of different layers may run at the same time as bookkeeping of a later step.
template <class Policies>
class cache {
 public:
  using policies_type = Policies;
  using manager_type = block_manager<typename Policies::eviction>;
  using storage_type = kvcache::storage<Policies>;
  /// `blocks` that tokens can use, `block_size` where the policy is `dynamic`, and an `allocator` that needs arguments.
  using options = typename storage_type::options;

  /// Raises invalid_argument where geometry or options can never work, system_failure where memory is refused.
  /// O(blocks).
  cache(const geometry& shape, options chosen)
      : storage_(shape, std::move(chosen)),
        manager_({.blocks = storage_.blocks(), .block_size = storage_.block_size()}) {}

  /// Who holds which block: open, fork, truncate, close, commit, probe, predict, counts, tables.
  [[nodiscard]] manager_type& manager() noexcept { return manager_; }
  [[nodiscard]] const manager_type& manager() const noexcept { return manager_; }
  /// The bytes.
  [[nodiscard]] storage_type& storage() noexcept { return storage_; }
  [[nodiscard]] const storage_type& storage() const noexcept { return storage_; }

  /// As block_manager::open: finds what is cached of the request, references it and reserves, all or nothing.
  /// O(content + blocks).
  [[nodiscard]] result<opened> open(const open_request& request) noexcept { return manager_.open(request); }
  /// As block_manager::begin: makes room for every want, all or nothing. O(wants + blocks of their tables + tokens).
  [[nodiscard]] result<step> begin(std::span<const want> wants) noexcept { return manager_.begin(wants); }
  /// Carries out the copies that `begin` asked for; before the step's first append. O(bytes copied), on this thread.
  void prepare(const step& begun) { storage_.copy(begun.copies()); }
  /// Writes K and V of the step's query tokens, rows in the order of its wants, into their slots in `layer`. As
  /// kvcache::append: raises invalid_argument, and writes nothing, where the shapes are not the geometry's.
  /// O(rows * kv_heads * head_dim).
  template <class K, class V>
  void append(const step& begun, std::uint32_t layer, const rows_view<K>& k, const rows_view<V>& v) {
    storage_.append(layer, k, v, begun.batch().slots);
  }
  /// As block_manager::commit: from here on the full blocks of these tokens can be found by their content.
  /// O(tokens).
  result<void> commit(sequence_id sequence, content_view tokens) noexcept { return manager_.commit(sequence, tokens); }
  /// As block_manager::retire: the step's work is done, what was released meanwhile becomes free. O(blocks held).
  result<void> retire(step& done) noexcept { return manager_.retire(done); }
  /// As block_manager::close. O(blocks).
  result<void> close(sequence_id sequence) noexcept { return manager_.close(sequence); }

  /// The KV of one layer, as attention reads it. Raises invalid_argument where there is no such layer. O(1).
  [[nodiscard]] kv_view view(std::uint32_t layer) const { return storage_.view(layer); }
  /// Tokens that a block holds.
  [[nodiscard]] std::uint32_t block_size() const noexcept { return storage_.block_size(); }

 private:
  storage_type storage_;
  manager_type manager_;
};

}  // namespace kvcache
