// SPDX-License-Identifier: Apache-2.0
#include "replay_events.hpp"

#include <kvcache/blocks/event_log.hpp>
#include <kvcache/events.hpp>

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"

using kvcache::cache_event;
using kvcache::event_log;
using kvcache::event_reading;

namespace {

/// A cache reduced to its index: contents by serial in a map, changed at random.
class naive_source {
 public:
  naive_source(std::uint64_t seed, std::size_t log) : random_(seed), log_(log) {
    for (kvcache::block_id b = 40; b > 0; --b) free_.push_back(b);
  }

  [[nodiscard]] const event_log& events() const { return log_; }
  template <class Visit>
  std::uint64_t visit_cached(Visit&& visit) const {
    // A parent has the lower serial.
    for (const auto& [content, event] : cached_) {
      cache_event shown = event;
      shown.number = log_.newest();
      visit(std::as_const(shown));
    }
    return log_.newest();
  }

  void change() {
    const std::uint32_t what = below(100);
    if (what == 0) {
      for (const auto& [content, event] : cached_) free_.push_back(event.block);
      cached_.clear();
      log_.cleared();
    } else if (what < 10) {
      roots_[below(4)] = next_serial_++;  // another set of keys, or the same one anew
    } else if (what < 60 && !free_.empty()) {
      store();
    } else {
      remove();
    }
  }

  static constexpr std::uint32_t window_group = 1;
  std::size_t most = 0;

 private:
  std::uint32_t below(std::uint32_t limit) {
    random_ = random_ * 6'364'136'223'846'793'005u + 1'442'695'040'888'963'407u;
    return static_cast<std::uint32_t>(random_ >> 33) % limit;
  }
  void store() {
    cache_event e;
    const std::uint32_t root = below(4);
    e.layer_group = root % 2;
    e.parent = roots_[root];
    if (!cached_.empty() && below(4) != 0) {
      auto parent = cached_.begin();
      std::advance(parent, below(static_cast<std::uint32_t>(cached_.size())));
      e.parent = parent->first;
      e.layer_group = parent->second.layer_group;
    }
    e.content = next_serial_++;
    e.block = free_.back();
    free_.pop_back();
    e.tokens = e.layer_group == 0 ? 16 : 4;
    e.fingerprint = (e.parent * 31 + e.block) * 0x9e3779b97f4a7c15u;
    cached_.emplace(e.content, e);
    if (cached_.size() > most) most = cached_.size();
    log_.stored(e);
  }
  void remove() {
    if (cached_.empty()) return;
    auto gone = cached_.begin();
    std::advance(gone, below(static_cast<std::uint32_t>(cached_.size())));
    if (gone->second.layer_group != window_group)
      for (auto next = gone; next != cached_.end(); ++next)  // down to a leaf
        if (next->second.parent == gone->first) gone = next;
    log_.removed(gone->second);
    free_.push_back(gone->second.block);
    cached_.erase(gone);
  }

  std::uint64_t random_;
  event_log log_;
  std::map<kvcache::serial, cache_event> cached_;
  std::vector<kvcache::block_id> free_;
  std::array<kvcache::serial, 4> roots_{1, 2, 3, 4};
  kvcache::serial next_serial_ = 5;
};

cache_event about(kvcache::block_id block) {
  return {.content = 100 + block, .parent = 1, .block = block, .tokens = 4};
}

}  // namespace

TEST_CASE("R12 events replayed onto any snapshot rebuild an equal index") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  CAPTURE(seed);
  SECTION("nobody falls behind") {
    naive_source source(seed, 4'096);
    const auto outcome = kvcache_test::replay_events(source, {1}, 3'000, [&] { source.change(); });
    CHECK(outcome.compared > 3'500);
    CHECK(outcome.lost == 0);
    CHECK(source.most > 20);
  }
  SECTION("some fall behind and begin again from a snapshot") {
    naive_source source(seed, 20);
    const auto outcome = kvcache_test::replay_events(source, {1}, 3'000, [&] { source.change(); });
    CHECK(outcome.lost > 40);
  }
  SECTION("room for one event") {
    naive_source source(seed, 1);
    const auto outcome = kvcache_test::replay_events(source, {1}, 600, [&] { source.change(); });
    CHECK(outcome.lost > 40);
  }
}

TEST_CASE("R12 two sources that are driven alike tell the same events") {
  naive_source a(9, 5'000), b(9, 5'000);
  for (int i = 0; i < 4'000; ++i) a.change(), b.change();
  std::vector<cache_event> of_a(5'000), of_b(5'000);
  const event_reading read = a.events().read(0, of_a);
  CHECK(read.events > 2'000);
  CHECK(b.events().read(0, of_b) == read);
  CHECK(of_a == of_b);
}

TEST_CASE("an event log numbers from 1 without a gap and keeps the newest") {
  const std::size_t capacity = GENERATE(1u, 2u, 3u, 8u);
  CAPTURE(capacity);
  event_log log(capacity);
  CHECK(log.enabled());
  CHECK(log.capacity() == capacity);
  CHECK(log.newest() == 0);
  std::vector<cache_event> out(capacity + 5);
  CHECK(log.read(0, out) == event_reading{0, 0});
  for (kvcache::block_id block = 1; block <= 3 * capacity; ++block) {
    log.stored(about(block));
    CHECK(log.newest() == block);
    const std::uint64_t oldest = block > capacity ? block - capacity : 0;  // the one before it, to be exact
    const event_reading all = log.read(oldest, out);
    REQUIRE(all == event_reading{static_cast<std::size_t>(block - oldest), 0});
    for (std::size_t i = 0; i < all.events; ++i) {
      CHECK(out[i].number == oldest + 1 + i);
      CHECK(out[i].block == oldest + 1 + i);
    }
    if (oldest > 0) CHECK(log.read(oldest - 1, out) == event_reading{0, 1});
    if (oldest > 0) CHECK(log.read(0, out) == event_reading{0, oldest});
    CHECK(log.read(block, out) == event_reading{0, 0});
  }
}

TEST_CASE("a reader with little room gets the oldest first, and nothing beyond its room") {
  event_log log(8);
  for (kvcache::block_id block = 1; block <= 11; ++block) log.stored(about(block));
  std::array<cache_event, 4> out{};
  CHECK(log.read(4, std::span(out).first(3)) == event_reading{3, 0});
  CHECK(out[0].number == 5);
  CHECK(out[2].number == 7);
  CHECK(out[3] == cache_event{});
  CHECK(log.read(4, {}) == event_reading{0, 0});
}

TEST_CASE("a reader that has fallen behind is told how far, and its room is left alone") {
  event_log log(4);
  for (kvcache::block_id block = 1; block <= 10; ++block) log.stored(about(block));
  std::array<cache_event, 4> out{};
  CHECK(log.read(3, out) == event_reading{0, 3});
  CHECK(out[0] == cache_event{});
  CHECK(log.read(6, out) == event_reading{4, 0});
}

TEST_CASE("a number that was never given tells that the source began anew") {
  event_log log(4);
  log.cleared();
  std::array<cache_event, 4> out{};
  CHECK(log.read(2, out) == event_reading{0, kvcache::all_events_lost});
}

TEST_CASE("events say what happened to which content") {
  event_log log(4);
  log.stored(about(7));
  log.removed(about(7));
  log.cleared();
  std::array<cache_event, 4> out{};
  REQUIRE(log.read(0, out).events == 3);
  cache_event expected = about(7);
  expected.number = 1;
  CHECK(out[0] == expected);
  expected.number = 2;
  expected.kind = kvcache::cache_event_kind::removed;
  CHECK(out[1] == expected);
  CHECK(out[2] == cache_event{.number = 3, .kind = kvcache::cache_event_kind::cleared});
  CHECK(name(out[0].kind) == std::string("stored"));
  CHECK(name(out[1].kind) == std::string("removed"));
  CHECK(name(out[2].kind) == std::string("cleared"));
}

TEST_CASE("an event log of capacity 0 is off: nothing is numbered, nothing is lost") {
  event_log log(0);
  CHECK_FALSE(log.enabled());
  log.stored(about(1));
  log.removed(about(1));
  log.cleared();
  CHECK(log.newest() == 0);
  std::array<cache_event, 1> out{};
  CHECK(log.read(0, out) == event_reading{0, 0});
}
