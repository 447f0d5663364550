// SPDX-License-Identifier: Apache-2.0
// What cannot work is refused with value, limit and remedy, and leaves nothing behind.
#include <array>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::errc;
using kvcache::layer_group;

#if KVCACHE_HAS_EXCEPTIONS
TEST_CASE("A pool that cannot be is refused by name of the value") {
  using kvcache::invalid_argument;
  CHECK_THROWS_AS(manager({.blocks = 10, .block_size = 0}), invalid_argument);
  CHECK_THROWS_WITH(manager({.blocks = 10, .block_size = 0}),
                    "layer group 0: block size 0, at least 1 needed; give the tokens that a block holds");
  CHECK_THROWS_AS(manager({.blocks = 0}), invalid_argument);
  CHECK_THROWS_WITH(manager({.blocks = 0}), contains_text("0 blocks"));
  CHECK_THROWS_WITH(manager({.blocks = ~0u}), contains_text("4294967295 blocks"));
  const std::array groups{layer_group{16}, layer_group{0}};
  CHECK_THROWS_WITH(manager({.blocks = 10, .layer_groups = groups}), contains_text("layer group 1"));
  CHECK_THROWS_WITH(manager({.blocks = 10, .hash_bits = 65}), contains_text("65 hash bits, at most 64"));
  CHECK_THROWS_WITH(manager({.blocks = 10, .unit_tokens = 0}), contains_text("0 tokens a unit, from 1 to 268435455"));
  CHECK_THROWS_WITH(manager({.blocks = 10, .unit_tokens = 1u << 28}), contains_text("268435456 tokens a unit"));
  CHECK_THROWS_WITH(manager({.blocks = 10, .events = std::size_t{1} << 60}),
                    contains_text("1152921504606846976 events to keep, at most 1073741824"));
}
#endif

TEST_CASE("An empty prompt is refused") {
  manager m({.blocks = 4, .block_size = 4});
  CHECK(m.open({}).error() == kvcache::failure{errc::empty_content, 0, 1});
  CHECK(m.open({.reserve = 4}).error().code == errc::empty_content);
  CHECK(m.probe({}).tokens == 0);
  CHECK(m.counts().free == 4);
  CHECK(m.statistics() == kvcache::block_statistics{});
}

TEST_CASE("A prompt or reserve longer than the pool is refused at once, whatever its size, and others go on") {
  manager m({.blocks = 4, .block_size = 4});
  const text content = words(1, 4);
  const auto s = prompt(m, content).sequence;
  const std::uint64_t reserve = GENERATE(std::uint64_t{17}, std::uint64_t{1} << 32, ~std::uint64_t{0});
  CAPTURE(reserve);
  const kvcache::open_request request{.content = content, .reserve = reserve};
  CHECK_FALSE(m.predict(request).fits());
  const auto refused = m.open(request).error();
  CHECK(refused.code == errc::exceeds_pool);
  CHECK(refused.limit == 4);
  CHECK(refused.value >= 5);
  CHECK(kvcache::message(refused).find("the pool has 4") != std::string::npos);
  extend(m, s, words(2, 8));
  CHECK(m.statistics().opened_sequences == 1);
}

TEST_CASE("A step that no pool could hold is refused at once") {
  manager m({.blocks = 4, .block_size = 4});
  const text content = words(1, 4);
  const auto s = prompt(m, content).sequence;
  const kvcache::want pool{s, 13};
  CHECK(m.begin({&pool, 1}).error() == kvcache::failure{errc::exceeds_pool, 5, 4});
  const kvcache::want length{s, ~0u};
  CHECK(m.begin({&length, 1}).error() == kvcache::failure{errc::beyond_length, 4 + std::uint64_t{~0u}, ~0u});
}

TEST_CASE("A step whose tokens together pass 32 bits is refused, though each sequence would fit") {
  // Row offsets of a step are 32 bit too.
  constexpr std::uint32_t many = 0x9000'0000u;
  manager m({.blocks = 8, .block_size = 1u << 31});
  const text content = words(1, 1);
  const std::array wants{kvcache::want{m.open({.content = content})->sequence, many},
                         kvcache::want{m.open({.content = content})->sequence, many}};
  CHECK(m.blocks_needed({wants.data(), 1}).value() == 2);
  const kvcache::failure refused{errc::beyond_length, 2 * std::uint64_t{many}, ~0u};
  CHECK(m.blocks_needed(wants).error() == refused);
  CHECK(m.begin(wants).error() == refused);
}

TEST_CASE("R8 slots of block ids beyond 2^31 / stride keep all their bits") {
  // The product alone: a pool with such ids would take gigabytes of bookkeeping.
  const ids blocks{kvcache::max_blocks, 1u << 27, 3};
  for (const std::uint32_t block_size : {1u, 7u, 4096u}) {
    std::vector<kvcache::slot_id> slots(3 * std::size_t{block_size});
    kvcache::map_slots(blocks, block_size, 0, slots);
    for (std::size_t i = 0; i < slots.size(); ++i) {
      const auto expected =
          std::int64_t{blocks[i / block_size]} * block_size + static_cast<std::int64_t>(i % block_size);
      if (slots[i] != expected) FAIL_CHECK("block size " << block_size << " token " << i << ": " << slots[i]);
    }
  }
  std::array<kvcache::slot_id, 40> slots{};
  kvcache::map_slots(blocks, 16, 5, slots);
  CHECK(slots[0] == 34359738357);
  CHECK(slots[11] == 2147483648);
  const ids large{3'000'000u};
  std::array<kvcache::slot_id, 2> wide{};
  kvcache::map_slots(large, 4096, 4094, wide);
  CHECK(wide[1] == 12288004095);
}

TEST_CASE("Slots can be asked for where a sequence has blocks, and not beyond") {
  manager m({.blocks = 4, .block_size = 4});
  const text content = words(1, 6);
  const auto s = m.open({.content = content, .reserve = 6})->sequence;
  std::array<kvcache::slot_id, 5> out{};
  REQUIRE(m.slots(s, 3, out).has_value());
  CHECK(out == std::array<kvcache::slot_id, 5>{7, 8, 9, 10, 11});
  const auto before = out;
  CHECK(m.slots(s, 4, out).error() == kvcache::failure{errc::beyond_length, 9, 8});
  CHECK(out == before);
}
