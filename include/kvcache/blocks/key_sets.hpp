// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/content_hash.hpp>
#include <kvcache/blocks/extra_key.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvcache::detail {

/// Interns sets of extra keys: equal sets have one index as long as anyone uses it. Sets are compared byte for byte.
/// Each has one serial for every layer group, which the first blocks under it name as their parent.
class key_sets {
 public:
  using index = std::uint32_t;
  static constexpr index none = ~0u;
  static constexpr index empty_set = 0;

  /// The empty set is there from the start, with the serials from 1.
  explicit key_sets(std::uint32_t groups) : buckets_(initial_buckets, none), groups_(groups) {
    sets_.push_back({});
    sets_[empty_set].first_serial = 1;
  }

  /// The set's index, or none. O(keys^2 + bytes).
  [[nodiscard]] index find(std::span<const extra_key> keys) const noexcept {
    if (keys.empty()) return empty_set;
    const std::uint64_t hash = hash_of(keys);
    for (index i = buckets_[hash & (buckets_.size() - 1)]; i != none; i = sets_[i].next)
      if (sets_[i].hash == hash && equal(sets_[i].text, keys)) return i;
    return none;
  }

  /// The set's index, with one user more. A new set takes its serials from `next_serial`. O(keys^2 + bytes).
  index acquire(std::span<const extra_key> keys, serial& next_serial) noexcept {
    index i = find(keys);
    if (i == none) {
      if (free_ == none) {
        i = static_cast<index>(sets_.size());
        sets_.push_back({});
      } else {
        i = free_;
        free_ = sets_[i].next;
      }
      set& s = sets_[i];
      s.hash = hash_of(keys);
      s.text.clear();
      each_in_order(keys, [&](const extra_key& key) { append(s.text, key); });
      s.users = 0;
      s.first_serial = next_serial;
      next_serial += groups_;
      if (++used_ > buckets_.size()) grow();
      link(i);
    }
    add_user(i);
    return i;
  }

  void add_user(index i) noexcept { ++sets_[i].users; }
  /// One user less: open sequences and first blocks under the set are its users. O(1) on average.
  void drop_user(index i) noexcept {
    if (--sets_[i].users != 0 || i == empty_set) return;
    index* at = &buckets_[sets_[i].hash & (buckets_.size() - 1)];
    while (*at != i) at = &sets_[*at].next;
    *at = sets_[i].next;
    sets_[i].next = free_;
    free_ = i;
    --used_;
  }

  /// Where the fingerprints of chains under the set begin: equal for equal sets at any time.
  [[nodiscard]] std::uint64_t fingerprint(index i, std::uint32_t group) const noexcept {
    return mix(sets_[i].hash + group);
  }
  [[nodiscard]] serial serial_of(index i, std::uint32_t group) const noexcept { return sets_[i].first_serial + group; }

 private:
  struct set {
    std::string text;  // keys in order, each as kind, length and bytes
    std::uint64_t hash = 0;
    serial first_serial = 0;
    std::uint32_t users = 0;
    index next = none;  // in its bucket, or among the free ones
  };
  static constexpr std::size_t initial_buckets = 16;
  static constexpr std::size_t head_size = 9;

  // Ascending, each key once, without a copy: a request has few keys.
  template <class F>
  static void each_in_order(std::span<const extra_key> keys, F&& visit) noexcept {
    const extra_key* last = nullptr;
    for (;;) {
      const extra_key* least = nullptr;
      for (const extra_key& key : keys)
        if ((last == nullptr || key > *last) && (least == nullptr || key < *least)) least = &key;
      if (least == nullptr) return;
      visit(*least);
      last = least;
    }
  }

  struct head {
    char bytes[head_size];
    explicit head(const extra_key& key) noexcept {
      bytes[0] = static_cast<char>(key.kind);
      for (std::size_t i = 0; i + 1 < head_size; ++i)
        bytes[i + 1] = static_cast<char>(static_cast<std::uint64_t>(key.value.size()) >> (8 * i));
    }
    [[nodiscard]] std::string_view view() const noexcept { return {bytes, head_size}; }
  };

  static void append(std::string& text, const extra_key& key) {
    text.append(head(key).view());
    text.append(key.value);
  }
  static std::uint64_t hash_of(std::span<const extra_key> keys) noexcept {
    std::uint64_t hash = 0xcbf29ce484222325u;
    each_in_order(keys,
                  [&](const extra_key& key) { hash = bytes_hash(bytes_hash(hash, head(key).view()), key.value); });
    return mix(hash);
  }
  static bool equal(std::string_view text, std::span<const extra_key> keys) noexcept {
    bool same = true;
    each_in_order(keys, [&](const extra_key& key) {
      same = same && text.substr(0, head_size) == head(key).view() &&
             text.substr(head_size, key.value.size()) == key.value;
      if (same) text.remove_prefix(head_size + key.value.size());
    });
    return same && text.empty();
  }

  void link(index i) noexcept {
    index& bucket = buckets_[sets_[i].hash & (buckets_.size() - 1)];
    sets_[i].next = bucket;
    bucket = i;
  }
  void grow() noexcept {
    const std::vector<index> old = std::move(buckets_);
    buckets_.assign(old.size() * 2, none);
    for (index i : old)
      while (i != none) {
        const index next = sets_[i].next;
        link(i);
        i = next;
      }
  }

  std::vector<set> sets_;
  std::vector<index> buckets_;
  index free_ = none;
  std::size_t used_ = 0;
  std::uint32_t groups_;
};

}  // namespace kvcache::detail
