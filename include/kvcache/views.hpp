// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/quantization.hpp>
#include <kvcache/types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <type_traits>

namespace kvcache {

/// Rows of heads, [rows, heads, head_dim], the elements of a head contiguous: q, k, v or out of one layer, also as a
/// slice of a fused QKV matrix. Strides count elements. Owns nothing.
template <class T>
struct rows_view {
  T* data = nullptr;
  std::uint32_t rows = 0;
  std::uint32_t heads = 0;
  std::uint32_t head_dim = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;

  constexpr rows_view() noexcept = default;
  constexpr rows_view(T* first, std::uint32_t row_count, std::uint32_t head_count, std::uint32_t dim,
                      std::int64_t row_step, std::int64_t head_step) noexcept
      : data(first), rows(row_count), heads(head_count), head_dim(dim), row_stride(row_step), head_stride(head_step) {}
  /// Rows that lie one after another without gaps.
  constexpr rows_view(T* first, std::uint32_t row_count, std::uint32_t head_count, std::uint32_t dim) noexcept
      : rows_view(first, row_count, head_count, dim, std::int64_t{head_count} * dim, dim) {}
  /// A view to write through reads as well.
  template <class U>
    requires std::same_as<const U, T>
  constexpr rows_view(const rows_view<U>& o) noexcept
      : rows_view(o.data, o.rows, o.heads, o.head_dim, o.row_stride, o.head_stride) {}

  /// First element of a row's head. Precondition: row < rows, head < heads.
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr T* at(std::uint32_t row, std::uint32_t head) const noexcept {
    return data + row * row_stride + head * head_stride;
  }
};

/// A run of content units, read from 32-bit token ids or 64-bit units as the caller holds them. Owns nothing.
class content_view {
 public:
  constexpr content_view() noexcept = default;
  constexpr content_view(const std::int32_t* ids, std::size_t size) noexcept : narrow_(ids), size_(size) {}
  constexpr content_view(const content_unit* units, std::size_t size) noexcept : wide_(units), size_(size) {}
  constexpr content_view(std::span<const std::int32_t> ids) noexcept : content_view(ids.data(), ids.size()) {}
  constexpr content_view(std::span<const content_unit> units) noexcept : content_view(units.data(), units.size()) {}
  /// Any contiguous container of the two.
  // clang-format off
  template <class Container>
    requires(!std::same_as<std::remove_cvref_t<Container>, content_view>) &&
            (std::convertible_to<const Container&, std::span<const std::int32_t>> ||
             std::convertible_to<const Container&, std::span<const content_unit>>)
  constexpr content_view(const Container& c) noexcept : content_view(std::data(c), std::size(c)) {}
  // clang-format on

  [[nodiscard]] constexpr std::size_t size() const noexcept { return size_; }
  [[nodiscard]] constexpr bool empty() const noexcept { return size_ == 0; }
  /// A negative 32-bit id keeps its 32 bits, so it is a unit of its own and no fingerprint.
  [[nodiscard]] constexpr content_unit operator[](std::size_t i) const noexcept {
    return wide_ != nullptr ? wide_[i] : unit(narrow_[i]);
  }
  /// Calls `f` with the units as the caller holds them: a span of std::int32_t or of content_unit.
  template <class F>
  constexpr decltype(auto) visit(F&& f) const {
    return wide_ != nullptr ? f(std::span<const content_unit>(wide_, size_))
                            : f(std::span<const std::int32_t>(narrow_, size_));
  }
  /// What operator[] makes of a unit that visit hands out.
  [[nodiscard]] static constexpr content_unit unit(std::int32_t id) noexcept { return static_cast<std::uint32_t>(id); }
  [[nodiscard]] static constexpr content_unit unit(content_unit as_it_is) noexcept { return as_it_is; }
  /// Units [first, first + count).
  [[nodiscard]] constexpr content_view sub(std::size_t first, std::size_t count) const noexcept {
    KVCACHE_ASSERT(first + count <= size_, "content_view::sub beyond the end");
    return wide_ != nullptr ? content_view(wide_ + first, count) : content_view(narrow_ + first, count);
  }

 private:
  const content_unit* wide_ = nullptr;
  const std::int32_t* narrow_ = nullptr;
  std::size_t size_ = 0;
};

/// The block tables of a batch, one row a sequence: padded ([rows, columns], short rows end in null blocks), CSR
/// (row r is blocks[offsets[r] .. offsets[r + 1])) or ragged (row r is the counts[r] entries from blocks[begins[r]]
/// on). Entries are block ids, with tail_bit set where the block lies in the tail pool. Owns nothing.
class block_tables {
 public:
  constexpr block_tables() noexcept = default;

  [[nodiscard]] static constexpr block_tables padded(const block_id* blocks, std::uint32_t rows,
                                                     std::uint32_t columns) noexcept {
    block_tables t;
    t.blocks_ = blocks;
    t.rows_ = rows;
    t.columns_ = columns;
    return t;
  }
  /// `offsets` has one entry more than there are rows.
  [[nodiscard]] static constexpr block_tables csr(const block_id* blocks,
                                                  std::span<const std::uint32_t> offsets) noexcept {
    block_tables t;
    t.blocks_ = blocks;
    t.begins_ = offsets.data();
    t.rows_ = offsets.empty() ? 0 : static_cast<std::uint32_t>(offsets.size() - 1);
    return t;
  }
  /// `begins` and `counts` have one entry a row.
  [[nodiscard]] static constexpr block_tables ragged(const block_id* blocks, std::span<const std::uint32_t> begins,
                                                     std::span<const std::uint32_t> counts) noexcept {
    KVCACHE_ASSERT(begins.size() == counts.size(), "block_tables: as many begins as counts");
    block_tables t;
    t.blocks_ = blocks;
    t.begins_ = begins.data();
    t.counts_ = counts.data();
    t.rows_ = static_cast<std::uint32_t>(begins.size());
    return t;
  }

  [[nodiscard]] constexpr std::uint32_t rows() const noexcept { return rows_; }
  /// Precondition: r < rows().
  [[nodiscard]] constexpr std::span<const block_id> row(std::uint32_t r) const noexcept {
    if (counts_ != nullptr) return {blocks_ + begins_[r], counts_[r]};
    if (begins_ != nullptr) return {blocks_ + begins_[r], begins_[r + 1] - begins_[r]};
    return {blocks_ + std::size_t{r} * columns_, columns_};
  }

 private:
  const block_id* blocks_ = nullptr;
  const std::uint32_t* begins_ = nullptr;
  const std::uint32_t* counts_ = nullptr;
  std::uint32_t rows_ = 0;
  std::uint32_t columns_ = 0;
};

/// What one step computes, for one layer group: sequence r has the queries [query_offsets[r], query_offsets[r + 1])
/// of the step's rows, and its newest query is the last of its kv_lengths[r] tokens. Host arrays; owns nothing.
struct batch_view {
  std::span<const std::uint32_t> query_offsets;  ///< rows + 1 entries, from 0
  std::span<const std::uint32_t> kv_lengths;     ///< per sequence, this step's tokens included
  block_tables tables;                           ///< per sequence
  std::span<const slot_id> slots;                ///< per query token: where its K and V go
  std::uint32_t block_size = 0;
  /// Newest tokens that the tables hold for a query, its own included: the window of a layer group that has one.
  std::uint32_t window = ~0u;

  [[nodiscard]] constexpr std::uint32_t rows() const noexcept { return static_cast<std::uint32_t>(kv_lengths.size()); }
  [[nodiscard]] constexpr std::uint32_t tokens() const noexcept {
    return query_offsets.empty() ? 0 : query_offsets.back();
  }
};

/// Where one plane (codes or scales of K or of V) of one layer lies; all strides in bytes, what belongs to a head
/// contiguous. Scales per channel have a token_stride of 0, since all tokens of a block share them.
struct plane_view {
  std::byte* base = nullptr;
  std::int64_t block_stride = 0;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;

  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr std::byte* at(block_id block, std::uint32_t token,
                                                            std::uint32_t head) const noexcept {
    return base + static_cast<std::int64_t>(block) * block_stride + token * token_stride + head * head_stride;
  }
};

/// The KV of one layer: the pool's planes and, for formats that seal whole blocks, those of the tail pool. Any pool
/// with strides can be seen so, the library's own or an engine's. Owns nothing.
struct kv_view {
  plane_view k;
  plane_view v;
  plane_view k_scales;  ///< no base where the dtype has none
  plane_view v_scales;
  plane_view k_tail;  ///< no base: no block table entry has tail_bit set
  plane_view v_tail;
  std::uint32_t blocks = 0;  ///< ids below this may stand in a table, the null block included
  std::uint32_t tail_blocks = 0;
  std::uint32_t block_size = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t head_dim_v = 0;  ///< 0: as head_dim
  dtype_id k_dtype = dtype_id::bfloat16;
  dtype_id v_dtype = dtype_id::bfloat16;
  /// What the tail pool holds instead of a format with scales; element types lie there as they do elsewhere.
  dtype_id tail_dtype = dtype_id::bfloat16;
  /// What was subtracted from every key before it was stored, [kv_heads, head_dim] floats; null: nothing. See
  /// storage::set_key_offset.
  const float* key_offset = nullptr;

  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr std::uint32_t v_dim() const noexcept {
    return head_dim_v != 0 ? head_dim_v : head_dim;
  }
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr dtype_id k_tail_dtype() const noexcept { return in_tail(k_dtype); }
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr dtype_id v_tail_dtype() const noexcept { return in_tail(v_dtype); }

  /// First byte of token `token` of `entry`, an entry of a block table.
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr const std::byte* k_at(block_id entry, std::uint32_t token,
                                                                    std::uint32_t head) const noexcept {
    return (entry & tail_bit) != 0 ? k_tail.at(entry & ~tail_bit, token, head) : k.at(entry, token, head);
  }
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr const std::byte* v_at(block_id entry, std::uint32_t token,
                                                                    std::uint32_t head) const noexcept {
    return (entry & tail_bit) != 0 ? v_tail.at(entry & ~tail_bit, token, head) : v.at(entry, token, head);
  }
  /// The same with its scales and what it is stored in.
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr stored_head k_head(block_id entry, std::uint32_t token,
                                                                 std::uint32_t head) const noexcept {
    if ((entry & tail_bit) != 0) return {k_at(entry, token, head), nullptr, k_tail_dtype()};
    return {k_at(entry, token, head), scales_at(k_scales, entry, token, head), k_dtype};
  }
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr stored_head v_head(block_id entry, std::uint32_t token,
                                                                 std::uint32_t head) const noexcept {
    if ((entry & tail_bit) != 0) return {v_at(entry, token, head), nullptr, v_tail_dtype()};
    return {v_at(entry, token, head), scales_at(v_scales, entry, token, head), v_dtype};
  }

 private:
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr dtype_id in_tail(dtype_id id) const noexcept {
    if (quantization_of(id).bits == 0) return id;
    const auto wide = static_cast<std::uint8_t>(tail_dtype);
    return static_cast<dtype_id>(is_rotated(id) ? wide | rotated_bit : wide);
  }
  [[nodiscard]] KVCACHE_HOST_DEVICE static constexpr const std::byte* scales_at(const plane_view& scales,
                                                                                block_id entry, std::uint32_t token,
                                                                                std::uint32_t head) noexcept {
    return scales.base == nullptr ? nullptr : scales.at(entry, token, head);
  }
};

static_assert(std::is_trivially_copyable_v<rows_view<float>> && std::is_trivially_copyable_v<content_view> &&
              std::is_trivially_copyable_v<block_tables> && std::is_trivially_copyable_v<batch_view> &&
              std::is_trivially_copyable_v<kv_view>);

}  // namespace kvcache
