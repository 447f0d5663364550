// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvcache {

/// How often which values came: eight buckets for each power of two, so a bucket is at most an eighth as wide as its
/// values are large, and values below 16 have one each. Counts and sum are exact, the sum modulo 2^64. Holds all of
/// itself, 4 KiB, and allocates nothing; trivially copyable, so it can be published or sent as it is. One thread at a
/// time; calls of const members may overlap each other.
class histogram {
 public:
  static constexpr unsigned precision = 3;  ///< buckets for each power of two, as a power of two
  static constexpr std::size_t buckets = (64 - precision + 1) << precision;

  /// The bucket that holds `value`. O(1).
  [[nodiscard]] static constexpr std::size_t bucket_of(std::uint64_t value) noexcept {
    if (value < steps) return static_cast<std::size_t>(value);
    const unsigned shift = static_cast<unsigned>(std::bit_width(value)) - precision - 1;
    return (std::size_t{shift} << precision) + static_cast<std::size_t>(value >> shift);
  }
  /// The least value of a bucket. O(1). Precondition, here and below: bucket < buckets.
  [[nodiscard]] static constexpr std::uint64_t least(std::size_t bucket) noexcept {
    KVCACHE_ASSERT(bucket < buckets, "no such bucket");
    if (bucket < 2 * steps) return bucket;
    return (steps + bucket % steps) << (bucket / steps - 1);
  }
  /// The greatest value of a bucket. O(1).
  [[nodiscard]] static constexpr std::uint64_t greatest(std::size_t bucket) noexcept {
    return bucket + 1 == buckets ? ~std::uint64_t{0} : least(bucket + 1) - 1;
  }

  /// One value, or one that stands for `weight` of them. O(1).
  constexpr void add(std::uint64_t value, std::uint64_t weight = 1) noexcept {
    counts_[bucket_of(value)] += weight;
    count_ += weight;
    sum_ += value * weight;
  }
  /// All values of another. O(buckets).
  constexpr void merge(const histogram& other) noexcept {
    for (std::size_t b = 0; b < buckets; ++b) counts_[b] += other.counts_[b];
    count_ += other.count_;
    sum_ += other.sum_;
  }

  [[nodiscard]] constexpr std::uint64_t count() const noexcept { return count_; }
  [[nodiscard]] constexpr std::uint64_t sum() const noexcept { return sum_; }
  [[nodiscard]] constexpr std::uint64_t count(std::size_t bucket) const noexcept {
    KVCACHE_ASSERT(bucket < buckets, "no such bucket");
    return counts_[bucket];
  }

  /// A value that at least the share `q` of all values does not exceed: the greatest of the bucket where that share is
  /// reached; 0 where there is no value. O(buckets). Precondition: 0 <= q <= 1.
  [[nodiscard]] constexpr std::uint64_t quantile(double q) const noexcept {
    KVCACHE_ASSERT(q >= 0 && q <= 1, "a quantile is from 0 to 1");
    const double wanted = q * static_cast<double>(count_);
    std::uint64_t below = 0;
    std::size_t last = 0;
    for (std::size_t b = 0; b < buckets; ++b) {
      if (counts_[b] == 0) continue;
      below += counts_[b];
      last = b;
      if (static_cast<double>(below) >= wanted) break;
    }
    return greatest(last);
  }
  /// How many values are less than `value`, as if those of a bucket lay evenly in it. O(buckets).
  [[nodiscard]] constexpr double count_below(std::uint64_t value) const noexcept {
    const std::size_t at = bucket_of(value);
    std::uint64_t whole = 0;
    for (std::size_t b = 0; b < at; ++b) whole += counts_[b];
    const double width = static_cast<double>(greatest(at) - least(at)) + 1;
    return static_cast<double>(whole) +
           static_cast<double>(counts_[at]) * static_cast<double>(value - least(at)) / width;
  }

  friend constexpr bool operator==(const histogram&, const histogram&) = default;

 private:
  static constexpr std::uint64_t steps = std::uint64_t{1} << precision;

  std::uint64_t counts_[buckets]{};
  std::uint64_t count_ = 0;
  std::uint64_t sum_ = 0;
};

static_assert(std::is_trivially_copyable_v<histogram>);

}  // namespace kvcache
