// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/events.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvcache {

/// The newest events of a cache, for consumers that poll: routers, indexes over several caches, logs. A ring that is
/// allocated once, 48 bytes an event. Events are numbered whether or not anybody reads them; a consumer that falls
/// behind by more than the capacity is told so and starts again from a snapshot. Capacity 0: off, nothing is numbered,
/// and a call costs a branch. One thread at a time; calls of const members may overlap each other.
class event_log {
 public:
  /// Remembers the newest `capacity` events. O(capacity).
  explicit event_log(std::size_t capacity) : ring_(capacity) {}

  [[nodiscard]] bool enabled() const noexcept { return !ring_.empty(); }
  [[nodiscard]] std::size_t capacity() const noexcept { return ring_.size(); }
  /// Number of the newest event; 0 where there was none yet. A snapshot taken now includes all up to it.
  [[nodiscard]] std::uint64_t newest() const noexcept { return newest_; }

  /// A block is cached. Its number is given here. O(1), as the two below.
  void stored(cache_event block) noexcept { append(block, cache_event_kind::stored); }
  /// A block is no longer cached. The event is what `stored` was given for it.
  void removed(cache_event block) noexcept { append(block, cache_event_kind::removed); }
  /// Nothing is cached any more. In place of all the single events.
  void cleared() noexcept { append({}, cache_event_kind::cleared); }

  /// Writes the events that follow number `after` (0: from the first on), as many as `out` holds. All or none of them
  /// are there: where some were overwritten, or `after` is a number that was never given, it says so and writes
  /// nothing. O(events written).
  [[nodiscard]] event_reading read(std::uint64_t after, std::span<cache_event> out) const noexcept {
    if (after > newest_) return {0, all_events_lost};
    const std::uint64_t behind = newest_ - after;
    if (behind > ring_.size()) return {0, behind - ring_.size()};
    const std::size_t there = static_cast<std::size_t>(behind);
    const std::size_t count = there < out.size() ? there : out.size();
    std::size_t at = next_ >= there ? next_ - there : next_ + ring_.size() - there;
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = ring_[at];
      if (++at == ring_.size()) at = 0;
    }
    return {count, 0};
  }

 private:
  void append(cache_event event, cache_event_kind kind) noexcept {
    if (ring_.empty()) return;
    event.number = ++newest_;
    event.kind = kind;
    ring_[next_] = event;
    if (++next_ == ring_.size()) next_ = 0;
  }

  std::vector<cache_event> ring_;
  std::size_t next_ = 0;  // where the next event goes
  std::uint64_t newest_ = 0;
};

}  // namespace kvcache
