// SPDX-License-Identifier: Apache-2.0
#include <kvcache/observe/histogram.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>

#include "catch.hpp"

using kvcache::histogram;

namespace {

constexpr std::uint64_t highest = std::numeric_limits<std::uint64_t>::max();

}  // namespace

TEST_CASE("the buckets of a histogram cover every value once, in order, an eighth wide at most") {
  CHECK(histogram::least(0) == 0);
  CHECK(histogram::greatest(histogram::buckets - 1) == highest);
  for (std::size_t b = 0; b < histogram::buckets; ++b) {
    CAPTURE(b);
    const std::uint64_t least = histogram::least(b);
    const std::uint64_t greatest = histogram::greatest(b);
    REQUIRE(least <= greatest);
    REQUIRE(histogram::bucket_of(least) == b);
    REQUIRE(histogram::bucket_of(greatest) == b);
    REQUIRE(histogram::bucket_of(least + (greatest - least) / 2) == b);
    if (b != 0) REQUIRE(histogram::greatest(b - 1) + 1 == least);
    if (least < 16) REQUIRE(least == greatest);
    REQUIRE(greatest - least <= least / 8);
  }
  static_assert(histogram::bucket_of(1'000) == 63 && histogram::least(63) == 960 && histogram::greatest(63) == 1'023);
}

TEST_CASE("a histogram counts and sums exactly, weights included") {
  histogram h;
  CHECK(h.count() == 0);
  CHECK(h.sum() == 0);
  std::uint64_t sum = 0;
  for (std::uint64_t v = 0; v < 100'000; v += 7) h.add(v), sum += v;
  h.add(1'000'003, 5);
  CHECK(h.count() == 14'286 + 5);
  CHECK(h.sum() == sum + 5 * 1'000'003);
  CHECK(h.count(histogram::bucket_of(1'000'003)) == 5);
  std::uint64_t all = 0;
  for (std::size_t b = 0; b < histogram::buckets; ++b) all += h.count(b);
  CHECK(all == h.count());
  h.add(highest);
  CHECK(h.count(histogram::buckets - 1) == 1);
}

TEST_CASE("merged histograms are the histogram of all their values") {
  histogram a, b, both;
  for (std::uint64_t v = 1; v < 1'000; ++v) {
    (v % 3 == 0 ? a : b).add(v * v, v % 4);
    both.add(v * v, v % 4);
  }
  CHECK_FALSE(a == both);
  a.merge(b);
  CHECK(a == both);
}

TEST_CASE("quantiles of a histogram are at most an eighth above the exact ones, never below") {
  histogram h;
  CHECK(h.quantile(0.5) == 0);
  for (std::uint64_t v = 1; v <= 10'000; ++v) h.add(v);
  for (const double q : {0.01, 0.25, 0.5, 0.9, 0.99, 1.0}) {
    CAPTURE(q);
    const double exact = q * 10'000;
    CHECK(static_cast<double>(h.quantile(q)) >= exact);
    CHECK(static_cast<double>(h.quantile(q)) <= exact * 1.125);
  }
  CHECK(h.quantile(0) == 1);
  histogram four;
  for (std::uint64_t v = 1; v <= 4; ++v) four.add(v);
  CHECK(four.quantile(0.5) == 2);
  CHECK(four.quantile(0.51) == 3);
  histogram one;
  one.add(12, 3);
  CHECK(one.quantile(0) == 12);
  CHECK(one.quantile(1) == 12);
}

TEST_CASE("a histogram says how many values lie below a value, within the bucket's width") {
  histogram h;
  for (std::uint64_t v = 0; v < 10'000; ++v) h.add(v, 2);
  CHECK(h.count_below(0) == 0);
  CHECK(h.count_below(9) == 18);
  CHECK(h.count_below(1'000) == Approx(2'000));
  CHECK(h.count_below(7'777) == Approx(15'554));
  CHECK(h.count_below(highest) == 20'000);
}
