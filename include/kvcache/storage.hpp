// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/append.hpp>
#include <kvcache/concepts.hpp>
#include <kvcache/copy.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>
#include <kvcache/geometry.hpp>
#include <kvcache/layout/nhd.hpp>
#include <kvcache/memory/aligned_allocator.hpp>
#include <kvcache/policies.hpp>
#include <kvcache/quantise.hpp>
#include <kvcache/seal.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvcache {

/// What a storage is made with beside the geometry.
template <class Allocator>
struct storage_options {
  std::uint32_t blocks = 0;      ///< that can hold tokens; the null block comes on top
  std::uint32_t block_size = 0;  ///< tokens; needed where the policy is `dynamic`, else 0 or the policy's value
  /// Blocks of the tail pool, where tokens wait until their block is whole. Needed where the dtype seals blocks, see
  /// tail_blocks_for; 0 elsewhere.
  std::uint32_t tail_blocks = 0;
  /// Layers that are stored in the policies' tail_dtype and not quantised, in rising order. Read by the constructor.
  std::span<const std::uint32_t> wide_layers{};
  Allocator allocator{};
};

/// What a storage takes, in bytes.
struct storage_footprint {
  std::uint64_t block = 0;  ///< each of the blocks, the null block too
  std::uint64_t tails = 0;  ///< the tail pool
};

namespace detail {

/// Where the planes of one layer lie in a block.
struct block_planes {
  plane_strides k;
  plane_strides k_scales;
  plane_strides v;
  plane_strides v_scales;

  template <class Layout>
  [[nodiscard]] static constexpr block_planes of(const geometry& shape, std::uint32_t tokens, kv_format f) noexcept {
    return {Layout::strides(tokens, shape.kv_heads, code_bytes(f.k, shape.head_dim)),
            scales<Layout>(f.k, shape, tokens, shape.head_dim),
            Layout::strides(tokens, shape.kv_heads, code_bytes(f.v, shape.v_dim())),
            scales<Layout>(f.v, shape, tokens, shape.v_dim())};
  }

  [[nodiscard]] static constexpr std::int64_t padded(std::int64_t bytes) noexcept {
    constexpr auto boundary = static_cast<std::int64_t>(plane_alignment);
    return (bytes + boundary - 1) / boundary * boundary;
  }
  [[nodiscard]] constexpr std::int64_t bytes() const noexcept {
    return padded(k.bytes) + padded(k_scales.bytes) + padded(v.bytes) + padded(v_scales.bytes);
  }

  /// Blocks from `base` on, `stride` bytes apart.
  void show(std::byte* base, std::int64_t stride, kv_view& out) const noexcept {
    const auto plane = [&](const plane_strides& p) {
      const plane_view seen = p.bytes == 0 ? plane_view{} : plane_view{base, stride, p.token, p.head};
      base += padded(p.bytes);
      return seen;
    };
    out.k = plane(k);
    out.k_scales = plane(k_scales);
    out.v = plane(v);
    out.v_scales = plane(v_scales);
  }

 private:
  template <class Layout>
  [[nodiscard]] static constexpr plane_strides scales(dtype_id id, const geometry& shape, std::uint32_t tokens,
                                                      std::uint32_t dim) noexcept {
    const std::uint64_t each = scale_bytes(id, dim);
    if (each == 0) return {};
    if (!seals(id)) return Layout::strides(tokens, shape.kv_heads, each);
    plane_strides all = Layout::strides(1, shape.kv_heads, each);
    all.token = 0;
    return all;
  }
};

}  // namespace detail

/// The bytes of one layer group. Memory order: [layer][block][K plane | V plane], the inside of a plane as the layout
/// policy says, each plane on a 64-byte boundary. Attention works layer by layer, so a step streams through one
/// contiguous region, and the K and V of a block lie side by side. Where several layer groups share a pool, whose
/// blocks are of one group now and of another later, all of a block lies together instead: [block][layer][K plane | V
/// plane]. Scales follow the codes that they belong to, on a boundary of their own. Where the dtype seals blocks, the
/// tail pool comes behind all that, in the same order. The bytes of unwritten slots are whatever the allocator gave;
/// nothing is touched before it is written, so a pool is resident as far as it was used. Owns its memory; moves, never
/// copies. Thread safety: `append`, see the free function; everything const at any time.
template <class Policies>
class storage {
 public:
  // A policy that fails its mandate (below) gives way to the default, so that one fault is one message.
  using dtype =
      std::conditional_t<kv_dtype_policy<typename Policies::dtype>, typename Policies::dtype, policies::dtype>;
  using layout = std::conditional_t<kv_layout<typename Policies::layout>, typename Policies::layout, nhd>;
  using allocator = std::conditional_t<memory_allocator<typename Policies::allocator>, typename Policies::allocator,
                                       aligned_allocator>;
  using tail_dtype =
      std::conditional_t<wide_element<typename Policies::tail_dtype>, typename Policies::tail_dtype, bf16>;
  using options = storage_options<allocator>;
  /// What K and V are stored in.
  static constexpr kv_format format{dtype_traits<typename dtype::k>::id, dtype_traits<typename dtype::v>::id};
  /// Whether blocks are quantised as a whole, and wait in a tail pool until then.
  static constexpr bool seals_blocks = seals(format.k) || seals(format.v);

  /// Takes the memory for `options.blocks` blocks, the null block and the tail pool. Raises invalid_argument, naming
  /// value and limit, where the geometry, the numbers of blocks or the block size can hold nothing, contradict the
  /// dtype or pass 64-bit offsets, and system_failure where the allocator has no memory.
  explicit storage(const kvcache::geometry& shape, options chosen) : storage(shape, std::move(chosen), 0) {
    check_size(0);
    appended_.resize(shape.layers);
    const std::uint64_t bytes = this->bytes();
    if (bytes > SIZE_MAX) refuse_size();
    memory_ = static_cast<std::byte*>(allocator_.allocate(static_cast<std::size_t>(bytes), plane_alignment));
    tails_ = memory_ + (bytes - tail_bytes());
  }
  /// In a pool that others share and somebody else owns: block b, up to options.blocks, has the `pool_block` bytes from
  /// pool + b * pool_block on, and the tail pool, tail_bytes in all, lies at `tails`; all on 64-byte boundaries. Raises
  /// invalid_argument as above, and where a block of this group takes more than that. Takes no memory.
  storage(const kvcache::geometry& shape, options chosen, std::byte* pool, std::uint64_t pool_block, std::byte* tails)
      : storage(shape, std::move(chosen), pool_block) {
    check_size(pool_block);
    appended_.resize(shape.layers);
    if (bytes_per_block() > pool_block)
      detail::raise<invalid_argument>("storage: a block takes " + std::to_string(bytes_per_block()) +
                                      " bytes, the pool's blocks have " + std::to_string(pool_block) +
                                      "; make the pool's blocks as large as the largest group's");
    memory_ = pool;  // only now: what is refused is not ours to free
    tails_ = tails;
  }

  storage(storage&& other) noexcept
      : geometry_(other.geometry_),
        allocator_(std::move(other.allocator_)),
        blocks_(other.blocks_),
        block_size_(other.block_size_),
        tail_blocks_(other.tail_blocks_),
        wide_layers_(std::move(other.wide_layers_)),
        key_offsets_(std::move(other.key_offsets_)),
        appended_(std::move(other.appended_)),
        pool_block_(other.pool_block_),
        memory_(std::exchange(other.memory_, nullptr)),
        tails_(other.tails_) {}
  storage& operator=(storage&& other) noexcept {
    if (this != &other) {
      free_memory();
      geometry_ = other.geometry_;
      allocator_ = std::move(other.allocator_);
      blocks_ = other.blocks_;
      block_size_ = other.block_size_;
      tail_blocks_ = other.tail_blocks_;
      wide_layers_ = std::move(other.wide_layers_);
      key_offsets_ = std::move(other.key_offsets_);
      appended_ = std::move(other.appended_);
      pool_block_ = other.pool_block_;
      memory_ = std::exchange(other.memory_, nullptr);
      tails_ = other.tails_;
    }
    return *this;
  }
  ~storage() { free_memory(); }

  [[nodiscard]] const kvcache::geometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] std::uint32_t block_size() const noexcept { return block_size_; }
  /// Blocks that can hold tokens: ids 1 to blocks().
  [[nodiscard]] std::uint32_t blocks() const noexcept { return blocks_; }
  /// Blocks of the tail pool: ids 0 to tail_blocks() - 1, with tail_bit set where they stand in a table.
  [[nodiscard]] std::uint32_t tail_blocks() const noexcept { return tail_blocks_; }
  /// Bytes of one block over all layers, the padding that aligns its planes included.
  [[nodiscard]] std::uint64_t bytes_per_block() const noexcept { return layer_begin(geometry_.layers); }
  /// The same before there is a storage, to see how many blocks a budget holds; of `shape.layers`, `wide_layers` are
  /// not quantised. Sizes as the constructor allows them.
  [[nodiscard]] static constexpr std::uint64_t bytes_per_block(const kvcache::geometry& shape, std::uint32_t tokens,
                                                               std::uint32_t wide_layers = 0) noexcept {
    return std::uint64_t{shape.layers - wide_layers} * layer_bytes(shape, tokens, format) +
           std::uint64_t{wide_layers} * layer_bytes(shape, tokens, wide_format);
  }
  /// What a storage of such options takes, without taking it. Raises invalid_argument as the constructor does.
  [[nodiscard]] static storage_footprint footprint_of(const kvcache::geometry& shape, options chosen) {
    const storage sizes(shape, std::move(chosen), 0);
    sizes.check_size(0);
    return {sizes.bytes_per_block(), sizes.tail_bytes()};
  }
  /// Bytes of the tail pool.
  [[nodiscard]] std::uint64_t tail_bytes() const noexcept {
    return tail_blocks_ * layer_begin(geometry_.layers, tail_format);
  }
  /// Bytes taken from the allocator, null block and tail pool included; 0 in a pool that is somebody else's.
  [[nodiscard]] std::uint64_t bytes() const noexcept {
    return pool_block_ != 0 ? 0 : (std::uint64_t{blocks_} + 1) * bytes_per_block() + tail_bytes();
  }

  /// The KV of one layer. Valid until the storage dies or is moved into; a moved storage keeps its views valid. Raises
  /// invalid_argument where there is no such layer.
  [[nodiscard]] kv_view view(std::uint32_t layer) const {
    if (layer >= geometry_.layers)
      detail::raise<invalid_argument>("storage: layer " + std::to_string(layer) + " asked for, the geometry has " +
                                      std::to_string(geometry_.layers) + ", counted from 0");
    KVCACHE_ASSERT(memory_ != nullptr, "storage used after it was moved from");
    const kv_format stored = is_wide(layer) ? wide_format : format;
    const auto before = layer_begin(layer);
    const auto stride = static_cast<std::int64_t>(pool_block_ != 0 ? pool_block_ : layer_begin(layer + 1) - before);
    kv_view out;
    if (tail_blocks_ != 0) {
      kv_view tails;
      const kv_format waiting = is_wide(layer) ? wide_format : tail_format;
      detail::block_planes::of<layout>(geometry_, block_size_, waiting)
          .show(tails_ + tail_blocks_ * layer_begin(layer, tail_format),
                static_cast<std::int64_t>(layer_bytes(geometry_, block_size_, waiting)), tails);
      out.k_tail = tails.k;
      out.v_tail = tails.v;
    }
    detail::block_planes::of<layout>(geometry_, block_size_, stored)
        .show(memory_ + (pool_block_ != 0 ? before : (std::uint64_t{blocks_} + 1) * before), stride, out);
    out.blocks = blocks_ + 1;
    out.tail_blocks = tail_blocks_;
    out.block_size = block_size_;
    out.kv_heads = geometry_.kv_heads;
    out.head_dim = geometry_.head_dim;
    out.head_dim_v = geometry_.v_dim();
    out.k_dtype = stored.k;
    out.v_dtype = stored.v;
    out.tail_dtype = dtype_traits<tail_dtype>::id;
    if (!key_offsets_.empty() && !key_offsets_[layer].empty()) out.key_offset = key_offsets_[layer].data();
    return out;
  }

  /// From here on `append` subtracts `offset`, [kv_heads, head_dim], from every key of `layer`, also where it is wide,
  /// and attention gives what it would give of the keys as they were, lse, soft cap and sinks included: a constant in
  /// all keys adds one number to all logits of a query, which softmax does not see. What is subtracted needs no bits,
  /// so keys with large steady channels are stored closer; their mean is a good offset, see key_mean (SageAttention:
  /// Zhang et al., "Accurate 8-Bit Attention for Plug-and-play Inference Acceleration", 2024, arXiv 2410.02367).
  ///
  /// Once for a layer, before its first append and before views of it are taken: views have what was set when they were
  /// taken, and keys that lie in the pool already would be read as if they had been shifted. Raises invalid_argument,
  /// naming value and limit, where there is no such layer, it has an offset, this storage's append has written to it,
  /// the offset has another size or holds what is not finite. Keys that came by way of a view it knows of by
  /// note_append, those that the memory held from the first not at all. Copies the offset. O(kv_heads * head_dim). Not
  /// beside other calls.
  void set_key_offset(std::uint32_t layer, std::span<const float> offset) {
    const auto refuse = [&](const std::string& text) {
      detail::raise<invalid_argument>("storage: key offset of layer " + std::to_string(layer) + ": " + text);
    };
    if (layer >= geometry_.layers)
      refuse("the geometry has " + std::to_string(geometry_.layers) + " layers, counted from 0");
    const std::uint64_t size = std::uint64_t{geometry_.kv_heads} * geometry_.head_dim;
    if (offset.size() != size)
      refuse(std::to_string(offset.size()) + " floats given, " + std::to_string(size) +
             " needed; give one for each kv head and channel");
    if (geometry_.head_dim > max_quantised_dim)
      refuse("head_dim is " + std::to_string(geometry_.head_dim) + ", at most " + std::to_string(max_quantised_dim) +
             " possible; store such keys as they are");
    for (std::size_t i = 0; i < offset.size(); ++i)
      if ((std::bit_cast<std::uint32_t>(offset[i]) & 0x7f80'0000u) == 0x7f80'0000u)
        refuse("float " + std::to_string(i) + ", of head " + std::to_string(i / geometry_.head_dim) + ", is " +
               ((std::bit_cast<std::uint32_t>(offset[i]) & 0x7f'ffffu) != 0 ? "no number" : "infinite") +
               ", it has to be finite; calibrate with keys that are");
    if (key_offsets_.empty()) key_offsets_.resize(geometry_.layers);
    if (!key_offsets_[layer].empty()) refuse("it is set already, and keys are stored by it; set it once");
    if (appended_[layer] != 0)
      refuse(
          "rows of keys were appended to it, 0 possible, since they would be read as if they had been shifted; set it "
          "before the first append");
    key_offsets_[layer].assign(offset.begin(), offset.end());
  }

  /// kvcache::append into `layer`; refuses the null block's slots as well, and a layer that does not exist.
  template <class K, class V>
    requires element<std::remove_const_t<K>> && element<std::remove_const_t<V>>
  void append(std::uint32_t layer, const rows_view<K>& k, const rows_view<V>& v, std::span<const slot_id> slots,
              unsigned ith = 0, unsigned nth = 1) {
    detail::append_beyond_null(view(layer), k, v, slots, ith, nth);
    if (k.rows != 0) note_append(layer);
  }

  /// Keys of `layer` were written by way of a view, so set_key_offset refuses to set one from here on. At any time, by
  /// any thread. O(1). Precondition: there is such a layer.
  void note_append(std::uint32_t layer) noexcept { KVCACHE_SET_BYTE(appended_[layer]); }

  /// kvcache::copy in every layer, in the given order.
  void copy(std::span<const block_copy> copies) {
    if (copies.empty()) return;
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) kvcache::copy(view(layer), copies);
  }

  /// kvcache::seal in every layer.
  void seal(std::span<const block_seal> blocks) {
    if (blocks.empty()) return;
    for (std::uint32_t layer = 0; layer < geometry_.layers; ++layer) kvcache::seal(view(layer), blocks);
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

  static constexpr kv_format tail_format = detail::format_of_tails(format, dtype_traits<tail_dtype>::id);
  static constexpr kv_format wide_format{dtype_traits<tail_dtype>::id, dtype_traits<tail_dtype>::id};

  /// Checks all that needs no memory, and takes none.
  storage(const kvcache::geometry& shape, options chosen, std::uint64_t pool_block)
      : geometry_(shape),
        allocator_(std::move(chosen.allocator)),
        blocks_(checked_blocks(chosen.blocks)),
        block_size_(checked_block_size(chosen.block_size)),
        tail_blocks_(chosen.tail_blocks),
        wide_layers_(chosen.wide_layers.begin(), chosen.wide_layers.end()),
        pool_block_(pool_block) {
    validate(shape);
    const auto refuse = [](const std::string& text) { detail::raise<invalid_argument>("storage: " + text); };
    const auto quantisable = [&](const char* what, dtype_id id, std::uint32_t dim) {
      if ((quantization_of(id).bits != 0 || is_rotated(id)) && dim > max_quantised_dim)
        refuse(std::string(what) + " is " + std::to_string(dim) + ", " + name(id) + " stores at most " +
               std::to_string(max_quantised_dim) + "; take an element type");
    };
    quantisable("head_dim of K", format.k, shape.head_dim);
    quantisable("head_dim of V", format.v, shape.v_dim());
    if (seals_blocks ? tail_blocks_ == 0 || tail_blocks_ > max_blocks : tail_blocks_ != 0)
      refuse("tail_blocks is " + std::to_string(tail_blocks_) + (seals_blocks ? ", 1 to " : ", ") +
             std::to_string(seals_blocks ? max_blocks : 0) + " possible where " + name(format.k) + " and " +
             name(format.v) + " are stored; " +
             (seals_blocks ? "set storage_options::tail_blocks, see tail_blocks_for"
                           : "leave it 0 where storage::seals_blocks is false"));
    if (!wide_layers_.empty() && bits(format.k) >= 16 && bits(format.v) >= 16)
      refuse("wide_layers names " + std::to_string(wide_layers_.size()) + " layers, 0 possible where " +
             name(format.k) + " and " + name(format.v) + " are stored, which are wide already; leave it out");
    for (std::size_t i = 0; i < wide_layers_.size(); ++i)
      if (wide_layers_[i] >= shape.layers || (i > 0 && wide_layers_[i] <= wide_layers_[i - 1]))
        refuse("wide_layers names layer " + std::to_string(wide_layers_[i]) + " of " + std::to_string(shape.layers) +
               " at place " + std::to_string(i) + "; name each layer once, in rising order, counted from 0");
  }

  /// Raises unless every byte offset, alignment included, fits 63 bits, in blocks of `pool_block` bytes, or of those
  /// that the layers take where that is 0.
  void check_size(std::uint64_t pool_block) const {
    const std::uint64_t room = std::uint64_t{INT64_MAX} / geometry_.layers / (std::uint64_t{blocks_} + 1);
    constexpr std::uint64_t padding = 4 * plane_alignment;
    if (room < padding) refuse_size();
    const std::uint64_t room_in_block = (room - padding) / block_size_ / geometry_.kv_heads;
    for (const kv_format f : {format, wide_format, tail_format}) {
      const std::uint64_t head_bytes = code_bytes(f.k, geometry_.head_dim) + scale_bytes(f.k, geometry_.head_dim) +
                                       code_bytes(f.v, geometry_.v_dim()) + scale_bytes(f.v, geometry_.v_dim());
      if (room_in_block < head_bytes) refuse_size();
    }
    if (pool_block > std::uint64_t{INT64_MAX} / (std::uint64_t{blocks_} + 1)) refuse_size();
    for (const kv_format f : {wide_format, tail_format})
      if (tail_blocks_ != 0 &&
          layer_bytes(geometry_, block_size_, f) > std::uint64_t{INT64_MAX} / 2 / tail_blocks_ / geometry_.layers)
        refuse_size();
    if (pool_block_ == 0 && (std::uint64_t{blocks_} + 1) * bytes_per_block() > std::uint64_t{INT64_MAX} - tail_bytes())
      refuse_size();
  }

  [[noreturn]] void refuse_size() const {
    const auto times = [](std::uint32_t n, const char* what) { return std::to_string(n) + ' ' + what; };
    detail::raise<invalid_argument>("storage: " + times(geometry_.layers, "layers x ") + times(blocks_, "blocks x ") +
                                    times(block_size_, "tokens x ") +
                                    times(geometry_.kv_heads, "kv heads x head_dim ") +
                                    times(geometry_.head_dim, "and ") + times(geometry_.v_dim(), "bytes") +
                                    " pass the limit of 2^63; check the geometry and the number of blocks");
  }

  /// Bytes of one block in one layer that is stored so.
  [[nodiscard]] static constexpr std::uint64_t layer_bytes(const kvcache::geometry& shape, std::uint32_t tokens,
                                                           kv_format stored) noexcept {
    return static_cast<std::uint64_t>(detail::block_planes::of<layout>(shape, tokens, stored).bytes());
  }
  [[nodiscard]] bool is_wide(std::uint32_t layer) const noexcept {
    for (const std::uint32_t wide : wide_layers_)
      if (wide == layer) return true;
    return false;
  }
  /// Bytes of one block in the layers before `layer`, of which those that are not wide are stored so.
  [[nodiscard]] std::uint64_t layer_begin(std::uint32_t layer, kv_format stored = format) const noexcept {
    std::uint32_t wide = 0;
    for (const std::uint32_t w : wide_layers_) wide += w < layer;
    return (layer - wide) * layer_bytes(geometry_, block_size_, stored) +
           wide * layer_bytes(geometry_, block_size_, wide_format);
  }

  void free_memory() noexcept {
    if (memory_ != nullptr && pool_block_ == 0)
      allocator_.deallocate(memory_, static_cast<std::size_t>(bytes()), plane_alignment);
  }

  kvcache::geometry geometry_;
  allocator allocator_;
  std::uint32_t blocks_ = 0;
  std::uint32_t block_size_ = 0;
  std::uint32_t tail_blocks_ = 0;
  std::vector<std::uint32_t> wide_layers_;
  std::vector<std::vector<float>> key_offsets_;  // of each layer, or empty; nothing where no layer has one
  std::vector<unsigned char> appended_;          // of each layer: not 0 where append has written to it
  std::uint64_t pool_block_ = 0;  // bytes of a block that groups share; 0: the memory is this storage's own
  std::byte* memory_ = nullptr;
  std::byte* tails_ = nullptr;

  // Last in the class, since some compilers leave out what follows a mandate that fails.
  static_assert(
      kv_dtype_policy<typename Policies::dtype>,
      "dtype needs `using k = T; using v = T;`, each T an element type (f32, f16, bf16, fp8_e4m3, fp8_e5m2) or "
      "a format of <kvcache/quantization.hpp>: kvcache::kv_dtype<K, V>");
  static_assert(std::is_same_v<typename Policies::tail_dtype, tail_dtype>,
                "tail_dtype needs f32, f16 or bf16: what waits there is quantised from it");
  static_assert(kv_layout<typename Policies::layout>,
                "layout needs `static constexpr const char* name` and `static constexpr kvcache::plane_strides "
                "strides(std::uint32_t block_size, std::uint32_t heads, std::uint64_t head_bytes) noexcept`; is its "
                "header included?");
  static_assert(memory_allocator<typename Policies::allocator>,
                "allocator needs `static constexpr const char* name`, `static constexpr kvcache::memory_space space`, "
                "`void* allocate(std::size_t bytes, std::size_t alignment)` and `void deallocate(void* memory, "
                "std::size_t bytes, std::size_t alignment) noexcept`, and moves without throwing; is its header "
                "included?");
  static_assert(Policies::block_size > 0, "block_size needs at least 1 token, or kvcache::dynamic");
};

}  // namespace kvcache
