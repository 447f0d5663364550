// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/attention_params.hpp>
#include <kvcache/cuda/context.hpp>
#include <kvcache/cuda/operands.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

// K and V on their way into shared memory: chunks of tokens, several of them in flight.

namespace kvcache::device {

/// What waits in the tail pool for a block that is stored as `Stored`: 16 bits where it seals, else the same.
template <class Stored, class Tail>
using waiting_as = std::conditional_t<stored_as<Stored>::codes.bits == 0, Stored, Tail>;

/// Where one of K and V lies in a stage: rows of codes or elements, then scales.
/// Blocks of a chunk, where scales are a block's.
inline constexpr unsigned sealed_sets = 4;

/// `Mixed`: chunks may be of the tail pool.
template <class Stored, class Tail, unsigned Dim, unsigned Tokens, bool Mixed>
struct staged_plane {
  using as = stored_as<Stored>;
  using waiting = stored_as<waiting_as<Stored, Tail>>;
  static constexpr bool seals = as::codes.per_channel;
  /// Blocks whose scales a chunk has room for, where scales are a block's; else each token has its own.
  static constexpr unsigned scale_sets = seals ? sealed_sets : Tokens;

  static constexpr unsigned row_bytes = as::row_bytes(Dim);
  static constexpr unsigned waiting_row_bytes = waiting::row_bytes(Dim);
  static constexpr unsigned widest = Mixed && waiting_row_bytes > row_bytes ? waiting_row_bytes : row_bytes;
  /// From one token to the next: 16 bytes more than whole sixteens, so that eight rows meet in no bank.
  static constexpr unsigned stride = (widest + 15) / 16 * 16 + 16;

  /// Scales come as aligned words; the first may begin in the middle of one.
  static constexpr unsigned scale_bytes = as::scale_bytes(Dim);
  static constexpr unsigned scale_words = scale_bytes == 0 ? 0 : (scale_bytes + 2 + 3) / 4;
  static constexpr unsigned scales_begin = Tokens * stride;
  static constexpr unsigned bytes = scales_begin + (scale_sets * scale_words * 4 + 15) / 16 * 16;
};

/// The tokens of a unit in chunks of `Tokens`, several of them in shared memory at a time. All threads of a block use
/// it together.
template <class K, class V, class Tail, unsigned DimK, unsigned DimV, unsigned Tokens, unsigned Threads>
struct chunks {
  static constexpr bool mixed = stored_as<K>::codes.per_channel || stored_as<V>::codes.per_channel;
  using k_plane = staged_plane<K, Tail, DimK, Tokens, mixed>;
  using v_plane = staged_plane<V, Tail, DimV, Tokens, mixed>;
  static constexpr unsigned v_begin = k_plane::bytes;
  static constexpr unsigned stage_bytes = v_begin + v_plane::bytes;
  /// As many as fit 72 KiB, so that two blocks share a multiprocessor of any device.
  static constexpr unsigned stages = 72 * 1024 / stage_bytes < 2   ? 2
                                     : 72 * 1024 / stage_bytes > 4 ? 4
                                                                   : 72 * 1024 / stage_bytes;

  /// A run of tokens.
  struct span {
    std::uint32_t begin;
    std::uint32_t count;
    bool waiting;  ///< in the tail pool
  };
  /// Where the tokens of a chunk lie; no token, no address.
  struct addresses {
    const std::byte* k[Tokens];
    const std::byte* v[Tokens];
    const std::byte* k_scales[k_plane::scale_words == 0 ? 1 : k_plane::scale_sets];
    const std::byte* v_scales[v_plane::scale_words == 0 ? 1 : v_plane::scale_sets];
    span tokens;
  };
  /// A chunk in shared memory.
  struct staged {
    const std::byte* keys;
    const std::byte* values;
    const std::uint8_t* k_odd;
    const std::uint8_t* v_odd;
    span tokens;
    std::uint32_t block_size;

    /// The scales of a token of the chunk.
    KVCACHE_DEVICE_INLINE const std::byte* k_scales(unsigned token) const {
      return scales<k_plane>(keys, k_odd, token);
    }
    KVCACHE_DEVICE_INLINE const std::byte* v_scales(unsigned token) const {
      return scales<v_plane>(values, v_odd, token);
    }

   private:
    template <class Plane>
    KVCACHE_DEVICE_INLINE const std::byte* scales(const std::byte* plane, const std::uint8_t* odd,
                                                  unsigned token) const {
      if constexpr (Plane::scale_words == 0) {
        return nullptr;
      } else {
        unsigned set = token;
        if constexpr (Plane::seals)
          set = token < tokens.count ? (tokens.begin + token) / block_size - tokens.begin / block_size : 0;
        return plane + Plane::scales_begin + set * Plane::scale_words * 4 + odd[set];
      }
    }
  };
  struct shared {
    addresses next[2];
    span spans[stages + 1];
    std::uint8_t k_odd[stages][k_plane::scale_words == 0 ? 1 : k_plane::scale_sets];  ///< scales begin behind 2 bytes
    std::uint8_t v_odd[stages][v_plane::scale_words == 0 ? 1 : v_plane::scale_sets];
  };

  const block_id* table;
  std::uint32_t block_size;
  std::uint32_t at;   ///< the next chunk to be found begins here
  std::uint32_t end;  ///< of all tokens
  std::uint32_t head;

  /// Takes the tokens [at, end) through `memory`, stages * stage_bytes of it: calls `meet(staged)` for each
  /// chunk when it is there. Nobody uses the memory any more when it returns.
  template <context C, class Meet>
  KVCACHE_DEVICE_INLINE void pass(C& c, const kv_view& kv, std::uint32_t copy_bytes, shared& s, std::byte* memory,
                                  const Meet& meet) {
    constexpr unsigned ahead = stages - 1;
    const auto find_and_place = [&](unsigned i) {
      const span found = find(c);
      place(c, kv, found, s.next[i % 2]);
      if (c.thread() == 0) s.spans[i % (stages + 1)] = found;
    };
    const auto start_copy = [&](unsigned i) {
      copy(c, s, s.next[i % 2], i % stages, memory + i % stages * stage_bytes, copy_bytes);
      c.copy_async_commit();
    };
    for (unsigned i = 0; i < ahead; ++i) {
      find_and_place(i);
      c.sync();
      start_copy(i);
    }
    find_and_place(ahead);
    for (unsigned i = 0;; ++i) {
      c.template copy_async_wait<stages - 2>();
      c.sync();  // the chunk is there for all, and all are through with the one before
      const span tokens = s.spans[i % (stages + 1)];
      if (tokens.count == 0) break;
      start_copy(i + ahead);
      find_and_place(i + ahead + 1);
      const std::byte* const keys = memory + i % stages * stage_bytes;
      meet(staged{keys, keys + v_begin, s.k_odd[i % stages], s.v_odd[i % stages], tokens, block_size});
    }
    c.template copy_async_wait<0>();
    c.sync();
  }

 private:
  /// The next chunk; none is left where its count is 0. Chunks end at multiples of `Tokens`. Where blocks are sealed,
  /// one lies wholly in the tail pool or wholly outside, and in no more blocks than there is room for scales.
  template <context C>
  KVCACHE_DEVICE_INLINE span find(const C& c) {
    span s{at, 0, false};
    if (at >= end) return s;
    const std::uint32_t stop = (at / Tokens + 1) * Tokens;
    s.count = (stop < end ? stop : end) - at;
    if constexpr (mixed) {
      const std::uint32_t first = at / block_size;
      s.waiting = (c.load(table + first) & tail_bit) != 0;
      const std::uint32_t last = (at + s.count - 1) / block_size;
      for (std::uint32_t b = first + 1; b <= last; ++b) {
        const bool other = ((c.load(table + b) & tail_bit) != 0) != s.waiting;
        if (!other && (s.waiting || b - first < sealed_sets)) continue;
        s.count = b * block_size - at;
        break;
      }
    }
    at += s.count;
    return s;
  }

  /// Puts down where the tokens of `s` lie. Visible to others after the next sync.
  template <context C>
  KVCACHE_DEVICE_INLINE void place(const C& c, const kv_view& kv, const span& s, addresses& out) const {
    for (unsigned i = c.thread(); i < Tokens; i += Threads) {
      const std::byte* k = nullptr;
      const std::byte* v = nullptr;
      const std::byte* k_scales = nullptr;
      const std::byte* v_scales = nullptr;
      if (i < s.count) {
        const std::uint32_t token = s.begin + i;
        const std::uint32_t index = token / block_size;
        const std::uint32_t offset = token - index * block_size;
        const block_id entry = c.load(table + index);
        k = kv.k_at(entry, offset, head);
        v = kv.v_at(entry, offset, head);
        if constexpr (k_plane::scale_words != 0)
          if (!k_plane::seals && !s.waiting) k_scales = kv.k_scales.at(entry, offset, head);
        if constexpr (v_plane::scale_words != 0)
          if (!v_plane::seals && !s.waiting) v_scales = kv.v_scales.at(entry, offset, head);
      }
      out.k[i] = k;
      out.v[i] = v;
      if constexpr (k_plane::scale_words != 0 && !k_plane::seals) out.k_scales[i] = k_scales;
      if constexpr (v_plane::scale_words != 0 && !v_plane::seals) out.v_scales[i] = v_scales;
    }
    if constexpr (mixed) {
      if (c.thread() < sealed_sets) {
        const unsigned i = c.thread();
        const std::uint32_t first = s.begin / block_size;
        const bool there = !s.waiting && s.count != 0 && first + i <= (s.begin + s.count - 1) / block_size;
        const block_id entry = there ? c.load(table + first + i) : null_block;
        if constexpr (k_plane::seals) out.k_scales[i] = there ? kv.k_scales.at(entry, 0, head) : nullptr;
        if constexpr (v_plane::seals) out.v_scales[i] = there ? kv.v_scales.at(entry, 0, head) : nullptr;
      }
    }
    if (c.thread() == 0) out.tokens = s;
  }

  /// Starts the copies of a chunk into `stage`.
  template <context C>
  KVCACHE_DEVICE_INLINE void copy(C& c, shared& s, const addresses& from, unsigned stage, std::byte* to,
                                  std::uint32_t copy_bytes) const {
    const bool waiting = mixed && from.tokens.waiting;
    if (copy_bytes == 16)
      copy_rows<16>(c, from, to, waiting);
    else if (copy_bytes == 8)
      copy_rows<8>(c, from, to, waiting);
    else
      copy_rows<4>(c, from, to, waiting);
    if constexpr (k_plane::scale_words != 0)
      copy_scales<k_plane>(c, from.k_scales, to + k_plane::scales_begin, s.k_odd[stage]);
    if constexpr (v_plane::scale_words != 0)
      copy_scales<v_plane>(c, from.v_scales, to + v_begin + v_plane::scales_begin, s.v_odd[stage]);
  }

  /// `bytes` behind an address that need not be one: that of no token, or what is there where a barrier is missing.
  KVCACHE_DEVICE_INLINE static const std::byte* behind(const std::byte* address, int bytes) {
    return reinterpret_cast<const std::byte*>(reinterpret_cast<std::uintptr_t>(address) +
                                              static_cast<std::uintptr_t>(std::intptr_t{bytes}));
  }

  template <unsigned Bytes, context C>
  KVCACHE_DEVICE_INLINE static void copy_rows(C& c, const addresses& from, std::byte* to, bool waiting) {
    if constexpr (mixed) {
      if (waiting) {
        copy_plane<Bytes, k_plane::waiting_row_bytes, k_plane::stride>(c, from.k, to);
        copy_plane<Bytes, v_plane::waiting_row_bytes, v_plane::stride>(c, from.v, to + v_begin);
        return;
      }
    }
    copy_plane<Bytes, k_plane::row_bytes, k_plane::stride>(c, from.k, to);
    copy_plane<Bytes, v_plane::row_bytes, v_plane::stride>(c, from.v, to + v_begin);
  }

  template <unsigned Bytes, unsigned RowBytes, unsigned Stride, context C>
  KVCACHE_DEVICE_INLINE static void copy_plane(C& c, const std::byte* const (&from)[Tokens], std::byte* to) {
    constexpr unsigned pieces = RowBytes / Bytes;
    if constexpr (RowBytes % Bytes == 0) {  // else rows cannot be aligned so
      for (unsigned i = c.thread(); i < Tokens * pieces; i += Threads) {
        const unsigned token = i / pieces;
        const unsigned piece = i % pieces;
        const std::byte* const row = from[token];
        c.template copy_async<Bytes>(to + token * Stride + piece * Bytes, behind(row, static_cast<int>(piece * Bytes)),
                                     row != nullptr);
      }
    }
  }

  template <class Plane, context C, unsigned Sets>
  KVCACHE_DEVICE_INLINE static void copy_scales(C& c, const std::byte* const (&from)[Sets], std::byte* to,
                                                std::uint8_t (&odd)[Sets]) {
    for (unsigned i = c.thread(); i < Sets * Plane::scale_words; i += Threads) {
      const unsigned set = i / Plane::scale_words;
      const unsigned word = i % Plane::scale_words;
      const std::byte* const first = from[set];
      const auto over = static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(first) % 4);
      if (word == 0) odd[set] = static_cast<std::uint8_t>(over);
      const bool there = first != nullptr && word * 4 < over + Plane::scale_bytes;
      c.template copy_async<4>(to + i * 4, behind(first, static_cast<int>(word * 4) - static_cast<int>(over)), there);
    }
  }
};

}  // namespace kvcache::device
