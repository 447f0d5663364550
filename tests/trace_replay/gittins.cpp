// SPDX-License-Identifier: Apache-2.0
// What gittins is for, on loads made by hand: it has to learn what comes back, and to learn anew when that changes.
#include "catch.hpp"
#include "optimal.hpp"
#include "replay.hpp"
#include "trace.hpp"

#include <cstdint>
#include <vector>

namespace {

constexpr std::uint32_t conversations = 6;
constexpr std::uint32_t pool = 40;

/// Adds `count` requests that are never repeated, each followed by one of six conversations in turn.
class load {
 public:
  void add(std::uint32_t count, std::uint32_t scan_blocks, std::uint32_t conversation_blocks) {
    ++generation_;
    for (std::uint32_t i = 0; i < count; ++i) {
      replay::request scan;
      for (std::uint32_t b = 0; b < scan_blocks; ++b) scan.push_back(next_++);
      all.requests.push_back(scan);
      replay::request same;
      for (std::uint32_t b = 0; b < conversation_blocks; ++b)
        same.push_back((std::uint64_t{generation_} << 40) + (i % conversations) * 100 + b);
      all.requests.push_back(same);
      all.references += scan.size() + same.size();
    }
  }
  replay::trace all;

 private:
  std::uint32_t generation_ = 0;
  kvcache::content_unit next_ = 0;
};

double share(const replay::trace& t, const char* policy) {
  return static_cast<double>(replay::hits(policy, t, {pool})) / static_cast<double>(replay::optimal_hits(t, pool));
}

}  // namespace

TEST_CASE("gittins keeps six conversations through scans that push everything out of lru") {
  // Between two turns of a conversation 96 blocks of scans pass through 40.
  load l;
  l.add(1000, 16, 4);
  CHECK(replay::hits("lru", l.all, {pool}) == 0);
  CHECK(share(l.all, "gittins") > 0.9);
}

TEST_CASE("gittins learns anew when what comes back becomes what does not") {
  // First short prompts return and long ones do not, then the other way round.
  load l;
  l.add(1000, 16, 4);
  const double before = static_cast<double>(replay::hits("gittins", l.all, {pool}));
  const double best_before = static_cast<double>(replay::optimal_hits(l.all, pool));
  l.add(2000, 4, 5);
  const double after = static_cast<double>(replay::hits("gittins", l.all, {pool})) - before;
  const double best_after = static_cast<double>(replay::optimal_hits(l.all, pool)) - best_before;
  CHECK(before > 0.9 * best_before);
  CHECK(after > 0.9 * best_after);
}

TEST_CASE("gittins keeps nothing back where everything fits") {
  load l;
  l.add(10, 2, 3);
  CHECK(replay::hits("gittins", l.all, {1000}) == replay::optimal_hits(l.all, 1000));
  CHECK(replay::hits("lru", l.all, {1000}) == replay::optimal_hits(l.all, 1000));
}
