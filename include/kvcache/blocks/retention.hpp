// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/error.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

namespace kvcache {

/// As a duration or time: it does not pass.
inline constexpr std::uint64_t never = ~std::uint64_t{0};

/// What the cached content of some tokens of a request is worth. A block goes by the range that its first token is in;
/// what no range names keeps what it has. Time is the caller's: `block_manager::advance` says what it is.
struct retention_range {
  /// As `end`: all tokens to come, generated ones included.
  static constexpr std::uint32_t open_end = (std::numeric_limits<std::uint32_t>::max)();

  std::uint32_t first = 0;
  std::uint32_t end = open_end;  ///< token after the last
  /// 0 to 100, the lowest goes first; for policies that keep priorities.
  std::uint8_t priority = default_priority;
  /// From the last time that a request took the content up (open, commit, retain): then the priority falls back to the
  /// default.
  std::uint64_t duration = never;
  /// Once unused for so long, content is forgotten at the next `advance`; under any policy. The longest counts that was
  /// given for a block, since somebody relies on it.
  std::uint64_t time_to_live = never;

  friend constexpr bool operator==(const retention_range&, const retention_range&) = default;
};

namespace detail {

/// bad_range: ranges that are reversed or empty, overlap or are out of order, or name a priority beyond the highest.
/// unsupported: a priority where the policy keeps none. O(ranges).
[[nodiscard]] inline result<void> check_retention(std::span<const retention_range> ranges,
                                                  bool keeps_priorities) noexcept {
  std::uint64_t earliest = 0;
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    const retention_range& r = ranges[i];
    if (r.first < earliest || r.end <= r.first || r.priority > highest_priority)
      return failure{errc::bad_range, i, earliest};
    if (!keeps_priorities && (r.priority != default_priority || r.duration != never))
      return failure{errc::unsupported, i, 0};
    earliest = r.end;
  }
  return {};
}

/// The range that a token is in, or null. O(ranges).
[[nodiscard]] inline const retention_range* range_of(std::span<const retention_range> ranges,
                                                     std::uint64_t token) noexcept {
  for (const retention_range& r : ranges)
    if (token >= r.first && (token < r.end || r.end == retention_range::open_end)) return &r;
  return nullptr;
}

/// A time so much later; stays `never` once it gets there.
[[nodiscard]] constexpr std::uint64_t later(std::uint64_t now, std::uint64_t duration) noexcept {
  return duration < never - now ? now + duration : never;
}

}  // namespace detail

static_assert(std::is_trivially_copyable_v<retention_range>);

}  // namespace kvcache
