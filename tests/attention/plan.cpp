// SPDX-License-Identifier: Apache-2.0
// The plan: what it covers, what it depends on, what it refuses.
#include <kvcache/attention/plan.hpp>

#include <map>

#include "support.hpp"

using namespace kvcache_test;

namespace {

bool same(const attention_plan& a, const attention_plan& b) {
  return std::equal(a.units().begin(), a.units().end(), b.units().begin(), b.units().end()) &&
         std::equal(a.tiles().begin(), a.tiles().end(), b.tiles().begin(), b.tiles().end()) &&
         std::equal(a.sequences().begin(), a.sequences().end(), b.sequences().begin(), b.sequences().end()) &&
         std::equal(a.blocks().begin(), a.blocks().end(), b.blocks().begin(), b.blocks().end());
}

plan_options options(unsigned threads, bool invariant = false) {
  return {.shape = {8, 2, 64, 64}, .threads = threads, .batch_invariant = invariant};
}

const std::vector<sequence> mixed{{1, 5000}, {100, 300}, {1, 1}, {0, 77}, {700, 700}, {3, 2}, {1, 0}};

}  // namespace

TEST_CASE("R18 equal batches give equal plans, also in a plan's old memory") {
  const std::uint32_t block_size = GENERATE(1u, 16u, 48u);
  const scene<bf16> s({.block_size = block_size, .kv_heads = 2, .group = 4, .head_dim = 8}, mixed);
  const scene<bf16> other({.block_size = block_size, .kv_heads = 2, .group = 4, .head_dim = 8}, {{9, 2000}, {1, 4}});
  for (const unsigned threads : {1u, 2u, 16u}) {
    for (const bool invariant : {false, true}) {
      INFO("block size " << block_size << " threads " << threads << " invariant " << invariant);
      const attention_plan plan = plan_attention(s.batch(), options(threads, invariant));
      CHECK(same(plan, plan_attention(s.batch(), options(threads, invariant))));
      attention_plan old = plan_attention(other.batch(), options(threads, invariant));
      CHECK_FALSE(same(plan, old));
      CHECK(same(plan, plan_attention(s.batch(), options(threads, invariant), std::move(old))));
    }
  }
}

TEST_CASE("R18 a plan covers every row and visible token once") {
  const std::uint32_t block_size = GENERATE(1u, 16u, 48u);
  const scene<bf16> s({.block_size = block_size, .kv_heads = 2, .group = 4, .head_dim = 8}, mixed);
  for (const unsigned threads : {1u, 2u, 3u, 16u, 64u}) {
    for (const bool invariant : {false, true}) {
      INFO("block size " << block_size << " threads " << threads << " invariant " << invariant);
      const attention_plan plan = plan_attention(s.batch(), options(threads, invariant));
      std::vector<unsigned> rows(s.rows());
      for (const query_tile& t : plan.tiles())
        for (std::uint32_t r = t.query_begin; r < t.query_end; ++r) ++rows[r];
      CHECK(std::all_of(rows.begin(), rows.end(), [](unsigned n) { return n == 1; }));

      std::map<std::uint32_t, std::map<std::uint32_t, work_unit>> parts;
      for (const work_unit& u : plan.units()) CHECK(parts[u.tile].emplace(u.part, u).second);
      CHECK(parts.size() == plan.tiles().size());
      for (const auto& [index, units] : parts) {
        const query_tile& tile = plan.tiles()[index];
        const planned_sequence& q = plan.sequences()[tile.sequence];
        CHECK(units.size() == tile.parts);
        std::uint32_t at = 0;
        for (const auto& [part, u] : units) {
          CHECK(u.kv_begin == at);
          at = u.kv_end;
        }
        CHECK(at == visible({.causal = true}, 0, q.position(tile.query_end - 1), q.kv_length).end);
      }
    }
  }
}

TEST_CASE("a lone long sequence keeps every thread busy") {
  const scene<bf16> s({.kv_heads = 2, .group = 4, .head_dim = 8}, {{1, 20'000}});
  for (const unsigned threads : {2u, 4u, 8u}) {
    const attention_plan plan = plan_attention(s.batch(), options(threads));
    CHECK(plan.units().size() >= threads);
    std::uint32_t longest = 0;
    for (const work_unit& u : plan.units()) longest = (std::max)(longest, u.kv_end - u.kv_begin);
    CHECK(longest <= 20'000 / threads);
  }
  const attention_plan alone = plan_attention(s.batch(), options(1));
  CHECK(alone.units().size() == 1);
}

TEST_CASE("a window known to the plan leaves out what no layer sees") {
  const scene<bf16> s({.kv_heads = 2, .group = 4}, {{1, 5000}, {10, 3000}});
  plan_options o = options(1);
  o.features = sliding_window::features;
  o.window = 100;
  const attention_plan plan = plan_attention(s.batch(), o);
  for (const work_unit& u : plan.units()) CHECK(u.kv_end - u.kv_begin <= 110);

  for (const cpu_isa isa : isas()) {
    const attention<bundle<sliding_window, bf16>> a(
        {.shape = s.heads(), .threads = 3, .window = 100, .backend = {.isa = isa}});
    const attention_plan narrow = a.plan(s.batch());
    for (const std::uint32_t window : {1u, 50u, 100u}) {
      outcome r{std::vector<float>(s.q.size(), poison_value()), {}};
      a.run(narrow, s.view(), s.queries(), rows_view<float>(r.out.data(), s.rows(), 8, 64), 0, 1, {.window = window});
      CHECK(distance(r, expected<sliding_window>(s, {.window = window})) < 1);
    }
    std::vector<float> out(s.q.size());
    CHECK_THROWS_WITH(
        a.run(narrow, s.view(), s.queries(), rows_view<float>(out.data(), s.rows(), 8, 64), 0, 1, {.window = 101}),
        contains_text("101") && contains_text("100"));
  }
}

TEST_CASE("R3 R16 holes behind a window may be null blocks and are not read") {
  for (const cpu_isa isa : isas()) {
    scene<bf16> s({.kv_heads = 2, .group = 2}, {{1, 400}, {20, 400}});
    const variant_values values{.window = 30};
    const expectation e = expected<sliding_window>(s, values);
    // Query positions begin at 380, so tokens below 351 are seen by none: 21 blocks. Block 0 is poison.
    for (std::size_t row : {0u, 1u})
      std::fill_n(s.table().begin() + static_cast<std::ptrdiff_t>(row * 25), 21, null_block);
    INFO(name(isa));
    CHECK(distance(attend<sliding_window>(s, values, isa), e) < 1);
    CHECK(distance(attend<sliding_window, true>(s, values, isa), e) < 1);
  }
}

TEST_CASE("a batch that contradicts itself is refused with value and limit") {
  scene<bf16> s({.kv_heads = 2, .group = 4}, {{2, 20}, {3, 30}});
  batch_view batch = s.batch();
  const auto refused = [&](const batch_view& b) {
    try {
      static_cast<void>(plan_attention(b, options(1)));
    } catch (const invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string("nothing");
  };
  batch.block_size = 0;
  CHECK_THAT(refused(batch), contains_text("block_size is 0"));
  batch = s.batch();
  const std::vector<std::uint32_t> few{0, 2};
  batch.query_offsets = few;
  CHECK_THAT(refused(batch), contains_text("2 query_offsets") && contains_text("3 needed"));
  const std::vector<std::uint32_t> falling{0, 3, 2};
  batch.query_offsets = falling;
  CHECK_THAT(refused(batch), contains_text("from 3 to 2"));
  const std::vector<std::uint32_t> late{1, 3, 5};
  batch.query_offsets = late;
  CHECK_THAT(refused(batch), contains_text("begin with 1"));
  batch.kv_lengths = {};
  CHECK_THAT(refused(batch), contains_text("5 rows") && contains_text("kv_lengths"));
  batch = s.batch();
  batch.tables = block_tables::padded(s.table().data(), 1, 2);
  CHECK_THAT(refused(batch), contains_text("1 block tables") && contains_text("2 needed"));
  CHECK_THROWS_WITH(plan_attention(s.batch(), {.shape = {7, 2, 64, 64}}),
                    contains_text("7 query heads") && contains_text("2 kv heads"));
}
