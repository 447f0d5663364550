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

/// The same with blocks of three sizes, from one that fills no vector to one of several.
template <class F>
void each_kernel_and_block_size(const F& f) {
  each_kernel([&](cpu_isa isa, std::uint32_t group) {
    for (const std::uint32_t block_size : {7u, 16u, 64u})
      if (thorough || block_size == (group == 1 ? 7 : 64)) f(isa, group, block_size);
  });
}

/// So many tokens or a few more: as many as fill whole blocks, which a format with scales per channel seals.
std::uint32_t whole_blocks(std::uint32_t tokens, std::uint32_t block_size) {
  return (tokens + block_size - 1) / block_size * block_size;
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
expectation relative(expectation e, double least = 1e-35) {
  e.largest = least;
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

TEMPLATE_TEST_CASE("R16 what is no number, or infinite, reaches the rows that attend to its token, and no other", "",
                   fp8_small, fp8_large, int8, int4, int4_asymmetric, int4_channels, int2_channels, int4_rotated,
                   int8_beside_int4, channels_beside_rotated) {
  // A NaN stays one where scales are per token, in fp8, and at 16 bits in the tail pool. Sealed per channel it is a
  // number, and so is an infinity wherever there is a scale, or fp8. Several infinities are NaN once they are rotated.
  constexpr std::uint32_t first = 80;
  constexpr std::uint32_t queries = 24;
  const auto hold = [&](cpu_isa isa, const shape& form, bool keys, float bad) {
    const dtype_id id = keys ? dtype_traits<typename TestType::k>::id : dtype_traits<typename TestType::v>::id;
    const bool per_channel = quantization_of(id).per_channel;
    scene_of<TestType> s(form, {{queries, first + queries}, {1, first + queries}});
    const auto in_tail = [&](std::size_t r, std::uint32_t t) {
      return (s.table()[s.table_offsets()[r] + t / form.block_size] & tail_bit) != 0;
    };
    std::uint32_t token = first + 5;
    while (in_tail(0, token) != form.tails) ++token;
    REQUIRE(token < first + queries - 5);
    const outcome clean = attend<causal>(s, {}, isa);
    for (const std::size_t r : {std::size_t{0}, std::size_t{1}})
      keys ? s.fill_k(r, token, bad) : s.fill_v(r, token, bad);
    const outcome o = attend<causal>(s, {}, isa);
    INFO(text(form, isa) << (keys ? " in K" : " in V") << " token " << token << " bad " << bad);
    const std::size_t per_row = std::size_t{form.query_heads()} * 64;
    const auto row = [&](const outcome& of, std::uint32_t position) {
      return of.out.begin() + static_cast<std::ptrdiff_t>((position - first) * per_row);
    };
    // What shares a scale with the token is stored otherwise once it is bad.
    const bool sealed = per_channel && !form.tails;
    const std::uint32_t untouched = (std::max)(first, sealed ? token / form.block_size * form.block_size : token);
    CHECK(std::equal(row(o, first), row(o, untouched), row(clean, first)));

    const outcome passed = attend<sliding_window>(s, {.window = 4}, isa);
    CHECK(std::all_of(row(passed, token + 4), row(passed, first + queries), is_number));

    // Of rotated 4 bits, whole numbers round off more than rounding_of says, without anything bad too.
    const double most = o.rounding != 0 && is_rotated(dtype_traits<typename TestType::v>::id) ? 2 : 1;
    std::vector<std::uint8_t> bits(16 * s.rows(), 0xff);
    for (std::uint32_t r = 0; r < s.rows(); ++r)
      bits[r * 16 + token / 8] = static_cast<std::uint8_t>(~(1u << token % 8));
    const variant_values mask{.mask = {bits.data(), s.rows(), 16}};
    using masked = combine<causal, custom_mask>;
    CHECK(distance(attend<masked>(s, mask, isa), expected<masked>(s, mask)) < most);

    const bool nan =
        is_rotated(id) || std::bit_cast<std::uint32_t>(bad) == std::bit_cast<std::uint32_t>(not_a_number());
    bool all_stay_bad = true;
    for (const std::size_t r : {std::size_t{0}, std::size_t{1}}) {
      const auto begin = r == 0 ? row(o, token) : row(o, first + queries);
      const auto end = r == 0 ? row(o, first + queries) : o.out.end();
      const bool at_16_bits = without_rotation(s.stored(keys, r, token, 0).dtype) == dtype_id::bfloat16;
      const bool stays_bad = at_16_bits || (nan && !per_channel);
      all_stay_bad = all_stay_bad && stays_bad;
#if defined(__FAST_MATH__)
      if (stays_bad && isa == cpu_isa::scalar) continue;  // there a compiler may take any logit for a number
#endif
      CHECK((stays_bad ? std::none_of(begin, end, is_number) : std::all_of(begin, end, is_number)));
    }
    // Logits of fp8's largest numbers are beyond what f32 tells apart.
    if (!form.tails && !all_stay_bad && quantization_of(id).bits != 0) CHECK(distance(o, expected<causal>(s)) < most);
  };
  each_kernel([&](cpu_isa isa, std::uint32_t group) {
    shape form{.block_size = group == 1 ? 1u : group == 4 ? 7u : 16u, .kv_heads = 2, .group = group};
    for (const bool tails : {false, true}) {
      form.tails = tails;
      for (const bool keys : {false, true})
        for (const float bad : {not_a_number(), infinity(), -infinity()})
          if (thorough || bad != -infinity()) hold(isa, form, keys, bad);
    }
  });
}

TEMPLATE_TEST_CASE("R16 infinities saturate", "", fp8_small, fp8_large, int8, int4, int4_asymmetric, int4_channels,
                   int2_channels, int4_rotated, int8_beside_int4, channels_beside_rotated) {
  constexpr std::uint32_t token = 20;
  const auto stored_as = [](bool keys) {
    return keys ? dtype_traits<typename TestType::k>::id : dtype_traits<typename TestType::v>::id;
  };
  // The end of what shares a scale with the element: what an infinity is stored as.
  const auto end_of = [&](std::uint32_t block, bool keys, std::uint32_t h, std::uint32_t d) {
    const dtype_id id = stored_as(keys);
    if (id == dtype_id::float8_e4m3) return keys ? 448.0f : -448.0f;
    if (id == dtype_id::float8_e5m2) return keys ? 57344.0f : -57344.0f;
    const quantization q = quantization_of(id);
    float end = 0;
    for (std::uint32_t t = 0; t < whole_blocks(48, block); ++t) {
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
  each_kernel_and_block_size([&](cpu_isa isa, std::uint32_t group, std::uint32_t block) {
    const shape form{.block_size = block, .kv_heads = 2, .group = group};
    const std::uint32_t length = whole_blocks(48, block);
    const auto with = [&](bool infinite) {
      scene_of<TestType> s(form, {{4, length}, {1, length}});
      s.write_all([&](bool keys, std::size_t, std::uint32_t t, std::uint32_t h, std::uint32_t d) {
        // Rotated, one infinity makes all of the head infinite: no finite element is left but 0.
        if (!infinite && t == token && is_rotated(stored_as(keys))) return 0.0f;
        if (t != token || d != 5) return number_of(keys, 0, t, h, d);
        return !infinite ? end_of(block, keys, h, d) : keys ? infinity() : -infinity();
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
    each_kernel_and_block_size([&](cpu_isa isa, std::uint32_t group, std::uint32_t block_size) {
      const shape form{.block_size = block_size, .kv_heads = 2, .group = group, .head_dim = dim};
      const std::uint32_t first_length = whole_blocks(32, block_size);
      const std::uint32_t second_length = whole_blocks(48, block_size);
      scene_of<TestType> s(form, {{3, first_length}, {1, second_length}});
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
        const std::uint32_t token = r == 0 ? first_length - 3 + row : second_length - 1;
        for (std::uint32_t head = 0; head < form.query_heads(); ++head) {
          const std::size_t at = std::size_t{row} * form.query_heads() + head;
          double logit = 0;
          double allowed = 0;
          for (std::uint32_t d = 0; d < dim; ++d) {
            const double v = static_cast<double>(data(false, r, token, head / group, d));
            worst = (std::max)(worst, how_far(o.out[at * dim + d], v));
            const double q = static_cast<double>(s.q[at * dim + d]);
            logit += q * static_cast<double>(data(true, r, token, head / group, d));
            allowed += std::fabs(q) * most;
          }
          const double per_unit = 1.4426950408889634 / std::sqrt(static_cast<double>(dim));
          worst_lse = (std::max)(worst_lse, how_far(o.lse[at], logit * per_unit, allowed * per_unit));
        }
      }
      CHECK(worst < most + 1e-5);
      CHECK(worst_lse < 1);
    });
  }
}

TEMPLATE_TEST_CASE("attention_10 data and scales of high block ids follow strides larger than a block", "", int8, int4,
                   int8_beside_int4, channels_beside_rotated) {
  const std::uint32_t block_size = GENERATE(1u, 16u, 64u);
  const scene_of<TestType> s({.block_size = block_size, .kv_heads = 2, .group = 4}, {{1, 77}, {6, 40}, {1, 64}});
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
    batch_view batch = s.batch();
    batch.tables = block_tables::csr(table.data(), s.table_offsets());
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
      INFO(text(s.form(), isa) << " block " << high);
      CHECK(distance(o, e) < 1);
    }
  }
}

TEMPLATE_TEST_CASE("scales of 0 and channels of equal elements", "", fp8_small, int8, int4, int4_asymmetric,
                   int4_channels, int2_channels, int4_rotated, int8_beside_int4, channels_beside_rotated) {
  each_kernel_and_block_size([](cpu_isa isa, std::uint32_t group, std::uint32_t block_size) {
    const shape form{.block_size = block_size, .kv_heads = 2, .group = group};
    const std::uint32_t length = whole_blocks(48, block_size);
    scene_of<TestType> s(form, {{3, whole_blocks(32, block_size) + 5}, {1, length}});
    INFO(text(form, isa));
    s.write_all([](auto...) { return 0.0f; });
    outcome o = attend<full>(s, {}, isa);
    CHECK(std::all_of(o.out.begin(), o.out.end(), [](float x) { return x == 0; }));
    CHECK(distance(o, expected<full>(s)) < 1);
    CHECK(how_far(o.lse.back(), std::log2(static_cast<double>(length))) < 1e-5);

    for (const float equal : {3.25f, -3.25f}) {  // exact in bf16 and fp8
      s.write_all([&](auto...) { return equal; });
      o = attend<full>(s, {}, isa);
      CHECK(distance(o, expected<full>(s)) < 1);
      CHECK(std::all_of(o.out.begin(), o.out.end(),
                        [&](float x) { return how_far(x, static_cast<double>(equal)) < 0.03; }));
    }
    // Half the channels, and half the tokens.
    s.write_all([](bool keys, std::size_t r, std::uint32_t t, std::uint32_t h, std::uint32_t d) {
      return d / 32 == 0 ? 0.0f : t % 2 == 0 ? -2.5f : number_of(keys, r, t, h, d);
    });
    CHECK(distance(attend<causal>(s, {}, isa), expected<causal>(s)) < 1);
  });
}

namespace {

/// How far elements of [-1, 1] may lie from what is stored of them.
double most_off(dtype_id id) {
  if (id == dtype_id::float8_e4m3) return 0x1p-5;  // half of what lies between two numbers below 1
  if (id == dtype_id::float8_e5m2) return 0x1p-4;
  const quantization q = quantization_of(id);
  // Rotated, 64 errors add up to one as from a Gaussian, of 8.6 % of the data's 0.577 (quantise_error.cpp): five sigma.
  if (is_rotated(id)) return 5 * 0.086 * 0.577;
  const double rounded_up = 1 + 0x1p-7;  // the scale
  if (q.bits == 8) return 0.5 / 127 * rounded_up;
  // The zero point is below -1 by 2^-7 at most. Without one, the side with seven codes ends a step early.
  return q.zero_points ? 0.5 * (2 + 0x1p-7) / ((1 << q.bits) - 1) * rounded_up : 1.0 / 8 * rounded_up;
}

}  // namespace

TEMPLATE_TEST_CASE("elements of 1e-30 and 1e30 are as precise as those of 1", "", fp8_small, fp8_large, int8, int4,
                   int4_asymmetric, int4_channels, int2_channels, int4_rotated, int8_beside_int4,
                   channels_beside_rotated) {
  each_kernel_and_block_size([](cpu_isa isa, std::uint32_t group, std::uint32_t block_size) {
    const shape form{.block_size = block_size, .kv_heads = 2, .group = group};
    const std::uint32_t length = whole_blocks(48, block_size);
    for (const float size : {1e-30f, 1.0f, 1e30f}) {
      scene_of<TestType> s(form, {{3, whole_blocks(32, block_size) + 5}, {1, length}});
      s.write_all([&](bool keys, std::size_t r, std::uint32_t t, std::uint32_t h, std::uint32_t d) {
        return size * number_of(keys, r, t, h, d);
      });
      INFO(text(form, isa) << " size " << size);
      if (size > 1) CHECK(all_numbers(attend<causal>(s, {}, isa)));
      for (float& x : s.q) x = to_float(from_float<bf16>(x / size));
      const outcome o = attend<causal>(s, {}, isa);
      CHECK(all_numbers(o));
      // Weights that are rounded move an output by a part of how far values lie from it.
      CHECK(distance(o, relative(expected<causal>(s), o.rounding != 0 ? static_cast<double>(size) : 1e-35)) < 1);

      // A window of one token shows V itself.
      const dtype_id stored_as = dtype_traits<typename TestType::v>::id;
      if (quantization_of(stored_as).bits == 0 && size != 1) continue;  // beyond fp8
      const outcome own = attend<sliding_window>(s, {.window = 1}, isa);
      double worst = 0;
      for (std::uint32_t h = 0; h < form.query_heads(); ++h)
        for (std::uint32_t d = 0; d < 64; ++d)
          worst = (std::max)(worst, how_far(own.out[own.out.size() - (form.query_heads() - h) * std::size_t{64} + d],
                                            static_cast<double>(size * number_of(false, 1, length - 1, h / group, d)),
                                            static_cast<double>(size)));
      CHECK(worst < most_off(stored_as) + 1e-5);
    }
  });
}
