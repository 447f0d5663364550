// SPDX-License-Identifier: Apache-2.0
#include "sampler.hpp"

#include "bad_input.hpp"
#include "catch.hpp"

#include <cmath>
#include <limits>
#include <map>
#include <vector>

using namespace engine;
using kvcache_test::contains_text;

namespace {

/// How often each token was chosen in `draws` draws.
std::map<token_id, int> draw(const sampling& how, const std::vector<float>& logits, int draws) {
  sampler s(how);
  std::map<token_id, int> counts;
  for (int i = 0; i < draws; ++i) ++counts[s.choose(logits)];
  return counts;
}

}  // namespace

TEST_CASE("Without temperature the largest logit wins, the first of equals") {
  sampler s({});
  CHECK(s.choose(std::vector<float>{-1, 3, 2, 3}) == 1);
  CHECK(s.choose(std::vector<float>{-5}) == 0);
}

TEST_CASE("Sampling draws each token as often as its probability says") {
  const std::vector<float> logits{std::log(0.5f), std::log(0.3f), std::log(0.15f), std::log(0.05f)};
  constexpr int draws = 40000;
  // Five standard deviations of the rarest and the commonest count are below 0.0125 of all draws.
  const auto near = [&](int count, double p) { return std::fabs(double(count) / draws - p) < 0.0125; };

  auto all = draw({.temperature = 1, .seed = 11}, logits, draws);
  CHECK((near(all[0], 0.5) && near(all[1], 0.3) && near(all[2], 0.15) && near(all[3], 0.05)));

  auto two = draw({.temperature = 1, .top_k = 2, .seed = 12}, logits, draws);
  CHECK(two.size() == 2);
  CHECK((near(two[0], 0.625) && near(two[1], 0.375)));

  auto nucleus = draw({.temperature = 1, .top_p = 0.9f, .seed = 13}, logits, draws);  // 0.5 + 0.3 + 0.15 reach it
  CHECK(nucleus.size() == 3);
  CHECK((near(nucleus[0], 0.5 / 0.95) && near(nucleus[1], 0.3 / 0.95) && near(nucleus[2], 0.15 / 0.95)));

  auto cold = draw({.temperature = 0.5f, .seed = 14}, logits, draws);  // probabilities squared
  const double total = 0.25 + 0.09 + 0.0225 + 0.0025;
  CHECK((near(cold[0], 0.25 / total) && near(cold[1], 0.09 / total)));
}

TEST_CASE("A seed gives the same tokens every time, another seed others") {
  const std::vector<float> logits(50, 0.0f);
  const auto tokens = [&](std::uint64_t seed) {
    sampler s({.temperature = 1, .seed = seed});
    std::vector<token_id> out;
    for (int i = 0; i < 40; ++i) out.push_back(s.choose(logits));
    return out;
  };
  CHECK(tokens(5) == tokens(5));
  CHECK(tokens(5) != tokens(6));
}

TEST_CASE("Extreme sampling values stay inside the vocabulary") {
  const std::vector<float> logits{-1e30f, 80, 79, std::numeric_limits<float>::lowest()};
  for (const sampling& how :
       {sampling{.temperature = 1e-3f, .seed = 1}, sampling{.temperature = 1e6f, .seed = 2},
        sampling{.temperature = 1, .top_k = 1, .seed = 3}, sampling{.temperature = 1, .top_p = 1e-6f},
        sampling{.temperature = 1, .top_k = 1000, .top_p = 0.5f}}) {
    for (const auto& [token, count] : draw(how, logits, 50)) CHECK((token >= 0 && token < 4));
  }
  CHECK(draw({.temperature = 1, .top_k = 1}, logits, 20).size() == 1);
  CHECK(draw({.temperature = 1, .top_p = 1e-6f}, logits, 20).size() == 1);
}

TEST_CASE("Impossible sampling values are named") {
  CHECK_THROWS_WITH(validate({.temperature = -1}), contains_text("temperature is -1"));
  CHECK_THROWS_WITH(validate({.temperature = std::numeric_limits<float>::infinity()}),
                    contains_text("temperature is inf"));
  CHECK_THROWS_WITH(validate({.top_p = 0}), contains_text("top_p is 0.0"));
  CHECK_THROWS_WITH(validate({.top_p = 1.5f}), contains_text("top_p is 1.5"));
  CHECK_NOTHROW(validate({.temperature = 2, .top_k = 5, .top_p = 1}));
}
