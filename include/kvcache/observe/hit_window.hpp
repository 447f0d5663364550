// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/error.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace kvcache {

/// What some admitted requests asked for and found, in tokens.
struct hit_sums {
  std::uint64_t requests = 0;
  std::uint64_t queried = 0;
  std::uint64_t hit = 0;  ///< of these, reused

  /// Share of the tokens that were reused; 0 where none was asked for.
  [[nodiscard]] constexpr double ratio() const noexcept {
    return queried == 0 ? 0 : static_cast<double>(hit) / static_cast<double>(queried);
  }
  constexpr hit_sums& operator+=(const hit_sums& more) noexcept {
    requests += more.requests;
    queried += more.queried;
    hit += more.hit;
    return *this;
  }
  constexpr hit_sums& operator-=(const hit_sums& less) noexcept {
    requests -= less.requests;
    queried -= less.queried;
    hit -= less.hit;
    return *this;
  }
  friend constexpr bool operator==(const hit_sums&, const hit_sums&) = default;
};

static_assert(std::is_trivially_copyable_v<hit_sums>);

/// The hit ratio of the last N requests, in tokens, so that a long prompt weighs more than a short one. Each admitted
/// request is recorded once: an attempt that was refused is none, and what a preempted request computes again is kept
/// apart. Requests may be recorded in groups, say all of a step; a group leaves the window whole, and the newest one
/// stays even where it alone is more than the window. O(1) a call, amortised; 24 bytes a request of the window, from
/// the start. One thread at a time; calls of const members may overlap each other.
class hit_window {
 public:
  /// Of the last `requests` requests. Raises invalid_argument for 0 and for more than 2^24. O(requests).
  explicit hit_window(std::uint32_t requests) : limit_(checked(requests)), groups_(std::size_t{requests} + 1) {}

  /// One admitted request, or a group of them. A group of no request is ignored. Precondition: hit <= queried.
  void record(const hit_sums& admitted) noexcept {
    KVCACHE_ASSERT(admitted.hit <= admitted.queried, "more tokens hit than queried");
    if (admitted.requests == 0) return;
    total_ += admitted;
    window_ += admitted;
    // All groups but the newest have at most as many requests as the window, so there is room for one more.
    groups_[(first_ + size_) % groups_.size()] = admitted;
    ++size_;
    while (size_ > 1 && window_.requests > limit_) {
      window_ -= groups_[first_];
      first_ = (first_ + 1) % groups_.size();
      --size_;
    }
  }
  /// A request that was admitted before and preempted is admitted again. Not in the window. Precondition as above.
  void record_again(const hit_sums& readmitted) noexcept {
    KVCACHE_ASSERT(readmitted.hit <= readmitted.queried, "more tokens hit than queried");
    again_ += readmitted;
  }
  /// Empties the window, say when the weights have changed; total() and again() go on.
  void clear() noexcept {
    size_ = 0;
    window_ = {};
  }

  /// Of the last requests: as many as the window has, or fewer where groups do not fit exactly. O(1), as all below.
  [[nodiscard]] const hit_sums& window() const noexcept { return window_; }
  /// Since the beginning.
  [[nodiscard]] const hit_sums& total() const noexcept { return total_; }
  /// Of requests admitted again after preemption, since the beginning.
  [[nodiscard]] const hit_sums& again() const noexcept { return again_; }
  /// Requests that the window is for.
  [[nodiscard]] std::uint32_t limit() const noexcept { return limit_; }

 private:
  static std::uint32_t checked(std::uint32_t requests) {
    constexpr std::uint32_t most = 1u << 24;
    if (requests == 0 || requests > most)
      detail::raise<invalid_argument>("hit window: " + std::to_string(requests) + " requests, from 1 to " +
                                      std::to_string(most) + " possible; a thousand tell a trend");
    return requests;
  }

  std::uint32_t limit_;
  std::vector<hit_sums> groups_;  // a ring of size_ groups from first_ on
  std::size_t first_ = 0;
  std::size_t size_ = 0;
  hit_sums window_;
  hit_sums total_;
  hit_sums again_;
};

}  // namespace kvcache
