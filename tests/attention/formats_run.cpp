// SPDX-License-Identifier: Apache-2.0
// Running attention over formats: rotation changes no result, layers may be kept wide, bits depend on the row alone,
// and what does not fit is refused.
#include "formats.hpp"

using namespace kvcache_test;

TEMPLATE_TEST_CASE("formats, rotated or not, give what their numbers give as f32", "", fp8_small, fp8_large, int8, int4,
                   int4_asymmetric, int4_channels, int2_channels, int4_rotated, int8_beside_int4,
                   channels_beside_rotated) {
  for (const std::uint32_t dim : {64u, 80u, 96u, 128u}) {
    if (!thorough && dim != 80) continue;
    const shape form{.block_size = 16, .kv_heads = 2, .group = 4, .head_dim = dim, .tails = dim == 96};
    const scene_of<TestType> s(form, {{1, 130}, {9, 40}, {1, dim == 64 && thorough ? 2500u : 1u}});
    const expectation e = expected<causal>(plain_twin(s));
    for (const cpu_isa isa : isas()) {
      for (const unsigned threads : {1u, 5u}) {
        INFO(text(form, isa, threads));
        CHECK(distance(attend<causal>(s, {}, isa, threads), e) < 1);
      }
    }
    const expectation read = expected<causal>(s);
    double worst = 0;
    for (std::size_t i = 0; i < e.out.size(); ++i) worst = (std::max)(worst, how_far(e.out[i], read.out[i]));
    for (std::size_t i = 0; i < e.lse.size(); ++i) worst = (std::max)(worst, how_far(e.lse[i], read.lse[i]));
    CHECK(worst < 1e-5);
  }
}

TEMPLATE_TEST_CASE("a query that holds no number, or an infinity, makes its own row none, and no other", "", fp8_small,
                   int8, int4, int4_asymmetric, int4_channels, channels_beside_rotated) {
  const shape form{.kv_heads = 2, .group = 3, .tails = true};
  for (const cpu_isa isa : isas()) {
    for (const float bad : {poison_value(), std::bit_cast<float>(0x7f80'0000u)}) {
      scene_of<TestType> s(form, {{1, 130}, {1, 77}});
      const outcome clean = attend<causal>(s, {}, isa);
      const std::size_t row = 2 * 6 - 2;  // the second sequence's fifth head
      s.q[row * 64 + 17] = bad;
      const outcome o = attend<causal>(s, {}, isa);
      INFO(text(form, isa));
      for (std::size_t i = 0; i < o.out.size(); ++i)
        if (i / 64 != row)
          REQUIRE(std::bit_cast<std::uint32_t>(o.out[i]) == std::bit_cast<std::uint32_t>(clean.out[i]));
      CHECK(!is_number(o.out[row * 64]));
      CHECK(!is_number(o.out[row * 64 + 63]));
    }
  }
}

TEMPLATE_TEST_CASE("one attention object runs layers in its format and layers kept in its tail's type", "", int8, int4,
                   channels_beside_rotated, fp8_small) {
  using narrow = scene_of<TestType>;
  const std::vector<sequence> sequences{{1, 130}, {9, 40}};
  const shape form{.kv_heads = 2, .group = 4};
  const narrow quantised(form, sequences);
  const scene<bf16> wide(form, sequences);
  const scene_of<TestType, f16> quantised_f16(form, sequences);
  const scene<f16> wide_f16(form, sequences);
  const auto runs = [&](const auto& a, const any_scene& s, double rounding, cpu_isa isa) {
    outcome o{std::vector<float>(s.q.size(), poison_value()), std::vector<float>(s.rows() * 8u, poison_value())};
    run_share(a, a.plan(s.batch()), s.view(), s.queries(), rows_view<float>(o.out.data(), s.rows(), 8, 64), {},
              {o.lse.data(), 8});
    o.rounding = isa >= cpu_isa::avx512_dot ? rounding : 0;
    return distance(o, expected<causal>(s)) < 1;
  };
  using k = typename TestType::k;
  using v = typename TestType::v;
  for (const cpu_isa isa : isas()) {
    INFO(name(isa));
    const attention<bundle<causal, k, v>> a({.shape = wide.heads(), .threads = 1, .backend = {.isa = isa}});
    CHECK(runs(a, quantised, rounding_of<k, v>(form, false), isa));
    CHECK(runs(a, wide, rounding_of<bf16, bf16>(form, true), isa));
    CHECK(runs(a, quantised, rounding_of<k, v>(form, false), isa));
    const attention<bundle<causal, k, v, false, f16>> b({.shape = wide.heads(), .threads = 1, .backend = {.isa = isa}});
    CHECK(runs(b, quantised_f16, rounding_of<k, v>(form, false), isa));
    CHECK(runs(b, wide_f16, 0, isa));
    // Both are of one plan too, as the layers of a step are.
    const attention_plan plan = a.plan(wide.batch());
    std::vector<float> out(wide.q.size());
    run_share(a, plan, wide.view(), wide.queries(), rows_view<float>(out.data(), wide.rows(), 8, 64));
    CHECK(distance({out, {}, isa >= cpu_isa::avx512_dot ? rounding_of<bf16, bf16>(form, true) : 0},
                   expected<causal>(wide)) < 1);
  }
}

TEST_CASE("views that do not fit a format are refused with value and remedy, and nothing is written") {
  const shape form{.kv_heads = 2, .group = 2};
  const std::vector<sequence> sequences{{3, 40}};
  std::vector<float> out(std::size_t{3} * 4 * 64, 7.0f);
  const auto refused = [&]<class A>(const A& a, const any_scene& s, const kv_view& view) {
    try {
      a.run(a.plan(s.batch()), view, s.queries(), rows_view<float>(out.data(), s.rows(), 4, view.head_dim));
    } catch (const invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string("nothing");
  };
  const scene_of<int4> s(form, sequences);
  const attention<bundle<causal, int4::k, int4::v>> a({.threads = 1});

  kv_view view = scene<f32>(form, sequences).view();
  CHECK_THAT(refused(a, s, view), contains_text("holds f32 and f32") &&
                                      contains_text("say int4_grouped_32 and int4_grouped_32") &&
                                      contains_text("one policy bundle"));
  view = scene<f16>(form, sequences).view();  // a tail's type, but another one's
  CHECK_THAT(refused(a, s, view), contains_text("holds f16 and f16"));
  view = s.view();
  view.v_dtype = dtype_id::bfloat16;  // half wide
  CHECK_THAT(refused(a, s, view), contains_text("holds int4_grouped_32 and bf16"));
  view = s.view();
  view.k_dtype = dtype_traits<rotated<int4_grouped<32>>>::id;
  CHECK_THAT(refused(a, s, view), contains_text("holds rotated_int4_grouped_32 and int4_grouped_32"));

  view = s.view();
  view.k_scales.base = nullptr;
  CHECK_THAT(refused(a, s, view),
             contains_text("K is int4_grouped_32") && contains_text("no base") && contains_text("set k_scales"));
  view = s.view();
  view.v_scales.base = nullptr;
  CHECK_THAT(refused(a, s, view),
             contains_text("V is int4_grouped_32") && contains_text("no base") && contains_text("v_scales"));

  const scene_of<int8_beside_int4> tails(form, sequences);
  const attention<bundle<causal, int8_beside_int4::k, int8_beside_int4::v>> b({.threads = 1});
  view = tails.view();
  view.tail_dtype = dtype_id::float16;
  CHECK_THAT(refused(b, tails, view), contains_text("tail pool holds f16") && contains_text("policies say bf16") &&
                                          contains_text("one policy bundle"));
  view = tails.view();
  view.tail_blocks = 0;
  CHECK_THAT(refused(b, tails, view), contains_text("tail block id") && contains_text("0 tail blocks"));
  // V alone lies in another type in the tail pool.
  scene<bf16, int4_grouped<32>> half({.kv_heads = 2, .group = 2, .tails = true}, sequences);
  const attention<bundle<causal, bf16, int4_grouped<32>>> c({.threads = 1});
  view = half.view();
  view.tail_dtype = dtype_id::float16;
  CHECK_THAT(refused(c, half, view), contains_text("tail pool holds f16"));
  CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == 7.0f; }));
  CHECK(refused(c, half, half.view()) == "nothing");

  // Heads longer than what can be quantised or rotated.
  const shape longest{.kv_heads = 2, .group = 2, .head_dim = 1024};
  const shape longer{.kv_heads = 2, .group = 2, .head_dim = 1040};
  const scene<bf16> wide(longer, sequences);
  out.assign(std::size_t{3} * 4 * 1040, 7.0f);
  for (const bool turned : {false, true}) {
    view = wide.view();
    const dtype_id id = turned ? dtype_traits<rotated<int4_grouped<32>>>::id : dtype_id::int4_grouped_32;
    view.k_dtype = view.v_dtype = id;
    view.k_scales = view.v_scales = view.k;
    const attention<bundle<causal, int4_rotated::k, int4_rotated::v>> r({.threads = 1});
    CHECK_THAT(turned ? refused(r, wide, view) : refused(a, wide, view),
               contains_text(name(id)) && contains_text("1040") && contains_text("at most 1024") &&
                   contains_text("element type"));
  }
  CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == 7.0f; }));
  const scene_of<int4> fits(longest, sequences);
  CHECK(distance(attend<causal>(fits), expected<causal>(fits)) < 1);
}

TEST_CASE("the reference refuses what run refuses of formats") {
  const scene_of<int4> s({.kv_heads = 2, .group = 2}, {{3, 40}});
  std::vector<double> out(s.q.size());
  kv_view view = s.view();
  view.v_scales.base = nullptr;
  CHECK_THROWS_WITH(reference_attention<causal>(s.batch(), view, s.queries(), rows_view<double>(out.data(), 3, 4, 64)),
                    contains_text("no base"));
}

TEMPLATE_TEST_CASE("R19 over formats a row's bits depend on its own query and tokens only", "", int8, int4,
                   channels_beside_rotated, fp8_large) {
  constexpr std::uint32_t length = 2300;
  constexpr std::uint32_t queries = 20;
  for (const std::uint32_t block_size : {1u, 7u, 64u}) {
    if (!thorough && block_size != 7) continue;
    const shape form{.block_size = block_size, .kv_heads = 1, .group = block_size == 7 ? 4u : 3u};
    const scene_of<TestType> s(form, {{queries, length}, {1, 300}, {30, 90}}, 3);
    using policy = bundle<causal, typename TestType::k, typename TestType::v, true>;
    const expectation e = expected<causal>(s);
    for (const cpu_isa isa : isas()) {
      const outcome chunk = attend<causal, true>(s, {}, isa, 8);
      CHECK(distance(chunk, e) < 1);
      bool same = true;
      for (std::uint32_t i = 0; i < queries; i += 3) {
        const attention<policy> a({.shape = s.heads(), .threads = i % 5 + 1, .backend = {.isa = isa}});
        same = same && has_row(chunk.out, i, row_alone(a, s, i, length - queries + 1 + i));
      }
      INFO(text(form, isa));
      CHECK(same);
    }
  }
}
