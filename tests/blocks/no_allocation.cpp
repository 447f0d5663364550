// SPDX-License-Identifier: Apache-2.0
// No heap allocation per call once arrays have grown: every allocation of the program is counted.
#include <kvcache/blocks/block_manager.hpp>

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "catch.hpp"
#include "counting_new.hpp"

namespace {

using manager = kvcache::block_manager<kvcache::lru>;

/// What an engine does all day, in turns of ever new content: prompts with a common head, steps that overlap, drafts
/// that are not confirmed, forks, cuts. True where everything succeeded.
bool turn(manager& m, std::span<std::int32_t> content, std::int32_t number) {
  constexpr std::uint32_t count = 6;
  std::array<kvcache::sequence_id, count> sequences{};
  std::array<kvcache::want, count> wants{};
  std::array<std::uint32_t, count> counts{};
  const std::array keys{kvcache::extra_key{kvcache::key_kind::adapter, "an adapter with a long name of its own"},
                        kvcache::extra_key{kvcache::key_kind::salt, number % 2 == 0 ? "even tenants" : "odd tenants"}};
  bool good = true;
  for (std::uint32_t i = 0; i < count; ++i) {
    for (std::size_t t = content.size() / 2; t < content.size(); ++t)
      content[t] = number * 1'000 + static_cast<std::int32_t>(i * 100 + t);
    const auto some_keys =
        i % 2 == 0 ? std::span<const kvcache::extra_key>{} : std::span<const kvcache::extra_key>(keys);
    good = good && m.predict({.content = content, .keys = some_keys, .reserve = content.size()}).fits();
    const auto opened = m.open({.content = content, .keys = some_keys, .reserve = content.size()});
    if (!opened) return false;
    sequences[i] = opened->sequence;
    wants[i] = {opened->sequence, static_cast<std::uint32_t>(content.size()) - opened->reused_tokens};
    auto prefill = m.begin({&wants[i], 1});
    good = good && prefill && prefill->accept();
    good =
        good &&
        m.commit(
            sequences[i],
            kvcache::content_view(std::span<const std::int32_t>(content)).sub(opened->reused_tokens, wants[i].tokens));
    good = good && m.retire(*prefill);
    good = good && m.probe(content, some_keys).tokens >= content.size() / 16 * 16;
  }
  kvcache::step last;
  for (std::int32_t n = 0; n < 40; ++n) {
    for (std::uint32_t i = 0; i < count; ++i) wants[i] = {sequences[i], 1};
    auto step = m.begin(wants);
    good = good && step && step->padded().rows() == count;
    if (last.open()) good = good && last.accept() && m.retire(last);
    last = std::move(*step);
  }
  good = good && last.accept();
  for (std::uint32_t i = 0; i < count; ++i) {
    const std::array<std::int32_t, 3> ids{number, static_cast<std::int32_t>(i), 7};
    good = good && m.commit(sequences[i], ids);
    wants[i].tokens = 20;
    counts[i] = i;
  }
  good = good && m.retire(last);
  auto drafts = m.begin(wants);
  good = good && drafts && drafts->accept(counts) && m.retire(*drafts);
  {
    auto dropped = m.begin(wants);
    good = good && dropped;
  }
  const auto fork = m.fork(sequences[0]);
  const kvcache::want both[]{{sequences[0], 1}, {*fork, 1}};
  auto copies = m.begin(both);
  good = good && copies && copies->accept() && m.retire(*copies) && m.truncate(*fork, 11);
  good = good && m.close(*fork);
  for (const auto s : sequences) good = good && m.close(s);
  return good && m.counts().available() == m.capacity();
}

}  // namespace

TEST_CASE("No heap allocation per call: open, begin, accept, commit, retire, fork, truncate, close") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  CAPTURE(block_size);
  // Small enough that every turn evicts.
  manager m({.blocks = 1200 / block_size, .block_size = block_size});
  std::vector<std::int32_t> content(90, 5);
  for (std::int32_t number = 0; number < 20; ++number) REQUIRE(turn(m, content, number));
  const std::uint64_t before = allocations;
  const std::uint64_t evicted = m.statistics().evicted_blocks;
  bool good = true;
  for (std::int32_t number = 20; number < 200; ++number) good = good && turn(m, content, number);
  const std::uint64_t after = allocations;
  CHECK(good);
  CHECK(after == before);
  CHECK(m.statistics().evicted_blocks > evicted + 100);
  CHECK(m.statistics().hit_tokens > 0);
}

TEST_CASE("Memory grows with tokens: a sequence takes blocks and table entries as it goes, not for a longest length") {
  manager m({.blocks = 100'000, .block_size = 16});
  const std::int32_t token = 1;
  bool good = true;
  const std::uint64_t at_first = allocated_bytes;
  const auto s = m.open({.content = kvcache::content_view(&token, 1)});
  good = s.has_value() && m.counts().referenced == 0;
  std::array<std::uint64_t, 3> bytes{};
  for (std::uint32_t length = 1; good && length <= 4'000; ++length) {
    const kvcache::want w{s->sequence, 1};
    auto step = m.begin({&w, 1});
    good = step && step->accept() && m.retire(*step) && m.counts().referenced == (length + 15) / 16;
    if (length == 1) bytes[0] = allocated_bytes - at_first;
    if (length == 400) bytes[1] = allocated_bytes - at_first;
    if (length == 4'000) bytes[2] = allocated_bytes - at_first;
  }
  REQUIRE(good);
  CAPTURE(bytes[0], bytes[1], bytes[2]);
  CHECK(bytes[0] < 2'000);
  // A table entry takes 4 bytes, in the table and in the step; arrays that double were allocated twice over.
  CHECK(bytes[1] - bytes[0] < 400 / 16 * 4 * 2 * 4);
  CHECK(bytes[2] - bytes[0] < 4'000 / 16 * 4 * 2 * 4);
}
