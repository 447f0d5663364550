// SPDX-License-Identifier: Apache-2.0
// Inputs that break formats with scales under attention. Compiled a second time with -ffast-math.
#include "formats.hpp"

using namespace kvcache_test;

namespace {

float not_a_number() { return std::bit_cast<float>(0x7fc0'0000u); }
float infinity() { return std::bit_cast<float>(0x7f80'0000u); }

/// Decoding in small groups, in large ones, and tiles.
template <class F>
void each_kernel(const F& f) {
  for (const cpu_isa isa : isas())
    for (const std::uint32_t group : {1u, 4u, 16u})
      if (thorough || group != 4) f(isa, group);
}

/// The same numbers on every call, between -1 and 1.
float number_of(bool keys, std::size_t r, std::uint32_t t, std::uint32_t h, std::uint32_t d) {
  std::uint32_t x = (keys ? 1u : 2u) + static_cast<std::uint32_t>(r) * 7919u + t * 104'729u + h * 1'299'709u + d * 31u;
  x = (x ^ x >> 15) * 2'246'822'519u;
  x = (x ^ x >> 13) * 3'266'489'917u;
  return static_cast<float>(x >> 8) * 0x1p-23f - 1.0f;
}

bool all_numbers(const outcome& o) {
  return std::all_of(o.out.begin(), o.out.end(), is_number) && std::all_of(o.lse.begin(), o.lse.end(), is_number);
}

/// Where outputs are held against the data's own size, and not against 1.
expectation relative(expectation e) {
  e.largest = 1e-35;
  for (const double x : e.out) e.largest = (std::max)(e.largest, std::fabs(x));
  return e;
}

}  // namespace

TEMPLATE_TEST_CASE("attention_5 R16 slots, scales, zero points and blocks that hold nothing do not reach the output",
                   "", fp8_small, fp8_large, int8, int4, int4_asymmetric, int4_channels, int2_channels, int4_rotated,
                   int8_beside_int4, channels_beside_rotated) {
  // A scene's pool is poison wherever no token was written: three slots behind token 12, their scales, and whole
  // blocks.
  each_kernel([](cpu_isa isa, std::uint32_t group) {
    shape form{.block_size = 4, .kv_heads = 2, .group = group};
    for (const bool tails : {false, true}) {
      form.tails = tails;
      const scene_of<TestType> s(form, {{1, 13}, {13, 13}, {2, 13}});
      INFO(text(form, isa));
      CHECK(distance(attend<causal>(s, {}, isa), expected<causal>(s)) < 1);
      CHECK(distance(attend<full>(s, {}, isa), expected<full>(s)) < 1);
    }
    // Behind a window tables have the null block, which is poison too.
    scene_of<TestType> w({.block_size = 4, .kv_heads = 2, .group = group}, {{1, 41}, {3, 40}});
    for (const std::size_t first : {0, 11})
      for (std::size_t i = first; i < first + 6; ++i) w.table()[i] = null_block;
    const variant_values values{.window = 14};
    INFO(text(w.form(), isa));
    CHECK(distance(attend<sliding_window>(w, values, isa), expected<sliding_window>(w, values)) < 1);
  });
}

TEMPLATE_TEST_CASE("R16 what is no number reaches the rows that attend to its token, and no other", "", fp8_small,
                   fp8_large, int8, int4, int4_asymmetric) {
  each_kernel([](cpu_isa isa, std::uint32_t group) {
    // Rows at positions 60 .. 99; token 80 is bad.
    const shape form{.block_size = group == 1 ? 1u : 7u, .kv_heads = 2, .group = group};
    const std::size_t per_row = std::size_t{form.query_heads()} * 64;
    for (const bool keys : {false, true}) {
      scene_of<TestType> s(form, {{40, 100}, {1, 100}});
      const outcome clean = attend<causal>(s, {}, isa);
      for (const std::size_t r : {std::size_t{0}, std::size_t{1}})
        keys ? s.fill_k(r, 80, not_a_number()) : s.fill_v(r, 80, not_a_number());
      const outcome o = attend<causal>(s, {}, isa);
      INFO(text(form, isa) << (keys ? " in K" : " in V"));
      CHECK(std::equal(o.out.begin(), o.out.begin() + static_cast<std::ptrdiff_t>(20 * per_row), clean.out.begin()));

      const variant_values window{.window = 10};
      const outcome passed = attend<sliding_window>(s, window, isa);
      CHECK(std::all_of(passed.out.begin() + static_cast<std::ptrdiff_t>(30 * per_row), passed.out.end(), is_number));

      std::vector<std::uint8_t> bits(16 * s.rows(), 0xff);
      for (std::uint32_t r = 0; r < s.rows(); ++r) bits[r * 16 + 10] = 0xfe;
      const variant_values mask{.mask = {bits.data(), s.rows(), 16}};
      using masked = combine<causal, custom_mask>;
      CHECK(distance(attend<masked>(s, mask, isa), expected<masked>(s, mask)) < 1);
#if defined(__FAST_MATH__)
      if (isa == cpu_isa::scalar) continue;  // there a compiler may take any logit for a number
#endif
      CHECK(std::none_of(o.out.begin() + static_cast<std::ptrdiff_t>(20 * per_row), o.out.end(), is_number));
    }
  });
}

TEMPLATE_TEST_CASE("R16 infinities saturate", "", fp8_small, fp8_large, int8, int4, int4_asymmetric, int4_channels,
                   int2_channels, int8_beside_int4) {
  constexpr std::uint32_t token = 20;
  constexpr std::uint32_t block = 16;
  // The end of what shares a scale with the element: what an infinity is stored as.
  const auto end_of = [&](bool keys, std::uint32_t h, std::uint32_t d) {
    const dtype_id id = keys ? dtype_traits<typename TestType::k>::id : dtype_traits<typename TestType::v>::id;
    if (id == dtype_id::float8_e4m3) return keys ? 448.0f : -448.0f;
    if (id == dtype_id::float8_e5m2) return keys ? 57344.0f : -57344.0f;
    const quantization q = quantization_of(id);
    float end = 0;
    for (std::uint32_t t = 0; t < 48; ++t) {
      for (std::uint32_t i = 0; i < 64; ++i) {
        const bool shares = q.per_channel ? t / block == token / block && i == d
                                          : t == token && (q.group == 0 || i / q.group == d / q.group);
        if (!shares || (t == token && i == d)) continue;
        const float x = number_of(keys, 0, t, h, i);
        end = keys ? (std::max)(end, x) : (std::min)(end, x);
      }
    }
    return end;
  };
  each_kernel([&](cpu_isa isa, std::uint32_t group) {
    const shape form{.block_size = block, .kv_heads = 2, .group = group};
    const auto with = [&](bool infinite) {
      scene_of<TestType> s(form, {{4, 48}, {1, 48}});
      s.write_all([&](bool keys, std::size_t, std::uint32_t t, std::uint32_t h, std::uint32_t d) {
        if (t != token || d != 5) return number_of(keys, 0, t, h, d);
        return !infinite ? end_of(keys, h, d) : keys ? infinity() : -infinity();
      });
      return s;
    };
    const auto s = with(true);
    const outcome o = attend<causal>(s, {}, isa);
    const outcome ends = attend<causal>(with(false), {}, isa);
    INFO(text(form, isa));
    CHECK(all_numbers(o));
    CHECK(distance(o, expected<causal>(s)) < 1);
    CHECK(same_bits(o.out, ends.out));
    CHECK(same_bits(o.lse, ends.lse));
  });
}

TEMPLATE_TEST_CASE("attention_9 int4 of data in [5, 6]: the range does not hold zero, nor padding", "", int4_asymmetric,
                   int4_channels) {
  for (const std::uint32_t dim : {80u, 96u}) {
    each_kernel([&](cpu_isa isa, std::uint32_t group) {
      const shape form{.kv_heads = 2, .group = group, .head_dim = dim};
      scene_of<TestType> s(form, {{3, 32}, {1, 48}});
      const auto data = [](bool keys, std::size_t r, std::uint32_t t, std::uint32_t h, std::uint32_t d) {
        return 5.5f + 0.5f * number_of(keys, r, t, h, d);
      };
      s.write_all(data);
      INFO(text(form, isa));
      CHECK(distance(attend<causal>(s, {}, isa), expected<causal>(s)) < 1);

      // A window of one token: each row is its own token's V. Zero points are at least 4.96, so a step is at most
      // 1.04 / 15, rounded up by 2^-7 of itself, and what is stored is half of that away.
      const double most = 0.5 * 1.04 / 15 * (1 + 0x1p-7);
      const outcome o = attend<sliding_window>(s, {.window = 1}, isa);
      double worst = 0;
      double worst_lse = 0;
      for (std::uint32_t row = 0; row < 4; ++row) {
        const std::size_t r = row / 3;
        const std::uint32_t token = r == 0 ? 29 + row : 47;
        for (std::uint32_t head = 0; head < form.query_heads(); ++head) {
          const std::size_t at = std::size_t{row} * form.query_heads() + head;
          double logit = 0;
          double allowed = 0;
          for (std::uint32_t d = 0; d < dim; ++d) {
            const double v = static_cast<double>(data(false, r, token, head / group, d));
            worst = (std::max)(worst, std::fabs(static_cast<double>(o.out[at * dim + d]) - v));
            const double q = static_cast<double>(s.q[at * dim + d]);
            logit += q * static_cast<double>(data(true, r, token, head / group, d));
            allowed += std::fabs(q) * most;
          }
          const double per_unit = 1.4426950408889634 / std::sqrt(static_cast<double>(dim));
          worst_lse = (std::max)(worst_lse,
                                 std::fabs(static_cast<double>(o.lse[at]) - logit * per_unit) / (allowed * per_unit));
        }
      }
      CHECK(worst < most + 1e-5);
      CHECK(worst_lse < 1);
    });
  }
}

TEMPLATE_TEST_CASE("attention_10 data and scales of high block ids follow strides larger than a block", "", int8, int4,
                   int8_beside_int4, channels_beside_rotated) {
  const scene_of<TestType> s({.kv_heads = 2, .group = 4}, {{1, 77}, {6, 40}, {1, 64}});
  const expectation e = expected<causal>(s);
  const kv_view low = s.view();
  REQUIRE(low.k.block_stride > low.kv_heads * low.block_size * static_cast<std::int64_t>(code_bytes(low.k_dtype, 64)));
  // So high that the bytes of scales, which are fewest, pass 2^31 and 2^32.
  const std::int64_t fewest = (std::min)(low.k_scales.block_stride, low.v_scales.block_stride);
  for (const std::int64_t bytes : {std::int64_t{1} << 31, std::int64_t{1} << 32}) {
    const auto high = static_cast<block_id>(bytes / fewest + 1);
    kv_view view = low;
    // Bases are so far before the planes that block `high` falls on block 0, whose pages are the only ones there are.
    for (plane_view* const p : {&view.k, &view.v, &view.k_scales, &view.v_scales, &view.k_tail, &view.v_tail})
      p->base = reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(p->base) -
                                             static_cast<std::uintptr_t>(high * p->block_stride));
    view.blocks += high;
    view.tail_blocks += high;
    std::vector<block_id> table = s.table();
    for (block_id& entry : table) entry += high;
    const std::vector<std::uint32_t> table_offsets{0, 5, 8, 12};
    batch_view batch = s.batch();
    batch.tables = block_tables::csr(table.data(), table_offsets);
    std::vector<double> want(e.out.size());
    reference_attention<causal>(batch, view, s.queries(), rows_view<double>(want.data(), s.rows(), 8, 64));
    CHECK(want == e.out);
    for (const cpu_isa isa : isas()) {
      const attention<bundle<causal, typename TestType::k, typename TestType::v>> a(
          {.shape = s.heads(), .threads = 1, .backend = {.isa = isa}});
      outcome o{std::vector<float>(e.out.size(), poison_value()), {}};
      run_share(a, a.plan(batch), view, s.queries(), rows_view<float>(o.out.data(), s.rows(), 8, 64));
      if (isa >= cpu_isa::avx512_dot)
        o.rounding = rounding_of<typename TestType::k, typename TestType::v>(s.form(), false);
      INFO(name(isa) << " block " << high);
      CHECK(distance(o, e) < 1);
    }
  }
}

TEMPLATE_TEST_CASE("scales of 0 and channels of equal elements", "", fp8_small, int8, int4, int4_asymmetric,
                   int4_channels, int2_channels, int4_rotated, int8_beside_int4, channels_beside_rotated) {
  each_kernel([](cpu_isa isa, std::uint32_t group) {
    const shape form{.block_size = 16, .kv_heads = 2, .group = group};
    scene_of<TestType> s(form, {{3, 37}, {1, 48}});
    INFO(text(form, isa));
    s.write_all([](auto...) { return 0.0f; });
    outcome o = attend<full>(s, {}, isa);
    CHECK(std::all_of(o.out.begin(), o.out.end(), [](float x) { return x == 0; }));
    CHECK(distance(o, expected<full>(s)) < 1);
    CHECK(std::fabs(o.lse.back() - std::log2(48.0f)) < 1e-5f);

    for (const float equal : {3.25f, -3.25f}) {  // exact in bf16 and fp8
      s.write_all([&](auto...) { return equal; });
      o = attend<full>(s, {}, isa);
      CHECK(distance(o, expected<full>(s)) < 1);
      CHECK(std::all_of(o.out.begin(), o.out.end(), [&](float x) { return std::fabs(x - equal) < 0.03f; }));
    }
    // Half the channels, and half the tokens.
    s.write_all([](bool keys, std::size_t r, std::uint32_t t, std::uint32_t h, std::uint32_t d) {
      return d / 32 == 0 ? 0.0f : t % 2 == 0 ? -2.5f : number_of(keys, r, t, h, d);
    });
    CHECK(distance(attend<causal>(s, {}, isa), expected<causal>(s)) < 1);
  });
}

TEMPLATE_TEST_CASE("elements of 1e-30 and 1e30 are as precise as those of 1", "", fp8_small, fp8_large, int8, int4,
                   int4_asymmetric, int4_channels, int2_channels, int4_rotated, int8_beside_int4,
                   channels_beside_rotated) {
  each_kernel([](cpu_isa isa, std::uint32_t group) {
    const shape form{.block_size = 16, .kv_heads = 2, .group = group};
    for (const float size : {1e-30f, 1.0f, 1e30f}) {
      scene_of<TestType> s(form, {{3, 37}, {1, 48}});
      s.write_all([&](bool keys, std::size_t r, std::uint32_t t, std::uint32_t h, std::uint32_t d) {
        return size * number_of(keys, r, t, h, d);
      });
      INFO(text(form, isa) << " size " << size);
      if (size > 1) CHECK(all_numbers(attend<causal>(s, {}, isa)));
      for (float& x : s.q) x = to_float(from_float<bf16>(x / size));
      const outcome o = attend<causal>(s, {}, isa);
      CHECK(all_numbers(o));
      CHECK(distance(o, relative(expected<causal>(s))) < 1);

      // A window of one token shows V itself, which two bits hold to a third.
      if (quantization_of(dtype_traits<typename TestType::v>::id).bits == 0 && size != 1) continue;  // beyond fp8
      const outcome own = attend<sliding_window>(s, {.window = 1}, isa);
      double worst = 0;
      for (std::uint32_t h = 0; h < form.query_heads(); ++h)
        for (std::uint32_t d = 0; d < 64; ++d)
          worst = (std::max)(
              worst,
              std::fabs(static_cast<double>(own.out[own.out.size() - (form.query_heads() - h) * std::size_t{64} + d]) /
                            static_cast<double>(size) -
                        static_cast<double>(number_of(false, 1, 47, h / group, d))));
      CHECK(worst < 0.36);
    }
  });
}
