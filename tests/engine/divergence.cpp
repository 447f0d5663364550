// SPDX-License-Identifier: Apache-2.0
#include "divergence.hpp"

#include "catch.hpp"

#include <cmath>
#include <cstddef>
#include <vector>

using namespace engine;

namespace {

std::vector<float> some_logits(std::size_t size, unsigned seed) {
  std::vector<float> out(size);
  for (float& x : out) {
    seed = seed * 1664525u + 1013904223u;
    x = static_cast<float>(seed >> 8) / 16777216.0f * 20.0f - 10.0f;
  }
  return out;
}

std::vector<long double> softmax(const std::vector<float>& logits) {
  long double sum = 0;
  std::vector<long double> out;
  for (const float x : logits) sum += out.emplace_back(std::exp(static_cast<long double>(x)));
  for (long double& x : out) x /= sum;
  return out;
}

/// By the definition, which cancels: good to some 1e-18 here.
double definition(const std::vector<float>& p, const std::vector<float>& q) {
  const auto of_p = softmax(p);
  const auto of_q = softmax(q);
  long double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) sum += of_p[i] * std::log(of_p[i] / of_q[i]);
  return static_cast<double>(sum);
}

double measured(const std::vector<float>& p, const std::vector<float>& q) {
  return divergence(p, summarise(p), q, summarise(q));
}

}  // namespace

TEST_CASE("A row's log-sum and its first largest") {
  const std::vector<float> logits{1, 3, -2, 3, 0};
  const logit_summary s = summarise(logits);
  CHECK(s.best == 1);
  double sum = 0;
  for (const float x : logits) sum += std::exp(double{x});
  CHECK(s.log_sum == Approx(std::log(sum)).epsilon(1e-7));
  // Far beyond what exp can hold.
  CHECK(summarise(std::vector<float>{1000, 1000}).log_sum == Approx(1000 + std::log(2.0)));
  CHECK(summarise(std::vector<float>{-1000}).log_sum == -1000);
  CHECK(std::isnan(summarise(std::vector<float>{1, NAN, 2}).log_sum));
}

TEST_CASE("The divergence is that of the definition, from far apart to nearly equal") {
  const std::vector<float> p = some_logits(3000, 1);
  for (const float noise : {20.0f, 1.0f, 0.3f, 0.1f, 1e-2f, 1e-3f, 1e-4f}) {
    std::vector<float> q = p;
    const std::vector<float> change = some_logits(p.size(), 2);
    for (std::size_t i = 0; i < q.size(); ++i) q[i] += change[i] / 10 * noise;
    const double expected = definition(p, q);
    INFO("noise " << noise << ", divergence " << expected);
    CHECK(expected > 0);
    CHECK(measured(p, q) == Approx(expected).epsilon(1e-5));
  }
}

TEST_CASE("The divergence of equal rows is 0, and a constant added to all logits does not count") {
  const std::vector<float> p = some_logits(1000, 3);
  CHECK(measured(p, p) == 0);
  std::vector<float> shifted = p;
  for (float& x : shifted) x += 4;
  CHECK(measured(p, shifted) < 1e-12);
}
