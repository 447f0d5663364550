// SPDX-License-Identifier: Apache-2.0
// Caches whose formats seal whole blocks: what is stored does not depend on how it came, drafts are never sealed, and
// the tail pool loses nothing.

#include "model.hpp"

#include "../support/catch.hpp"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

namespace {

using namespace kvcache;

template <unsigned BlockSize, class K, class V>
struct with : policies {
  static constexpr unsigned block_size = BlockSize;
  using dtype = kv_dtype<K, V>;
};
using keys_by_channel = with<16, int4_per_channel, int4_grouped<32>>;
using both_by_channel = with<7, int8_per_channel, rotated<int2_per_channel>>;
using values_by_channel = with<64, fp8_e4m3, int4_per_channel_symmetric>;

constexpr std::uint32_t tokens = 200;

std::vector<std::int32_t> numbers(std::int32_t first, std::size_t count) {
  std::vector<std::int32_t> v(count);
  std::iota(v.begin(), v.end(), first);
  return v;
}

template <class Policies>
using engine_of = kvcache_test::toy_engine<Policies>;

/// The stored bytes of a sequence's tokens, layer by layer: codes and scales, from the tail pool where they lie there.
template <class Policies>
std::vector<std::byte> stored(const engine_of<Policies>& engine, sequence_id id, std::uint32_t count) {
  const auto table = engine.cache.manager().table(id).value();
  const std::uint32_t size = engine.cache.block_size();
  std::vector<std::byte> bytes;
  const auto add = [&](const stored_head& head, std::uint32_t dim) {
    bytes.insert(bytes.end(), head.codes, head.codes + code_bytes(head.dtype, dim));
    if (head.scales != nullptr) bytes.insert(bytes.end(), head.scales, head.scales + scale_bytes(head.dtype, dim));
  };
  for (std::uint32_t layer = 0; layer < kvcache_test::toy_model::layers; ++layer) {
    const kv_view view = engine.cache.view(layer);
    for (std::uint32_t t = 0; t < count; ++t) {
      const block_id entry = engine.cache.manager().table_entry(table[t / size]);
      for (std::uint32_t head = 0; head < view.kv_heads; ++head) {
        add(view.k_head(entry, t % size, head), view.head_dim);
        add(view.v_head(entry, t % size, head), view.v_dim());
      }
    }
  }
  return bytes;
}

template <class Policies>
std::uint32_t tails_in_use(const engine_of<Policies>& engine) {
  return engine.cache.manager().tail_blocks() - engine.cache.manager().tail_blocks_available();
}

}  // namespace

TEMPLATE_TEST_CASE("attention_13 R20 stored bytes do not depend on how tokens were chunked", "", keys_by_channel,
                   both_by_channel, values_by_channel) {
  const auto prompt = numbers(7, tokens);
  const auto bytes_of = [&](std::initializer_list<std::uint32_t> chunks) {
    engine_of<TestType> engine(kvcache_test::some_blocks<TestType>(64));
    auto s = engine.open(prompt);
    auto chunk = chunks.begin();
    while (s.computed < tokens) {
      engine.run({&s}, *chunk);
      if (chunk + 1 != chunks.end()) ++chunk;
    }
    CHECK(tails_in_use(engine) == (tokens % engine.cache.block_size() != 0 ? 1 : 0));
    const auto table = engine.cache.manager().table(s.id).value();
    for (std::uint32_t b = 0; b < tokens / engine.cache.block_size(); ++b)
      CHECK(engine.cache.manager().table_entry(table[b]) == table[b]);  // sealed
    CHECK(engine.error(s) <= 1);
    return stored(engine, s.id, tokens);
  };
  const auto at_once = bytes_of({tokens});
  CHECK(bytes_of({32, 1}) == at_once);
  CHECK(bytes_of({5, 27, 13, 1, 64, 3}) == at_once);
}

TEMPLATE_TEST_CASE("R20 blocks of accepted tokens are sealed, drafts never", "", keys_by_channel, both_by_channel,
                   values_by_channel) {
  engine_of<TestType> engine(kvcache_test::some_blocks<TestType>(64));
  const std::uint32_t size = engine.cache.block_size();
  auto s = engine.open(numbers(0, 3 * size));
  // All but the last two tokens, then four drafts beyond them.
  const want most[]{{s.id, 3 * size - 2}};
  auto first = engine.cache.begin(most).value();
  CHECK(engine.cache.manager().seals().empty());
  first.accept().value();
  CHECK(engine.cache.manager().seals().size() == 2);
  engine.cache.retire(first).value();
  CHECK(engine.cache.manager().seals().empty());
  CHECK(tails_in_use(engine) == 1);

  const want drafts[]{{s.id, 6}};
  auto second = engine.cache.begin(drafts).value();
  const std::uint32_t accepted = 1;
  second.accept({&accepted, 1}).value();
  CHECK(engine.cache.manager().seals().empty());  // the block that the drafts had filled
  engine.cache.retire(second).value();
  CHECK(tails_in_use(engine) == 1);
  CHECK((engine.cache.manager().table_entry(engine.cache.manager().table(s.id).value()[2]) & tail_bit) != 0);

  const want last[]{{s.id, 1}};
  auto third = engine.cache.begin(last).value();
  third.accept().value();
  CHECK(engine.cache.manager().seals().size() == 1);
  engine.cache.retire(third).value();
  CHECK(tails_in_use(engine) == 0);
}

TEST_CASE("R20 a sealed block that is cut and written again is reopened from its sealed bytes") {
  engine_of<keys_by_channel> engine(kvcache_test::some_blocks<keys_by_channel>(16));
  auto s = engine.open(numbers(0, 32));
  engine.run({&s});
  const kv_view view = engine.cache.view(1);
  const block_id block = engine.cache.manager().table(s.id).value()[1];
  float sealed[64];
  read_head(view.k_head(block, 3, 1), 64, sealed);

  engine.truncate(s, 20);
  s.tokens.push_back(99);
  engine.run({&s});
  const block_id now = engine.cache.manager().table(s.id).value()[1];
  const block_id entry = engine.cache.manager().table_entry(now);
  REQUIRE((entry & tail_bit) != 0);
  float reopened[64];
  read_head(view.k_head(entry, 3, 1), 64, reopened);
  for (int d = 0; d < 64; ++d) CHECK(reopened[d] == to_float(from_float<bf16>(sealed[d])));
  CHECK(engine.error(s) <= 1);
}

TEST_CASE("R20 a reopened block is read where it lies, though an earlier step's table is used again") {
  engine_of<keys_by_channel> engine(kvcache_test::some_blocks<keys_by_channel>(16));
  auto s = engine.open(numbers(0, 32));
  engine.run({&s});
  engine.run({&s});  // of no tokens: its table names the sealed blocks
  engine.truncate(s, 20);
  s.tokens.push_back(99);
  engine.run({&s});
  CHECK(engine.error(s) <= 1);
  const want wants[]{{s.id, 1}};
  auto step = engine.cache.begin(wants).value();
  const block_id block = engine.cache.manager().table(s.id).value()[1];
  CHECK(step.batch().tables.row(0)[1] == engine.cache.manager().table_entry(block));
  CHECK((engine.cache.manager().table_entry(block) & tail_bit) != 0);
}

TEST_CASE("R20 blocks that are held for later have no place in the tail pool before they are written") {
  engine_of<keys_by_channel> engine(kvcache_test::some_blocks<keys_by_channel>(16));
  const auto prompt = numbers(0, 60);
  const auto opened = engine.cache.open({.content = prompt, .reserve = 100}).value();
  CHECK(engine.cache.manager().table(opened.sequence).value().size() == 7);
  CHECK(tails_in_use(engine) == 0);
  kvcache_test::toy_engine<keys_by_channel>::sequence s{opened.sequence, prompt, 0, {}};
  for (std::uint32_t i = 0; i < 60; ++i) {
    engine.run({&s}, 1);
    CHECK(tails_in_use(engine) == (s.computed % 16 != 0 ? 1 : 0));
    CHECK(engine.error(s) <= 1);
  }
}

TEST_CASE("R20 a step that is dropped gives its places in the tail pool back, and what was sealed stays sealed") {
  engine_of<keys_by_channel> engine(kvcache_test::some_blocks<keys_by_channel>(32));
  auto& manager = engine.cache.manager();
  auto s = engine.open(numbers(0, 32));
  engine.run({&s});
  engine.truncate(s, 20);
  const auto before = stored(engine, s.id, 20);
  const std::uint32_t available = manager.tail_blocks_available();
  {
    const want wants[]{{s.id, 40}};
    auto step = engine.cache.begin(wants).value();
    CHECK(step.copies().size() == 1);
    CHECK(manager.tail_blocks_available() == available - 3);
    engine.cache.prepare(step);
  }
  CHECK(manager.tail_blocks_available() == available);
  CHECK(stored(engine, s.id, 20) == before);
}

TEST_CASE("R20 a step for which the tail pool has no room is refused by its numbers and changes nothing") {
  kvcache::cache<keys_by_channel>::options options{.blocks = 64};
  options.tail_blocks = 3;
  engine_of<keys_by_channel> engine(std::move(options));
  auto s = engine.open(numbers(0, 100));
  const auto before = engine.cache.manager().counts();
  const want too_many[]{{s.id, 49}};
  const auto refused = engine.cache.begin(too_many);
  REQUIRE(!refused);
  CHECK(refused.error() == failure{errc::out_of_tail_blocks, 4, 3});
  CHECK(engine.cache.manager().counts() == before);
  CHECK(engine.cache.manager().tail_blocks_available() == 3);
  while (s.computed < 100) engine.run({&s}, 48);
  CHECK(engine.error(s) <= 1);
}

TEST_CASE("R20 a place in the tail pool is not used again while a step that reads it is in flight") {
  engine_of<keys_by_channel> engine(kvcache_test::some_blocks<keys_by_channel>(64));
  auto& manager = engine.cache.manager();
  auto s = engine.open(numbers(0, 64));
  const want half[]{{s.id, 16}};
  auto first = engine.cache.begin(half).value();
  auto second = engine.cache.begin(half).value();  // its table names the first block where it lies now
  const block_id entry = second.batch().tables.row(0)[0];
  CHECK((entry & tail_bit) != 0);
  first.accept().value();
  engine.cache.retire(first).value();
  CHECK(manager.seals().empty());
  CHECK(tails_in_use(engine) == 2);
  auto third = engine.cache.begin(half).value();
  CHECK(third.batch().tables.row(0)[0] == manager.table(s.id).value()[0]);
  for (const block_id other : third.batch().tables.row(0)) CHECK(other != entry);
  second.accept().value();
  engine.cache.retire(second).value();
  CHECK(tails_in_use(engine) == 2);  // the second block's until the third step is over, and the third's
  third.accept().value();
  engine.cache.retire(third).value();
  CHECK(tails_in_use(engine) == 0);
}

TEST_CASE("R20 seals that nobody has carried out keep their places") {
  engine_of<keys_by_channel> engine(kvcache_test::some_blocks<keys_by_channel>(64));
  auto& manager = engine.cache.manager();
  auto s = engine.open(numbers(0, 64));
  const want all[]{{s.id, 64}};
  auto step = engine.cache.begin(all).value();
  step.accept().value();
  manager.retire(step).value();  // behind the cache's back
  CHECK(manager.seals().size() == 4);
  CHECK(tails_in_use(engine) == 4);
  engine.cache.seal();
  CHECK(manager.seals().empty());
  CHECK(tails_in_use(engine) == 0);
}

TEST_CASE("R20 first tokens stay at 16 bits while they are used, and until their place is needed") {
  kvcache::cache<keys_by_channel>::options options{.blocks = 64};
  options.tail_blocks = 4;
  kvcache::cache<keys_by_channel> cache(kvcache_test::toy_model::geometry, std::move(options), {.wide_tokens = 4});
  auto& manager = cache.manager();
  const auto run = [&](const std::vector<std::int32_t>& prompt) {
    const auto opened = cache.open({.content = prompt}).value();
    for (std::uint32_t done = opened.reused_tokens; done < prompt.size();) {
      const want wants[]{
          {opened.sequence, std::min<std::uint32_t>(16, static_cast<std::uint32_t>(prompt.size()) - done)}};
      auto step = cache.begin(wants).value();
      cache.prepare(step);
      step.accept().value();
      cache.commit(opened.sequence, content_view(prompt).sub(done, wants[0].tokens)).value();
      cache.retire(step).value();
      done += wants[0].tokens;
    }
    return opened.sequence;
  };
  const auto is_wide = [&](sequence_id id, std::size_t i) {
    return (manager.table_entry(manager.table(id).value()[i]) & tail_bit) != 0;
  };
  const auto a = run(numbers(0, 48));
  CHECK(is_wide(a, 0));
  CHECK(!is_wide(a, 1));
  CHECK(manager.tail_blocks_available() == 3);
  cache.close(a).value();
  CHECK(manager.tail_blocks_available() == 4);  // it would give way

  // Found again, it is as it was.
  const auto b = cache.open({.content = numbers(0, 48)}).value();
  CHECK(b.reused_tokens == 32);
  CHECK(is_wide(b.sequence, 0));
  CHECK(manager.tail_blocks_available() == 3);
  cache.close(b.sequence).value();

  // Four other sequences need all places; what is cached of the first is read from its sealed bytes from now on.
  std::vector<sequence_id> others;
  for (std::int32_t i = 1; i <= 3; ++i) others.push_back(run(numbers(1000 * i, 16)));
  others.push_back(run(numbers(9000, 5)));
  CHECK(manager.tail_blocks_available() == 0);
  const auto c = cache.open({.content = numbers(0, 48)}).value();
  CHECK(c.reused_tokens == 32);
  CHECK(!is_wide(c.sequence, 0));
  for (const sequence_id id : others) cache.close(id).value();
  cache.close(c.sequence).value();
  CHECK(manager.tail_blocks_available() == 4);
}

TEST_CASE("R20 layers that are kept at 16 bits and quantised ones answer side by side") {
  const std::uint32_t wide[]{1};
  kvcache::cache<keys_by_channel>::options options{.blocks = 32, .tail_blocks = 20, .wide_layers = wide};
  engine_of<keys_by_channel> engine(std::move(options));  // the last layer is the one that is compared
  CHECK(engine.cache.view(0).k_dtype == dtype_id::int4_per_channel);
  CHECK(engine.cache.view(1).k_dtype == dtype_id::bfloat16);
  auto s = engine.open(numbers(0, 100));
  while (s.computed < 100) {
    engine.run({&s}, 21);
    CHECK(engine.error(s) <= 1);
  }
}
