// SPDX-License-Identifier: Apache-2.0
// Bookkeeping, bytes and attention together: whatever is shared, copied, cut or reused, a sequence reads its own KV.

#include "model.hpp"

#include "../support/catch.hpp"

#include <bit>
#include <filesystem>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include <unistd.h>

namespace {

template <unsigned BlockSize, class K, class V, class Layout>
struct with : kvcache::policies {
  static constexpr unsigned block_size = BlockSize;
  using dtype = kvcache::kv_dtype<K, V>;
  using layout = Layout;
};
using small_f32 = with<4, float, float, kvcache::nhd>;
using plain_f16 = with<16, kvcache::f16, kvcache::f16, kvcache::hnd>;
using mixed = with<kvcache::dynamic, kvcache::bf16, float, kvcache::nhd>;

using fp8 = with<16, kvcache::fp8_e4m3, kvcache::fp8_e5m2, kvcache::nhd>;
using int8 = with<kvcache::dynamic, kvcache::int8_per_token, kvcache::rotated<kvcache::int8_per_token>, kvcache::hnd>;
using int4 = with<16, kvcache::rotated<kvcache::int4_grouped<32>>, kvcache::int4_grouped_asymmetric<32>, kvcache::nhd>;
using sealed_int8 = with<4, kvcache::int8_per_channel, kvcache::int8_per_channel, kvcache::nhd>;
using sealed_int4 = with<kvcache::dynamic, kvcache::int4_per_channel, kvcache::int4_grouped<64>, kvcache::hnd>;
using half_sealed = with<16, kvcache::f16, kvcache::rotated<kvcache::int8_per_channel>, kvcache::nhd>;

using kvcache_test::some_blocks;

std::vector<std::int32_t> numbers(std::int32_t first, std::size_t count) {
  std::vector<std::int32_t> v(count);
  std::iota(v.begin(), v.end(), first);
  return v;
}

}  // namespace

TEMPLATE_TEST_CASE("a prompt gives the same in one piece, in chunks, and from the cache", "", small_f32, plain_f16,
                   mixed, fp8, int8, int4, sealed_int8, sealed_int4, half_sealed) {
  kvcache_test::toy_engine<TestType> engine(some_blocks<TestType>(64));
  const auto prompt = numbers(100, 61);

  auto whole = engine.open(prompt);
  engine.run({&whole});
  CHECK(engine.error(whole) <= 1);
  engine.close(whole);

  auto again = engine.open(prompt);
  const std::uint32_t size = engine.cache.block_size();
  CHECK(again.computed == 60 / size * size);
  engine.run({&again});
  CHECK(engine.error(again) <= 1);

  auto other = engine.open(numbers(101, 61));
  CHECK(other.computed == 0);
  while (other.computed < 61) {
    engine.run({&other}, 9);
    CHECK(engine.error(other) <= 1);
  }
}

TEMPLATE_TEST_CASE("R10 forks diverge from the middle of a block and keep their own tokens", "", small_f32, plain_f16,
                   mixed, fp8, int8, int4, sealed_int8, sealed_int4, half_sealed) {
  kvcache_test::toy_engine<TestType> engine(some_blocks<TestType>(64));
  auto first = engine.open(numbers(0, 30));
  engine.run({&first});
  auto second = engine.fork(first, 30);
  auto third = engine.fork(first, 17);
  for (std::int32_t turn = 0; turn < 5; ++turn) {
    first.tokens.push_back(1000 + turn);
    second.tokens.push_back(2000 + turn);
    third.tokens.push_back(3000 + turn);
    engine.run({&second, &first, &third});
    CHECK(engine.error(first) <= 1);
    CHECK(engine.error(second) <= 1);
    CHECK(engine.error(third) <= 1);
  }
  engine.truncate(second, 23);
  second.tokens.push_back(7);
  first.tokens.push_back(8);
  engine.run({&first, &second});
  CHECK(engine.error(first) <= 1);
  CHECK(engine.error(second) <= 1);
}

TEMPLATE_TEST_CASE("random opens, forks, cuts and closes never show a sequence foreign KV", "", small_f32, plain_f16,
                   mixed, fp8, int8, int4, sealed_int8, sealed_int4, half_sealed) {
  kvcache_test::toy_engine<TestType> engine(some_blocks<TestType>(100));
  using sequence = typename kvcache_test::toy_engine<TestType>::sequence;
  const std::uint32_t seed = 20261129;
  INFO("seed " << seed);
  std::mt19937 random(seed);
  const auto below = [&](std::size_t n) { return static_cast<std::uint32_t>(random() % n); };
  std::vector<sequence> open;
  unsigned steps = 0;
  while (steps < 150) {
    switch (below(6)) {
      case 0:
        if (open.size() < 4) {
          // Few first tokens and long runs, so that prefixes are found often.
          auto prompt = numbers(static_cast<std::int32_t>(below(3)) * 1000, 1 + below(50));
          if (below(2) == 0) prompt.push_back(-1);
          open.push_back(engine.open(prompt));
        }
        break;
      case 1:
        if (!open.empty() && open.size() < 4) {
          const sequence& from = open[below(open.size())];
          open.push_back(engine.fork(from, below(from.computed + 1)));
          open.back().tokens.push_back(static_cast<std::int32_t>(below(5)));
        }
        break;
      case 2:
        if (!open.empty()) {
          sequence& s = open[below(open.size())];
          engine.truncate(s, below(s.computed + 1));
          s.tokens.push_back(static_cast<std::int32_t>(below(5)));
        }
        break;
      case 3:
        if (!open.empty()) {
          const auto i = static_cast<std::ptrdiff_t>(below(open.size()));
          engine.close(open[static_cast<std::size_t>(i)]);
          open.erase(open.begin() + i);
        }
        break;
      default: {
        std::vector<sequence*> batch;
        for (sequence& s : open) {
          if (s.tokens.size() > 70) engine.truncate(s, 5);
          if (s.computed == s.tokens.size()) s.tokens.push_back(static_cast<std::int32_t>(below(5)));
          if (below(4) != 0) batch.push_back(&s);
        }
        if (batch.empty()) break;
        engine.run(batch, 1 + below(40));
        ++steps;
        for (const sequence* s : batch) CHECK(engine.error(*s) <= 1);
      }
    }
    REQUIRE(engine.cache.manager().counts().capacity() == 100);
  }
  for (sequence& s : open) engine.close(s);
  CHECK(engine.cache.manager().counts().available() == 100);
}

TEST_CASE("R16 what a block held before never reaches an output") {
  kvcache_test::toy_engine<small_f32> engine({.blocks = 6});
  // Poison every block, then use them again for fewer tokens than they hold.
  const std::vector<float> nan(std::size_t{24} * 2 * 80, std::bit_cast<float>(0x7fc00000u));
  std::vector<kvcache::slot_id> slots(24);
  std::iota(slots.begin(), slots.end(), kvcache::make_slot(1, 0, 4));
  for (std::uint32_t layer = 0; layer < 2; ++layer)
    engine.cache.storage().append(layer, kvcache::rows_view<const float>(nan.data(), 24, 2, 64),
                                  kvcache::rows_view<const float>(nan.data(), 24, 2, 80), slots);
  auto s = engine.open(numbers(5, 9));
  engine.run({&s});
  CHECK(engine.error(s) <= 1);
  s.tokens.push_back(3);
  engine.run({&s});
  CHECK(engine.error(s) <= 1);
}

TEST_CASE("a refused step leaves the cache as it was, and the sequences go on") {
  kvcache_test::toy_engine<small_f32> engine({.blocks = 4});
  auto s = engine.open(numbers(0, 9));
  engine.run({&s});
  const auto before = engine.cache.manager().counts();
  const kvcache::want wants[]{{s.id, 8}};
  const auto refused = engine.cache.begin(wants);
  REQUIRE(!refused);
  CHECK(refused.error().code == kvcache::errc::exceeds_pool);
  CHECK(engine.cache.manager().counts() == before);
  s.tokens.push_back(1);
  engine.run({&s});
  CHECK(engine.error(s) <= 1);
}

TEST_CASE("impossible geometries and pools are refused in one sentence") {
  using cache = kvcache::cache<small_f32>;
  const auto text = [](auto&& make) -> std::string {
    try {
      make();
    } catch (const kvcache::error& e) {
      return e.message();
    }
    return "nothing was refused";
  };
  CHECK_THAT(text([] { cache({.layers = 1, .kv_heads = 0, .head_dim = 64}, {.blocks = 4}); }),
             kvcache_test::contains_text("kv_heads is 0"));
  CHECK_THAT(text([] { cache({.layers = 1, .kv_heads = 1, .head_dim = 64}, {.blocks = 0}); }),
             kvcache_test::contains_text("0 blocks"));
  CHECK_THAT(text([] { cache({.layers = 1, .kv_heads = 1, .head_dim = 64}, {.blocks = 4, .block_size = 5}); }),
             kvcache_test::contains_text("block_size 5"));
  CHECK_THAT(text([] { kvcache::cache<mixed>({.layers = 1, .kv_heads = 1, .head_dim = 64}, {.blocks = 4}); }),
             kvcache_test::contains_text("block_size is 0"));
}

namespace {

struct on_file : small_f32 {
  using allocator = kvcache::mapped_file_allocator;
};
struct on_huge_pages : small_f32 {
  using allocator = kvcache::huge_page_allocator;
};

}  // namespace

TEST_CASE("a cache takes its bytes from the allocator it is given") {
  const auto path = std::filesystem::temp_directory_path() / ("kvcache_test_cache_" + std::to_string(::getpid()));
  kvcache_test::toy_engine<on_file> file(
      {.blocks = 16, .block_size = 0, .allocator = kvcache::mapped_file_allocator(path.string())});
  kvcache_test::toy_engine<on_huge_pages> huge({.blocks = 16});
  auto a = file.open(numbers(0, 30));
  auto b = huge.open(numbers(0, 30));
  file.run({&a}, 11);
  huge.run({&b}, 11);
  CHECK(file.error(a) <= 1);
  CHECK(huge.error(b) <= 1);
}
