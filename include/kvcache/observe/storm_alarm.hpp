// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/error.hpp>
#include <kvcache/observe/hit_window.hpp>

#include <cstdint>
#include <string>

namespace kvcache {

struct storm_alarm_options {
  /// Requests whose hit ratio is looked at. Fewer: sooner, and more often for nothing.
  std::uint32_t window = 100;
  /// Requests that say what is usual, the window's own included. Many windows long, so that a storm does not soon
  /// become the usual; short enough that a change of load does.
  std::uint32_t average = 2'000;
  /// A storm begins where the window falls to this share of the average. At a half, a cache that spared half of all
  /// prefill has half as much again to compute.
  double falls_to = 0.5;
  /// It is over where the window is back at this share of the average. Well above falls_to: a ratio that wavers about
  /// one limit would raise at every turn.
  double recovers_to = 0.8;
  /// Where the average is below this, there is nothing to lose, and what is left is noise. More than 0: a cache that
  /// never finds anything would be in a storm.
  double least_average = 0.05;
};

/// Tells when the hit ratio falls off a cliff: a pool that has become too small, weights that changed, a router that
/// scatters conversations, a policy that froze. Raises once, and again only after the ratio has recovered or what is
/// usual has come down to it. Nothing raises before four windows have been seen. Deterministic: no clock, requests are
/// its time. O(1) a call, amortised. One thread at a time; calls of const members may overlap each other.
class storm_alarm {
 public:
  /// Raises invalid_argument for windows that hit_window refuses, an average shorter than four windows, and shares
  /// other than 0 < falls_to < recovers_to <= 1 and 0 < least_average <= 1. O(window + average).
  explicit storm_alarm(const storm_alarm_options& options = {})
      : options_(checked(options)), window_(options.window), average_(options.average) {}

  /// One admitted request, or a group of them, as hit_window::record takes it. Whether a storm begins with it.
  bool record(const hit_sums& admitted) noexcept {
    window_.record(admitted);
    average_.record(admitted);
    const double now = window_.window().ratio();
    const double usual = average_.window().ratio();
    if (raised_) {
      if (now >= options_.recovers_to * usual) raised_ = false;
      return false;
    }
    if (average_.total().requests < windows_first * options_.window || usual < options_.least_average ||
        now > options_.falls_to * usual)
      return false;
    raised_ = true;
    ++storms_;
    return true;
  }

  /// Whether there is a storm. O(1), as all below.
  [[nodiscard]] bool raised() const noexcept { return raised_; }
  /// Storms since the beginning.
  [[nodiscard]] std::uint64_t storms() const noexcept { return storms_; }
  [[nodiscard]] const hit_sums& window() const noexcept { return window_.window(); }
  [[nodiscard]] const hit_sums& average() const noexcept { return average_.window(); }

 private:
  static constexpr std::uint64_t windows_first = 4;

  static storm_alarm_options checked(const storm_alarm_options& o) {
    if (o.average / windows_first < o.window)
      detail::raise<invalid_argument>("storm alarm: an average of " + std::to_string(o.average) +
                                      " requests, at least " + std::to_string(windows_first * o.window) +
                                      " needed; let it be many windows long, so that a storm is no part of the usual");
    if (!(o.falls_to > 0 && o.falls_to < o.recovers_to && o.recovers_to <= 1))
      detail::raise<invalid_argument>("storm alarm: falls to " + std::to_string(o.falls_to) + " and recovers to " +
                                      std::to_string(o.recovers_to) +
                                      ", 0 < falls_to < recovers_to <= 1 possible; leave room between the two");
    if (!(o.least_average > 0 && o.least_average <= 1))
      detail::raise<invalid_argument>("storm alarm: a least average of " + std::to_string(o.least_average) +
                                      ", more than 0 and at most 1 possible; 0.05 leaves noise alone");
    return o;
  }

  storm_alarm_options options_;
  hit_window window_;
  hit_window average_;
  bool raised_ = false;
  std::uint64_t storms_ = 0;
};

}  // namespace kvcache
