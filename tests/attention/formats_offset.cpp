// SPDX-License-Identifier: Apache-2.0
// Keys that were stored less an offset give the attention of the keys as they were: outputs, lse, soft cap and sinks.
#include <numeric>

#include "formats.hpp"

using namespace kvcache_test;

namespace {

const std::vector<sequence> mixed{{1, 130}, {20, 70}, {5, 90}, {1, 1}, {33, 97}, {0, 9}, {1, 0}};
const std::vector<sequence> long_ones{{1, thorough ? 3000u : 2300u}, {3, 2200}, {2, 40}};

/// Gives a scene an offset: its keys are then what is stored, and that on top.
template <class Scene>
Scene with_offset(Scene s, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  s.key_offset.resize(std::size_t{s.form().kv_heads} * s.form().head_dim);
  for (float& x : s.key_offset) x = normal(random);
  return s;
}

template <class K, class V, class Variant>
void hold_offset() {
  for (const std::uint32_t group : {1u, 4u, 16u}) {
    if (!thorough && group != 4) continue;
    shape form{.block_size = group == 1 ? 7u : 16u, .kv_heads = 2, .group = group};
    form.tails = group == 4;
    const auto s = with_offset(scene<K, V>(form, mixed, group), group);
    const given g = values_for<Variant>(s, 33, group);
    hold<Variant>(s, g.values);
  }
  const auto s = with_offset(scene<K, V>({.kv_heads = 1, .group = 3, .head_dim = 80}, long_ones), 9);
  const given g = values_for<Variant>(s, 2100, 5);
  REQUIRE(plan_attention(s.batch(), {.shape = s.heads(), .features = Variant::features, .threads = 5}).state_rows() >
          0);
  hold<Variant>(s, g.values);
}

}  // namespace

TEMPLATE_TEST_CASE("keys stored less an offset agree with the reference", "", kv_dtype<f32>, kv_dtype<f16>,
                   kv_dtype<bf16>, fp8_small, int8, int4, int4_asymmetric, int4_channels, int4_rotated,
                   channels_beside_rotated) {
  using k = typename TestType::k;
  using v = typename TestType::v;
  hold_offset<k, v, causal>();
  hold_offset<k, v, combine<causal, soft_cap>>();
  hold_offset<k, v, combine<causal, sinks>>();
}

TEMPLATE_TEST_CASE("variants together over keys stored less an offset agree with the reference", "", kv_dtype<bf16>,
                   int8, int8_beside_int4, fp8_small) {
  using k = typename TestType::k;
  using v = typename TestType::v;
  hold_offset<k, v, sliding_window>();
  hold_offset<k, v, combine<sliding_window, soft_cap, alibi, sinks, custom_mask>>();
}

TEMPLATE_TEST_CASE("the reference over keys less an offset is that over the keys as they were", "", kv_dtype<bf16>,
                   int4, int4_rotated, channels_beside_rotated) {
  using all = combine<causal, soft_cap, sinks>;
  const auto s = with_offset(scene_of<TestType>({.kv_heads = 2, .group = 3, .head_dim = 80}, mixed), 4);
  const scene<f32> twin = plain_twin(s);
  const given g = values_for<all>(s, 0, 4);
  for (const bool capped : {false, true}) {
    const expectation less = capped ? expected<all>(s, g.values) : expected<causal>(s);
    const expectation whole = capped ? expected<all>(twin, g.values) : expected<causal>(twin);
    double worst = 0;
    for (std::size_t i = 0; i < less.out.size(); ++i) worst = (std::max)(worst, how_far(less.out[i], whole.out[i]));
    for (std::size_t i = 0; i < less.lse.size(); ++i)
      worst = (std::max)(worst, how_far_lse(less.lse[i], whole.lse[i], 1));
    CHECK(worst < 1e-5);
  }
}

TEST_CASE("states over parts merge where keys are stored less an offset") {
  // Two scenes of one query: its tokens in halves.
  const shape form{.kv_heads = 2, .group = 2};
  auto whole = with_offset(scene<bf16>(form, {{1, 96}}), 3);
  const expectation e = expected<full>(whole);
  const std::vector<block_id> table = whole.table();
  const std::uint32_t heads = form.query_heads();
  whole.lengths()[0] = 48;
  for (const cpu_isa isa : isas()) {
    whole.table() = table;
    outcome merged = attend<full>(whole, {}, isa);
    std::copy(table.begin() + 3, table.end(), whole.table().begin());
    const outcome part = attend<full>(whole, {}, isa);
    merge({{merged.out.data(), 1, heads, 64}, {merged.lse.data(), heads}},
          {{part.out.data(), 1, heads, 64}, {part.lse.data(), heads}});
    INFO(name(isa));
    CHECK(distance(merged, e) < 1);
  }
}

TEMPLATE_TEST_CASE("R19 over keys less an offset a row's bits depend on its own query and tokens only", "",
                   kv_dtype<bf16>, int8) {
  constexpr std::uint32_t length = 2300;
  constexpr std::uint32_t queries = 20;
  const auto s = with_offset(scene_of<TestType>({.kv_heads = 1, .group = 3}, {{queries, length}, {30, 90}}, 3), 2);
  using policy = bundle<causal, typename TestType::k, typename TestType::v, true>;
  for (const cpu_isa isa : isas()) {
    const outcome chunk = attend<causal, true>(s, {}, isa, 8);
    CHECK(distance(chunk, expected<causal>(s)) < 1);
    bool same = true;
    for (std::uint32_t i = 0; i < queries; i += 6) {
      const attention<policy> a({.shape = s.heads(), .threads = i % 5 + 1, .backend = {.isa = isa}});
      same = same && has_row(chunk.out, i, row_alone(a, s, i, length - queries + 1 + i));
    }
    INFO(name(isa));
    CHECK(same);
  }
}
