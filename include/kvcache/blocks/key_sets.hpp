// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/content_hash.hpp>
#include <kvcache/blocks/content_id.hpp>
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

/// Names a set of extra keys. Used again once the set is gone.
using key_set_id = std::uint32_t;
inline constexpr key_set_id no_key_set = ~0u;

/// Interns sets of extra keys: equal sets have one name as long as anyone uses it, and may have a node of the content
/// tree that stands before all content under them. Sets are compared byte for byte. `Owner`: see block_keeper.
template <class Owner>
class key_sets {
 public:
  key_sets() : buckets_(initial_buckets, no_key_set) {}

  /// Hash of a set, the empty one included. O(keys^2 + bytes).
  [[nodiscard]] static std::uint64_t hash_of(std::span<const extra_key> keys) noexcept {
    std::uint64_t hash = 0xcbf29ce484222325u;
    each_in_order(keys,
                  [&](const extra_key& key) { hash = bytes_hash(bytes_hash(hash, head(key).view()), key.value); });
    return mix(hash);
  }
  [[nodiscard]] std::uint64_t hash(key_set_id i) const noexcept { return sets_[i].hash; }
  /// The node that was set for it, or no_content.
  [[nodiscard]] content_id root(key_set_id i) const noexcept { return sets_[i].root; }
  void set_root(key_set_id i, content_id root) noexcept { sets_[i].root = root; }

  /// The set's name, or no_key_set. O(keys^2 + bytes).
  [[nodiscard]] key_set_id find(std::span<const extra_key> keys) const noexcept { return find(keys, hash_of(keys)); }
  /// The set's name, with one user more. O(keys^2 + bytes).
  key_set_id acquire(std::span<const extra_key> keys) noexcept {
    const std::uint64_t hash = hash_of(keys);
    key_set_id i = find(keys, hash);
    if (i == no_key_set) i = add(keys, hash);
    ++sets_[i].users;
    return i;
  }
  /// One user less; a set without users goes. O(1) on average.
  void drop_user(key_set_id i) noexcept {
    if (--sets_[i].users != 0) return;
    key_set_id* at = &buckets_[sets_[i].hash & (buckets_.size() - 1)];
    while (*at != i) at = &sets_[*at].next;
    *at = sets_[i].next;
    sets_[i].next = free_;
    sets_[i].root = no_content;
    free_ = i;
    --used_;
  }
  /// Calls `visit` with the root of every set, in the order of their indices. O(sets there ever were at once).
  template <class Visit>
  void each_root(Visit&& visit) const {
    for (const set& s : sets_)
      if (s.root != no_content) visit(s.root);
  }

 private:
  struct set {
    std::string text;  // keys in order, each as kind, length and bytes
    std::uint64_t hash = 0;
    content_id root = no_content;
    std::uint32_t users = 0;
    key_set_id next = no_key_set;  // in its bucket, or among the free ones
  };
  static constexpr std::size_t initial_buckets = 16;
  static constexpr std::size_t head_size = 9;

  [[nodiscard]] key_set_id find(std::span<const extra_key> keys, std::uint64_t hash) const noexcept {
    for (key_set_id i = buckets_[hash & (buckets_.size() - 1)]; i != no_key_set; i = sets_[i].next)
      if (sets_[i].hash == hash && equal(sets_[i].text, keys)) return i;
    return no_key_set;
  }
  key_set_id add(std::span<const extra_key> keys, std::uint64_t hash) noexcept {
    key_set_id i = free_;
    if (i == no_key_set) {
      i = static_cast<key_set_id>(sets_.size());
      sets_.push_back({});
    } else {
      free_ = sets_[i].next;
    }
    set& s = sets_[i];
    s.hash = hash;
    s.text.clear();
    each_in_order(keys, [&](const extra_key& key) { append(s.text, key); });
    if (++used_ > buckets_.size()) grow();
    link(i);
    return i;
  }

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
  static bool equal(std::string_view text, std::span<const extra_key> keys) noexcept {
    bool same = true;
    each_in_order(keys, [&](const extra_key& key) {
      same = same && text.substr(0, head_size) == head(key).view() &&
             text.substr(head_size, key.value.size()) == key.value;
      if (same) text.remove_prefix(head_size + key.value.size());
    });
    return same && text.empty();
  }

  void link(key_set_id i) noexcept {
    key_set_id& bucket = buckets_[sets_[i].hash & (buckets_.size() - 1)];
    sets_[i].next = bucket;
    bucket = i;
  }
  void grow() noexcept {
    const std::vector<key_set_id> old = std::move(buckets_);
    buckets_.assign(old.size() * 2, no_key_set);
    for (key_set_id i : old)
      while (i != no_key_set) {
        const key_set_id next = sets_[i].next;
        link(i);
        i = next;
      }
  }

  std::vector<set> sets_;
  std::vector<key_set_id> buckets_;
  key_set_id free_ = no_key_set;
  std::size_t used_ = 0;
};

}  // namespace kvcache::detail
