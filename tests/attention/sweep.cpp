// SPDX-License-Identifier: Apache-2.0
// Every instruction set against the reference, over shapes, types and mixes of prefill chunks and decodes.
#include "support.hpp"

using namespace kvcache_test;

namespace {

/// Holds the scene against the reference on every instruction set, whole and cut for several threads.
template <class Variant, class K, class V>
void hold(const scene<K, V>& s, const variant_values& values = {}) {
  const expectation e = expected<Variant>(s, values);
  for (const cpu_isa isa : isas()) {
    for (const unsigned threads : {1u, 5u}) {
      INFO(text(s.form(), isa, threads) << " " << dtype_traits<K>::name << " " << dtype_traits<V>::name << " variant "
                                        << Variant::name);
      CHECK(distance(attend<Variant>(s, values, isa, threads), e) < 1);
    }
  }
}

const std::vector<sequence> mixed{{1, 130}, {thorough ? 70u : 20u, 70}, {5, thorough ? 200u : 90u}, {1, 1}, {33, 97}};
const std::vector<sequence> decodes{{1, 67}, {1, 16}, {1, 1}, {1, 129}};

}  // namespace

TEST_CASE("attention_11 every group size agrees with the reference") {
  for (const std::uint32_t group : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 10u, 11u, 12u, 13u, 14u, 15u, 16u, 64u, 128u}) {
    if (!thorough && group > 8 && group % 5 != 0 && group != 64) continue;
    const shape form{.kv_heads = group > 16 ? 1u : 2u, .group = group, .head_dim = group > 16 ? 64u : 128u};
    hold<causal>(scene<bf16>(form, decodes, group));
    hold<causal>(scene<bf16>(form, {{3, 40}, {1, 20}}, group + 100));
  }
}

TEST_CASE("attention_11 every head size agrees with the reference") {
  for (const std::uint32_t dim : {64u, 80u, 96u, 112u, 128u, 192u, 256u}) {
    const shape form{.kv_heads = 2, .group = 3, .head_dim = dim};
    hold<causal>(scene<bf16>(form, mixed, dim));
    if (thorough || dim % 48 == 0) {
      hold<causal>(scene<f16>(form, {{1, 67}, {9, 40}}, dim + 1));
      hold<causal>(scene<f32>(form, {{1, 67}, {9, 40}}, dim + 2));
    }
  }
}

TEST_CASE("head sizes that fill no vector agree with the reference") {
  for (const std::uint32_t dim : {1u, 3u, 8u, 20u, 72u, 100u}) {
    hold<causal>(scene<bf16>({.kv_heads = 2, .group = 2, .head_dim = dim}, {{1, 67}, {9, 40}}, dim));
    hold<causal>(scene<f32>({.kv_heads = 2, .group = 2, .head_dim = dim}, {{1, 67}, {9, 40}}, dim));
  }
}

TEST_CASE("attention_11 every block size and order of heads agrees with the reference") {
  for (const std::uint32_t block_size : {1u, 7u, 16u, 64u, 256u}) {
    for (const bool heads_outside : {false, true}) {
      const shape form{
          .block_size = block_size, .kv_heads = 3, .group = 2, .head_dim = 64, .heads_outside = heads_outside};
      hold<causal>(scene<bf16>(form, mixed, block_size));
      hold<causal>(scene<f32>(form, decodes, block_size));
    }
  }
}

TEST_CASE("K and V of different sizes and types agree with the reference") {
  const shape form{.kv_heads = 2, .group = 5, .head_dim = 192, .head_dim_v = 128};
  hold<causal>(scene<bf16>(form, mixed, 1));
  hold<causal>(scene<f16, bf16>(form, {{1, 67}, {9, 40}}, 2));
  hold<causal>(scene<bf16, f32>(form, {{1, 67}, {9, 40}}, 3));
  hold<causal>(scene<f32, f16>({.group = 4, .head_dim = 64, .head_dim_v = 112}, {{1, 67}, {9, 40}}, 4));
  // As latent attention has them: one kv head for all query heads.
  hold<causal>(scene<bf16>({.kv_heads = 1, .group = 16, .head_dim = 576, .head_dim_v = 512}, {{1, 67}, {9, 40}}, 5));
}

TEST_CASE("blocks in the tail pool agree with the reference") {
  for (const std::uint32_t block_size : {1u, 7u, 16u}) {
    // Kernels for decoding take tails with equal strides only.
    for (const bool alike : {false, true}) {
      shape form{.block_size = block_size, .kv_heads = 2, .group = 4, .head_dim = 64};
      form.tails = true;
      form.tails_alike = alike;
      hold<causal>(scene<bf16>(form, mixed, 1));
      form.group = 1;
      form.heads_outside = true;
      hold<causal>(scene<f32>(form, mixed, 2));
    }
  }
}

TEST_CASE("R17 lengths below, at and above each border agree with the reference") {
  std::vector<sequence> all;
  for (const std::uint32_t n : {0u, 1u, 2u, 15u, 16u, 17u, 31u, 32u, 33u, 63u, 64u, 65u, 127u, 128u, 129u}) {
    all.push_back({1, n});
    all.push_back({2, n});
    if (n >= 31) all.push_back({31, n});
  }
  hold<causal>(scene<bf16>({.kv_heads = 1, .group = 4, .head_dim = 64}, all, 3));
  hold<full>(scene<bf16>({.kv_heads = 1, .group = 3, .head_dim = 64}, all, 4));
  hold<causal>(scene<f32>({.block_size = 7, .kv_heads = 1, .group = 17, .head_dim = 64}, all, 5));
}

namespace {

/// Places of precision.
template <class T>
constexpr double half_unit = std::is_same_v<T, float> ? 0x1p-24
                             : std::is_same_v<T, f16> ? 0x1p-11
                                                      : 0x1p-8;

}  // namespace

TEMPLATE_TEST_CASE("R17 q and out may be slices with strides of their own, of any element type", "", float, f16, bf16) {
  const scene<bf16> s({.kv_heads = 2, .group = 2, .head_dim = 64}, mixed, 5);
  const std::uint32_t heads = s.form().query_heads();
  // q as the first part of a fused row [q | k | v]; out with a gap behind every head.
  const std::int64_t fused = (heads + 2 * 2) * std::int64_t{64};
  std::vector<bf16> qkv(static_cast<std::size_t>(fused) * s.rows(), from_float<bf16>(poison_value()));
  scene<bf16> rounded({.kv_heads = 2, .group = 2, .head_dim = 64}, mixed, 5);
  for (std::uint32_t r = 0; r < s.rows(); ++r) {
    for (std::uint32_t i = 0; i < heads * 64; ++i) {
      const bf16 x = from_float<bf16>(s.q[std::size_t{r} * heads * 64 + i]);
      qkv[static_cast<std::size_t>(r * fused) + i] = x;
      rounded.q[std::size_t{r} * heads * 64 + i] = to_float(x);
    }
  }
  const expectation e = expected<causal>(rounded);
  const std::int64_t head_step = 70;
  const std::int64_t row_step = heads * head_step + 3;
  for (const cpu_isa isa : isas()) {
    const attention<bundle<causal, bf16>> a({.shape = s.heads(), .threads = 1, .backend = {.isa = isa}});
    const auto plan = a.plan(s.batch());
    const auto untouched = from_float<TestType>(1234.5f);
    std::vector<TestType> out(static_cast<std::size_t>(row_step) * s.rows(), untouched);
    // The lse too has a gap behind every head.
    std::vector<float> lse(std::size_t{s.rows()} * heads * 3, 1234.5f);
    a.run(plan, s.view(), rows_view<const bf16>(qkv.data(), s.rows(), heads, 64, fused, 64),
          rows_view<TestType>(out.data(), s.rows(), heads, 64, row_step, head_step), 0, 1, {},
          {lse.data(), heads * std::int64_t{3}, 3});
    const double of_weights = isa >= cpu_isa::avx512_dot ? 0x1p-8 : 0;
    double worst = 0;
    bool kept = true;
    for (std::uint32_t r = 0; r < s.rows(); ++r) {
      for (std::uint32_t h = 0; h < heads; ++h) {
        const TestType* const row = out.data() + r * row_step + h * head_step;
        const std::size_t at = std::size_t{r} * heads + h;
        worst = (std::max)(
            worst, how_far_lse(lse[at * 3], e.lse[at], of_weights + 1e-5 * (std::max)(1.0, std::fabs(e.lse[at]))));
        kept = kept && lse[at * 3 + 1] == 1234.5f && lse[at * 3 + 2] == 1234.5f;
        for (std::uint32_t d = 0; d < 64; ++d) {
          const double want = e.out[at * 64 + d];
          // Half a unit in the last place, and what f32 or weights of bf16 allow.
          const double allowed = std::fabs(want) * half_unit<TestType> + 0x1p-25 + (of_weights + 1e-5) * e.largest;
          worst = (std::max)(worst, how_far(to_float(row[d]), want, allowed));
        }
        for (std::uint32_t d = 64; d < 70; ++d) kept = kept && std::memcmp(&row[d], &untouched, sizeof untouched) == 0;
      }
    }
    INFO(name(isa));
    CHECK(worst < 1);
    CHECK(kept);
  }
}

TEST_CASE("logits that rise, fall or jump from token to token agree with the reference") {
  // Two natural units a token, so a row's maximum grows beyond any threshold again and again. It ends near 0, where an
  // f32 logit is precise.
  const std::uint32_t length = 130;
  for (const std::uint32_t group : {1u, 2u, 4u, 8u, 13u, 16u}) {
    for (const int kind : {0, 1, 2}) {
      scene<bf16> s({.kv_heads = 2, .group = group}, {{1, length}, {5, length}}, group);
      for (std::uint32_t t = 0; t < length; ++t) {
        const std::uint32_t step = kind == 0 ? t : kind == 1 ? length - t : t * 37 % length;
        for (const std::size_t row : {std::size_t{0}, std::size_t{1}})
          s.fill_k(row, t, 0.25f * (static_cast<float>(step) - static_cast<float>(length)));
      }
      std::fill(s.q.begin(), s.q.end(), 1.0f);  // logit = 64 * 0.25 * step / 8
      INFO((kind == 0 ? "rising" : kind == 1 ? "falling" : "jumping"));
      hold<causal>(s);
    }
  }
}

TEST_CASE("a randomly drawn batch agrees with the reference") {
  const unsigned rounds = thorough ? 60 : 4;
  for (unsigned seed = 1; seed <= rounds; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](std::uint32_t least, std::uint32_t most) {
      return std::uniform_int_distribution<std::uint32_t>(least, most)(random);
    };
    shape form;
    form.block_size = draw(1, 40);
    form.kv_heads = draw(1, 4);
    form.group = draw(1, 18);
    form.head_dim = draw(1, 10) * 16;
    form.head_dim_v = draw(1, 10) * 16;
    form.heads_outside = draw(0, 1) == 1;
    form.tails = draw(0, 1) == 1;
    std::vector<sequence> sequences(draw(0, 5));
    for (sequence& s : sequences) {
      s.kv_length = draw(0, 300);
      s.queries = draw(0, 2) == 0 ? draw(0, 50) : 1;
    }
    INFO("seed " << seed);
    hold<causal>(scene<bf16>(form, sequences, seed));
  }
}
