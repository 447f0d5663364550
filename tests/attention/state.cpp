// SPDX-License-Identifier: Apache-2.0
// States and their merging. Compiled a second time with -ffast-math.
#include <kvcache/attention/state.hpp>

#include <algorithm>
#include <array>

#include "support.hpp"

using namespace kvcache_test;

namespace {

constexpr std::uint32_t dim = 70;  // no multiple of anything

struct row_state {
  std::array<float, dim> output{};
  float lse = empty_lse();
};

/// The state over `tokens` tokens with random logits and values.
row_state random_state(unsigned seed, double shift, std::vector<double>& logits,
                       std::vector<std::array<double, dim>>& values, unsigned tokens) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  double top = -1e300;
  std::vector<double> own;
  for (unsigned t = 0; t < tokens; ++t) {
    own.push_back(normal(random) + shift);
    top = (std::max)(top, own.back());
    logits.push_back(own.back());
    values.emplace_back();
    for (double& x : values.back()) x = normal(random);
  }
  row_state s;
  double total = 0;
  for (const double x : own) total += std::exp2(x - top);
  for (std::uint32_t d = 0; d < dim; ++d) {
    double sum = 0;
    for (unsigned t = 0; t < tokens; ++t) sum += std::exp2(own[t] - top) * values[values.size() - tokens + t][d];
    s.output[d] = static_cast<float>(tokens == 0 ? 0 : sum / total);
  }
  if (tokens != 0) s.lse = static_cast<float>(top + std::log2(total));
  return s;
}

bool is_empty_state(const row_state& s) {
  return is_minus_infinity(s.lse) &&
         std::all_of(s.output.begin(), s.output.end(), [](float x) { return std::bit_cast<std::uint32_t>(x) == 0; });
}

row_state merged(const std::vector<row_state>& parts) {
  row_state r;
  merge_states(static_cast<std::uint32_t>(parts.size()), parts.data()->output.data(), sizeof(row_state) / sizeof(float),
               &parts.data()->lse, sizeof(row_state) / sizeof(float), dim, r.output.data(), &r.lse);
  return r;
}

state_view<float> view(row_state& s) { return {{s.output.data(), 1, 1, dim}, {&s.lse, 1}}; }

}  // namespace

TEST_CASE("what is no number, expected or found, is too far from everything") {
  const double bad[] = {std::bit_cast<double>(0x7ff8'0000'0000'0000u), std::bit_cast<double>(0x7ff0'0000'0000'0000u)};
  const outcome o{{1.0f, 2.0f}, {3.0f, empty_lse()}};
  const expectation right{{1.0, 2.0}, {3.0, std::bit_cast<double>(0xfff0'0000'0000'0000u)}};
  CHECK(distance(o, right) == 0);
  for (const double x : bad) {
    for (const std::size_t i : {0u, 1u}) {
      expectation e = right;
      e.out[i] = x;
      CHECK(distance(o, e) >= too_far);
      e = right;
      e.lse[i] = x;
      CHECK(distance(o, e) >= too_far);
      outcome found = o;
      found.out[i] = static_cast<float>(x);
      CHECK(distance(found, right) >= too_far);
      found = o;
      found.lse[i] = static_cast<float>(x);
      CHECK(distance(found, right) >= too_far);
    }
    CHECK(how_far(x, x) == too_far);
    CHECK(how_far(1.0, 1.0, x) == too_far);
  }
  CHECK(how_far(1.0, 1.0, 0) == too_far);  // 0 / 0
  CHECK(distance({{1.0f}, {}}, right) == too_far);
}

TEST_CASE("attention_3 R15 merging two empty states gives an empty state") {
  CHECK(is_empty_state(merged({row_state{}, row_state{}})));
  CHECK(is_empty_state(merged(std::vector<row_state>(5))));
  row_state a;
  row_state b;
  a.output.fill(poison_value());  // an empty state's output is not looked at
  merge(view(a), view(b));
  CHECK(is_empty_state(a));
}

TEST_CASE("attention_3 R15 an empty state leaves the other one as it is, bit for bit") {
  std::vector<double> logits;
  std::vector<std::array<double, dim>> values;
  const row_state s = random_state(3, 0, logits, values, 4);
  for (const auto& parts : {std::vector<row_state>{row_state{}, s}, std::vector<row_state>{s, row_state{}},
                            std::vector<row_state>{row_state{}, row_state{}, s, row_state{}}}) {
    const row_state m = merged(parts);
    CHECK(std::bit_cast<std::uint32_t>(m.lse) == std::bit_cast<std::uint32_t>(s.lse));
    CHECK(std::memcmp(m.output.data(), s.output.data(), sizeof m.output) == 0);
  }
}

TEST_CASE("attention_3 R15 states merge into the state over all their tokens, n ways and in place") {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    INFO("seed " << seed);
    std::vector<double> logits;
    std::vector<std::array<double, dim>> values;
    std::vector<row_state> parts;
    for (unsigned p = 0; p < 5; ++p)
      parts.push_back(
          random_state(seed * 100 + p, seed % 3 == 0 ? -6e4 : 20.0 * p, logits, values, p == 2 ? 0 : p + 1));
    double top = -1e300;
    for (const double x : logits) top = (std::max)(top, x);
    double total = 0;
    std::array<double, dim> want{};
    for (std::size_t t = 0; t < logits.size(); ++t) {
      total += std::exp2(logits[t] - top);
      for (std::uint32_t d = 0; d < dim; ++d) want[d] += std::exp2(logits[t] - top) * values[t][d];
    }
    const auto worst = [&](const row_state& s) {
      double w = how_far(s.lse, top + std::log2(total), 1 + std::fabs(top));
      for (std::uint32_t d = 0; d < dim; ++d) w = (std::max)(w, how_far(s.output[d], want[d] / total));
      return w;
    };
    // Near -6e4 an f32 lse is known to 2^-8, and so are the weights of the parts.
    const double allowed = seed % 3 == 0 ? 0x1p-7 : 4e-6;
    CHECK(worst(merged(parts)) < allowed);

    std::vector<state_view<const float>> views;
    for (row_state& p : parts) views.push_back(view(p));
    merge(views, view(parts[3]));  // in place of a part
    CHECK(worst(parts[3]) < allowed);
  }
}

TEST_CASE("R15 states in base e merge like states in base 2") {
  std::vector<double> logits;
  std::vector<std::array<double, dim>> values;
  row_state a = random_state(1, 0, logits, values, 3);
  row_state b = random_state(2, 5, logits, values, 4);
  row_state want = merged({a, b});
  row_state natural_b = b;
  natural_b.lse *= ln_2;
  state_view<float> other = view(natural_b);
  other.lse.base = lse_base::natural;
  row_state empty;
  state_view<float> third = view(empty);
  third.lse.base = lse_base::natural;
  const state_view<const float> parts[] = {view(a), other, third};
  row_state r;
  state_view<float> into = view(r);
  into.lse.base = lse_base::natural;
  merge(parts, into);
  CHECK(how_far(r.lse, static_cast<double>(want.lse * ln_2)) < 1e-5);
  for (std::uint32_t d = 0; d < dim; ++d) CHECK(how_far(r.output[d], static_cast<double>(want.output[d])) < 1e-5);
}

TEST_CASE("R15 a sink of any size leaves numbers") {
  for (const float sink : {1e38f, 2.5e38f, 3.4e38f}) {
    float output[2] = {1.0f, -2.0f};
    float lse = 3.0f;
    apply_sink(sink, 2, output, &lse);
    CHECK(std::fabs(output[0]) == 0.0f);
    CHECK(std::fabs(output[1]) == 0.0f);
    CHECK(lse > 1e38f);
    CHECK(std::bit_cast<std::uint32_t>(lse) < 0x7f80'0000u);
  }
  float output = 5.0f;
  float lse = 1.0f;
  apply_sink(-3.4e38f, 1, &output, &lse);
  CHECK(output == 5.0f);
  CHECK(lse == 1.0f);
}

TEST_CASE("states of different shapes do not merge") {
  row_state a;
  row_state b;
  state_view<float> longer = view(b);
  longer.output.head_dim = 71;
  CHECK_THROWS_WITH(merge(view(a), longer), contains_text("71") && contains_text("70"));
}

TEST_CASE("R15 attention over two halves merges into attention over the whole") {
  // A prefix that several requests share, and what is their own: two runs without causality over parts of the table.
  const std::uint32_t block_size = GENERATE(1u, 3u, 16u);
  for (const cpu_isa isa : isas()) {
    scene<bf16> s({.block_size = block_size, .kv_heads = 2, .group = 4}, {{1, 96}});
    outcome whole = attend<full>(s, {}, isa);
    const std::vector<std::uint32_t> offsets{0, 1};
    const auto part = [&](std::size_t first_block, std::uint32_t length, lse_base base) {
      outcome o{std::vector<float>(s.q.size()), std::vector<float>(8)};
      const std::vector<std::uint32_t> lengths{length};
      const batch_view batch{
          offsets, lengths, block_tables::padded(s.table().data() + first_block, 1, 48 / block_size), {}, block_size};
      const attention<bundle<full, bf16>> a({.shape = s.heads(), .threads = 1, .backend = {.isa = isa}});
      a.run(a.plan(batch), s.view(), s.queries(), rows_view<float>(o.out.data(), 1, 8, 64), 0, 1, {},
            {o.lse.data(), 8, 1, base});
      return o;
    };
    outcome head = part(0, 48, lse_base::two);
    outcome tail = part(48 / block_size, 48, lse_base::natural);
    state_view<float> into{{head.out.data(), 1, 8, 64}, {head.lse.data(), 8}};
    const state_view<float> other{{tail.out.data(), 1, 8, 64}, {tail.lse.data(), 8, 1, lse_base::natural}};
    merge(into, other);
    INFO(text(s.form(), isa));
    CHECK(distance(head, expected<full>(s)) < 1);
    CHECK(distance(whole, expected<full>(s)) < 1);
  }
}
