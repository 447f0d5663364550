// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/convert.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dispatch.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/quantise.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

namespace kvcache {

namespace detail {

/// Every element type that bytes are written in.
using stored_element = dtype_of<f32, f16, bf16, fp8_e4m3, fp8_e5m2>;

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
  const auto possible = [](const char* what, std::uint32_t given, std::uint32_t most, const char* why) {
    if (given > most)
      refuse_append(std::string(what) + " is " + std::to_string(given) + ", at most " + std::to_string(most) +
                    " possible; " + why);
  };
  constexpr const char* bits_of_entry = "a table entry has 31 bits for the block";
  possible("the number of blocks", view.blocks, tail_bit, bits_of_entry);
  possible("the number of tail blocks", view.tail_blocks, tail_bit, bits_of_entry);
  if (view.tail_blocks != 0) possible("block_size", view.block_size, max_blocks, bits_of_entry);
  const bool sealed = seals(view.k_dtype) || seals(view.v_dtype);
  const auto by_floats = [&](const char* what, dtype_id dtype, std::uint32_t dim, bool shifted) {
    if (quantization_of(dtype).bits != 0 || is_rotated(dtype) || shifted)
      possible(what, dim, max_quantised_dim, "longer vectors can be neither quantised nor rotated nor shifted");
  };
  by_floats("head_dim of K", view.k_dtype, k_dim, view.key_offset != nullptr);
  by_floats("head_dim of V", view.v_dtype, v_dim, false);
  const slot_id end = view.blocks * size;
  const slot_id tail_first = slot_id{tail_bit} * size;
  const slot_id tail_end = (slot_id{tail_bit} + view.tail_blocks) * size;
  for (std::uint32_t row = 0; row < k_rows; ++row) {
    const slot_id slot = slots[row];
    const bool in_pool = slot >= first_slot && slot < end;
    const bool in_tail = slot >= tail_first && slot < tail_end;
    if (in_pool && sealed)
      refuse_append("slot " + std::to_string(slot) + " of row " + std::to_string(row) + " is in block " +
                    std::to_string(slot / size) + ", which " + name(seals(view.k_dtype) ? view.k_dtype : view.v_dtype) +
                    " seals as a whole; write to a block of the tail pool, whose slots have tail_bit");
    if (!in_pool && !in_tail && slot != no_slot)
      refuse_append("slot " + std::to_string(slot) + " of row " + std::to_string(row) + " is outside the pool's " +
                    std::to_string(first_slot) + " to " + std::to_string(end - 1) +
                    "; take slots from the tables of this pool");
  }
}

/// Rows of K or of V on their way into a pool.
template <class From>
struct row_writer {
  const plane_view& plane;
  const plane_view& scales;
  const plane_view& tail;
  dtype_id dtype;
  dtype_id tail_dtype;
  std::uint32_t block_size;
  const rows_view<From>& rows;
  std::span<const slot_id> slots;
  const float* offset;  // [heads, head_dim], to be subtracted; null: nothing

  /// Elements as they are, in rows [first, last).
  template <class To>
  void write_elements(std::uint32_t first, std::uint32_t last) const {
    const std::size_t dim = rows.head_dim;
    const bool one_run = rows.head_stride == std::int64_t{rows.head_dim} &&
                         plane.head_stride == static_cast<std::int64_t>(dim * sizeof(To)) &&
                         (tail.base == nullptr || tail.head_stride == plane.head_stride);
    for (std::uint32_t row = first; row < last; ++row) {
      if (slots[row] == no_slot) continue;
      const block_id entry = entry_of(row);
      const plane_view& target = (entry & tail_bit) != 0 ? tail : plane;
      const block_id block = entry & ~tail_bit;
      if (one_run) {
        convert(rows.at(row, 0), dim * rows.heads, reinterpret_cast<To*>(target.at(block, offset_of(row), 0)));
      } else {
        for (std::uint32_t head = 0; head < rows.heads; ++head)
          convert(rows.at(row, head), dim, reinterpret_cast<To*>(target.at(block, offset_of(row), head)));
      }
    }
  }

  /// The same by way of floats: shifted, rotated, quantised, or several of these.
  void write_floats(std::uint32_t first, std::uint32_t last) const {
    float x[max_quantised_dim];
    for (std::uint32_t row = first; row < last; ++row) {
      if (slots[row] == no_slot) continue;
      const block_id entry = entry_of(row);
      const bool in_tail = (entry & tail_bit) != 0;
      const dtype_id stored = without_rotation(in_tail ? tail_dtype : dtype);
      for (std::uint32_t head = 0; head < rows.heads; ++head) {
        convert(rows.at(row, head), rows.head_dim, x);
        if (offset != nullptr)
          for (std::uint32_t d = 0; d < rows.head_dim; ++d) x[d] -= offset[std::size_t{head} * rows.head_dim + d];
        if (is_rotated(dtype)) rotate(x, rows.head_dim);
        std::byte* const to = (in_tail ? tail : plane).at(entry & ~tail_bit, offset_of(row), head);
        if (quantization_of(stored).bits != 0)
          quantise_head(stored, x, rows.head_dim, to, scales.at(entry, offset_of(row), head));
        else
          convert(x, rows.head_dim, to, stored);
      }
    }
  }

 private:
  [[nodiscard]] block_id entry_of(std::uint32_t row) const noexcept {
    return static_cast<block_id>(slots[row] / block_size);
  }
  [[nodiscard]] std::uint32_t offset_of(std::uint32_t row) const noexcept {
    return static_cast<std::uint32_t>(slots[row] % block_size);
  }
};

template <class From>
void write_rows(const row_writer<From>& writer, std::uint32_t first, std::uint32_t last) {
  if (is_rotated(writer.dtype) || quantization_of(writer.dtype).bits != 0 || writer.offset != nullptr)
    writer.write_floats(first, last);
  else
    dispatch([&](auto to) { writer.template write_elements<typename decltype(to)::type>(first, last); },
             stored_element{writer.dtype});
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
  write_rows(row_writer<K>{view.k, view.k_scales, view.k_tail, view.k_dtype, view.k_tail_dtype(), view.block_size, k,
                           slots, view.key_offset},
             first, last);
  write_rows(row_writer<V>{view.v, view.v_scales, view.v_tail, view.v_dtype, view.v_tail_dtype(), view.block_size, v,
                           slots, nullptr},
             first, last);
}

/// append into a pool whose block 0 is the null block: its slots are refused as well.
template <class K, class V>
void append_beyond_null(const kv_view& view, const rows_view<K>& k, const rows_view<V>& v,
                        std::span<const slot_id> slots, unsigned ith, unsigned nth) {
  check_append(view, k.rows, k.heads, k.head_dim, v.rows, v.heads, v.head_dim, slots, view.block_size);
  write_kv(view, k, v, slots, ith, nth);
}

}  // namespace detail

/// Writes the K and V of new tokens into one layer of a pool, the library's own or an engine's: row r goes to
/// slots[r], and nowhere where that is no_slot. One token, a chunk of a prompt and a ragged batch are the same call.
/// `k` is [rows, kv_heads, head_dim], `v` [rows, kv_heads, head_dim_v], each with strides and an element type of its
/// own (any element type), less the view's key offset where it has one, rotated where the pool's dtype is, and
/// converted or quantised to it: nearest, ties to even; what is not shifted and of the same element type is copied bit
/// for bit. Formats that seal whole blocks take tokens into the tail pool only. More slots than rows are allowed, for
/// padded batches; no slot may be named twice.
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

}  // namespace kvcache
