// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/error.hpp>
#include <kvcache/geometry.hpp>
#include <kvcache/memory/aligned_allocator.hpp>
#include <kvcache/storage.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace kvcache {

namespace detail {

/// The bookkeeping of a cache: what is the same for one layer group and for several.
template <class Eviction>
class cache_calls {
 public:
  using manager_type = block_manager<Eviction>;

  /// Who holds which block: open, fork, truncate, close, commit, probe, predict, counts, tables.
  [[nodiscard]] manager_type& manager() noexcept { return manager_; }
  [[nodiscard]] const manager_type& manager() const noexcept { return manager_; }

  /// As block_manager::open: finds what is cached of the request, references it and reserves, all or nothing.
  /// O(content + blocks).
  [[nodiscard]] result<opened> open(const open_request& request) noexcept { return manager_.open(request); }
  /// As block_manager::begin: makes room for every want, all or nothing. O(wants + blocks of their tables + tokens).
  [[nodiscard]] result<step> begin(std::span<const want> wants) noexcept { return manager_.begin(wants); }
  /// As block_manager::commit: from here on the full blocks of these tokens can be found by their content.
  /// O(tokens).
  result<void> commit(sequence_id sequence, content_view tokens) noexcept { return manager_.commit(sequence, tokens); }
  /// As block_manager::close. O(blocks).
  result<void> close(sequence_id sequence) noexcept { return manager_.close(sequence); }

 protected:
  explicit cache_calls(const block_manager_options& options) : manager_(options) {}
  ~cache_calls() = default;

 private:
  manager_type manager_;
};

/// Memory that the storages of several layer groups share.
template <class Allocator>
class pool_memory {
 public:
  pool_memory(Allocator allocator, std::uint64_t bytes) : allocator_(std::move(allocator)), bytes_(bytes) {
    memory_ = static_cast<std::byte*>(allocator_.allocate(static_cast<std::size_t>(bytes), plane_alignment));
  }
  pool_memory(const pool_memory&) = delete;
  pool_memory& operator=(const pool_memory&) = delete;
  ~pool_memory() { allocator_.deallocate(memory_, static_cast<std::size_t>(bytes_), plane_alignment); }

  [[nodiscard]] std::byte* data() const noexcept { return memory_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  Allocator allocator_;
  std::uint64_t bytes_;
  std::byte* memory_;
};

/// A group's policies, but for the allocator: its memory is the pool's.
template <class Group>
struct in_shared_pool : Group {
  using allocator = aligned_allocator;
};

}  // namespace detail

/// An engine's KV cache: `block_manager` says who holds which block, `storage` holds the bytes. The cache only joins
/// them, so each can be used alone and everything about a sequence is asked from `manager()`.
///
/// A step, in order: begin, prepare, for each layer append and attention, accept, commit once ids are known, retire
/// once the step's work is done. Steps may overlap and end in order.
///
/// With further policy bundles as `Groups`, one for each layer group, the cache holds layers of different kinds in one
/// pool; see below. Without, all layers are of one kind and go by `Policies`.
///
/// Thread safety: bookkeeping (everything but `append` and `view`) is for one thread at a time; `append` and attention
/// of different layers may run at the same time as bookkeeping of a later step.
template <class Policies>
class cache<Policies> : public detail::cache_calls<typename Policies::eviction> {
  using calls = detail::cache_calls<typename Policies::eviction>;

 public:
  using policies_type = Policies;
  using storage_type = kvcache::storage<Policies>;
  /// `blocks` that tokens can use, `block_size` where the policy is `dynamic`, and an `allocator` that needs arguments.
  using options = typename storage_type::options;

  /// Of `bookkeeping`, blocks, block size and layer groups are taken from the storage. Raises invalid_argument where
  /// geometry or options can never work, system_failure where memory is refused. O(blocks).
  cache(const geometry& shape, options chosen, block_manager_options bookkeeping = {})
      : cache(storage_type(shape, std::move(chosen)), bookkeeping) {}

  /// The bytes.
  [[nodiscard]] storage_type& storage() noexcept { return storage_; }
  [[nodiscard]] const storage_type& storage() const noexcept { return storage_; }

  /// Carries out the seals of earlier steps and the copies that `begin` asked for; before the step's first append.
  /// O(bytes copied), on this thread.
  void prepare(const step& begun) {
    seal();
    storage_.copy(begun.copies());
  }
  /// Quantises the blocks that accepted steps have filled; prepare and retire do it too. O(bytes of those blocks).
  void seal() {
    storage_.seal(this->manager().seals());
    this->manager().sealed();
  }
  /// As block_manager::retire: the step's work is done, what was released meanwhile becomes free. O(blocks held), and
  /// seal().
  result<void> retire(step& done) {
    seal();
    return this->manager().retire(done);
  }
  /// Writes K and V of the step's query tokens, rows in the order of its wants, into their slots in `layer`. As
  /// kvcache::append: raises invalid_argument, and writes nothing, where the shapes are not the geometry's.
  /// O(rows * kv_heads * head_dim).
  template <class K, class V>
  void append(const step& begun, std::uint32_t layer, const rows_view<K>& k, const rows_view<V>& v) {
    storage_.append(layer, k, v, begun.batch().slots);
  }
  /// As storage::set_key_offset.
  void set_key_offset(std::uint32_t layer, std::span<const float> offset) { storage_.set_key_offset(layer, offset); }
  /// The KV of one layer, as attention reads it. Raises invalid_argument where there is no such layer. O(1).
  [[nodiscard]] kv_view view(std::uint32_t layer) const { return storage_.view(layer); }
  /// Tokens that a block holds.
  [[nodiscard]] std::uint32_t block_size() const noexcept { return storage_.block_size(); }

 private:
  cache(storage_type bytes, block_manager_options bookkeeping)
      : calls(sized(bookkeeping, bytes)), storage_(std::move(bytes)) {}
  static block_manager_options sized(block_manager_options bookkeeping, const storage_type& bytes) noexcept {
    bookkeeping.blocks = bytes.blocks();
    bookkeeping.block_size = bytes.block_size();
    bookkeeping.tail_blocks = bytes.tail_blocks();
    bookkeeping.layer_groups = {};
    return bookkeeping;
  }

  storage_type storage_;
};

/// The layers of one group of a cache.
struct cache_group {
  geometry shape;                            ///< its layers are those of the group alone
  std::uint32_t block_size = 0;              ///< tokens; needed where the group's policy is `dynamic`
  std::uint32_t window = layer_group::full;  ///< newest tokens that a query sees; full: all
  std::uint32_t tail_blocks = 0;             ///< see storage_options::tail_blocks
  std::uint32_t wide_tokens = 0;             ///< see layer_group::wide_tokens
  /// Layers that are not quantised, counted within the group; see storage_options::wide_layers.
  std::span<const std::uint32_t> wide_layers{};
};

/// A cache for models whose layers are not all of one kind: full attention beside sliding windows, other head counts or
/// other types. `Policies` has the eviction policy and the allocator, each of `Groups` the block size, the dtype, the
/// layout and, for the engine's attention<Group>, the variant.
///
/// All groups draw from one pool, a block being of one group now and of another later, so each block has the bytes of
/// the largest; `padding` says what a group leaves unused. Layers are numbered as in the model, 0 to layers() - 1.
/// Calls and thread safety are those of a cache with one group, but that plans are made for each group, from
/// begun.batch(group).
template <class Policies, class... Groups>
class cache : public detail::cache_calls<typename Policies::eviction> {
  using calls = detail::cache_calls<typename Policies::eviction>;
  using allocator = typename kvcache::storage<Policies>::allocator;

 public:
  using policies_type = Policies;
  static constexpr std::uint32_t group_count = sizeof...(Groups);

  struct options {
    std::uint32_t blocks = 0;  ///< that can hold tokens, of any group; the null block comes on top
    std::array<cache_group, group_count> groups{};
    /// The group of each of the model's layers, in order; a group's layers come in the order of the model. Empty: all
    /// of group 0, then all of group 1, and so on.
    std::vector<std::uint32_t> layers{};
    allocator memory{};
  };

  /// Of `bookkeeping`, blocks, block size and layer groups are taken from `chosen`. Raises invalid_argument where a
  /// geometry or an option can never work, system_failure where memory is refused. O(blocks + layers).
  explicit cache(options chosen, block_manager_options bookkeeping = {})
      : cache(std::move(chosen), bookkeeping, std::index_sequence_for<Groups...>{}) {}

  /// Layers of the model. O(1).
  [[nodiscard]] std::uint32_t layers() const noexcept { return static_cast<std::uint32_t>(layers_.size()); }
  /// The group of a layer. Precondition: layer < layers().
  [[nodiscard]] std::uint32_t group(std::uint32_t layer) const noexcept {
    KVCACHE_ASSERT(layer < layers_.size(), "no such layer");
    return layers_[layer].group;
  }
  /// Bytes of one block, whatever group it is of.
  [[nodiscard]] std::uint64_t bytes_per_block() const noexcept { return block_bytes(); }
  /// Bytes of a block that group `layer_group` leaves unused. Precondition: layer_group < group_count.
  [[nodiscard]] std::uint64_t padding(std::uint32_t layer_group) const {
    KVCACHE_ASSERT(layer_group < group_count, "no such layer group");
    std::uint64_t unused = 0;
    at(layer_group, [&](const auto& bytes) { unused = block_bytes() - bytes.bytes_per_block(); });
    return unused;
  }
  /// Bytes taken from the allocator.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return memory_.bytes(); }

  /// Carries out the seals of earlier steps and the copies that `begin` asked for; before the step's first append.
  /// O(bytes copied), on this thread.
  void prepare(const step& begun) {
    seal();
    for (const block_copy& c : begun.copies()) at(c.layer_group, [&](auto& bytes) { bytes.copy(std::span(&c, 1)); });
  }
  /// As those of a cache with one group.
  void seal() {
    for (const block_seal& s : this->manager().seals())
      at(s.layer_group, [&](auto& bytes) { bytes.seal(std::span(&s, 1)); });
    this->manager().sealed();
  }
  result<void> retire(step& done) {
    seal();
    return this->manager().retire(done);
  }
  template <class K, class V>
  void append(const step& begun, std::uint32_t layer, const rows_view<K>& k, const rows_view<V>& v) {
    const place p = checked(layer);
    at(p.group, [&](auto& bytes) { bytes.append(p.layer, k, v, begun.batch(p.group).slots); });
  }
  /// As storage::set_key_offset; `offset` has the heads and channels of the layer's group.
  void set_key_offset(std::uint32_t layer, std::span<const float> offset) {
    const place p = checked(layer);
    at(p.group, [&](auto& bytes) { bytes.set_key_offset(p.layer, offset); });
  }
  /// The KV of one layer, as attention reads it. Raises invalid_argument where there is no such layer. O(groups).
  [[nodiscard]] kv_view view(std::uint32_t layer) const {
    const place p = checked(layer);
    kv_view seen;
    at(p.group, [&](const auto& bytes) { seen = bytes.view(p.layer); });
    return seen;
  }
  /// Tokens that a block of a group holds.
  [[nodiscard]] std::uint32_t block_size(std::uint32_t layer_group) const noexcept {
    return this->manager().block_size(layer_group);
  }

 private:
  template <class Group>
  using group_storage = kvcache::storage<detail::in_shared_pool<Group>>;
  struct place {
    std::uint32_t group = 0;
    std::uint32_t layer = 0;  // within the group
  };

  template <std::size_t... Index>
  cache(options chosen, block_manager_options bookkeeping, std::index_sequence<Index...>)
      : calls(sized(bookkeeping, chosen.blocks,
                    std::array{layer_group{tokens<Groups>(chosen.groups[Index]), chosen.groups[Index].window,
                                           chosen.groups[Index].tail_blocks, chosen.groups[Index].wide_tokens}...})),
        footprints_{
            group_storage<Groups>::footprint_of(chosen.groups[Index].shape, storage_options_of(chosen, Index))...},
        memory_(std::move(chosen.memory), (std::uint64_t{chosen.blocks} + 1) * block_bytes() + tail_bytes(group_count)),
        storages_(group_storage<Groups>(
            chosen.groups[Index].shape, storage_options_of(chosen, Index), memory_.data(), block_bytes(),
            memory_.data() + (std::uint64_t{chosen.blocks} + 1) * block_bytes() + tail_bytes(Index))...) {
    place_layers(chosen);
  }
  [[nodiscard]] static storage_options<aligned_allocator> storage_options_of(const options& chosen, std::size_t group) {
    const cache_group& g = chosen.groups[group];
    return {.blocks = chosen.blocks,
            .block_size = g.block_size,
            .tail_blocks = g.tail_blocks,
            .wide_layers = g.wide_layers};
  }
  /// Of the largest group: what every block takes.
  [[nodiscard]] std::uint64_t block_bytes() const noexcept {
    std::uint64_t most = 0;
    for (const storage_footprint& f : footprints_)
      if (f.block > most) most = f.block;
    return most;
  }
  /// Of the tail pools of the first `groups` groups, which lie behind the blocks.
  [[nodiscard]] std::uint64_t tail_bytes(std::size_t groups) const noexcept {
    std::uint64_t bytes = 0;
    for (std::size_t g = 0; g < groups; ++g) bytes += footprints_[g].tails;
    return bytes;
  }

  static block_manager_options sized(block_manager_options bookkeeping, std::uint32_t blocks,
                                     std::span<const layer_group> groups) noexcept {
    bookkeeping.blocks = blocks;
    bookkeeping.layer_groups = groups;
    return bookkeeping;
  }
  template <class Group>
  static std::uint32_t tokens(const cache_group& g) noexcept {
    return Group::block_size == dynamic ? g.block_size : Group::block_size;
  }

  void place_layers(const options& chosen) {
    std::array<std::uint32_t, group_count> next{};
    if (chosen.layers.empty())
      for (std::uint32_t g = 0; g < group_count; ++g)
        for (; next[g] < chosen.groups[g].shape.layers; ++next[g]) layers_.push_back({g, next[g]});
    for (const std::uint32_t g : chosen.layers) {
      if (g >= group_count)
        detail::raise<invalid_argument>("cache: layer " + std::to_string(layers_.size()) + " is in group " +
                                        std::to_string(g) + ", there are " + std::to_string(group_count) +
                                        ", counted from 0");
      layers_.push_back({g, next[g]++});
    }
    for (std::uint32_t g = 0; g < group_count; ++g)
      if (next[g] != chosen.groups[g].shape.layers)
        detail::raise<invalid_argument>("cache: " + std::to_string(next[g]) + " layers named for group " +
                                        std::to_string(g) + ", its geometry has " +
                                        std::to_string(chosen.groups[g].shape.layers) + "; name each layer once");
  }
  [[nodiscard]] place checked(std::uint32_t layer) const {
    if (layer >= layers_.size())
      detail::raise<invalid_argument>("cache: layer " + std::to_string(layer) + " asked for, there are " +
                                      std::to_string(layers_.size()) + ", counted from 0");
    return layers_[layer];
  }

  /// Calls `f` with the storage of a group.
  template <class F>
  void at(std::uint32_t layer_group, F&& f) {
    std::apply([&](auto&... each) { visit(layer_group, f, each...); }, storages_);
  }
  template <class F>
  void at(std::uint32_t layer_group, F&& f) const {
    std::apply([&](const auto&... each) { visit(layer_group, f, each...); }, storages_);
  }
  template <class F, class... Each>
  static void visit(std::uint32_t layer_group, F& f, Each&... each) {
    std::uint32_t g = 0;
    static_cast<void>(((g++ == layer_group ? (f(each), true) : false) || ...));
  }

  std::array<storage_footprint, group_count> footprints_;
  detail::pool_memory<allocator> memory_;
  std::tuple<group_storage<Groups>...> storages_;
  std::vector<place> layers_;
};

}  // namespace kvcache
