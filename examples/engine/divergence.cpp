// SPDX-License-Identifier: Apache-2.0
#include "divergence.hpp"

#include <cmath>

namespace engine {
namespace {

/// exp(d) - 1 - d without the cancellation that a small d has.
double exp_beyond_linear(double d) noexcept {
  if (std::fabs(d) > 0.25) return std::exp(d) - 1 - d;
  // The series to d^9: what is left out is below 1e-11 of the sum.
  return d * d / 2 * (1 + d / 3 * (1 + d / 4 * (1 + d / 5 * (1 + d / 6 * (1 + d / 7 * (1 + d / 8 * (1 + d / 9)))))));
}

}  // namespace

logit_summary summarise(std::span<const float> logits) {
  logit_summary out;
  for (std::size_t i = 1; i < logits.size(); ++i)
    if (logits[i] > logits[out.best]) out.best = i;
  const float largest = logits[out.best];
  double sum = 0;
  for (const float x : logits) sum += double{std::exp(x - largest)};
  out.log_sum = double{largest} + std::log(sum);
  return out;
}

double divergence(std::span<const float> p, const logit_summary& of_p, std::span<const float> q,
                  const logit_summary& of_q) {
  const double shift = of_p.log_sum - of_q.log_sum;
  const auto p_log_sum = static_cast<float>(of_p.log_sum);
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i)
    sum += double{std::exp(p[i] - p_log_sum)} * exp_beyond_linear(double{q[i]} - double{p[i]} + shift);
  return sum;
}

}  // namespace engine
