// SPDX-License-Identifier: Apache-2.0
// What callers say their content is worth: priorities, pins, times to live.
#include <kvcache/eviction/priority.hpp>

#include <array>
#include <span>
#include <vector>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::errc;
using kvcache::failure;
using kvcache::retention_range;

namespace {

using prioritised = kvcache::block_manager<kvcache::priority>;
using ranges = std::vector<retention_range>;

template <class Manager>
kvcache::sequence_id retained(Manager& m, const text& content, const ranges& what) {
  const auto opened = m.open({.content = content, .reserve = content.size(), .retention = what});
  REQUIRE(opened.has_value());
  extend(m, opened->sequence, {content.begin() + opened->reused_tokens, content.end()});
  return opened->sequence;
}

/// Priorities as a policy hears of them, for blocks in the order of their tokens.
struct listener : kvcache::lru {
  explicit listener(kvcache::block_id highest) : lru(highest) { levels.assign(highest + 1, -1); }
  void reference(kvcache::block_id, std::uint64_t, kvcache::block_id) noexcept {}
  void set_priority(kvcache::block_id block, unsigned priority, std::uint64_t) noexcept {
    levels[block] = static_cast<int>(priority);
  }
  void advance(std::uint64_t) noexcept {}
  static inline std::vector<int> levels;
};

/// What the policy has heard of a request's blocks once its prompt is there, and once its last block is full.
struct heard {
  std::vector<int> prompt;
  std::vector<int> full;

  friend bool operator==(const heard&, const heard&) = default;
};

heard levels_of(const ranges& what, std::uint32_t block_size, std::uint32_t tokens) {
  kvcache::block_manager<listener> m({.blocks = 8, .block_size = block_size});
  const auto s = retained(m, words(1, tokens), what);
  const auto levels = [&] {
    std::vector<int> all;
    for (const auto b : table(m, s)) all.push_back(listener::levels[b]);
    return all;
  };
  heard h{.prompt = levels(), .full = {}};
  extend(m, s, words(2, table(m, s).size() * block_size - tokens));
  h.full = levels();
  return h;
}

}  // namespace

TEST_CASE("T4 content of higher priority outlives content that was used later") {
  prioritised m({.blocks = 4, .block_size = 4});
  const auto a = retained(m, words(1, 8), {{.priority = 90}});
  const auto b = retained(m, words(2, 8), {});
  const ids of_b = table(m, b);
  close(m, a);
  close(m, b);
  const auto c = retained(m, words(3, 8), {});
  CHECK(table(m, c) == ids{of_b[1], of_b[0]});
  CHECK(m.probe(words(1, 8) + words(4, 1)).tokens == 8);
  CHECK(m.probe(words(2, 8) + words(4, 1)).tokens == 0);
}

TEST_CASE("T8 a block goes by the range that holds its first token") {
  constexpr std::uint32_t open_end = retention_range::open_end;
  const auto whole = [](const std::vector<int>& levels) { return heard{levels, levels}; };
  CHECK(levels_of({{0, 64, 80}, {64, 128, 50}}, 64, 256) == whole({80, 50, -1, -1}));
  // A block is worth something once it is cached, which is when it is full.
  CHECK(levels_of({{0, 63, 80}, {63, 127, 30}}, 32, 127) == heard{{80, 80, 30, -1}, {80, 80, 30, 30}});
  CHECK(levels_of({{0, 128, 80}}, 256, 192) == heard{{-1}, {80}});
  CHECK(levels_of({{0, 64, 80}, {129, open_end, 50}}, 64, 256) == whole({80, -1, -1, 50}));
  CHECK(levels_of({{1, open_end, 80}}, 64, 128) == whole({-1, 80}));
}

TEST_CASE("T8 ranges that are reversed, overlap, stand after an open one or ask for too much are refused by number") {
  prioritised m({.blocks = 4, .block_size = 4});
  const text content = words(1, 8);
  const auto refused = [&](const ranges& what) {
    const auto before = m.counts();
    const auto s = m.open({.content = content, .reserve = 8, .retention = what});
    REQUIRE_FALSE(s.has_value());
    CHECK(m.counts() == before);
    CHECK(m.statistics().opened_sequences == 0);
    return s.error();
  };
  CHECK(refused({{0, retention_range::open_end, 80}, {8, 9, 80}}) ==
        failure{errc::bad_range, 1, retention_range::open_end});
  CHECK(refused({{5, 4, 80}}) == failure{errc::bad_range, 0, 0});
  CHECK(refused({{4, 4, 80}}) == failure{errc::bad_range, 0, 0});
  CHECK(refused({{0, 4, 80}, {3, 8, 50}}) == failure{errc::bad_range, 1, 4});
  CHECK(refused({{4, 8, 80}, {0, 4, 50}}) == failure{errc::bad_range, 1, 8});
  CHECK(refused({{0, 4, 101}}) == failure{errc::bad_range, 0, 0});
  CHECK(kvcache::message({errc::bad_range, 1, 4}).find("token 4") != std::string::npos);

  manager plain({.blocks = 4, .block_size = 4});
  const ranges high{{.priority = 90}};
  CHECK(plain.open({.content = content, .retention = high}).error() == failure{errc::unsupported, 0, 0});
  const auto s = prompt(m, content).sequence;
  CHECK(m.retain(s, ranges{{5, 4, 80}}).error() == failure{errc::bad_range, 0, 0});
  close(m, s);
  CHECK(m.retain(s, high).error().code == errc::stale_id);
}

TEST_CASE("T9 leaves only, whatever their priority: of a chain the last goes first") {
  prioritised m({.blocks = 3, .block_size = 1});
  close(m, retained(m, words(1, 3), {{0, 1, 10}, {1, 2, 50}, {2, 3, 90}}));
  const auto s = retained(m, words(2, 1), {});
  CHECK(table(m, s) == ids{3});
}

TEST_CASE("Retention: a priority falls back when its duration is over, counted from the last use") {
  prioritised m({.blocks = 4, .block_size = 4});
  const ranges high{{.priority = 90, .duration = 10}};
  m.advance(100);
  close(m, retained(m, words(1, 8), high));
  close(m, retained(m, words(2, 8), {}));
  m.advance(109);
  SECTION("not over yet") { close(m, retained(m, words(3, 8), {})); }
  SECTION("used again meanwhile") {
    const text more = words(1, 8) + words(5, 1);
    close(m, m.open({.content = more, .retention = high})->sequence);
    m.advance(110);
    close(m, retained(m, words(3, 8), {}));
  }
  SECTION("over") {
    m.advance(110);
    m.advance(50);  // time does not go back
    close(m, retained(m, words(3, 8), {}));
    CHECK(m.probe(words(1, 8)).tokens == 0);
    CHECK(m.probe(words(2, 8)).tokens == 8);
    return;
  }
  CHECK(m.probe(words(1, 8)).tokens == 8);
  CHECK(m.probe(words(2, 8)).tokens == 0);
}

TEST_CASE("Retention: a fork and a duplicate that gives way are worth what their request said") {
  prioritised m({.blocks = 8, .block_size = 4});
  SECTION("fork") {
    const auto s = retained(m, words(1, 4), {{.priority = 90}});
    const auto f = m.fork(s).value();
    extend(m, f, words(1, 8, 4));
    close(m, f);
    close(m, s);
  }
  SECTION("duplicate") {
    // Both compute the same before either has committed it.
    const text content = words(1, 12);
    const ranges high{{.priority = 90}};
    const auto plain = m.open({.content = content})->sequence;
    const auto other = m.open({.content = content, .retention = high})->sequence;
    compute(m, plain, 12);
    compute(m, other, 12);
    REQUIRE(m.commit(plain, content).has_value());
    REQUIRE(m.commit(other, content).has_value());
    CHECK(table(m, plain) == table(m, other));
    close(m, other);
    close(m, plain);
  }
  close(m, retained(m, words(2, 20), {}));
  close(m, retained(m, words(3, 20), {}));
  CHECK(m.probe(words(1, 12)).tokens == 12);
}

TEST_CASE("V8 Retention: nothing of what content was worth is left after a reset") {
  prioritised m({.blocks = 4, .block_size = 4});
  close(m, retained(m, words(1, 8), {{.priority = 90}}));
  REQUIRE(m.reset().has_value());
  close(m, retained(m, words(1, 8), {}));
  close(m, retained(m, words(2, 8), {}));
  close(m, retained(m, words(3, 8), {}));
  CHECK(m.probe(words(1, 8)).tokens == 0);
}

TEST_CASE("Retention: content that was forgotten comes back at the default level, in the same block too") {
  prioritised m({.blocks = 2, .block_size = 4});
  close(m, retained(m, words(1, 4), {{.priority = 90, .time_to_live = 10}}));
  m.advance(10);
  REQUIRE(m.counts().free == 2);
  const auto again = retained(m, words(1, 4), {});
  CHECK(table(m, again) == ids{1});
  close(m, again);
  close(m, retained(m, words(2, 4), {}));
  close(m, retained(m, words(3, 4), {}));
  CHECK(m.probe(words(1, 4)).tokens == 0);
  CHECK(m.probe(words(2, 4)).tokens == 4);
}

TEST_CASE("Retention: the longer of two limits counts, also where the first was no limit at all") {
  manager m({.blocks = 8, .block_size = 4});
  const bool others = GENERATE(false, true);
  if (others) close(m, retained(m, words(9, 4), {{.time_to_live = 1}}));
  close(m, retained(m, words(1, 8), {{.time_to_live = kvcache::never}}));
  const text more = words(1, 8) + words(3, 1);
  close(m, m.open({.content = more, .retention = ranges{{.time_to_live = 10}}})->sequence);
  m.advance(1000);
  CHECK(m.probe(words(1, 8)).tokens == 8);
}

TEST_CASE("Retention: a block whose successor was overwritten is a leaf, and goes by its level") {
  prioritised m({.blocks = 3, .block_size = 4});
  const auto low = retained(m, words(1, 8), {{.priority = 10}});
  const auto high = retained(m, words(2, 4), {{.priority = 90}});
  REQUIRE(m.truncate(low, 6).has_value());
  compute(m, low, 1);  // in place: what followed the first block is found no more
  CHECK(m.probe(words(1, 8)).tokens == 4);
  close(m, low);
  close(m, high);
  const text other = words(3, 8);
  REQUIRE(m.open({.content = other, .reserve = 8}).has_value());
  CHECK(m.probe(words(1, 4)).tokens == 0);
  CHECK(m.probe(words(2, 4)).tokens == 4);
}

TEST_CASE("Retention: a pin whose time is over already ends with the next advance") {
  manager m({.blocks = 4, .block_size = 4});
  close(m, prompt(m, words(1, 8)).sequence);
  m.advance(10);
  const auto pin = m.pin(words(1, 8), {}, 10);
  CHECK(m.contains(pin.sequence));
  m.advance(10);
  CHECK_FALSE(m.contains(pin.sequence));
}

TEST_CASE("a root that went and a content that is new: nothing that was never there is touched") {
  manager m({.blocks = 4, .block_size = 4});
  const std::array keys{kvcache::extra_key{kvcache::key_kind::salt, "x"}};
  const text one = words(1, 1);
  close(m, m.open({.content = one, .keys = keys})->sequence);
  close(m, prompt(m, words(2, 16)).sequence);
  CHECK(m.probe(words(2, 16)).tokens == 16);
}

TEST_CASE("Retention: said again of an open sequence, for what it holds and for what it will generate") {
  prioritised m({.blocks = 6, .block_size = 4});
  const auto s = retained(m, words(1, 8), {});
  REQUIRE(m.retain(s, ranges{{.priority = 80}}).has_value());
  extend(m, s, words(1, 4, 8));
  close(m, s);
  close(m, retained(m, words(2, 12), {}));
  close(m, retained(m, words(3, 12), {}));
  CHECK(m.probe(words(1, 12)).tokens == 12);
}

TEST_CASE("Retention: what is not used for its time to live is forgotten, under any policy") {
  manager m({.blocks = 8, .block_size = 4});
  const ranges brief{{.time_to_live = 10}};
  m.advance(5);
  const auto s = retained(m, words(1, 8), brief);
  m.advance(1000);
  CHECK(m.probe(words(1, 8)).tokens == 8);  // in use
  close(m, s);
  m.advance(1009);
  CHECK(m.probe(words(1, 8)).tokens == 8);
  SECTION("its time passes") {
    m.advance(1010);
    CHECK(m.probe(words(1, 8)).tokens == 0);
    CHECK(m.counts().free == 8);
    check_counts(m);
    // The block has no limit left for the content it holds next.
    const auto next = retained(m, words(2, 8), {});
    close(m, next);
    m.advance(100'000);
    CHECK(m.probe(words(2, 8)).tokens == 8);
  }
  SECTION("used again, it starts anew; the longer of two limits counts") {
    const text more = words(1, 8) + words(3, 1);
    const auto again = m.open({.content = more, .retention = ranges{{.time_to_live = 20}}});
    close(m, again->sequence);
    m.advance(1028);
    CHECK(m.probe(words(1, 8)).tokens == 8);
    m.advance(1029);
    CHECK(m.probe(words(1, 8)).tokens == 0);
  }
  SECTION("what follows it goes with it") {
    const text longer = words(1, 8) + words(3, 8);
    close(m, prompt(m, longer).sequence);
    REQUIRE(m.probe(longer).tokens == 16);
    m.advance(1019);
    CHECK(m.counts().free == 8);
  }
}

TEST_CASE("Retention: a pin holds what is cached until it is closed or its time is over") {
  const std::uint32_t size = GENERATE(1u, 4u, 16u);
  CAPTURE(size);
  manager m({.blocks = 6, .block_size = size});
  const text content = words(1, 3 * size);
  close(m, prompt(m, content).sequence);
  const auto nothing = m.pin(words(9, size));
  CHECK(nothing.tokens == 0);
  close(m, nothing.sequence);
  const auto statistics = m.statistics();
  const auto pin = m.pin(content + words(2, 1), {}, 50);
  CHECK(pin.tokens == 3 * size);
  CHECK(m.statistics() == statistics);
  CHECK(m.counts().referenced == 3);
  close(m, prompt(m, words(3, 3 * size)).sequence);
  close(m, prompt(m, words(4, 3 * size)).sequence);
  CHECK(m.probe(content).tokens == 3 * size);
  const auto fork = m.fork(pin.sequence, 2 * size);
  REQUIRE(fork.has_value());
  close(m, *fork);
  SECTION("closed") {
    close(m, pin.sequence);
    m.advance(60);
  }
  SECTION("its time is over") {
    m.advance(49);
    CHECK(m.contains(pin.sequence));
    m.advance(50);
    CHECK(m.close(pin.sequence).error().code == errc::stale_id);
  }
  CHECK(m.counts().evictable == 6);
  CHECK(m.probe(content).tokens == 3 * size);
  prompt(m, words(5, 6 * size));
  CHECK(m.probe(content).tokens == 0);
}

TEST_CASE("Retention: what a request says does not reach the block whose head it borrows") {
  kvcache::block_manager<listener> m({.blocks = 8, .block_size = 4, .partial_reuse = true});
  const auto a = retained(m, words(1, 8), {{.priority = 10}});
  const ids of_a = table(m, a);
  m.close(a).value();
  const text other = head(words(1, 8), 6) + words(2, 2);
  const auto b = m.open({.content = other, .reserve = 8, .retention = ranges{{.priority = 90}}});
  REQUIRE(b.has_value());
  REQUIRE(b->reused_tokens == 6);
  CHECK(listener::levels[of_a[0]] == 90);
  CHECK(listener::levels[of_a[1]] == 10);
  extend(m, b->sequence, words(2, 2));
  CHECK(listener::levels[table(m, b->sequence)[1]] == 90);
  CHECK(listener::levels[of_a[1]] == 10);
}
