// SPDX-License-Identifier: Apache-2.0
// Inputs that break implementations of attention. Compiled a second time with -ffast-math.
#include <limits>
#include <stdexcept>

#include "support.hpp"

using namespace kvcache_test;

namespace {

float not_a_number() { return std::bit_cast<float>(0x7fc0'0000u); }
float infinity() { return std::bit_cast<float>(0x7f80'0000u); }

/// Every combination that decides which kernel takes a row.
template <class F>
void each_kernel(const F& f) {
  for (const cpu_isa isa : isas())
    for (const std::uint32_t group : {1u, 2u, 4u, 8u, 13u, 16u})
      if (thorough || group == 1 || group == 13 || group == 16) f(isa, group);
}

/// Another one for most groups, so that rules hold for several.
std::uint32_t block_size_of(std::uint32_t group) {
  return group == 1 || group == 8 ? 16 : group == 2 ? 4 : group == 4 ? 7 : group == 13 ? 1 : 64;
}

/// Where the plan of one query over `length` tokens cuts them.
std::vector<std::uint32_t> cuts(const scene<bf16>& s, std::uint32_t length, unsigned threads, bool invariant) {
  const std::vector<std::uint32_t> offsets{0, 1};
  const std::vector<std::uint32_t> lengths{length};
  const auto blocks = static_cast<std::uint32_t>((length + s.form().block_size - 1) / s.form().block_size);
  const std::vector<std::uint32_t> table_offsets{0, blocks};
  batch_view batch = s.batch();
  batch.query_offsets = offsets;
  batch.kv_lengths = lengths;
  batch.tables = block_tables::csr(batch.tables.row(0).data(), table_offsets);
  const attention_plan plan =
      plan_attention(batch, {.shape = s.heads(), .threads = threads, .batch_invariant = invariant});
  std::vector<std::uint32_t> found;
  for (const work_unit& u : plan.units())
    if (u.kv_begin != 0) found.push_back(u.kv_begin);
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

TEST_CASE("attention_1 logits near -6e4 leave a finite and right softmax") {
  for (const std::uint32_t kv : {1u, 17u}) {
    each_kernel([&](cpu_isa isa, std::uint32_t group) {
      scene<bf16> s({.kv_heads = 2, .group = group, .head_dim = 128}, {{1, kv}});
      for (std::uint32_t t = 0; t < kv; ++t) s.fill_k(0, t, -73.0f);
      std::fill(s.q.begin(), s.q.end(), 73.0f);
      const expectation e = expected<causal>(s);
      INFO(text(s.form(), isa) << " kv " << kv);
      CHECK(e.lse[0] < -8.0e4);  // 128 * 73 * 73 / sqrt(128) = 60,291 by log2 e
      CHECK(distance(attend<causal>(s, {}, isa), e) < 1);
    });
  }
  CHECK(is_minus_infinity(empty_lse()));
  CHECK(is_empty(empty_lse()));
  CHECK_FALSE(is_empty(-3.4e38f));
}

TEST_CASE("attention_2 causal, 4 queries over 2 keys: the first two rows are empty") {
  each_kernel([](cpu_isa isa, std::uint32_t group) {
    const scene<bf16> s({.kv_heads = 2, .group = group}, {{4, 2}});
    const outcome o = attend<causal>(s, {}, isa);
    const std::size_t heads = s.form().query_heads();
    INFO(text(s.form(), isa));
    for (std::size_t i = 0; i < 2 * heads; ++i) CHECK(is_minus_infinity(o.lse[i]));
    for (std::size_t i = 0; i < 2 * heads * 64; ++i) REQUIRE(std::bit_cast<std::uint32_t>(o.out[i]) == 0);
    CHECK(distance(o, expected<causal>(s)) < 1);
  });
}

TEST_CASE("attention_4 lengths 0, 5 and 0 into an output of no numbers: empty rows are written") {
  each_kernel([](cpu_isa isa, std::uint32_t group) {
    const scene<bf16> s({.kv_heads = 2, .group = group}, {{1, 0}, {1, 5}, {1, 0}});
    const outcome o = attend<causal>(s, {}, isa);
    const std::size_t heads = s.form().query_heads();
    INFO(text(s.form(), isa));
    for (const std::size_t row : {std::size_t{0}, std::size_t{2}}) {
      for (std::size_t h = 0; h < heads; ++h) CHECK(is_minus_infinity(o.lse[row * heads + h]));
      for (std::size_t i = 0; i < heads * 64; ++i)
        REQUIRE(std::bit_cast<std::uint32_t>(o.out[row * heads * 64 + i]) == 0);
    }
    CHECK(distance(o, expected<causal>(s)) < 1);
  });
}

TEST_CASE("attention_5 R16 unused slots and blocks of no numbers and infinities do not reach the output") {
  // A scene's pool is poison wherever no token was written: three slots behind token 12, and three whole blocks.
  each_kernel([](cpu_isa isa, std::uint32_t group) {
    const scene<bf16> s({.block_size = 4, .kv_heads = 2, .group = group}, {{1, 13}, {13, 13}, {2, 13}});
    INFO(text(s.form(), isa));
    CHECK(distance(attend<causal>(s, {}, isa), expected<causal>(s)) < 1);
    CHECK(distance(attend<full>(s, {}, isa), expected<full>(s)) < 1);
  });
}

TEST_CASE("R16 tokens that a row does not see contribute nothing, whatever they hold") {
  for (const float bad : {not_a_number(), infinity(), -infinity()}) {
    each_kernel([&](cpu_isa isa, std::uint32_t group) {
      // Rows at positions 60 .. 99; token 80 is bad. Rows before it are as if it were not there.
      const shape form{.block_size = block_size_of(group), .kv_heads = 2, .group = group};
      scene<bf16> s(form, {{40, 100}});
      const outcome clean = attend<causal>(s, {}, isa);
      s.fill_k(0, 80, bad);
      s.fill_v(0, 80, bad);
      const outcome o = attend<causal>(s, {}, isa);
      const std::size_t heads = form.query_heads();
      INFO(text(form, isa));
      bool same = true;
      for (std::size_t i = 0; i < 20 * heads * 64; ++i) same = same && o.out[i] == clean.out[i];
      CHECK(same);

      // A window that has passed it.
      scene<bf16> w(form, {{1, 100}, {10, 100}});
      for (const std::uint32_t row : {0u, 1u}) {
        w.fill_k(row, 80, bad);
        w.fill_v(row, 80, bad);
      }
      CHECK(distance(attend<sliding_window>(w, {.window = 10}, isa), expected<sliding_window>(w, {.window = 10})) < 1);

      // A mask that leaves it out, for one row and for several.
      std::vector<std::uint8_t> bits(16 * w.rows(), 0xff);
      for (std::uint32_t r = 0; r < w.rows(); ++r) bits[r * 16 + 10] = 0xfe;
      const variant_values values{.mask = {bits.data(), w.rows(), 16}};
      using masked = combine<causal, custom_mask>;
      CHECK(distance(attend<masked>(w, values, isa), expected<masked>(w, values)) < 1);
    });
  }
}

TEST_CASE("attention_7 a length at the end of its table is fine, one more is refused before anything is read") {
  scene<bf16> s({.block_size = 4, .kv_heads = 1, .group = 2}, {{1, 16}});
  CHECK(distance(attend<causal>(s), expected<causal>(s)) < 1);
  s.lengths()[0] = 17;
  const attention<bundle<causal, bf16>> a({.threads = 1});
  CHECK_THROWS_WITH(a.plan(s.batch()),
                    contains_text("17 tokens") && contains_text("covers 16") && contains_text("reserve"));
}

TEMPLATE_TEST_CASE("attention_8 q = 0 gives the mean of V exactly to rounding", "", f32, f16, bf16) {
  // Whole numbers up to 100 are exact in all three types.
  for (const std::uint32_t kv : {1u, 255u, 257u, 1300u}) {
    each_kernel([&](cpu_isa isa, std::uint32_t group) {
      scene<TestType> s({.kv_heads = 1, .group = group}, {{1, kv}, {3, kv}});
      std::fill(s.q.begin(), s.q.end(), 0.0f);
      // Whole numbers: their sum is exact in f32, so the mean is rounded once.
      std::vector<double> mean(64);
      for (std::uint32_t t = 0; t < kv; ++t) {
        for (std::uint32_t d = 0; d < 64; ++d) {
          const auto x = static_cast<float>((t * 37 + d * 11) % 101);
          s.write_v(0, t, 0, d, x);
          s.write_v(1, t, 0, d, x);
          mean[d] += static_cast<double>(x);
        }
      }
      for (const unsigned threads : {1u, 4u}) {
        const outcome o = attend<full>(s, {}, isa, threads);
        INFO(text(s.form(), isa, threads) << " kv " << kv);
        double worst = 0;
        for (std::size_t i = 0; i < o.out.size(); ++i) {
          const double want = mean[i % 64] / kv;
          worst = (std::max)(worst, how_far(o.out[i], want, std::fabs(want) * 0x1p-24 + 1e-30));  // half a unit
        }
#if defined(__FAST_MATH__)
        CHECK(worst <= 4);  // a division may become a product
#else
        CHECK(worst <= (kv == 1300 && threads > 1 ? 4 : 1));  // the means of parts are rounded before they merge
#endif
      }
    });
  }
}

TEST_CASE("attention_6 block ids whose byte offsets pass 2^31 and 2^32") {
  // 8 KiB blocks at the far end of a pool whose pages are never touched elsewhere; nothing but them is read.
  const std::int64_t block_bytes = 16 * 2 * 64 * 4;
  for (const block_id high :
       {block_id{0x8000'0000u / (16 * 2 * 64)}, block_id{262'145}, block_id{524'289 + 7}, block_id{2'097'153}}) {
    const std::int64_t first = std::int64_t{high} * block_bytes;
    std::vector<float> k(2 * 16 * 2 * 64);
    std::vector<float> v(k.size());
    for (std::size_t i = 0; i < k.size(); ++i) {
      k[i] = static_cast<float>(i % 17) * 0.1f - 0.8f;
      v[i] = static_cast<float>(i % 23) * 0.1f - 1.1f;
    }
    // The base is so far before the arrays that blocks `high` and `high + 1` fall on them.
    const auto before = [&](std::vector<float>& x) {
      return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(x.data()) -
                                          static_cast<std::uintptr_t>(first));
    };
    kv_view view;
    view.k = {before(k), block_bytes, 2 * 64 * 4, 64 * 4};
    view.v = {before(v), block_bytes, 2 * 64 * 4, 64 * 4};
    view.blocks = high + 2;
    view.block_size = 16;
    view.kv_heads = 2;
    view.head_dim = view.head_dim_v = 64;
    view.k_dtype = view.v_dtype = dtype_id::float32;
    const std::vector<block_id> table{high, high + 1};
    const std::vector<std::uint32_t> offsets{0, 1, 6};
    const std::vector<std::uint32_t> lengths{32, 20};
    const std::vector<block_id> both{table[0], table[1], table[0], table[1]};
    const batch_view batch{offsets, lengths, block_tables::padded(both.data(), 2, 2), {}, 16};
    std::vector<float> q(6 * 4 * 64, 0.3f);
    std::vector<double> want(q.size());
    reference_attention<causal>(batch, view, rows_view<const float>(q.data(), 6, 4, 64),
                                rows_view<double>(want.data(), 6, 4, 64));
    for (const cpu_isa isa : isas()) {
      const attention<bundle<causal, f32>> a({.shape = {4, 2, 64, 64}, .threads = 1, .backend = {.isa = isa}});
      std::vector<float> out(q.size());
      a.run(a.plan(batch), view, rows_view<const float>(q.data(), 6, 4, 64), rows_view<float>(out.data(), 6, 4, 64), 0,
            1);
      double worst = 0;
      for (std::size_t i = 0; i < out.size(); ++i) worst = (std::max)(worst, how_far(out[i], want[i]));
      INFO(name(isa) << " block " << high << ", byte " << first);
      CHECK(worst < 1e-5);
    }
  }
}

TEST_CASE("attention_12 two plans made back to back before the first ran are both right") {
  scene<bf16> first({.kv_heads = 2, .group = 2}, {{1, 900}, {3, 40}}, 1);
  scene<bf16> second({.kv_heads = 2, .group = 2}, {{20, 50}, {1, 1300}, {1, 3}}, 2);
  const attention<bundle<causal, bf16>> a({.shape = first.heads(), .threads = 3});
  std::vector<std::uint32_t> offsets = first.offsets();
  batch_view batch = first.batch();
  batch.query_offsets = offsets;
  const attention_plan one = a.plan(batch);
  const attention_plan two = a.plan(second.batch());
  const expectation e1 = expected<causal>(first);
  const expectation e2 = expected<causal>(second);
  // The batch's own arrays say something else by the time the plan runs.
  std::fill(first.table().begin(), first.table().end(), block_id{0});
  std::fill(first.lengths().begin(), first.lengths().end(), 1u);
  std::fill(offsets.begin(), offsets.end(), 0u);
  const auto run = [&](const scene<bf16>& s, const attention_plan& plan, const expectation& e) {
    outcome o{std::vector<float>(s.q.size(), poison_value()), {}};
    a.run(plan, s.view(), s.queries(), rows_view<float>(o.out.data(), s.rows(), 4, 64), 0, 1);
    return distance(o, e);
  };
  CHECK(run(second, two, e2) < 1);
  CHECK(run(first, one, e1) < 1);
  CHECK(run(second, two, e2) < 1);
}

TEST_CASE("attention_16 an empty batch, sequences without queries, duplicate blocks in one table") {
  const scene<bf16> nothing({}, {});
  CHECK(attend<causal>(nothing).out.empty());
  const scene<bf16> idle({}, {{0, 40}, {0, 0}});
  CHECK(attend<causal>(idle).out.empty());
  const scene<bf16> between({}, {{0, 40}, {1, 40}, {0, 7}});
  CHECK(distance(attend<causal>(between), expected<causal>(between)) < 1);

  each_kernel([](cpu_isa isa, std::uint32_t group) {
    scene<bf16> s({.kv_heads = 2, .group = group}, {{1, 64}, {5, 64}});
    for (std::size_t i : {1u, 3u, 6u}) s.table()[i] = s.table()[0];
    INFO(text(s.form(), isa));
    CHECK(distance(attend<causal>(s, {}, isa), expected<causal>(s)) < 1);
  });
}

TEST_CASE("attention_16 a window of 0 is refused, a window of 1 sees the query's own position") {
  const scene<bf16> s({.kv_heads = 2, .group = 2}, {{1, 40}, {6, 40}});
  CHECK_THROWS_WITH(attend<sliding_window>(s), contains_text("window is 0") && contains_text("at least 1"));
  for (const cpu_isa isa : isas()) {
    const outcome o = attend<sliding_window>(s, {.window = 1}, isa);
    CHECK(distance(o, expected<sliding_window>(s, {.window = 1})) < 1);
  }
}

TEST_CASE("attention_16 sinks of -inf change nothing, large ones take everything") {
  each_kernel([](cpu_isa isa, std::uint32_t group) {
    const scene<bf16> s({.kv_heads = 1, .group = group}, {{1, 40}, {6, 40}, {1, 0}, {1, 1300}});
    using with_sinks = combine<causal, sinks>;
    const std::size_t heads = s.form().query_heads();
    const std::vector<float> none(heads, empty_lse());
    INFO(text(s.form(), isa));
    for (const unsigned threads : {1u, 5u}) {
      CHECK(
          same_bits(attend<with_sinks>(s, {.sinks = none}, isa, threads).out, attend<causal>(s, {}, isa, threads).out));
      for (const float large : {100.0f, 1e4f}) {
        const std::vector<float> sink(heads, large);
        CHECK(distance(attend<with_sinks>(s, {.sinks = sink}, isa, threads), expected<with_sinks>(s, {.sinks = sink})) <
              1);
      }
    }
  });
}

TEST_CASE("attention_16 lengths one below, at and above each border of a split") {
  constexpr std::uint32_t longest = 4200;
  const scene<bf16> whole({.kv_heads = 1, .group = 2, .head_dim = 64}, {{1, longest}});
  for (const bool invariant : {false, true}) {
    // Where the plan begins to cut elsewhere, and where its last part begins.
    std::vector<std::uint32_t> lengths;
    std::vector<std::uint32_t> before;
    for (std::uint32_t n = 1; n < longest; ++n) {
      const auto now = cuts(whole, n, 3, invariant);
      const bool elsewhere = now != before;
      const bool just_cut = !now.empty() && n == now.back() + 1;
      if (elsewhere || just_cut) lengths.insert(lengths.end(), {n - 1, n, n + 1});
      before = now;
    }
    std::sort(lengths.begin(), lengths.end());
    lengths.erase(std::unique(lengths.begin(), lengths.end()), lengths.end());
    REQUIRE(lengths.size() >= 6);
    const std::size_t every = thorough ? lengths.size() / 48 + 1 : lengths.size() / 6 + 1;
    for (std::size_t i = 0; i < lengths.size(); i += i < 6 ? 1 : every) {
      const std::uint32_t n = lengths[i];
      const scene<bf16> t({.kv_heads = 1, .group = 2, .head_dim = 64}, {{1, n}, {3, n}});
      const scene<bf16> lone({.kv_heads = 1, .group = 2, .head_dim = 64}, {{1, n}});
      const expectation e = expected<causal>(t);
      const expectation e_lone = expected<causal>(lone);
      for (const cpu_isa isa : isas()) {
        INFO(name(isa) << " length " << n << " invariant " << invariant);
        CHECK(distance(invariant ? attend<causal, true>(t, {}, isa, 3) : attend<causal>(t, {}, isa, 3), e) < 1);
        CHECK(distance(invariant ? attend<causal, true>(lone, {}, isa, 3) : attend<causal>(lone, {}, isa, 3), e_lone) <
              1);
      }
    }
  }
}

TEST_CASE("attention_16 65,537 units of work") {
  const scene<bf16> s({.block_size = 1, .kv_heads = 1, .group = 1, .head_dim = 8},
                      std::vector<sequence>(65'537, sequence{1, 1}));
  const attention<bundle<causal, bf16>> a({.shape = s.heads(), .threads = 1});
  const attention_plan plan = a.plan(s.batch());
  CHECK(plan.units().size() == 65'537);
  const outcome o = attend<causal>(s);
  const expectation e = expected<causal>(s);
  CHECK(distance(o, e) < 1);
}
