// SPDX-License-Identifier: Apache-2.0
// Inputs that break implementations of attention, met by the bodies of the device's kernels.
#include "attention_support.hpp"

using namespace kvcache_test;

namespace {

float not_a_number() { return std::bit_cast<float>(0x7fc0'0000u); }
float infinity() { return std::bit_cast<float>(0x7f80'0000u); }

template <class F>
void each_group(const F& f) {
  for (const std::uint32_t group : {1u, 4u, 17u}) {
    INFO("group " << group);
    each_device_run([&](const device_run& how) { f(how, group); });
  }
}

}  // namespace

TEST_CASE("attention_1 device: logits near -6e4 leave a finite and right softmax", "[cuda]") {
  for (const std::uint32_t kv : {1u, 17u}) {
    scene<bf16> s({.kv_heads = 2, .group = 3}, {{1, kv}});
    for (std::uint32_t t = 0; t < kv; ++t) s.fill_k(0, t, -73.0f);
    std::fill(s.q.begin(), s.q.end(), 103.0f);  // 64 * 73 * 103 / 8 = 60,152
    const expectation e = expected<causal>(s);
    CHECK(e.lse[0] < -8.0e4);
    each_device_run([&](const device_run& how) { CHECK(distance(attend_on_device<causal>(s, {}, how), e) < 1); });
  }
}

TEST_CASE("attention_2 device: causal, 4 queries over 2 keys: the first two rows are empty", "[cuda]") {
  each_group([](const device_run& how, std::uint32_t group) {
    const scene<bf16> s({.kv_heads = 2, .group = group}, {{4, 2}});
    const outcome o = attend_on_device<causal>(s, {}, how);
    const std::size_t heads = s.form().query_heads();
    for (std::size_t i = 0; i < 2 * heads; ++i) CHECK(is_minus_infinity(o.lse[i]));
    for (std::size_t i = 0; i < 2 * heads * 64; ++i) REQUIRE(std::bit_cast<std::uint32_t>(o.out[i]) == 0);
    CHECK(distance(o, expected<causal>(s)) < 1);
  });
}

TEST_CASE("attention_4 device: lengths 0, 5 and 0 into an output of no numbers: empty rows are written", "[cuda]") {
  each_group([](const device_run& how, std::uint32_t group) {
    const scene<bf16> s({.kv_heads = 2, .group = group}, {{1, 0}, {1, 5}, {1, 0}});
    const outcome o = attend_on_device<causal>(s, {}, how);
    const std::size_t heads = s.form().query_heads();
    for (const std::size_t row : {std::size_t{0}, std::size_t{2}}) {
      for (std::size_t h = 0; h < heads; ++h) CHECK(is_minus_infinity(o.lse[row * heads + h]));
      for (std::size_t i = 0; i < heads * 64; ++i)
        REQUIRE(std::bit_cast<std::uint32_t>(o.out[row * heads * 64 + i]) == 0);
    }
    CHECK(distance(o, expected<causal>(s)) < 1);
  });
}

TEST_CASE("attention_5 R16 device: unused slots and blocks of no numbers and infinities do not reach the output",
          "[cuda]") {
  each_group([](const device_run& how, std::uint32_t group) {
    const scene<bf16> s({.block_size = 4, .kv_heads = 2, .group = group}, {{1, 13}, {13, 13}, {2, 13}});
    CHECK(distance(attend_on_device<causal>(s, {}, how), expected<causal>(s)) < 1);
    CHECK(distance(attend_on_device<full>(s, {}, how), expected<full>(s)) < 1);
  });
}

TEST_CASE("R16 device: tokens that a row does not see contribute nothing, whatever they hold", "[cuda]") {
  for (const float bad : {not_a_number(), infinity(), -infinity()}) {
    for (const std::uint32_t group : {1u, 5u}) {
      each_device_run([&](const device_run& how) {
        // Rows at positions 60 .. 99; token 80 is bad. Rows before it are as if it were not there, later ones are not.
        const shape form{.block_size = 7, .kv_heads = 1, .group = group};
        scene<bf16> s(form, {{40, 100}});
        const outcome clean = attend_on_device<causal>(s, {}, how);
        s.fill_k(0, 80, bad);
        s.fill_v(0, 80, bad);
        const outcome o = attend_on_device<causal>(s, {}, how);
        const std::size_t heads = form.query_heads();
        bool same = true;
        bool numbers = false;
        for (std::size_t i = 0; i < o.out.size(); ++i) {
          if (i < 20 * heads * 64)
            same = same && o.out[i] == clean.out[i];
          else
            numbers = numbers || (bad != bad && is_number(o.out[i]));
        }
        CHECK(same);
        CHECK_FALSE(numbers);

        // A mask that leaves it out.
        scene<bf16> w(form, {{1, 100}, {10, 100}});
        for (const std::uint32_t row : {0u, 1u}) {
          w.fill_k(row, 80, bad);
          w.fill_v(row, 80, bad);
        }
        std::vector<std::uint8_t> bits(16 * w.rows(), 0xff);
        for (std::uint32_t r = 0; r < w.rows(); ++r) bits[r * 16 + 10] = 0xfe;
        const variant_values values{.mask = {bits.data(), w.rows(), 16}};
        using masked = combine<causal, custom_mask>;
        CHECK(distance(attend_on_device<masked>(w, values, how), expected<masked>(w, values)) < 1);
      });
    }
  }
}

TEST_CASE("R16 device: an infinite value is what the rows that see it get", "[cuda]") {
  each_device_run([](const device_run& how) {
    scene<bf16> s({.block_size = 16, .kv_heads = 1, .group = 2}, {{40, 100}});
    s.write_v(0, 70, 0, 3, infinity());
    s.write_v(0, 75, 0, 5, -infinity());
    s.write_v(0, 72, 0, 9, infinity());
    s.write_v(0, 77, 0, 9, -infinity());
    const outcome o = attend_on_device<causal>(s, {}, how);
    const auto at = [&](std::uint32_t position, std::uint32_t d) {
      return std::bit_cast<std::uint32_t>(o.out[((position - 60) * 2 + 1) * 64 + d]);
    };
    CHECK(is_number(std::bit_cast<float>(at(69, 3))));
    CHECK(at(70, 3) == 0x7f80'0000u);
    CHECK(at(99, 3) == 0x7f80'0000u);
    CHECK(is_number(std::bit_cast<float>(at(74, 5))));
    CHECK(at(75, 5) == 0xff80'0000u);
    CHECK(at(76, 9) == 0x7f80'0000u);
    CHECK((at(77, 9) & 0x7fff'ffffu) > 0x7f80'0000u);
    CHECK(is_number(std::bit_cast<float>(at(99, 4))));
  });
}

TEST_CASE("attention_6 device: block ids whose byte offsets pass 2^31 and 2^32", "[cuda]") {
  const std::int64_t block_bytes = 16 * 64 * 2;
  for (const block_id high :
       {block_id{0x8000'0000u / (16 * 64)}, block_id{1'048'577}, block_id{2'097'153}, block_id{8'388'609}}) {
    const std::int64_t first = std::int64_t{high} * block_bytes;
    std::vector<kvcache::device::words4> memory(2 * 16 * 64 * 2 / 16 * 2);
    auto* const k = reinterpret_cast<bf16*>(memory.data());
    bf16* const v = k + 2 * 16 * 64;
    for (std::size_t i = 0; i < 2 * 16 * 64; ++i) {
      k[i] = from_float<bf16>(static_cast<float>(i % 17) * 0.125f - 1);
      v[i] = from_float<bf16>(static_cast<float>(i % 23) * 0.125f - 1);
    }
    const auto before = [&](bf16* x) {
      return reinterpret_cast<std::byte*>(reinterpret_cast<std::uintptr_t>(x) - static_cast<std::uintptr_t>(first));
    };
    kv_view view;
    view.k = {before(k), block_bytes, 64 * 2, 64 * 2};
    view.v = {before(v), block_bytes, 64 * 2, 64 * 2};
    view.blocks = high + 2;
    view.block_size = 16;
    view.kv_heads = 1;
    view.head_dim = view.head_dim_v = 64;
    view.k_dtype = view.v_dtype = dtype_id::bfloat16;
    scene<bf16> s({.block_size = 16, .kv_heads = 1, .group = 2}, {{1, 32}, {5, 20}});
    s.table() = {high, high + 1, high, high + 1};
    std::vector<double> want(s.q.size());
    reference_attention<causal>(s.batch(), view, s.queries(), rows_view<double>(want.data(), 6, 2, 64));
    each_device_run([&](const device_run& how) {
      outcome o = nothing_written(s);
      device_call call(s, causal::features, {}, how, o);
      call.params.kv = view;
      call.params.copy_bytes = 16;
      run_device<causal, bf16, bf16, bf16, 64, 64>(call, how, [](host_context&& c) { return std::move(c); });
      double worst = 0;
      for (std::size_t i = 0; i < o.out.size(); ++i) worst = (std::max)(worst, how_far(o.out[i], want[i]));
      CHECK(worst < 0.02);
    });
  }
}

TEST_CASE("attention_8 device: q = 0 gives the mean of V", "[cuda]") {
  for (const std::uint32_t kv : {1u, 255u, 257u}) {
    scene<bf16> s({.kv_heads = 1, .group = 2}, {{1, kv}, {3, kv}});
    std::fill(s.q.begin(), s.q.end(), 0.0f);
    std::vector<double> mean(64);
    for (std::uint32_t t = 0; t < kv; ++t)
      for (std::uint32_t d = 0; d < 64; ++d) {
        const auto x = static_cast<float>((t * 37 + d * 11) % 101);
        s.write_v(0, t, 0, d, x);
        s.write_v(1, t, 0, d, x);
        mean[d] += static_cast<double>(x);
      }
    each_device_run([&](const device_run& how) {
      // Weights are 1 and sums whole numbers: what is rounded are the inverse of their number, a product with it, and,
      // where warps or parts are merged, their means and shares.
      const outcome o = attend_on_device<full>(s, {}, how);
      double worst = 0;
      for (std::size_t i = 0; i < o.out.size(); ++i) {
        const double want = mean[i % 64] / kv;
        worst = (std::max)(worst, how_far(o.out[i], want, std::fabs(want) * 0x1p-24 + 1e-30));
      }
      CHECK(worst <= 8);
    });
  }
}

TEST_CASE("attention_12 device: two plans made back to back before the first ran are both right", "[cuda]") {
  const scene<bf16> first({.kv_heads = 2, .group = 2}, {{1, 900}, {3, 40}}, 1);
  const scene<bf16> second({.kv_heads = 2, .group = 2}, {{20, 50}, {1, 1300}, {1, 3}}, 2);
  each_device_run([&](const device_run& how) {
    outcome one = nothing_written(first);
    outcome two = nothing_written(second);
    const device_call of_first(first, causal::features, {}, how, one);
    const device_call of_second(second, causal::features, {}, how, two);
    const auto run = [&](const device_call& call) {
      run_device<causal, bf16, bf16, bf16, 64, 64>(call, how, [](host_context&& c) { return std::move(c); });
    };
    run(of_second);
    run(of_first);
    one.rounding = two.rounding = device_rounding<bf16, bf16>(how.kernel);
    CHECK(distance(two, expected<causal>(second)) < 1);
    CHECK(distance(one, expected<causal>(first)) < 1);
  });
}

TEST_CASE("attention_16 device: nothing, sequences without queries, duplicate blocks, windows of 1, sinks", "[cuda]") {
  each_device_run([](const device_run& how) {
    CHECK(attend_on_device<causal>(scene<bf16>({}, {}), {}, how).out.empty());
    CHECK(attend_on_device<causal>(scene<bf16>({}, {{0, 40}, {0, 0}}), {}, how).out.empty());
    const scene<bf16> between({}, {{0, 40}, {1, 40}, {0, 7}});
    CHECK(distance(attend_on_device<causal>(between, {}, how), expected<causal>(between)) < 1);

    scene<bf16> twice({.kv_heads = 2, .group = 3}, {{1, 64}, {5, 64}});
    for (std::size_t i : {1u, 3u, 6u}) twice.table()[i] = twice.table()[0];
    CHECK(distance(attend_on_device<causal>(twice, {}, how), expected<causal>(twice)) < 1);

    const variant_values one{.window = 1};
    CHECK(distance(attend_on_device<sliding_window>(twice, one, how), expected<sliding_window>(twice, one)) < 1);

    const scene<bf16> s({.kv_heads = 1, .group = 4}, {{1, 40}, {6, 40}, {1, 0}, {1, 700}});
    using with_sinks = combine<causal, sinks>;
    const std::vector<float> none(4, empty_lse());
    CHECK(
        same_bits(attend_on_device<with_sinks>(s, {.sinks = none}, how).out, attend_on_device<causal>(s, {}, how).out));
    for (const float large : {100.0f, 1e4f}) {
      const std::vector<float> sink(4, large);
      CHECK(distance(attend_on_device<with_sinks>(s, {.sinks = sink}, how), expected<with_sinks>(s, {.sinks = sink})) <
            1);
    }
  });
}

TEST_CASE("attention_16 device: lengths about each border of a chunk and of a part", "[cuda]") {
  for (const std::uint32_t border : {16u, 32u, 64u, 128u, 512u, 576u, 1024u})
    for (const std::uint32_t n : {border - 1, border, border + 1}) {
      if (!thorough && border > 64) continue;
      INFO("length " << n);
      const scene<bf16> s({.kv_heads = 1, .group = 2}, {{1, n}, {3, n}});
      const expectation e = expected<causal>(s);
      each_device_run([&](const device_run& how) { CHECK(distance(attend_on_device<causal>(s, {}, how), e) < 1); });
    }
}

TEST_CASE("R19 device: a row's bits do not depend on what else is in the batch", "[cuda]") {
  for (const device_kernel kernel : {device_kernel::many_rows, device_kernel::one_row}) {
    const device_run how{.kernel = kernel, .cut_for = 5, .batch_invariant = true};
    const shape form{.block_size = 16, .kv_heads = 2, .group = 3};
    const scene<bf16> s(form, {{9, 2300}});
    const outcome together = attend_on_device<causal>(s, {}, how);
    for (const std::uint32_t row : {0u, 4u, 8u}) {
      // The same tokens, of which the row is the newest of a step of its own.
      outcome alone{std::vector<float>(6 * 64, poison_value()), std::vector<float>(6, poison_value())};
      const std::uint32_t length = 2300 - 8 + row;
      scene<bf16> one(form, {{1, 2300}});
      one.lengths()[0] = length;
      one.q.assign(s.q.begin() + row * 6 * 64, s.q.begin() + (row + 1) * 6 * 64);
      device_call call(one, causal::features, {}, how, alone);
      call.params.kv = s.view();
      call.params.work.blocks = s.table().data();
      run_device<causal, bf16, bf16, bf16, 64, 64>(call, how, [](host_context&& c) { return std::move(c); });
      INFO(name(kernel) << " row " << row);
      CHECK(has_row(together.out, row, alone.out));
    }
  }
}

TEST_CASE("Device attention takes lengths that only the device knows", "[cuda]") {
  const scene<bf16> planned({.kv_heads = 2, .group = 2}, {{1, 700}, {4, 90}, {2, 40}, {1, 5}});
  scene<bf16> s({.kv_heads = 2, .group = 2}, {{1, 700}, {4, 90}, {2, 40}, {1, 5}});
  const std::vector<std::uint32_t> known{613, 90, 38, 0};
  s.lengths() = known;
  each_device_run([&](device_run how) {
    how.kv_lengths = known.data();
    CHECK(distance(attend_on_device<causal>(planned, {}, how), expected<causal>(s)) < 1);
  });
}

TEST_CASE("Device attention rounds queries of f32 in tiles only, and takes large ones", "[cuda]") {
  for (const float by : {1.0f, 1e-20f, 1e20f}) {
    scene<f16> s({.kv_heads = 1, .group = 2}, {{1, 100}, {5, 30}});
    for (float& x : s.q) x *= by;
    const variant_values values{.scale = 0.125f / by};
    const expectation e = expected<causal>(s, values);
    each_device_run([&](device_run how) {
      how.f32_queries = true;
      INFO("queries times " << by);
      CHECK(distance(attend_on_device<causal>(s, values, how), e) < 1);
    });
  }
}
