// SPDX-License-Identifier: Apache-2.0
// What the block manager tells a policy that asks for it, and when.
#include <kvcache/eviction/gittins.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "support.hpp"

using namespace kvcache_test;

namespace {

struct event {
  std::string what;
  kvcache::block_id block = 0;
  kvcache::block_id parent = 0;
  std::uint64_t fingerprint = 0;
  std::vector<std::uint64_t> fingerprints{};
  std::uint32_t hits = 0;
  std::uint32_t tokens = 0;
};
std::vector<event> told;

/// lru that writes down what it is told.
struct told_listener : kvcache::lru {
  using lru::lru;
  void open(std::span<const std::uint64_t> all, std::uint32_t hits, std::uint32_t tokens) noexcept {
    told.push_back({.what = "open", .fingerprints = {all.begin(), all.end()}, .hits = hits, .tokens = tokens});
  }
  void reference(kvcache::block_id block, std::uint64_t fingerprint, kvcache::block_id parent) noexcept {
    told.push_back({.what = "reference", .block = block, .parent = parent, .fingerprint = fingerprint});
  }
  void evict(kvcache::block_id block) noexcept {
    told.push_back({.what = "evict", .block = block});
    erase(block);
  }
};
static_assert(kvcache::told_of_requests<told_listener> && kvcache::told_of_references<told_listener> &&
              kvcache::told_of_evictions<told_listener> && !kvcache::told_of_requests<kvcache::lru>);

std::vector<event> taken() { return std::exchange(told, {}); }

}  // namespace

TEST_CASE("a policy is told of requests, of references head first, and of evictions, by fingerprints that last") {
  const std::uint32_t size = GENERATE(2u, 4u, 16u);
  CAPTURE(size);
  taken();
  kvcache::block_manager<told_listener> m({.blocks = 4, .block_size = size, .unit_tokens = 3});
  const text content = words(1, 2 * size + 1);
  const auto a = prompt(m, content).sequence;
  const auto first = taken();
  REQUIRE(first.size() == 3);
  CHECK(first[0].what == "open");
  REQUIRE(first[0].fingerprints.size() == 2);
  CHECK(first[0].hits == 0);
  CHECK(first[0].tokens == 3 * size);
  for (std::uint32_t i = 0; i < 2; ++i) {
    CHECK(first[i + 1].what == "reference");
    CHECK(first[i + 1].block == i + 1);
    CHECK(first[i + 1].parent == i);
    CHECK(first[i + 1].fingerprint == first[0].fingerprints[i]);
  }
  close(m, a);

  SECTION("a hit is a reference") {
    const auto b = m.open({.content = content});
    const auto second = taken();
    REQUIRE(second.size() == 3);
    CHECK(second[0].hits == 2);
    CHECK(second[0].fingerprints == first[0].fingerprints);
    CHECK(second[1].block == 1);
    CHECK(second[2].fingerprint == first[2].fingerprint);
    close(m, b->sequence);
  }
  SECTION("what is evicted and computed again has the fingerprints of before") {
    const auto other = prompt(m, words(2, 4 * size)).sequence;
    std::vector<kvcache::block_id> evicted;
    for (const event& e : taken())
      if (e.what == "evict") evicted.push_back(e.block);
    CHECK(evicted == std::vector<kvcache::block_id>{2, 1});
    close(m, other);
    prompt(m, content);
    std::vector<std::uint64_t> again;
    for (const event& e : taken())
      if (e.what == "reference") again.push_back(e.fingerprint);
    CHECK(again == std::vector<std::uint64_t>{first[1].fingerprint, first[2].fingerprint});
  }
  SECTION("other keys, another layer group or another head give other fingerprints") {
    const kvcache::extra_key salt{kvcache::key_kind::salt, "s"};
    close(m, m.open({.content = content, .keys = {&salt, 1}})->sequence);
    const auto salted = taken();
    CHECK(salted[0].fingerprints[0] != first[0].fingerprints[0]);
    const text moved = words(3, size) + content;
    close(m, m.open({.content = moved})->sequence);
    CHECK(taken()[0].fingerprints[1] != first[0].fingerprints[0]);
    const kvcache::layer_group groups[]{{size}, {size}};
    kvcache::block_manager<told_listener> two({.blocks = 8, .layer_groups = groups});
    close(two, two.open({.content = content})->sequence);
    const auto both = taken();
    REQUIRE(both.size() == 2);
    CHECK(both[0].fingerprints == first[0].fingerprints);
    CHECK(both[1].fingerprints[0] != both[0].fingerprints[0]);
  }
  SECTION("a refused request is none") {
    const text long_text = words(4, 6 * size);
    CHECK_FALSE(m.open({.content = long_text, .reserve = long_text.size()}).has_value());
    CHECK(taken().empty());
  }
}

TEST_CASE("random requests under gittins keep counts and never find what is not there") {
  kvcache::block_manager<kvcache::gittins> m({.blocks = 60, .block_size = 4});
  std::uint32_t state = 1;
  const auto below = [&](std::uint32_t n) { return (state = state * 1'664'525u + 1'013'904'223u) / 65'536 % n; };
  std::uint32_t hits = 0;
  for (int i = 0; i < 3000; ++i) {
    const text content = words(static_cast<int>(below(6)), 8 + below(40)) + words(10 + static_cast<int>(below(50)), 9);
    const auto s = prompt(m, content);
    hits += s.reused_tokens != 0 ? 1 : 0;
    REQUIRE(m.probe(content).tokens == content.size() / 4 * 4);
    close(m, s.sequence);
  }
  CHECK(hits > 1000);
  CHECK(m.counts().available() == 60);
}
