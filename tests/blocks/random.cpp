// SPDX-License-Identifier: Apache-2.0
// Random calls held against a model, and against a second instance.
#include "random_driver.hpp"

#include <kvcache/eviction/arc.hpp>
#include <kvcache/eviction/gittins.hpp>
#include <kvcache/eviction/lfu.hpp>
#include <kvcache/eviction/lru_k.hpp>
#include <kvcache/eviction/priority.hpp>
#include <kvcache/eviction/s3fifo.hpp>
#include <kvcache/eviction/tiny_lfu.hpp>

#include <algorithm>
#include <iterator>

#include "../eviction/policies.hpp"
#include "random_calls.hpp"
#include "support.hpp"

using namespace kvcache_test;
using kvcache::cache_event;
using kvcache::layer_group;

namespace {

template <class Manager>
void drive(const random_load& load, std::size_t calls) {
  INFO("seed " << load.seed << ", blocks " << load.blocks << ", block size " << load.groups[0].block_size << ", groups "
               << load.groups.size() << ", hash bits " << load.hash_bits << ", partial reuse " << load.partial_reuse);
  random_driver<Manager> driver(load);
  driver.run(calls);
  driver.finish();
  bool windows_alone = true;
  for (const layer_group& g : load.groups) windows_alone = windows_alone && g.window != layer_group::full;
  // A driver that never gets anywhere proves nothing.
  CHECK(driver.opened > calls / 100);
  CHECK(driver.refused > 0);
  CHECK(driver.hits > 0);
  CHECK((driver.copies > 0 || load.groups[0].block_size == 1));
  CHECK(driver.duplicates > 0);
  if (load.partial_reuse) CHECK(driver.heads > calls / 100);
  if (windows_alone) CHECK(driver.behind > 0);
  CHECK(driver.shortened > 0);
  CHECK(driver.dropped > 0);
  CHECK(driver.revived > 0);
  CHECK(driver.overlapped > 0);
  CHECK(driver.pins > 0);
  CHECK(driver.expired > 0);
  CHECK(driver.resets > 0);
  if (std::is_same_v<typename Manager::eviction_type, kvcache::priority>) CHECK(driver.ranked > 0);
  CHECK(driver.manager().statistics().evicted_blocks > 0);
}

/// By index: printing two whole logs would take minutes.
template <class T>
void require_equal(const std::vector<T>& one, const std::vector<T>& two) {
  REQUIRE(one.size() == two.size());
  REQUIRE(std::mismatch(one.begin(), one.end(), two.begin()).first - one.begin() == std::ssize(one));
}

template <class Manager>
std::vector<cache_event> events_of(const Manager& m) {
  std::vector<cache_event> all(m.events().newest());
  REQUIRE(m.events().read(0, all) == kvcache::event_reading{all.size(), 0});
  return all;
}

}  // namespace

TEST_CASE("R9 random calls against a model: counts, references, bytes, identity and predictors after every call") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u, 4u);
  const std::uint32_t block_size = GENERATE(1u, 2u, 4u, 16u);
  drive<manager>({.seed = seed, .blocks = 24, .groups = {{block_size}}}, 6'000);
}

TEST_CASE("R9 random calls with three layer groups in one pool") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u, 4u);
  drive<manager>({.seed = seed, .blocks = 60, .groups = {{4}, {2}, {4}}}, 6'000);
  drive<manager>({.seed = seed, .blocks = 40, .groups = {{3}, {2}}}, 6'000);
}

TEST_CASE("R9 random calls with windows beside a group that sees all, and with windows alone") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u, 4u);
  drive<manager>({.seed = seed, .blocks = 60, .groups = {{4}, {4, 9}}}, 6'000);
  drive<manager>({.seed = seed, .blocks = 60, .groups = {{4}, {2, 3}, {4, 8}}}, 6'000);
  drive<manager>({.seed = seed, .blocks = 24, .groups = {{2, 4}}}, 6'000);
  drive<manager>({.seed = seed, .blocks = 40, .groups = {{1, 1}, {3, 7}}}, 6'000);
}

TEST_CASE("R6 R9 random calls with reuse of heads of blocks") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u, 4u);
  drive<manager>({.seed = seed, .groups = {{4}}, .partial_reuse = true}, 6'000);
  drive<manager>({.seed = seed, .blocks = 60, .groups = {{8}, {8, 11}}, .partial_reuse = true}, 6'000);
}

TEST_CASE("R9 R20 random calls with tail pools: seals, reopened blocks and first tokens that stay wide") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u, 4u);
  const std::uint32_t block_size = GENERATE(2u, 4u, 7u);
  const auto drive_tails = [](const random_load& load, bool wide) {
    random_driver<manager> driver(load);
    INFO("seed " << load.seed << ", block size " << load.groups[0].block_size << ", groups " << load.groups.size());
    driver.run(6'000);
    driver.finish();
    CHECK(driver.opened > 60);
    CHECK(driver.hits > 0);
    CHECK(driver.sealed > 60);
    CHECK(driver.reopened > 0);
    CHECK(driver.no_tails > 0);
    CHECK(driver.shortened > 0);
    CHECK(driver.dropped > 0);
    CHECK(driver.overlapped > 0);
    if (wide) CHECK(driver.kept_wide > 0);
  };
  const layer_group tails{.block_size = block_size, .tail_blocks = 10};
  layer_group wide = tails;
  wide.wide_tokens = block_size + 1;
  drive_tails({.seed = seed, .blocks = 40, .groups = {tails}}, false);
  drive_tails({.seed = seed, .blocks = 40, .groups = {wide}, .partial_reuse = true}, true);
  layer_group seen_in_part = tails;
  seen_in_part.window = 2 * block_size + 1;
  drive_tails({.seed = seed, .blocks = 60, .groups = {wide, {block_size}, seen_in_part}}, true);
}

TEST_CASE("R7 R9 random calls while all hashes collide") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  const unsigned hash_bits = GENERATE(0u, 2u);
  drive<manager>({.seed = seed, .groups = {{4}}, .hash_bits = hash_bits}, 6'000);
}

TEMPLATE_TEST_CASE("R7 R9 random calls under policies that know nothing of parents", "", mru, lowest_id) {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  drive<kvcache::block_manager<TestType>>({.seed = seed, .groups = {{4}}}, 6'000);
}

TEMPLATE_TEST_CASE("R7 R9 random calls under the other policies, beside windows and with reuse of heads", "",
                   kvcache::arc, kvcache::gittins, kvcache::lfu, kvcache::lru_k, kvcache::s3fifo, kvcache::tiny_lfu) {
  using any = kvcache::block_manager<TestType>;
  drive<any>({.seed = 31, .blocks = 60, .groups = {{8}, {8, 11}}, .partial_reuse = true}, 6'000);
  drive<any>({.seed = 32, .blocks = 60, .groups = {{4}, {2, 3}, {4, 8}}}, 6'000);
}

TEST_CASE("R7 R9 random calls under levels that callers give: of all leaves one of the lowest goes") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  using prioritised = kvcache::block_manager<kvcache::priority>;
  drive<prioritised>({.seed = seed, .blocks = 40, .groups = {{4}}}, 6'000);
  drive<prioritised>({.seed = seed, .blocks = 60, .groups = {{4}, {4, 9}}, .partial_reuse = true}, 6'000);
}

TEST_CASE("R9 100,000 random calls in one go against a model") {
  drive<manager>({.seed = 21, .blocks = 40, .groups = {{4}}, .partial_reuse = true}, calls(100'000));
  drive<manager>({.seed = 22, .blocks = 60, .groups = {{4}, {2, 7}}}, calls(100'000));
}

TEST_CASE("Random accept lengths of drafts over 10,000 steps, then all closed: everything is available") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  INFO("seed " << seed << ", block size " << block_size);
  manager m({.blocks = 400, .block_size = block_size});
  std::uint64_t random = seed;
  const auto pick = [&](std::uint32_t below) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::uint32_t>((random >> 33) % below);
  };
  std::vector<kvcache::sequence_id> sequences;
  std::vector<std::int32_t> next(4);
  for (int i = 0; i < 4; ++i) sequences.push_back(m.open({.content = words(i, 1)})->sequence);
  for (int step_number = 0; step_number < 10'000; ++step_number) {
    std::vector<kvcache::want> wants;
    std::vector<std::uint32_t> counts;
    for (const auto s : sequences) {
      if (*m.length(s) > 80) REQUIRE(m.truncate(s, pick(40)).has_value());
      wants.push_back({s, 1 + pick(8)});
      counts.push_back(pick(wants.back().tokens + 1));
    }
    auto step = m.begin(wants);
    REQUIRE(step.has_value());
    REQUIRE(step->accept(counts).has_value());
    for (const auto s : sequences) {
      const std::uint32_t missing = *m.length(s) - *m.committed(s);
      REQUIRE(m.commit(s, words(static_cast<int>(pick(3)), missing)).has_value());
    }
    REQUIRE(m.retire(*step).has_value());
    REQUIRE(m.counts().capacity() == 400);
    REQUIRE(m.counts().held == 0);
  }
  for (const auto s : sequences) close(m, s);
  CHECK(m.counts().available() == 400);
}

TEMPLATE_TEST_CASE("R12 two instances fed the same 100,000 random calls give the same ids, order and events", "",
                   kvcache::lru, kvcache::priority) {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  INFO("seed " << seed);
  const std::uint32_t block_size = seed == 1 ? 4 : seed == 2 ? 6 : 3;
  const random_load load{.seed = seed,
                         .blocks = 60,
                         .groups = {{block_size}, {seed == 3 ? 3u : 2u, 7}},
                         .most_sequences = 8,
                         .partial_reuse = seed == 3,
                         .events = 1'000'000,
                         .check = false};
  using driver = random_driver<kvcache::block_manager<TestType>>;
  driver one(load);
  // The second one lives elsewhere in memory.
  const std::vector<std::string> elsewhere(1000, std::string(100, 'x'));
  driver two(load);
  for (driver* d : {&one, &two}) {
    d->run(calls(100'000));
    d->finish();
  }
  CHECK(one.opened > calls(1'000));
  CHECK(one.hits > 0);
  CHECK(one.copies > 0);
  CHECK(one.log().size() > calls(500'000));
  require_equal(one.log(), two.log());
  const auto events = events_of(one.manager());
  CHECK(events.size() > calls(10'000));
  require_equal(events, events_of(two.manager()));
}
