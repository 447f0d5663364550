// SPDX-License-Identifier: Apache-2.0
// R7: what makes two blocks one.
#include <set>
#include <string>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::extra_key;
using kvcache::key_kind;

TEST_CASE("R7 with a constant hash two prompts of equal length never share a block") {
  const unsigned hash_bits = GENERATE(0u, 1u, 3u, 64u);
  CAPTURE(hash_bits);
  manager m({.blocks = 200, .block_size = 16, .hash_bits = hash_bits});
  const text one = words(1, 48);
  const text two = words(2, 48);
  const auto a = prompt(m, one);
  const auto b = prompt(m, two);
  CHECK(b.reused_tokens == 0);
  std::set<kvcache::block_id> all;
  for (const auto s : {a.sequence, b.sequence})
    for (const kvcache::block_id block : table(m, s)) CHECK(all.insert(block).second);
  CHECK(m.probe(one).tokens == 48);
  CHECK(m.probe(two).tokens == 48);
  CHECK(m.probe(head(one, 16) + head(two, 32)).tokens == 16);

  // Many chains, taken out again in the middle of the collisions.
  std::vector<kvcache::sequence_id> open;
  for (int topic = 10; topic < 40; ++topic) open.push_back(prompt(m, words(topic, 32)).sequence);
  for (std::size_t i = 0; i < open.size(); i += 2) close(m, open[i]);
  const text hundred = words(50, 16 * 100);
  REQUIRE(m.open({.content = hundred, .reserve = hundred.size()}).has_value());
  for (int topic = 11; topic < 40; topic += 2) CHECK(m.probe(words(topic, 32)).tokens == 32);
}

TEST_CASE("R7 equal content after different heads is different content") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 20, .block_size = block_size});
  const text tail = words(9, block_size);
  prompt(m, words(1, block_size) + tail);
  CHECK(m.probe(words(2, block_size) + tail).tokens == 0);
  CHECK(m.probe(tail).tokens == 0);
  const auto b = prompt(m, words(2, block_size) + tail);
  CHECK(b.reused_tokens == 0);
  CHECK(m.counts().referenced == 4);
}

TEST_CASE("R7 a parent's block evicted and handed out again: no old child matches under the new content") {
  const std::uint32_t size = GENERATE(1u, 4u, 16u);
  CAPTURE(size);
  manager m({.blocks = 2, .block_size = size});
  const text second = words(2, size);
  close(m, prompt(m, words(1, size) + second).sequence);
  REQUIRE(m.probe(words(1, size) + second).tokens == 2 * size);
  // The child's block 2 goes to other content first, then the parent's block 1 to new content, as a first block too.
  prompt(m, words(3, size));
  const text fresh = words(4, size);
  CHECK(table(m, prompt(m, fresh).sequence) == ids{1});
  CHECK(m.probe(fresh).tokens == size);
  CHECK(m.probe(fresh + second).tokens == size);
  CHECK(m.probe(words(1, size) + second).tokens == 0);
}

TEST_CASE("R7 only leaves are evicted, so a cached prefix never lacks its head") {
  const std::uint32_t size = GENERATE(1u, 4u, 16u);
  CAPTURE(size);
  manager m({.blocks = 8, .block_size = size});
  const text stem = words(1, 2 * size);
  const text left = stem + words(2, 2 * size);
  const text right = stem + words(3, 2 * size);
  const auto a = prompt(m, left).sequence;
  const auto b = prompt(m, right).sequence;
  close(m, a);
  close(m, b);
  const std::uint32_t expected_left[] = {4, 3, 2, 2, 2, 1, 0};  // blocks
  const std::uint32_t expected_right[] = {4, 4, 4, 3, 2, 1, 0};
  for (std::uint32_t taken = 0; taken <= 6; ++taken) {
    CHECK(m.probe(left).tokens == expected_left[taken] * size);
    CHECK(m.probe(right).tokens == expected_right[taken] * size);
    if (taken == 0) {
      const text filler = words(4, 2 * size);
      REQUIRE(m.open({.content = filler, .reserve = 2 * size}).has_value());
    }
    if (taken < 6) {
      const text filler = words(5, 1);
      REQUIRE(m.open({.content = filler, .reserve = 1}).has_value());
    }
  }
}

TEST_CASE("R3 the null block is never cached, whatever is committed") {
  const std::uint32_t size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 3, .block_size = size});
  const text content = words(1, 2 * size + 1);
  const auto s = m.open({.content = content})->sequence;
  for (std::uint32_t i = 0; i < 2; ++i) {
    extend(m, s, words(1, size, i * size));
    CHECK_FALSE(m.cached(kvcache::null_block));
  }
  CHECK(m.probe(content).tokens == 2 * size);
}

TEST_CASE("V7 a salt shares with its equal only") {
  manager m({.blocks = 20, .block_size = 16});
  const text content = words(1, 59);
  const extra_key one{key_kind::salt, "1"};
  const extra_key two{key_kind::salt, "2"};
  prompt(m, content, {&one, 1});
  CHECK(prompt(m, content, {&one, 1}).reused_tokens == 48);
  CHECK(prompt(m, content, {&two, 1}).reused_tokens == 0);
  CHECK(m.probe(content).tokens == 0);
}

TEST_CASE("R7 equal text as adapter in one request and as salt in another is no hit") {
  manager m({.blocks = 20, .block_size = 16});
  const text content = words(1, 33);
  const extra_key adapter{key_kind::adapter, "red"};
  const extra_key salt{key_kind::salt, "red"};
  prompt(m, content, {&adapter, 1});
  CHECK(m.probe(content, {&adapter, 1}).tokens == 32);
  CHECK(m.probe(content, {&salt, 1}).tokens == 0);
  CHECK(prompt(m, content, {&salt, 1}).reused_tokens == 0);
}

TEST_CASE("R7 every kind has its own tag, and where one key ends and the next begins counts") {
  manager m({.blocks = 200, .block_size = 4});
  const text content = words(1, 4);
  using keys = std::vector<extra_key>;
  const std::string with_zero("a\0b", 3);
  const std::vector<keys> sets{
      {},
      {{key_kind::adapter, "x"}},
      {{key_kind::image, "x"}},
      {{key_kind::salt, "x"}},
      {{key_kind::generation, "x"}},
      {{key_kind::adapter, "x"}, {key_kind::salt, "x"}},
      {{key_kind::adapter, ""}},
      {{key_kind::salt, ""}},
      {{key_kind::salt, "a"}},
      {{key_kind::salt, "ab"}},
      {{key_kind::salt, "a"}, {key_kind::salt, "b"}},
      {{key_kind::salt, with_zero}},
  };
  for (std::size_t i = 0; i < sets.size(); ++i) {
    CAPTURE(i);
    CHECK(m.probe(content, sets[i]).tokens == 0);
    prompt(m, content, sets[i]);
    CHECK(m.probe(content, sets[i]).tokens == 4);
  }
  const keys turned{{key_kind::salt, "x"}, {key_kind::adapter, "x"}, {key_kind::salt, "x"}};
  CHECK(m.probe(content, turned).tokens == 4);
}

TEST_CASE("R7 a set of keys lives as long as a sequence or a cached block under it, and comes back new") {
  manager m({.blocks = 4, .block_size = 4});
  const text content = words(1, 4);
  for (int tenant = 0; tenant < 1000; ++tenant) {
    CAPTURE(tenant);
    const std::string name = "tenant " + std::to_string(tenant);
    const extra_key salt{key_kind::salt, name};
    CHECK(m.probe(content, {&salt, 1}).tokens == 0);
    const auto s = prompt(m, content, {&salt, 1});
    CHECK(s.reused_tokens == 0);
    close(m, s.sequence);
    CHECK(m.probe(content, {&salt, 1}).tokens == 4);
    for (int before = 0; before < 3 && before < tenant; ++before) {
      const std::string earlier = "tenant " + std::to_string(tenant - 1 - before);
      const extra_key other{key_kind::salt, earlier};
      CHECK(m.probe(content, {&other, 1}).tokens == 4);
    }
  }
}

TEST_CASE("R7 a fingerprint equals no token id, and a negative id is a unit of its own") {
  manager m({.blocks = 10, .block_size = 1});
  const std::vector<kvcache::content_unit> image{kvcache::fingerprint(5)};
  const text id{5};
  const text minus{-1};
  const std::vector<kvcache::content_unit> wide{~kvcache::content_unit{0}};
  const auto s = m.open({.content = image})->sequence;
  compute(m, s, 1);
  REQUIRE(m.commit(s, image).has_value());
  CHECK(m.probe(image).tokens == 1);
  CHECK(m.probe(id).tokens == 0);
  prompt(m, minus);
  CHECK(m.probe(wide).tokens == 0);
}

TEST_CASE("R7 a duplicate gives way on commit: the later block is given back and the cached one shared") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  manager m({.blocks = 8, .block_size = block_size});
  const text content = words(1, 2 * block_size);
  const auto a = m.open({.content = content, .reserve = content.size()})->sequence;
  const auto b = m.open({.content = content, .reserve = content.size()})->sequence;
  compute(m, a, 2 * block_size);
  compute(m, b, 2 * block_size);
  CHECK(m.counts().referenced == 4);
  REQUIRE(m.commit(a, content).has_value());
  REQUIRE(m.commit(b, content).has_value());
  CHECK(table(m, b) == table(m, a));
  CHECK(table(m, a) == ids{1, 2});
  CHECK(m.ref_count(1) == 2);
  CHECK(m.counts() == kvcache::block_counts{.free = 6, .referenced = 2});
}

TEST_CASE("R7 a chain of a million tokens is built, found, cut and taken apart without deep recursion") {
  const std::uint32_t block_size = GENERATE(1u, 16u);
  const std::uint32_t tokens = 1'000'000;
  manager m({.blocks = tokens / block_size + 1, .block_size = block_size});
  const text content = words(1, tokens);
  const auto s = prompt(m, content).sequence;
  CHECK(m.probe(content).tokens == tokens);
  const auto again = m.open({.content = content});
  REQUIRE(again.has_value());
  CHECK(again->reused_tokens == (tokens - 1) / block_size * block_size);
  close(m, again->sequence);
  close(m, s);
  CHECK(m.counts().evictable == tokens / block_size);
  // Overwriting the first block forgets all that follow it.
  const text first = head(content, block_size + 1);
  const auto cut = m.open({.content = first})->sequence;
  CHECK(m.counts().referenced == 1);
  if (block_size > 1) {
    REQUIRE(m.truncate(cut, 1).has_value());
    compute(m, cut, 1);
    CHECK(m.counts().evictable == 0);
    CHECK(m.probe(content).tokens == 0);
  }
  close(m, cut);
  drain(m);
}
