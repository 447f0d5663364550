// SPDX-License-Identifier: Apache-2.0
// The reference itself, against answers worked out by hand.
#include <kvcache/attention/reference.hpp>

#include <cmath>

#include "support.hpp"

using namespace kvcache_test;

namespace {

/// One head, two dims, three tokens: logits are what the first element of each key says.
scene<f32> three_tokens(std::uint32_t queries) {
  scene<f32> s({.block_size = 2, .kv_heads = 1, .group = 1, .head_dim = 2}, {{queries, 3}});
  const float logit[] = {0.0f, std::log(2.0f), std::log(5.0f)};
  for (std::uint32_t t = 0; t < 3; ++t) {
    s.write_k(0, t, 0, 0, logit[t]);
    s.write_k(0, t, 0, 1, 0.0f);
    s.write_v(0, t, 0, 0, static_cast<float>(t));
    s.write_v(0, t, 0, 1, 1.0f);
  }
  for (std::uint32_t i = 0; i < queries; ++i) {
    s.q[2 * i] = 1;
    s.q[2 * i + 1] = 0;
  }
  return s;
}

bool close(double a, double b) { return std::fabs(a - b) < 1e-6; }

}  // namespace

TEST_CASE("the reference weighs tokens by the exponentials of their logits") {
  const auto s = three_tokens(1);
  const auto e = expected<full>(s, {.scale = 1});
  CHECK(close(e.out[0], (1 * 2.0 + 2 * 5.0) / 8));
  CHECK(close(e.out[1], 1.0));
  CHECK(close(e.lse[0], 3.0));  // log2 of 1 + 2 + 5
}

TEST_CASE("the reference's causal rows see their own position and what is before") {
  const auto s = three_tokens(3);
  const auto e = expected<causal>(s, {.scale = 1});
  CHECK(close(e.out[0], 0.0));
  CHECK(close(e.out[2], 2.0 / 3));
  CHECK(close(e.out[4], 12.0 / 8));
}

TEST_CASE("the reference's window of 2 sees two tokens") {
  const auto s = three_tokens(1);
  const auto e = expected<sliding_window>(s, {.scale = 1, .window = 2});
  CHECK(close(e.out[0], 12.0 / 7));
}

TEST_CASE("the reference's sink takes its share and adds no value") {
  const auto s = three_tokens(1);
  const float sink[] = {std::log(8.0f)};
  const auto e = expected<combine<full, sinks>>(s, {.scale = 1, .sinks = sink});
  CHECK(close(e.out[0], 12.0 / 16));
  CHECK(close(e.out[1], 0.5));
  CHECK(close(e.lse[0], 4.0));
}

TEST_CASE("the reference's soft cap bends logits") {
  const auto s = three_tokens(1);
  const double cap = 0.5;
  const auto e = expected<combine<full, soft_cap>>(s, {.scale = 1, .soft_cap = 0.5f});
  double total = 0;
  double sum = 0;
  for (int t = 0; t < 3; ++t) {
    const double logit = t == 0 ? 0 : std::log(t == 1 ? 2.0 : 5.0);
    const double weight = std::exp(cap * std::tanh(logit / cap));
    total += weight;
    sum += t * weight;
  }
  CHECK(close(e.out[0], sum / total));
}

TEST_CASE("the reference's slope takes from far tokens") {
  const auto s = three_tokens(1);
  const float slope[] = {std::log(2.0f)};
  const auto e = expected<combine<causal, alibi>>(s, {.scale = 1, .alibi_slopes = slope});
  // 1 / 4, 2 / 2, 5
  CHECK(close(e.out[0], (1 * 1.0 + 2 * 5.0) / 6.25));
}

TEST_CASE("the reference leaves out what the mask leaves out") {
  const auto s = three_tokens(1);
  const std::uint8_t bits[] = {0b101};
  const auto e = expected<combine<full, custom_mask>>(s, {.scale = 1, .mask = {bits, 1, 1}});
  CHECK(close(e.out[0], 10.0 / 6));
}

TEST_CASE("the reference refuses shapes that do not fit, as run does") {
  const scene<bf16> s({.kv_heads = 2, .group = 4}, {{3, 40}});
  std::vector<double> out(s.q.size());
  const rows_view<double> to(out.data(), 3, 8, 64);
  const auto refused = [&](const kv_view& view, rows_view<const float> q, rows_view<double> o) {
    try {
      reference_attention<causal>(s.batch(), view, q, o);
    } catch (const invalid_argument& e) {
      return std::string(e.what());
    }
    return std::string("nothing");
  };
  CHECK(refused(s.view(), s.queries(), to) == "nothing");
  CHECK_THAT(refused(s.view(), {s.q.data(), 1, 8, 64}, to), contains_text("rows is 1") && contains_text("3 needed"));
  CHECK_THAT(refused(s.view(), {s.q.data(), 3, 8, 32}, to), contains_text("head_dim is 32"));
  CHECK_THAT(refused(s.view(), {s.q.data(), 3, 7, 64}, to), contains_text("7 query heads"));
  CHECK_THAT(refused(s.view(), s.queries(), {out.data(), 2, 8, 64}), contains_text("out's rows is 2"));
  CHECK_THAT(refused(s.view(), s.queries(), {out.data(), 3, 4, 64}), contains_text("out's heads is 4"));
  kv_view view = s.view();
  view.blocks = 2;
  CHECK_THAT(refused(view, s.queries(), to), contains_text("2 blocks"));
  view = s.view();
  view.block_size = 8;
  CHECK_THAT(refused(view, s.queries(), to), contains_text("block_size is 8"));
  view = s.view();
  view.head_dim_v = 0;  // as head_dim
  CHECK(refused(view, s.queries(), to) == "nothing");
}
