// SPDX-License-Identifier: Apache-2.0
// Layer groups with a window: blocks go back while the sequence runs, and a prefix counts where its end is warm.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::errc;
using kvcache::layer_group;
using kvcache::want;

namespace {

/// Evicts the blocks that a test has named, in their order.
struct named_victims : kvcache::lru {
  using lru::lru;
  static inline ids next;
  void erase(kvcache::block_id block) noexcept {
    lru::erase(block);
    if (!next.empty() && next.front() == block) next.erase(next.begin());
  }
  [[nodiscard]] kvcache::block_id victim() const noexcept { return next.empty() ? lru::victim() : next.front(); }
};
using chosen = kvcache::block_manager<named_victims>;

/// Evicts just these: of the blocks that a token takes, one in each group, all others are free.
void evict(chosen& m, const ids& blocks) {
  REQUIRE(m.counts().free + blocks.size() == m.layer_group_count());
  named_victims::next = blocks;
  const text one = words(77, 1);
  const auto s = m.open({.content = one});
  compute(m, s->sequence, 1);
}

/// Holds what is free, but for what evicting one block needs.
void use_up(chosen& m) {
  const text one = words(78, 1);
  const auto free = m.counts().free - (m.layer_group_count() - 1);
  REQUIRE(free % m.layer_group_count() == 0);
  if (free == 0) return;
  REQUIRE(m.open({.content = one, .reserve = std::uint64_t{free / m.layer_group_count()} * m.block_size()}));
}

}  // namespace

TEST_CASE("R17 a layer group with a window of 0 is refused") {
  const std::array groups{layer_group{4}, layer_group{4, 0}};
  CHECK_THROWS_WITH(manager({.blocks = 8, .layer_groups = groups}), Catch::Contains("layer group 1: window 0"));
}

TEST_CASE("V19 a window of 4 over blocks of 2 gives back blocks as the sequence grows") {
  const std::array groups{layer_group{2, 4}};
  const std::array<std::pair<std::uint32_t, std::uint32_t>, 9> released{
      {{0, 0}, {1, 0}, {2, 0}, {3, 0}, {4, 0}, {5, 1}, {6, 1}, {7, 2}, {11, 4}}};
  for (const auto& [tokens, blocks] : released) {
    CAPTURE(tokens);
    CHECK(kvcache::layer_groups(groups, {2}).first_needed(0, tokens) == blocks);
    manager m({.blocks = 20, .layer_groups = groups});
    const text content = words(1, 12);
    const auto s = m.open({.content = content})->sequence;
    extend(m, s, head(content, tokens));
    ids holes(blocks, kvcache::null_block);
    const ids all = table(m, s);
    CHECK(ids(all.begin(), all.begin() + blocks) == holes);
    CHECK(std::count(all.begin(), all.end(), kvcache::null_block) == blocks);
    CHECK(m.counts().referenced == all.size() - blocks);
    CHECK(m.counts().evictable == blocks);
  }
}

TEST_CASE("V19 block by block, at every length and block size, what a query sees is held and no block more") {
  const std::uint32_t size = GENERATE(1u, 3u, 16u);
  const std::uint32_t window = GENERATE(1u, 2u, 7u, 16u, 33u);
  CAPTURE(size, window);
  const std::array groups{layer_group{size, window}};
  manager m({.blocks = 100, .layer_groups = groups});
  const text content = words(1, 90);
  const text first = head(content, 1);  // where the window is 1, nothing has to be cached of a longer one
  const auto s = m.open({.content = first})->sequence;
  for (std::uint32_t n = 1; n <= content.size(); ++n) {
    extend(m, s, {content.begin() + n - 1, content.begin() + n});
    const ids all = table(m, s);
    for (std::uint32_t i = 0; i < all.size(); ++i) {
      CAPTURE(n, i);
      // The next query stands at position n and sees down to n - window + 1.
      const bool seen = (i + 1) * size + window > n + 1;
      REQUIRE((all[i] != kvcache::null_block) == seen);
    }
  }
}

TEST_CASE("V19 blocks behind the window wait for their commit, one step long, so that they can be found") {
  const std::array groups{layer_group{4}, layer_group{4, 5}};
  const text content = words(1, 41);
  SECTION("the whole prompt in one step, larger than the window") {
    manager m({.blocks = 30, .layer_groups = groups});
    const auto s = m.open({.content = content})->sequence;
    compute(m, s, 40);
    const ids all = table(m, s, 1);
    CHECK(std::count(all.begin(), all.end(), kvcache::null_block) == 0);
    REQUIRE(m.commit(s, head(content, 40)).has_value());
    CHECK(table(m, s, 1)[8] == kvcache::null_block);
    CHECK(table(m, s, 1)[9] != kvcache::null_block);
    CHECK(m.counts().evictable == 9);
    // And a shorter prefix of it is found, its window's block being cached.
    CHECK(m.probe(head(content, 23)).tokens == 20);
  }
  SECTION("never committed: they go one step later, and take no room for good") {
    manager m({.blocks = 30, .layer_groups = groups});
    const auto s = m.open({.content = content})->sequence;
    compute(m, s, 20);
    CHECK(m.counts().referenced == 10);
    compute(m, s, 8);
    CHECK(m.counts().referenced == 7 + 3);  // all of 28; of the other all but the 4 that 20 tokens had left behind
    compute(m, s, 1);
    CHECK(m.counts().referenced == 8 + 2);
    CHECK(m.counts().evictable == 0);
    close(m, s);
    CHECK(m.counts().free == 30);
  }
}

TEST_CASE("V18 the longest prefix whose end is warm, in a group with a window") {
  // Window 4 over blocks of 2: two blocks have to be cached before the next query.
  const std::array<std::pair<std::string, std::uint32_t>, 8> cases{{{"FFFFFFFFFF", 0},
                                                                    {"T", 1},
                                                                    {"TF", 1},
                                                                    {"TT", 2},
                                                                    {"TTF", 2},
                                                                    {"TTTF", 3},
                                                                    {"TTFTFFTTFTTT", 12},
                                                                    {"TTFTFFTTFFF", 8}}};
  for (const auto& [pattern, blocks] : cases) {
    CAPTURE(pattern);
    const std::array groups{layer_group{2, 4}};
    const auto count = static_cast<std::uint32_t>(pattern.size());
    chosen m({.blocks = count, .layer_groups = groups});
    const text content = words(1, 2 * count);
    close(m, prompt(m, content).sequence);
    REQUIRE(m.counts().evictable == count);
    for (std::uint32_t i = 0; i < count; ++i)
      if (pattern[i] == 'F') evict(m, {i + 1});  // a new pool hands out blocks from 1 up
    CHECK(m.probe(content).tokens == 2 * blocks);
  }
}

TEST_CASE("V13 full attention and two windows of two blocks in one pool") {
  const std::array groups{layer_group{16}, layer_group{16, 33}, layer_group{16, 33}};
  const auto start = [](auto& m) {
    const text common = words(1, 48);
    const text content = common + words(2, 7);
    const auto a = m.open({.content = content, .reserve = 55})->sequence;
    CHECK(table(m, a, 0) == ids{1, 2, 3, 4});
    CHECK(table(m, a, 1) == ids{5, 6, 7, 8});
    CHECK(table(m, a, 2) == ids{9, 10, 11, 12});
    extend(m, a, content);
    return a;
  };
  const text second = words(1, 48) + words(3, 5);
  SECTION("a second request takes what its next query sees") {
    manager m({.blocks = 20, .layer_groups = groups});
    start(m);
    const auto b = m.open({.content = second, .reserve = second.size()});
    CHECK(b->reused_tokens == 48);
    CHECK(table(m, b->sequence, 0) == ids{1, 2, 3, 13});
    CHECK(table(m, b->sequence, 1) == ids{0, 6, 7, 14});
    CHECK(table(m, b->sequence, 2) == ids{0, 10, 11, 15});
  }
  // Everything evictable, and nothing else left, so that a test can choose what goes.
  const auto all_evictable = [&](chosen& m) {
    close(m, start(m));
    use_up(m);
  };
  chosen m({.blocks = 17, .layer_groups = groups});
  all_evictable(m);
  REQUIRE(m.probe(second).tokens == 48);
  const auto [gone, tokens] = GENERATE(std::pair{5u, 48u}, std::pair{9u, 48u}, std::pair{1u, 32u}, std::pair{3u, 32u},
                                       std::pair{7u, 32u}, std::pair{11u, 32u});
  CAPTURE(gone);
  evict(m, {gone});
  // Named first of the full group's chain, its last block goes instead: only leaves do.
  CHECK(m.probe(second).tokens == tokens);
}

TEST_CASE("V18 what one window cuts off, another may not end at: look-ups go on until every window agrees") {
  // Windows of 9 over blocks of 4 need two blocks. Blocks 1 to 6 of the group that sees all, 7 to 12, 13 to 18.
  const std::array groups{layer_group{4}, layer_group{4, 9}, layer_group{4, 9}};
  chosen m({.blocks = 18, .layer_groups = groups});
  const text content = words(1, 24);
  const auto s = m.open({.content = content, .reserve = 24})->sequence;
  REQUIRE(table(m, s, 1) == ids{7, 8, 9, 10, 11, 12});
  extend(m, s, content);
  close(m, s);
  // The first window ends at 5 blocks for lack of the 6th, the second then at 4 for lack of the 5th, where the first
  // lacks the 3rd: two are left.
  evict(m, {12, 17, 9});
  CHECK(m.probe(content).tokens == 8);
  const text longer = content + words(2, 1);
  const auto again = m.open({.content = longer, .chunk = 4});
  REQUIRE(again.has_value());
  CHECK(again->reused_tokens == 8);
}

TEST_CASE("R7 once a group that needs all of a prefix has lost a block, what windows hold of it is given up too") {
  const std::array groups{layer_group{4}, layer_group{4, 9}};
  chosen m({.blocks = 9, .layer_groups = groups});
  close(m, prompt(m, words(1, 16)).sequence);
  REQUIRE(m.counts().evictable == 8);
  const ids full{1, 2, 3, 4}, window{5, 6, 7, 8};
  evict(m, {4});  // takes two blocks, its own and the one of the window
  CHECK_FALSE(m.cached(8));
  CHECK(m.cached(7));
  CHECK(m.probe(words(1, 16)).tokens == 12);
  check_counts(m);
}

TEST_CASE("V24 five hits at the head of the eviction order, with a window beside: none is taken for the new blocks") {
  const std::array groups{layer_group{4}, layer_group{4, 9}};
  for (std::uint32_t blocks = 10; blocks <= 16; ++blocks) {
    CAPTURE(blocks);
    manager m({.blocks = blocks, .layer_groups = groups});
    const text cached_text = words(1, 20);
    close(m, prompt(m, cached_text).sequence);
    const text longer = cached_text + words(2, 12);
    const kvcache::open_request request{.content = longer, .reserve = 32};
    const auto a = m.predict(request);
    CHECK(a.reused_tokens == 20);
    CHECK(a.revived_blocks == 5 + 2);
    CHECK(a.new_blocks == 3 + 3);
    const auto s = m.open(request);
    REQUIRE(s.has_value() == (a.fits()));
    CHECK(a.fits() == (blocks >= 16));  // what the whole prompt takes at once
    check_counts(m);
    if (!s) continue;
    ids all = table(m, s->sequence, 0);
    for (const kvcache::block_id b : table(m, s->sequence, 1))
      if (b != kvcache::null_block) all.push_back(b);
    CHECK(all.size() == 13);
    std::sort(all.begin(), all.end());
    CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
    for (const kvcache::block_id b : all) CHECK(m.ref_count(b) == 1);
  }
}

TEST_CASE("V23 512 tokens in chunks of 128 with a window of 64 beside full attention take 45 blocks") {
  const std::array groups{layer_group{16}, layer_group{16, 64}};
  const text content = words(1, 512);
  const kvcache::open_request request{.content = content, .reserve = 512, .chunk = 128};
  manager enough({.blocks = 45, .layer_groups = groups});
  CHECK(enough.predict(request).total_blocks == 45);
  CHECK(enough.predict(request).fits());
  manager short_of_one({.blocks = 44, .layer_groups = groups});
  CHECK_FALSE(short_of_one.predict(request).fits());
  CHECK(short_of_one.open(request).error() == kvcache::failure{errc::exceeds_pool, 45, 44});

  // And that is what it takes: the bound holds at every step, wherever chunks begin.
  const std::uint32_t first = GENERATE(128u, 1u, 17u, 127u);
  CAPTURE(first);
  const auto s = enough.open(request)->sequence;
  std::uint32_t most = 0;
  for (std::uint32_t done = 0; done < 512;) {
    const std::uint32_t tokens = std::min(done == 0 ? first : 128u, 512 - done);
    const want w{s, tokens};
    auto step = enough.begin({&w, 1});
    REQUIRE(step.has_value());
    most = std::max(most, enough.counts().referenced);
    REQUIRE(step->accept().has_value());
    REQUIRE(enough.commit(s, text(content.begin() + done, content.begin() + done + tokens)).has_value());
    REQUIRE(enough.retire(*step).has_value());
    done += tokens;
  }
  CHECK(most <= 45);
  CHECK(most >= 43);
}

TEST_CASE("a fork or cut that a window has moved past takes blocks back from the cache, or is refused with the least") {
  const std::array groups{layer_group{4}, layer_group{4, 8}};
  SECTION("cached still") {
    manager m({.blocks = 40, .layer_groups = groups});
    const auto s = prompt(m, words(1, 40)).sequence;
    CHECK(table(m, s, 1)[7] == kvcache::null_block);
    const auto f = m.fork(s, 18);
    REQUIRE(f.has_value());
    CHECK(table(m, *f, 1)[1] == kvcache::null_block);
    for (std::size_t i = 2; i < 5; ++i) CHECK(table(m, *f, 1)[i] != kvcache::null_block);
    REQUIRE(m.truncate(s, 18).has_value());
    CHECK(table(m, s, 1) == table(m, *f, 1));
    check_counts(m);
    extend(m, s, words(2, 9));
    CHECK(m.probe(head(words(1, 40), 18) + words(2, 9)).tokens == 24);
  }
  SECTION("gone") {
    manager m({.blocks = 20, .layer_groups = groups});
    const auto s = prompt(m, words(1, 40)).sequence;
    const text one = words(3, 1);
    const auto other = m.open({.content = one, .reserve = 16});  // takes the 8 that are evictable
    REQUIRE(other.has_value());
    REQUIRE(m.counts().available() == 0);
    const auto before = m.counts();
    CHECK(m.fork(s, 18).error() == kvcache::failure{errc::behind_window, 18, 39});
    CHECK(m.truncate(s, 38).error() == kvcache::failure{errc::behind_window, 38, 39});
    CHECK(m.counts() == before);
    CHECK(*m.length(s) == 40);
    REQUIRE(m.truncate(s, 39).has_value());
  }
}

TEST_CASE("V8 nothing is left of a sequence whose window holds none of its blocks") {
  const std::array groups{layer_group{2, 1}};
  manager m({.blocks = 4, .layer_groups = groups});
  const auto s = prompt(m, words(1, 4)).sequence;
  CHECK(table(m, s) == ids{0, 0});
  extend(m, s, words(1, 3, 4));
  CHECK(m.probe(words(1, 6)).tokens == 6);
  close(m, s);
  REQUIRE(m.reset().has_value());
  CHECK(m.counts().free == 4);
  CHECK_FALSE(m.cached(1));
}

TEST_CASE("Where a query sees its own token only, any prefix is there, whatever its keys") {
  const std::array groups{layer_group{2, 1}};
  const manager m({.blocks = 4, .layer_groups = groups});
  const std::array unused{kvcache::extra_key{kvcache::key_kind::salt, "nobody's"}};
  CHECK(m.probe(words(1, 6)).tokens == 6);
  CHECK(m.probe(words(1, 6), unused).tokens == 6);
}

TEST_CASE("Tokens that a window has left behind have no slots") {
  const std::array groups{layer_group{2, 4}};
  manager m({.blocks = 8, .layer_groups = groups});
  const auto s = prompt(m, words(1, 7)).sequence;
  REQUIRE(table(m, s) == ids{0, 0, 3, 4});
  std::vector<kvcache::slot_id> slots(6);
  REQUIRE(m.slots(s, 1, slots).has_value());
  CHECK(slots == std::vector<kvcache::slot_id>{kvcache::no_slot, kvcache::no_slot, kvcache::no_slot, 6, 7, 8});
}
