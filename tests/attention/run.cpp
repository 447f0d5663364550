// SPDX-License-Identifier: Apache-2.0
// Running a plan: what is refused, where it may run, and results that depend on nothing but the row.
#include "support.hpp"

using namespace kvcache_test;

namespace {

using mine = bundle<causal, bf16>;

struct two_layers {
  const scene<bf16>* first;
  const scene<bf16>* second;
  [[nodiscard]] kv_view view(std::size_t layer) const { return layer == 0 ? first->view() : second->view(); }
};

/// An executor that counts its calls and runs them one after another.
struct counting {
  unsigned calls = 0;
  [[nodiscard]] unsigned threads() const { return 3; }
  template <class F>
  void run(F&& f) {
    ++calls;
    for (unsigned i = 0; i < 3; ++i) f(i, 3u);
  }
};

}  // namespace

TEST_CASE("what does not fit is refused with value, limit and remedy, and nothing is written") {
  const scene<bf16> s({.kv_heads = 2, .group = 4}, {{3, 40}});
  const attention<mine> a({.threads = 1});
  const attention_plan plan = a.plan(s.batch());
  std::vector<float> out(s.q.size(), 7.0f);
  const rows_view<float> to(out.data(), s.rows(), 8, 64);
  const auto refused = [&](const kv_view& view, rows_view<const float> q, rows_view<float> o,
                           const variant_values& v = {}) {
    try {
      a.run(plan, view, q, o, v);
    } catch (const invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string("nothing");
  };
  kv_view view = s.view();
  view.blocks = 2;
  CHECK_THAT(refused(view, s.queries(), to), contains_text("block id") && contains_text("2 blocks"));
  view = s.view();
  view.block_size = 8;
  CHECK_THAT(refused(view, s.queries(), to), contains_text("block_size is 8") && contains_text("16 needed"));
  view = s.view();
  view.k_dtype = dtype_id::float16;
  CHECK_THAT(refused(view, s.queries(), to), contains_text("f16 and bf16") && contains_text("bf16 and bf16"));
  view = s.view();
  view.kv_heads = 3;
  CHECK_THAT(refused(view, s.queries(), to), contains_text("8 query heads") && contains_text("3 kv heads"));
  view.kv_heads = 0;
  CHECK_THAT(refused(view, s.queries(), to), contains_text("kv_heads is 0"));
  CHECK_THAT(refused(s.view(), {s.q.data(), 3, 8, 32}, to),
             contains_text("head_dim is 32") && contains_text("64 needed"));
  CHECK_THAT(refused(s.view(), {s.q.data(), 2, 8, 64}, to), contains_text("rows is 2") && contains_text("3 needed"));
  CHECK_THAT(refused(s.view(), s.queries(), {out.data(), 2, 8, 64}), contains_text("rows is 2"));
  CHECK_THAT(refused(s.view(), s.queries(), {out.data(), 3, 4, 64}), contains_text("heads is 4"));
  CHECK_THAT(refused(s.view(), s.queries(), to, {.window = 5}),
             contains_text("window") && contains_text("sliding_window"));
  CHECK_THAT(refused(s.view(), s.queries(), to, {.soft_cap = 5}), contains_text("soft_cap"));
  CHECK_THAT(refused(s.view(), s.queries(), to, {.scale = -1}), contains_text("scale"));
  CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == 7.0f; }));

  scene<bf16> tails({.kv_heads = 2, .group = 4, .tails = true}, {{3, 40}});
  const attention_plan with_tails = a.plan(tails.batch());
  view = tails.view();
  view.tail_blocks = 0;
  CHECK_THROWS_WITH(a.run(with_tails, view, tails.queries(), to), contains_text("tail block id"));
}

TEST_CASE("values of a variant are held against the heads and the batch") {
  const scene<bf16> s({.kv_heads = 2, .group = 4}, {{3, 40}});
  std::vector<float> few(7);
  CHECK_THROWS_WITH((attend<combine<causal, alibi>>(s, {.alibi_slopes = few})),
                    contains_text("7 alibi_slopes") && contains_text("8 needed"));
  CHECK_THROWS_WITH((attend<combine<causal, sinks>>(s, {.sinks = few})),
                    contains_text("7 sinks") && contains_text("8 needed"));
  CHECK_THROWS_WITH(attend<soft_cap>(s), contains_text("soft_cap is 0"));
  CHECK_THROWS_WITH(attend<soft_cap>(s, {.soft_cap = std::bit_cast<float>(0x7fc0'0000u)}), contains_text("soft_cap"));
  const std::vector<std::uint8_t> bits(12);
  CHECK_THROWS_WITH(attend<custom_mask>(s), contains_text("0 rows") && contains_text("3 needed"));
  CHECK_THROWS_WITH(attend<custom_mask>(s, {.mask = {bits.data(), 2, 5}}), contains_text("2 rows"));
  CHECK_THROWS_WITH(attend<custom_mask>(s, {.mask = {bits.data(), 3, 4}}),
                    contains_text("32 tokens") && contains_text("40"));
  for (const cpu_isa isa : {cpu_isa::neon, cpu_isa::avx2, cpu_isa::avx512, cpu_isa::avx512_dot, cpu_isa::amx})
    if (!has_isa(isa)) CHECK_THROWS_WITH(attend<causal>(s, {}, isa), contains_text(name(isa)));
  const attention<bundle<full, bf16>> other({.threads = 1});
  const attention<mine> a({.threads = 1});
  std::vector<float> out(s.q.size());
  CHECK_THROWS_WITH(other.run(a.plan(s.batch()), s.view(), s.queries(), rows_view<float>(out.data(), 3, 8, 64)),
                    contains_text("another variant"));
}

TEST_CASE("instruction sets are those of the machine's kind, up to the best") {
  CHECK(has_isa(cpu_isa::best));
  CHECK(has_isa(cpu_isa::scalar));
  CHECK(has_isa(best_isa()));
#if defined(__aarch64__)
  CHECK(best_isa() == cpu_isa::neon);
  CHECK_FALSE(has_isa(cpu_isa::avx2));
#else
  CHECK_FALSE(has_isa(cpu_isa::neon));
#endif
}

TEST_CASE("an executor is used, and a plan without heads runs on it") {
  const scene<bf16> s({.kv_heads = 2, .group = 4}, {{3, 40}, {1, 3000}});
  const expectation e = expected<causal>(s);
  counting executor;
  const attention<mine> a({}, executor);
  const attention_plan plan = a.plan(s.batch());
  for (unsigned round = 1; round <= 3; ++round) {
    outcome o{std::vector<float>(s.q.size(), poison_value()), {}};
    a.run(plan, s.view(), s.queries(), rows_view<float>(o.out.data(), s.rows(), 8, 64));
    CHECK(distance(o, e) < 1);
    CHECK(executor.calls == round);
  }
  std::vector<float> out(s.q.size());
  CHECK_THROWS_WITH(attention<mine>({.threads = 1})
                        .run(attention<mine>({.threads = 1}).plan(s.batch()), s.view(), s.queries(),
                             rows_view<float>(out.data(), s.rows(), 8, 64), 0, 1),
                    contains_text("attention_options::shape"));
}

TEST_CASE("a share is refused where the plan was made without heads, also after the plan has run") {
  const scene<bf16> s({.kv_heads = 2, .group = 4}, {{1, 40}});
  const attention<mine> a({.threads = 1});
  const attention_plan plan = a.plan(s.batch());
  std::vector<float> out(s.q.size());
  const rows_view<float> to(out.data(), s.rows(), 8, 64);
  CHECK_THROWS_AS(a.run(plan, s.view(), s.queries(), to, 0u, 1u), invalid_argument);
  a.run(plan, s.view(), s.queries(), to);
  CHECK_THROWS_AS(a.run(plan, s.view(), s.queries(), to, 0u, 1u), invalid_argument);
}

TEST_CASE("a plan with split rows may be copied before and after it has run") {
  const scene<bf16> s({.kv_heads = 2, .group = 2}, {{1, 3000}, {2, 70}});
  const expectation e = expected<causal>(s);
  const attention<mine> a({.shape = s.heads(), .threads = 2});
  const attention_plan plan = a.plan(s.batch());
  REQUIRE(plan.state_rows() > 0);
  const auto right = [&](const attention_plan& p) {
    outcome o{std::vector<float>(s.q.size(), poison_value()), {}};
    a.run(p, s.view(), s.queries(), rows_view<float>(o.out.data(), s.rows(), 4, 64), 0, 1);
    return distance(o, e) < 1;
  };
  const attention_plan before = plan;
  CHECK(right(plan));
  attention_plan after;
  after = plan;
  CHECK(right(before));
  CHECK(right(after));
  CHECK(right(plan));
}

TEST_CASE("one plan serves the layers of anything that shows them as views") {
  const scene<bf16> first({.kv_heads = 2, .group = 2}, {{3, 40}, {1, 700}}, 1);
  const scene<bf16> second({.kv_heads = 2, .group = 2}, {{3, 40}, {1, 700}}, 1);
  const two_layers cache{&first, &second};
  const attention<mine> a({.shape = first.heads(), .threads = 2});
  const attention_plan plan = a.plan(first.batch());
  const attention_plan copy = plan;
  const expectation e = expected<causal>(first);
  for (const std::uint32_t layer : {0u, 1u}) {
    outcome o{std::vector<float>(first.q.size(), poison_value()), {}};
    const rows_view<float> to(o.out.data(), first.rows(), 4, 64);
    a.run(plan, cache, layer, first.queries(), to);
    CHECK(distance(o, e) < 1);
    std::fill(o.out.begin(), o.out.end(), poison_value());
    a.run(copy, cache, layer, first.queries(), to, 0, 1);
    CHECK(distance(o, e) < 1);
  }
}

TEST_CASE("R19 a row's bits depend on its own query and tokens only") {
  // One sequence of 2,500 tokens, alone and among others, cut for one thread and for many, its newest tokens computed
  // one by one or in chunks of any size.
  for (const cpu_isa isa : isas()) {
    for (const std::uint32_t group : {1u, 4u, 20u}) {
      if (!thorough && group != 4) continue;
      const std::uint32_t block_size = group == 1 ? 16 : group == 4 ? 5 : 64;
      const shape form{.block_size = block_size, .kv_heads = 1, .group = group, .head_dim = thorough ? 64u : 16u};
      const std::uint32_t length = thorough ? 2500 : 2100;
      const scene<bf16> whole(form, {{length, length}}, 3);
      const std::size_t row_floats = std::size_t{group} * form.head_dim;

      // The tail's rows as the whole prefill gives them.
      const std::uint32_t rows = thorough ? 40 : 6;
      const auto part = [&](std::uint32_t queries, std::uint32_t kv, unsigned threads, bool among_others) {
        const std::uint32_t at = kv - queries;
        std::vector<std::uint32_t> offsets{0, queries};
        std::vector<std::uint32_t> lengths{kv};
        std::vector<block_id> table(const_cast<scene<bf16>&>(whole).table());
        std::vector<std::uint32_t> table_offsets{0, static_cast<std::uint32_t>(table.size())};
        std::vector<float> q(whole.q.begin() + static_cast<std::ptrdiff_t>(at * row_floats),
                             whole.q.begin() + static_cast<std::ptrdiff_t>(kv * row_floats));
        if (among_others) {
          for (const std::uint32_t n : {7u, 1u, 90u}) {
            offsets.insert(offsets.begin() + 1, offsets[0] + n);
            for (std::size_t i = 2; i < offsets.size(); ++i) offsets[i] += n;
            lengths.insert(lengths.begin(), 300 + n);
            table_offsets.push_back(0);
            q.insert(q.begin(), n * row_floats, 0.25f);
          }
          table.clear();
          table_offsets.assign(1, 0);
          for (std::size_t i = 0; i < lengths.size(); ++i) {
            const auto& own = const_cast<scene<bf16>&>(whole).table();
            table.insert(table.end(), own.begin(), own.end());
            table_offsets.push_back(static_cast<std::uint32_t>(table.size()));
          }
        }
        const batch_view batch{offsets, lengths, block_tables::csr(table.data(), table_offsets), {}, block_size};
        const attention<bundle<causal, bf16, bf16, true>> a(
            {.shape = whole.heads(), .threads = threads, .backend = {.isa = isa}});
        std::vector<float> out(q.size());
        run_share(a, a.plan(batch), whole.view(),
                  rows_view<const float>(q.data(), offsets.back(), group, form.head_dim),
                  rows_view<float>(out.data(), offsets.back(), group, form.head_dim));
        return std::vector<float>(out.end() - static_cast<std::ptrdiff_t>(queries * row_floats), out.end());
      };
      const std::vector<float> alone = part(rows, length, 1, false);
      INFO(text(form, isa));
      CHECK(same_bits(part(rows, length, 8, true), alone));
      const std::vector<float> long_chunk = part(300, length, 3, false);
      CHECK(same_bits({long_chunk.end() - static_cast<std::ptrdiff_t>(alone.size()), long_chunk.end()}, alone));
      std::vector<float> one_by_one;
      for (std::uint32_t t = length - rows; t < length; ++t) {
        const std::vector<float> row = part(1, t + 1, t % 5 + 1, t % 2 == 1);
        one_by_one.insert(one_by_one.end(), row.begin(), row.end());
      }
      CHECK(same_bits(one_by_one, alone));
    }
  }
}

TEST_CASE("R19 a long window cuts a row's tokens at the same places, whatever is beside it and known to the plan") {
  // The window's first token moves with the row, here also past a cut; the cuts may not.
  const std::uint32_t length = GENERATE(4260u, 5000u);
  CAPTURE(length);
  const scene<bf16> s({.kv_heads = 1, .group = 2, .head_dim = 16}, {{40, length}}, 5);
  const variant_values values{.window = 2200};
  for (const cpu_isa isa : isas()) {
    for (const std::uint32_t known : {0u, 2200u}) {
      const attention<bundle<sliding_window, bf16, bf16, true>> a(
          {.shape = s.heads(), .threads = 3, .window = known, .backend = {.isa = isa}});
      std::vector<float> chunk(s.q.size());
      run_share(a, a.plan(s.batch()), s.view(), s.queries(), rows_view<float>(chunk.data(), 40, 2, 16), values);
      bool same = true;
      for (std::uint32_t i = 0; i < 40; i += 3)
        same = same && has_row(chunk, i, row_alone(a, s, i, length - 39 + i, values));
      INFO(name(isa) << " window known to the plan " << known);
      CHECK(same);
      CHECK(distance({chunk, {}, isa >= cpu_isa::avx512_dot ? 0x1p-8 : 0}, expected<sliding_window>(s, values)) < 1);
    }
  }
}

TEST_CASE("a cut between the windows of a tile's rows takes nothing from either") {
  // The last rows' windows begin behind the cut, the first ones' end before it.
  const variant_values values{.window = 16};
  for (const cpu_isa isa : isas()) {
    INFO(name(isa));
    const scene<bf16> cut_by_rule({.kv_heads = 1, .group = 1, .head_dim = 16}, {{96, 2098}});
    CHECK(distance(attend<sliding_window, true>(cut_by_rule, values, isa),
                   expected<sliding_window>(cut_by_rule, values)) < 1);
    const scene<bf16> cut_for_threads({.kv_heads = 1, .group = 1, .head_dim = 16}, {{96, 8114}});
    CHECK(distance(attend<sliding_window>(cut_for_threads, values, isa, 8),
                   expected<sliding_window>(cut_for_threads, values)) < 1);
  }
}

TEST_CASE("R19 masks keep a row's bits") {
  using masked = combine<causal, custom_mask>;
  const std::uint32_t block_size = GENERATE(1u, 7u, 64u);
  const scene<bf16> s({.block_size = block_size, .kv_heads = 2, .group = 3}, {{50, 400}}, 4);
  std::vector<std::uint8_t> bits(50 * std::size_t{50});
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::uint8_t>(i * 2'654'435'761u >> 7);
  for (const cpu_isa isa : isas()) {
    const outcome chunk = attend<masked, true>(s, {.mask = {bits.data(), 50, 50}}, isa);
    const attention<bundle<masked, bf16, bf16, true>> a({.shape = s.heads(), .threads = 2, .backend = {.isa = isa}});
    bool same = true;
    for (std::uint32_t i = 0; i < 50; ++i)
      same = same && has_row(chunk.out, i, row_alone(a, s, i, 351 + i, {.mask = {bits.data() + i * 50, 1, 50}}));
    INFO(text(s.form(), isa));
    CHECK(same);
  }
}

TEST_CASE("R19 windows and blocks of any size keep a row's bits") {
  const std::uint32_t block_size = GENERATE(1u, 7u, 64u);
  for (const cpu_isa isa : isas()) {
    const shape form{.block_size = block_size, .kv_heads = 2, .group = 3};
    const scene<bf16> s(form, {{50, 400}}, 4);
    const variant_values values{.window = 77};
    const outcome chunk = attend<sliding_window, true>(s, values, isa);
    const attention<bundle<sliding_window, bf16, bf16, true>> a(
        {.shape = s.heads(), .threads = 2, .backend = {.isa = isa}});
    bool same = true;
    for (std::uint32_t i = 0; i < 50; ++i) same = same && has_row(chunk.out, i, row_alone(a, s, i, 351 + i, values));
    INFO(text(form, isa));
    CHECK(same);
  }
}

TEST_CASE("a plan of no rows runs over anything and does nothing") {
  const scene<bf16> idle({}, {{0, 40}});
  const std::vector<std::uint32_t> none;
  const batch_view nothing{none, none, {}, {}, 0};
  for (const auto& batch : {nothing, idle.batch()}) {
    const attention<mine> a({.threads = 2});
    const attention_plan plan = a.plan(batch);
    kv_view view;
    view.k_dtype = view.v_dtype = dtype_id::bfloat16;
    a.run(plan, view, rows_view<const float>(), rows_view<float>());
    a.run(plan, view, rows_view<const float>(), rows_view<float>(), 0u, 1u);
    CHECK(plan.units().empty());
  }
}

TEST_CASE("values beyond what f32 can compute with are refused; at the limits results are right") {
  const scene<bf16> s({.kv_heads = 1, .group = 2}, {{3, 40}, {1, 40}});
  using capped = combine<causal, soft_cap>;
  for (const float cap : {1e-39f, 0x1p-101f, 0x1p101f, 3.4e38f, -1.0f})
    CHECK_THROWS_WITH(attend<capped>(s, {.soft_cap = cap}), contains_text("soft_cap is") && contains_text("2^100"));
  for (const float scale : {1e-39f, 0x1p-101f, 3.4e38f, -1.0f})
    CHECK_THROWS_WITH(attend<causal>(s, {.scale = scale}), contains_text("scale is") && contains_text("2^100"));
  const float inf = std::bit_cast<float>(0x7f80'0000u);
  for (const float bad : {3e38f, -3e38f, inf, -inf, poison_value()}) {
    const std::vector<float> slopes{0.5f, bad};
    CHECK_THROWS_WITH((attend<combine<causal, alibi>>(s, {.alibi_slopes = slopes})), contains_text("slope is"));
  }
  for (const float bad : {inf, poison_value()}) {
    const std::vector<float> values{0.5f, bad};
    CHECK_THROWS_WITH((attend<combine<causal, sinks>>(s, {.sinks = values})), contains_text("a sink is"));
  }
  for (const cpu_isa isa : isas()) {
    INFO(name(isa));
    for (const float cap : {0x1p-100f, 0x1p100f})
      CHECK(distance(attend<capped>(s, {.soft_cap = cap}, isa), expected<capped>(s, {.soft_cap = cap})) < 1);
    const std::vector<float> slopes{0x1p60f, -0x1p60f};
    const outcome o = attend<combine<causal, alibi>>(s, {.alibi_slopes = slopes}, isa);
    CHECK(std::all_of(o.out.begin(), o.out.end(), is_number));
  }
}

TEST_CASE("R19 a visible value that is no finite number gives the same in a chunk and alone") {
  const shape form{.kv_heads = 1, .group = 2};
  for (const float bad : {std::bit_cast<float>(0x7f80'0000u), poison_value()}) {
    scene<bf16> s(form, {{2, 40}}, 3);
    // Token 0 is seen by both rows, and its weight vanishes beside token 20's.
    s.fill_k(0, 0, -60.0f);
    s.fill_k(0, 20, 60.0f);
    s.fill_v(0, 0, bad);
    std::fill(s.q.begin(), s.q.end(), 8.0f);
    const std::size_t row_floats = std::size_t{2} * 64;
    for (const cpu_isa isa : isas()) {
      const outcome chunk = attend<causal, true>(s, {}, isa);
      for (const std::uint32_t row : {0u, 1u}) {
        const attention<bundle<causal, bf16, bf16, true>> a(
            {.shape = s.heads(), .threads = 1, .backend = {.isa = isa}});
        const std::vector<float> out = row_alone(a, s, row, 39 + row);
        bool same = true;
        for (std::size_t i = 0; i < row_floats; ++i)
          same = same && is_number(out[i]) == is_number(chunk.out[row * row_floats + i]);
        INFO(name(isa) << " row " << row);
        CHECK(same);
      }
    }
  }
}
