// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/convert.hpp>
#include <kvcache/dispatch.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>
#include <kvcache/geometry.hpp>
#include <kvcache/layout/nhd.hpp>
#include <kvcache/memory/aligned_allocator.hpp>
#include <kvcache/policies.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace kvcache {

namespace detail {

/// Every element type that bytes are written in today.
using stored_dtype = dtype_of<f32, f16, bf16>;

[[noreturn]] KVCACHE_NOINLINE inline void refuse_append(const std::string& text) {
  raise<invalid_argument>("append: " + text);
}

/// Raises invalid_argument unless the rows fit the view and every slot is no_slot or at least `first_slot` and inside
/// the pool (or the tail pool).
inline void check_append(const kv_view& view, std::uint32_t k_rows, std::uint32_t k_heads, std::uint32_t k_dim,
                         std::uint32_t v_rows, std::uint32_t v_heads, std::uint32_t v_dim,
                         std::span<const slot_id> slots, slot_id first_slot) {
  if (k_rows != v_rows)
    refuse_append(std::to_string(k_rows) + " rows of K, but " + std::to_string(v_rows) +
                  " of V; give one of each for a token");
  if (slots.size() < k_rows)
    refuse_append(std::to_string(slots.size()) + " slots for " + std::to_string(k_rows) +
                  " rows; give one slot for each row, -1 for a row that is not to be written");
  if (k_rows == 0) return;
  const auto same = [](const char* what, std::uint32_t given, std::uint32_t stored) {
    if (given != stored)
      refuse_append(std::string(what) + " is " + std::to_string(given) + ", the pool's is " + std::to_string(stored) +
                    "; pass the rows of the model that the pool was made for (kv heads, not query heads)");
  };
  same("number of K heads", k_heads, view.kv_heads);
  same("number of V heads", v_heads, view.kv_heads);
  same("head_dim of K", k_dim, view.head_dim);
  same("head_dim of V", v_dim, view.v_dim());
  const slot_id size = view.block_size;
  if (size == 0) refuse_append("block_size is 0, at least 1 needed; set it in the view");
  const auto possible = [](const char* what, std::uint32_t given, std::uint32_t most) {
    if (given > most)
      refuse_append(std::string(what) + " is " + std::to_string(given) + ", at most " + std::to_string(most) +
                    " possible; a table entry has 31 bits for the block");
  };
  possible("the number of blocks", view.blocks, tail_bit);
  possible("the number of tail blocks", view.tail_blocks, tail_bit);
  if (view.tail_blocks != 0) possible("block_size", view.block_size, max_blocks);
  const slot_id end = view.blocks * size;
  const slot_id tail_first = slot_id{tail_bit} * size;
  const slot_id tail_end = (slot_id{tail_bit} + view.tail_blocks) * size;
  for (std::uint32_t row = 0; row < k_rows; ++row) {
    const slot_id slot = slots[row];
    const bool inside = (slot >= first_slot && slot < end) || (slot >= tail_first && slot < tail_end);
    if (!inside && slot != no_slot)
      refuse_append("slot " + std::to_string(slot) + " of row " + std::to_string(row) + " is outside the pool's " +
                    std::to_string(first_slot) + " to " + std::to_string(end - 1) +
                    "; take slots from the tables of this pool");
  }
}

/// Writes rows [first, last) into the planes of one of K and V, whose elements are `To`.
template <class To, class From>
void write_rows(const plane_view& plane, const plane_view& tail, std::uint32_t block_size, const rows_view<From>& rows,
                std::span<const slot_id> slots, std::uint32_t first, std::uint32_t last) {
  const std::size_t dim = rows.head_dim;
  const bool one_run = rows.head_stride == std::int64_t{rows.head_dim} &&
                       plane.head_stride == static_cast<std::int64_t>(dim * sizeof(To)) &&
                       (tail.base == nullptr || tail.head_stride == plane.head_stride);
  for (std::uint32_t row = first; row < last; ++row) {
    if (slots[row] == no_slot) continue;
    const auto entry = static_cast<block_id>(slots[row] / block_size);
    const auto offset = static_cast<std::uint32_t>(slots[row] % block_size);
    const plane_view& target = (entry & tail_bit) != 0 ? tail : plane;
    const block_id block = entry & ~tail_bit;
    if (one_run) {
      convert(rows.at(row, 0), dim * rows.heads, reinterpret_cast<To*>(target.at(block, offset, 0)));
    } else {
      for (std::uint32_t head = 0; head < rows.heads; ++head)
        convert(rows.at(row, head), dim, reinterpret_cast<To*>(target.at(block, offset, head)));
    }
  }
}

/// What append does once everything is checked: the ith of nth equal shares of the rows.
template <class K, class V>
void write_kv(const kv_view& view, const rows_view<K>& k, const rows_view<V>& v, std::span<const slot_id> slots,
              unsigned ith, unsigned nth) {
  KVCACHE_ASSERT(ith < nth, "append: share ith of nth needs ith < nth");
  const auto share = [&](unsigned i) { return static_cast<std::uint32_t>(std::uint64_t{k.rows} * i / nth); };
  const std::uint32_t first = share(ith);
  const std::uint32_t last = share(ith + 1);
  if (first == last) return;
  dispatch(
      [&](auto to) {
        write_rows<typename decltype(to)::type>(view.k, view.k_tail, view.block_size, k, slots, first, last);
      },
      stored_dtype{view.k_dtype});
  dispatch(
      [&](auto to) {
        write_rows<typename decltype(to)::type>(view.v, view.v_tail, view.block_size, v, slots, first, last);
      },
      stored_dtype{view.v_dtype});
}

/// append into a pool whose block 0 is the null block: its slots are refused as well.
template <class K, class V>
void append_beyond_null(const kv_view& view, const rows_view<K>& k, const rows_view<V>& v,
                        std::span<const slot_id> slots, unsigned ith, unsigned nth) {
  check_append(view, k.rows, k.heads, k.head_dim, v.rows, v.heads, v.head_dim, slots, view.block_size);
  write_kv(view, k, v, slots, ith, nth);
}

/// Copies the first `tokens` tokens of a block inside one plane, in as few runs as the strides allow.
inline void copy_tokens(const plane_view& plane, block_id source, block_id destination, std::uint32_t tokens,
                        std::uint32_t heads, std::uint64_t head_bytes) noexcept {
  const bool tokens_adjoin = plane.token_stride == static_cast<std::int64_t>(head_bytes);
  const bool heads_adjoin = plane.head_stride == static_cast<std::int64_t>(head_bytes);
  const bool rows_adjoin = heads_adjoin && plane.token_stride == static_cast<std::int64_t>(head_bytes * heads);
  const std::uint32_t token_steps = tokens_adjoin || rows_adjoin ? 1 : tokens;
  const std::uint32_t head_steps = heads_adjoin && !tokens_adjoin ? 1 : heads;
  const std::uint64_t run = head_bytes * (tokens / token_steps) * (heads / head_steps);
  for (std::uint32_t head = 0; head < head_steps; ++head)
    for (std::uint32_t token = 0; token < token_steps; ++token)
      std::memcpy(plane.at(destination, token, head), plane.at(source, token, head), run);
}

}  // namespace detail

/// Writes the K and V of new tokens into one layer of a pool, the library's own or an engine's: row r goes to
/// slots[r], and nowhere where that is no_slot. One token, a chunk of a prompt and a ragged batch are the same call.
/// `k` is [rows, kv_heads, head_dim], `v` [rows, kv_heads, head_dim_v], each with strides and an element type of its
/// own (f32, f16, bf16), converted to what the pool stores: nearest, ties to even; the same type is copied bit for
/// bit. More slots than rows are allowed, for padded batches; no slot may be named twice.
///
/// Raises invalid_argument, naming value and limit, and writes nothing where the shapes are not the pool's, slots are
/// too few, or a slot lies outside the pool. O(rows * kv_heads * (head_dim + head_dim_v)). Calls that write different
/// slots may run at the same time; with `nth` > 1 the call writes the ith of nth shares of the rows, after having
/// checked all of them, so that an engine's threads call it with the same arguments and either all or none succeed.
template <class K, class V>
  requires element<std::remove_const_t<K>> && element<std::remove_const_t<V>>
void append(const kv_view& view, const rows_view<K>& k, const rows_view<V>& v, std::span<const slot_id> slots,
            unsigned ith = 0, unsigned nth = 1) {
  detail::check_append(view, k.rows, k.heads, k.head_dim, v.rows, v.heads, v.head_dim, slots, 0);
  detail::write_kv(view, k, v, slots, ith, nth);
}

/// Carries out, in the given order, copies inside one layer of a pool: the first `tokens` tokens, whatever the layout,
/// and no other byte. Which layer group a copy names is the caller's business.
///
/// Raises invalid_argument, naming value and limit, before anything is copied where a block is the null block or
/// outside the pool, or a block has fewer tokens. O(bytes copied). One thread at a time.
inline void copy(const kv_view& view, std::span<const block_copy> copies) {
  const auto refuse = [](const char* what, std::uint32_t given, const char* limit, std::uint32_t most) {
    detail::raise<invalid_argument>("copy: " + std::string(what) + ' ' + std::to_string(given) + ", " + limit + ' ' +
                                    std::to_string(most) + "; take copies from this pool's block manager");
  };
  for (const block_copy& c : copies) {
    for (const block_id block : {c.source, c.destination})
      if (block == null_block || block >= view.blocks)
        refuse(block == c.source ? "source is block" : "destination is block", block, "the pool has 1 to",
               view.blocks == 0 ? 0 : view.blocks - 1);
    if (c.tokens > view.block_size) refuse("tokens to copy are", c.tokens, "a block holds", view.block_size);
  }
  for (const block_copy& c : copies) {
    if (c.tokens == 0 || c.source == c.destination) continue;
    detail::copy_tokens(view.k, c.source, c.destination, c.tokens, view.kv_heads,
                        std::uint64_t{view.head_dim} * bits(view.k_dtype) / 8);
    detail::copy_tokens(view.v, c.source, c.destination, c.tokens, view.kv_heads,
                        std::uint64_t{view.v_dim()} * bits(view.v_dtype) / 8);
  }
}

/// What a storage is made with beside the geometry.
template <class Allocator>
struct storage_options {
  std::uint32_t blocks = 0;      ///< that can hold tokens; the null block comes on top
  std::uint32_t block_size = 0;  ///< tokens; needed where the policy is `dynamic`, else 0 or the policy's value
  Allocator allocator{};
};

/// The bytes of one layer group. Memory order: [layer][block][K plane | V plane], the inside of a plane as the layout
/// policy says, each plane on a 64-byte boundary. Attention works layer by layer, so a step streams through one
/// contiguous region, and the K and V of a block lie side by side. Where several layer groups share a pool, whose
/// blocks are of one group now and of another later, all of a block lies together instead: [block][layer][K plane | V
/// plane]. The bytes of unwritten slots are whatever the allocator gave; nothing is touched before it is written, so a
/// pool is resident as far as it was used. Owns its memory; moves, never copies. Thread safety: `append`, see the free
/// function; everything const at any time.
template <class Policies>
class storage {
 public:
  // A policy that fails its mandate (below) gives way to the default, so that one fault is one message.
  using dtype =
      std::conditional_t<kv_dtype_policy<typename Policies::dtype>, typename Policies::dtype, policies::dtype>;
  using layout = std::conditional_t<kv_layout<typename Policies::layout>, typename Policies::layout, nhd>;
  using allocator = std::conditional_t<memory_allocator<typename Policies::allocator>, typename Policies::allocator,
                                       aligned_allocator>;
  using options = storage_options<allocator>;
  using k_element = typename dtype::k;
  using v_element = typename dtype::v;

  /// Takes the memory for `options.blocks` blocks and the null block. Raises invalid_argument, naming value and limit,
  /// where the geometry, the number of blocks or the block size can hold nothing or pass 64-bit offsets, and
  /// system_failure where the allocator has no memory.
  explicit storage(const kvcache::geometry& shape, options chosen)
      : geometry_(shape),
        allocator_(std::move(chosen.allocator)),
        blocks_(checked_blocks(chosen.blocks)),
        block_size_(checked_block_size(chosen.block_size)) {
    validate(shape);
    check_size(shape, block_size_, blocks_);
    const std::uint64_t bytes = this->bytes();
    if (bytes > SIZE_MAX) refuse_size(shape, block_size_, blocks_);
    memory_ = static_cast<std::byte*>(allocator_.allocate(static_cast<std::size_t>(bytes), plane_alignment));
  }
  /// In a pool that others share and somebody else owns: block b, up to options.blocks, has the `pool_block` bytes from
  /// pool + b * pool_block on; both on 64-byte boundaries. Raises invalid_argument as above, and where a block of this
  /// group takes more than that. Takes no memory.
  storage(const kvcache::geometry& shape, options chosen, std::byte* pool, std::uint64_t pool_block)
      : geometry_(shape),
        allocator_(std::move(chosen.allocator)),
        blocks_(checked_blocks(chosen.blocks)),
        block_size_(checked_block_size(chosen.block_size)),
        pool_block_(pool_block),
        memory_(pool) {
    validate(shape);
    check_size(shape, block_size_, blocks_);
    if (bytes_per_block() > pool_block)
      detail::raise<invalid_argument>("storage: a block takes " + std::to_string(bytes_per_block()) +
                                      " bytes, the pool's blocks have " + std::to_string(pool_block) +
                                      "; make the pool's blocks as large as the largest group's");
    if (pool_block > std::uint64_t{INT64_MAX} / (std::uint64_t{blocks_} + 1)) refuse_size(shape, block_size_, blocks_);
  }

  storage(storage&& other) noexcept
      : geometry_(other.geometry_),
        allocator_(std::move(other.allocator_)),
        blocks_(other.blocks_),
        block_size_(other.block_size_),
        pool_block_(other.pool_block_),
        memory_(std::exchange(other.memory_, nullptr)) {}
  storage& operator=(storage&& other) noexcept {
    if (this != &other) {
      free_memory();
      geometry_ = other.geometry_;
      allocator_ = std::move(other.allocator_);
      blocks_ = other.blocks_;
      block_size_ = other.block_size_;
      pool_block_ = other.pool_block_;
      memory_ = std::exchange(other.memory_, nullptr);
    }
    return *this;
  }
  ~storage() { free_memory(); }

  [[nodiscard]] const kvcache::geometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] std::uint32_t block_size() const noexcept { return block_size_; }
  /// Blocks that can hold tokens: ids 1 to blocks().
  [[nodiscard]] std::uint32_t blocks() const noexcept { return blocks_; }
  /// Bytes of one block over all layers, the padding that aligns its planes included.
  [[nodiscard]] std::uint64_t bytes_per_block() const noexcept { return bytes_per_block(geometry_, block_size_); }
  /// The same before there is a storage, to see how many blocks a budget holds. Sizes as the constructor allows them.
  [[nodiscard]] static constexpr std::uint64_t bytes_per_block(const kvcache::geometry& shape,
                                                               std::uint32_t tokens) noexcept {
    return shape.layers * block_stride(shape, tokens);
  }
  /// The same of what is asked for, for `blocks` blocks. Raises invalid_argument as the constructor does.
  [[nodiscard]] static std::uint64_t checked_bytes_per_block(const kvcache::geometry& shape, std::uint32_t block_size,
                                                             std::uint32_t blocks) {
    const std::uint32_t tokens = checked_block_size(block_size);
    validate(shape);
    check_size(shape, tokens, checked_blocks(blocks));
    return bytes_per_block(shape, tokens);
  }
  /// Bytes taken from the allocator, the null block included; 0 in a pool that is somebody else's.
  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return pool_block_ != 0 ? 0 : (std::uint64_t{blocks_} + 1) * bytes_per_block();
  }

  /// The KV of one layer. Valid until the storage dies or is moved into; a moved storage keeps its views valid. Raises
  /// invalid_argument where there is no such layer.
  [[nodiscard]] kv_view view(std::uint32_t layer) const {
    if (layer >= geometry_.layers)
      detail::raise<invalid_argument>("storage: layer " + std::to_string(layer) + " asked for, the geometry has " +
                                      std::to_string(geometry_.layers) + ", counted from 0");
    KVCACHE_ASSERT(memory_ != nullptr, "storage used after it was moved from");
    const plane_strides k = k_strides(geometry_, block_size_);
    const plane_strides v = v_strides(geometry_, block_size_);
    const auto in_layer = static_cast<std::int64_t>(block_stride(geometry_, block_size_));
    const std::int64_t stride = pool_block_ != 0 ? static_cast<std::int64_t>(pool_block_) : in_layer;
    const std::int64_t layer_stride = pool_block_ != 0 ? in_layer : (std::int64_t{blocks_} + 1) * in_layer;
    std::byte* const base = memory_ + std::int64_t{layer} * layer_stride;
    kv_view out;
    out.k = {base, stride, k.token, k.head};
    out.v = {base + padded(k.bytes), stride, v.token, v.head};
    out.blocks = blocks_ + 1;
    out.block_size = block_size_;
    out.kv_heads = geometry_.kv_heads;
    out.head_dim = geometry_.head_dim;
    out.head_dim_v = geometry_.v_dim();
    out.k_dtype = dtype_traits<k_element>::id;
    out.v_dtype = dtype_traits<v_element>::id;
    return out;
  }

  /// kvcache::append into `layer`; refuses the null block's slots as well, and a layer that does not exist.
  template <class K, class V>
    requires element<std::remove_const_t<K>> && element<std::remove_const_t<V>>
  void append(std::uint32_t layer, const rows_view<K>& k, const rows_view<V>& v, std::span<const slot_id> slots,
              unsigned ith = 0, unsigned nth = 1) {
    detail::append_beyond_null(view(layer), k, v, slots, ith, nth);
  }

  /// kvcache::copy in every layer, in the given order.
  void copy(std::span<const block_copy> copies) {
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) kvcache::copy(view(layer), copies);
  }

 private:
  static std::uint32_t checked_blocks(std::uint32_t blocks) {
    if (blocks == 0 || blocks > max_blocks)
      detail::raise<invalid_argument>("storage: " + std::to_string(blocks) + " blocks asked for, 1 to " +
                                      std::to_string(max_blocks) + " possible; set storage_options::blocks");
    return blocks;
  }

  static std::uint32_t checked_block_size(std::uint32_t tokens) {
    constexpr unsigned fixed = Policies::block_size;
    if constexpr (fixed == dynamic) {
      if (tokens == 0 || tokens == dynamic)
        detail::raise<invalid_argument>("storage: block_size is " + std::to_string(tokens) + ", 1 to " +
                                        std::to_string(dynamic - 1) +
                                        " tokens possible; set storage_options::block_size");
      return tokens;
    } else {
      if (tokens != 0 && tokens != fixed)
        detail::raise<invalid_argument>("storage: block_size " + std::to_string(tokens) +
                                        " asked for, the policy's is " + std::to_string(fixed) +
                                        "; leave it 0 or make the policy kvcache::dynamic");
      return fixed;
    }
  }

  /// Raises unless every byte offset, alignment included, fits 63 bits.
  static void check_size(const kvcache::geometry& shape, std::uint32_t tokens, std::uint32_t blocks) {
    const std::uint64_t room = std::uint64_t{INT64_MAX} / shape.layers / (std::uint64_t{blocks} + 1);
    if (room < 2 * plane_alignment) refuse_size(shape, tokens, blocks);
    const std::uint64_t room_in_block = (room - 2 * plane_alignment) / tokens / shape.kv_heads;
    const std::uint64_t head_bytes = (std::uint64_t{shape.head_dim} * dtype_traits<k_element>::bits +
                                      std::uint64_t{shape.v_dim()} * dtype_traits<v_element>::bits) /
                                     8;
    if (room_in_block < head_bytes) refuse_size(shape, tokens, blocks);
  }

  [[noreturn]] static void refuse_size(const kvcache::geometry& shape, std::uint32_t tokens, std::uint32_t blocks) {
    const auto times = [](std::uint32_t n, const char* what) { return std::to_string(n) + ' ' + what; };
    detail::raise<invalid_argument>("storage: " + times(shape.layers, "layers x ") + times(blocks, "blocks x ") +
                                    times(tokens, "tokens x ") + times(shape.kv_heads, "kv heads x head_dim ") +
                                    times(shape.head_dim, "and ") + times(shape.v_dim(), "bytes") +
                                    " pass the limit of 2^63; check the geometry and the number of blocks");
  }

  [[nodiscard]] static constexpr std::int64_t padded(std::int64_t bytes) noexcept {
    constexpr auto boundary = static_cast<std::int64_t>(plane_alignment);
    return (bytes + boundary - 1) / boundary * boundary;
  }
  [[nodiscard]] static constexpr plane_strides k_strides(const kvcache::geometry& shape,
                                                         std::uint32_t tokens) noexcept {
    return layout::template strides<k_element>(tokens, shape.kv_heads, shape.head_dim);
  }
  [[nodiscard]] static constexpr plane_strides v_strides(const kvcache::geometry& shape,
                                                         std::uint32_t tokens) noexcept {
    return layout::template strides<v_element>(tokens, shape.kv_heads, shape.v_dim());
  }
  /// Bytes of one block in one layer.
  [[nodiscard]] static constexpr std::uint64_t block_stride(const kvcache::geometry& shape,
                                                            std::uint32_t tokens) noexcept {
    return static_cast<std::uint64_t>(padded(k_strides(shape, tokens).bytes) + padded(v_strides(shape, tokens).bytes));
  }

  void free_memory() noexcept {
    if (memory_ != nullptr && pool_block_ == 0)
      allocator_.deallocate(memory_, static_cast<std::size_t>(bytes()), plane_alignment);
  }

  kvcache::geometry geometry_;
  allocator allocator_;
  std::uint32_t blocks_ = 0;
  std::uint32_t block_size_ = 0;
  std::uint64_t pool_block_ = 0;  // bytes of a block that groups share; 0: the memory is this storage's own
  std::byte* memory_ = nullptr;

  // Last in the class, since some compilers leave out what follows a mandate that fails.
  static_assert(kv_dtype_policy<typename Policies::dtype>,
                "dtype needs `using k = T; using v = T;`, each T one of f32, f16, bf16: kvcache::kv_dtype<K, V>");
  static_assert(kv_layout<typename Policies::layout>,
                "layout needs `static constexpr const char* name` and `template <class T> static constexpr "
                "kvcache::plane_strides strides(std::uint32_t block_size, std::uint32_t heads, std::uint32_t head_dim) "
                "noexcept`; is its header included?");
  static_assert(memory_allocator<typename Policies::allocator>,
                "allocator needs `static constexpr const char* name`, `static constexpr kvcache::memory_space space`, "
                "`void* allocate(std::size_t bytes, std::size_t alignment)` and `void deallocate(void* memory, "
                "std::size_t bytes, std::size_t alignment) noexcept`, and moves without throwing; is its header "
                "included?");
  static_assert(Policies::block_size > 0, "block_size needs at least 1 token, or kvcache::dynamic");
};

}  // namespace kvcache
