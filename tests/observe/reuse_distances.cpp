// SPDX-License-Identifier: Apache-2.0
#include <kvcache/observe/reuse_distances.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "catch.hpp"

using kvcache::histogram;
using kvcache::reuse_distances;

namespace {

/// All contents ever used, the newest last.
class naive_stack {
 public:
  void reference(std::uint64_t content) {
    ++references;
    const auto found = std::find(order_.begin(), order_.end(), content);
    if (found != order_.end()) distances.push_back(static_cast<std::uint64_t>(order_.end() - found) - 1);
    make_newest(content);
  }
  void release(std::uint64_t content) {
    if (std::erase(order_, content) != 0) order_.push_back(content);
  }
  [[nodiscard]] double hit_ratio(std::uint64_t blocks) const {
    std::size_t hits = 0;
    for (const std::uint64_t d : distances) hits += d < blocks ? 1 : 0;
    return static_cast<double>(hits) / static_cast<double>(references);
  }
  [[nodiscard]] histogram all() const {
    histogram h;
    for (const std::uint64_t d : distances) h.add(d);
    return h;
  }
  std::vector<std::uint64_t> distances;
  std::size_t references = 0;

 private:
  void make_newest(std::uint64_t content) {
    std::erase(order_, content);
    order_.push_back(content);
  }
  std::vector<std::uint64_t> order_;
};

class random_numbers {
 public:
  explicit random_numbers(std::uint64_t seed) : state_(seed) {}
  std::uint64_t operator()() {
    std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  std::uint64_t below(std::uint64_t limit) { return (*this)() % limit; }
  /// Rank `r` comes about 1 / r as often as rank 1.
  std::uint64_t zipf(double ranks) {
    return static_cast<std::uint64_t>(std::pow(ranks, double(below(1u << 30)) / (1u << 30)));
  }

 private:
  std::uint64_t state_;
};

std::uint64_t fingerprint(std::uint64_t content) { return random_numbers(content * 77)(); }

}  // namespace

TEST_CASE("reuse distances are exact while all contents fit the sample") {
  const std::uint32_t samples = GENERATE(64u, 100u, 300u);
  CAPTURE(samples);
  reuse_distances r(samples);
  naive_stack naive;
  random_numbers random(samples);
  for (int i = 0; i < 5'000; ++i) {
    const std::uint64_t content = fingerprint(random.below(1 + random.below(samples)));
    if (random.below(4) == 0) {
      r.release(content), naive.release(content);
    } else {
      r.reference(content), naive.reference(content);
    }
  }
  CHECK(r.stands_for() == 1);
  CHECK(r.references() == naive.references);
  CHECK(r.distances() == naive.all());
  for (const std::uint64_t blocks : {0u, 1u, 2u, 7u, 15u}) CHECK(r.hit_ratio(blocks) == naive.hit_ratio(blocks));
  for (const std::uint64_t blocks : {64u, 128u, 512u}) CHECK(r.hit_ratio(blocks) == naive.hit_ratio(blocks));
  CHECK(r.hit_ratio(60) == Approx(naive.hit_ratio(60)).margin(0.02));
}

TEST_CASE("a content released is no use, and one never used stays unknown") {
  reuse_distances r(64);
  r.release(fingerprint(9));
  r.reference(fingerprint(1));
  r.reference(fingerprint(2));
  r.release(fingerprint(1));
  CHECK(r.references() == 2);
  CHECK(r.distances().count() == 0);
  r.reference(fingerprint(2));  // 1 came back in between
  CHECK(r.distances().count(1) == 1);
  r.reference(fingerprint(9));
  CHECK(r.distances().count() == 1);
  CHECK(r.references() == 4);
}

TEST_CASE("a sample tells the curve of far more contents than it follows") {
  // 8,192 samples for 40,000 contents, and a hot one that is most of one load.
  const bool hot = GENERATE(false, true);
  const std::uint64_t salt = GENERATE(0u, 1'000'000u, 2'000'000u);
  CAPTURE(hot, salt);
  reuse_distances r(8'192);
  reuse_distances exact(1u << 17);
  random_numbers random(5);
  std::uint64_t uses = 0;
  for (int i = 0; i < 400'000; ++i) {
    const std::uint64_t content = fingerprint(salt + (hot && random.below(3) == 0 ? 0 : random.zipf(40'000)));
    r.reference(content), exact.reference(content);
    ++uses;
  }
  CHECK(r.references() == uses);
  CHECK(exact.stands_for() == 1);
  CHECK(r.stands_for() >= 4);
  CHECK(r.stands_for() <= 16);
  for (const std::uint64_t blocks : {500u, 1'000u, 3'000u, 10'000u, 30'000u, 50'000u}) {
    CAPTURE(blocks);
    CHECK(r.hit_ratio(blocks) == Approx(exact.hit_ratio(blocks)).margin(0.03));
  }
  // More room never finds less.
  double before = 0;
  for (std::uint64_t blocks = 1; blocks < 100'000; blocks += 1 + blocks / 5) {
    CHECK(r.hit_ratio(blocks) >= before);
    before = r.hit_ratio(blocks);
  }
}

TEST_CASE("a content that the halved sample has no place for is not counted between others") {
  unsigned seen = 0;
  for (std::uint64_t salt = 0; salt < 4'000; salt += 100) {
    reuse_distances r(64);
    for (std::uint64_t c = 0; c < 65; ++c) r.reference(fingerprint(salt + c));  // the last one does not fit
    REQUIRE(r.stands_for() >= 2);
    CHECK(r.distances().count() == 0);
    r.reference(fingerprint(salt + 64));
    if (r.distances().count() != 0) continue;  // it is in the sample
    r.reference(fingerprint(salt + 63));
    if (r.distances().count() == 0) continue;  // the one before it is not
    CHECK(r.distances().count(0) == r.stands_for());
    ++seen;
  }
  CHECK(seen > 2);
}

TEST_CASE("a curve begun anew is that of what came since, with the memory of before") {
  reuse_distances r(64);
  for (std::uint64_t c = 0; c < 20; ++c) r.reference(fingerprint(c));
  r.restart();
  CHECK(r.references() == 0);
  CHECK(r.hit_ratio(100) == 0);
  for (std::uint64_t c = 0; c < 20; ++c) r.reference(fingerprint(c));
  CHECK(r.hit_ratio(20) == 1);
  CHECK(r.hit_ratio(18) == 0);
}

#if KVCACHE_HAS_EXCEPTIONS
TEST_CASE("a sample too small to tell anything is refused with value, limit and remedy") {
  CHECK_THROWS_WITH(reuse_distances(63),
                    "reuse distances: 63 samples, from 64 to 16777216 possible; 16384 give a curve to about a "
                    "hundredth");
  CHECK_THROWS_AS(reuse_distances((1u << 24) + 1), kvcache::invalid_argument);
}
#endif
