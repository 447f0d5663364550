// SPDX-License-Identifier: Apache-2.0
// What callers have said that cached content is worth, kept naively beside a block manager: for how long each block may
// stay unused.
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
      if (!e.limit || *e.limit < r.time_to_live) e.limit = r.time_to_live;
      limited_ = true;
    }
  }
  void advance(std::uint64_t now) { now_ = now; }

  /// Takes note of what a call has left.
  template <class Manager>
  void observe(const Manager& m) {
    for (kvcache::block_id b = 1; b <= m.capacity(); ++b) {
      entry& e = blocks_[b];
      const bool evictable = m.state(b) == kvcache::block_state::evictable;
      if (e.cached && !m.cached(b)) e = {};
      if (evictable && !e.evictable) e.unused_since = now_;
      e.cached = m.cached(b);
      e.evictable = evictable;
    }
  }

  // As observed last.
  [[nodiscard]] bool cached(kvcache::block_id block) const { return blocks_[block].cached; }
  /// Whether any block has had a time to live.
  [[nodiscard]] bool limited() const { return limited_; }
  /// Whether a block that is unused, or has become so in this very moment, has outlived its time.
  [[nodiscard]] bool expired(kvcache::block_id block) const {
    const entry& e = blocks_[block];
    return e.limit && after(e.evictable ? e.unused_since : now_, *e.limit) <= now_;
  }

 private:
  struct entry {
    std::optional<std::uint64_t> limit;
    std::uint64_t unused_since = 0;
    bool cached = false;
    bool evictable = false;
  };

  static std::uint64_t after(std::uint64_t now, std::uint64_t duration) {
    return duration == kvcache::never ? kvcache::never : now + duration;
  }

  std::vector<entry> blocks_;
  std::uint64_t now_ = 0;
  bool limited_ = false;
};

}  // namespace kvcache_test
