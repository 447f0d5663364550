// SPDX-License-Identifier: Apache-2.0
// What callers have said that cached content is worth, kept naively beside a block manager: the level of each block and
// for how long it may stay unused.
#pragma once

#include <kvcache/blocks/retention.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace kvcache_test {

class worth_model {
 public:
  explicit worth_model(std::size_t blocks) : blocks_(blocks + 1) {}

  /// Somebody who holds the cached block says of its first token what a range says.
  void retain(kvcache::block_id block, std::uint64_t token, const std::vector<kvcache::retention_range>& ranges) {
    entry& e = blocks_[block];
    for (const kvcache::retention_range& r : ranges) {
      if (token < r.first || (token >= r.end && r.end != kvcache::retention_range::open_end)) continue;
      e.level_known = true;
      e.level = r.priority;
      e.falls = after(now_, r.duration);
      if (!e.limit || *e.limit < r.time_to_live) e.limit = r.time_to_live;
    }
    fall();
  }
  void advance(std::uint64_t now) {
    now_ = now;
    fall();
  }

  /// Takes note of what a call has left.
  template <class Manager>
  void observe(const Manager& m) {
    for (kvcache::block_id b = 1; b <= m.capacity(); ++b) {
      entry& e = blocks_[b];
      const bool evictable = m.state(b) == kvcache::block_state::evictable;
      if (e.cached && !m.cached(b)) {
        // What is overwritten in place and computed again may be worth what it was.
        const bool known = e.evictable;
        e = {};
        e.level_known = known;
      }
      if (evictable && !e.evictable) e.unused_since = now_;
      e.cached = m.cached(b);
      e.evictable = evictable;
    }
  }

  // As observed last.
  [[nodiscard]] bool cached(kvcache::block_id block) const { return blocks_[block].cached; }
  [[nodiscard]] bool evictable(kvcache::block_id block) const { return blocks_[block].evictable; }
  [[nodiscard]] std::optional<unsigned> level(kvcache::block_id block) const {
    const entry& e = blocks_[block];
    return e.level_known ? std::optional<unsigned>(e.level) : std::nullopt;
  }
  /// Whether a block that is unused, or has become so in this very moment, has outlived its time.
  [[nodiscard]] bool expired(kvcache::block_id block) const {
    const entry& e = blocks_[block];
    return e.limit && after(e.evictable ? e.unused_since : now_, *e.limit) <= now_;
  }

 private:
  struct entry {
    std::optional<std::uint64_t> limit;
    std::uint64_t unused_since = 0;
    unsigned level = kvcache::default_priority;
    std::uint64_t falls = kvcache::never;
    bool level_known = true;
    bool cached = false;
    bool evictable = false;
  };

  static std::uint64_t after(std::uint64_t now, std::uint64_t duration) {
    return duration == kvcache::never ? kvcache::never : now + duration;
  }
  void fall() {
    for (entry& e : blocks_)
      if (e.falls <= now_) {
        e.level = kvcache::default_priority;
        e.falls = kvcache::never;
      }
  }

  std::vector<entry> blocks_;
  std::uint64_t now_ = 0;
};

}  // namespace kvcache_test
