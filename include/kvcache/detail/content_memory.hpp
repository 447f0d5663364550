// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/types.hpp>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// What is remembered about content, resident or evicted, found by its fingerprint. Content without a block is a ghost
/// and waits in line to be forgotten: up to 8 ghosts for each block of a small pool, fewer in one of more than 262,144
/// blocks. Sized in the constructor.
class content_memory {
 public:
  /// A block with so many children is a prompt that conversations share, and not one of them.
  static constexpr std::uint32_t many = 8;
  static constexpr std::uint32_t most_turns = 4;

  /// Content that is remembered. Without a block it is a ghost and waits in line to be forgotten.
  struct record {
    std::uint64_t fingerprint = 0;
    std::uint32_t chain = 0;  // the next in its bucket
    std::uint32_t parent = 0;
    std::uint32_t last_child = 0;
    std::uint32_t group = 0;
    block_id block = null_block;
    std::uint32_t previous = 0;
    std::uint32_t next = 0;
    std::uint8_t children = 0;  // ever, of this content
    std::uint8_t refs = 0;
    std::uint8_t turn = 0;  // of the request that brought it
  };

  explicit content_memory(block_id highest)
      : records_(std::size_t{highest} + ghosts_for(highest) + 2), buckets_(std::bit_ceil(records_.size())) {}

  [[nodiscard]] std::size_t size() const noexcept { return records_.size(); }
  [[nodiscard]] record& operator[](std::uint32_t r) noexcept { return records_[r]; }

  /// 0 where it is unknown.
  [[nodiscard]] std::uint32_t find(std::uint64_t fingerprint) noexcept {
    std::uint32_t r = bucket(fingerprint);
    while (r != 0 && records_[r].fingerprint != fingerprint) r = records_[r].chain;
    return r;
  }
  /// A new ghost. It takes the place of the oldest one where there is no other, and tells the group of that
  /// one. Precondition: the parent is not the oldest ghost.
  template <class Forgotten>
  std::uint32_t remember(std::uint64_t fingerprint, std::uint32_t parent, std::uint32_t turn,
                         Forgotten&& forgotten) noexcept {
    std::uint32_t r = used_records_ + 1;
    if (r < records_.size()) {
      used_records_ = r;
    } else {
      r = ghosts_.oldest;
      KVCACHE_ASSERT(r != 0 && r != parent, "the parent of what is remembered would be forgotten for it");
      forget(r);
      forgotten(records_[r].group);
    }
    std::uint32_t& head = bucket(fingerprint);
    records_[r] = {};
    records_[r].fingerprint = fingerprint;
    records_[r].chain = head;
    records_[r].parent = parent;
    records_[r].turn = static_cast<std::uint8_t>((std::min)(most_turns - 1, turn + 1));
    head = r;
    if (parent != 0) {
      record& p = records_[parent];
      if (p.children < many) ++p.children;
      p.last_child = r;
    }
    append_ghost(r);
    return r;
  }
  void append_ghost(std::uint32_t r) noexcept {
    records_[r].previous = ghosts_.youngest;
    records_[r].next = 0;
    (ghosts_.youngest != 0 ? records_[ghosts_.youngest].next : ghosts_.oldest) = r;
    ghosts_.youngest = r;
  }
  void unlink_ghost(std::uint32_t r) noexcept {
    const record& gone = records_[r];
    (gone.previous != 0 ? records_[gone.previous].next : ghosts_.oldest) = gone.next;
    (gone.next != 0 ? records_[gone.next].previous : ghosts_.youngest) = gone.previous;
  }
  void refresh(std::uint32_t r) noexcept {
    if (r == 0 || records_[r].block != null_block) return;
    unlink_ghost(r);
    append_ghost(r);
  }

 private:
  // A small pool forgets within the time of a person's answer, so it has to remember more than it holds.
  [[nodiscard]] static std::size_t ghosts_for(block_id highest) noexcept {
    return (std::min)(std::size_t{highest} * 8, (std::max<std::size_t>)(highest, 1u << 21));
  }

  [[nodiscard]] std::uint32_t& bucket(std::uint64_t fingerprint) noexcept {
    return buckets_[fingerprint & (buckets_.size() - 1)];
  }
  void forget(std::uint32_t r) noexcept {
    unlink_ghost(r);
    std::uint32_t* link = &bucket(records_[r].fingerprint);
    while (*link != r) link = &records_[*link].chain;
    *link = records_[r].chain;
  }

  struct ends {
    std::uint32_t oldest = 0;
    std::uint32_t youngest = 0;
  };

  ends ghosts_;
  std::uint32_t used_records_ = 0;
  std::vector<record> records_;         // 0 is none
  std::vector<std::uint32_t> buckets_;  // by fingerprint: the first record
};

}  // namespace kvcache::detail
