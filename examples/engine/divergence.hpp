// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

namespace engine {

/// What has to be known of a row of logits before another is held against it.
struct logit_summary {
  double log_sum = 0;    ///< log of the sum of exp(logit): logit - log_sum is a log-probability
  std::size_t best = 0;  ///< the first largest: what greedy sampling takes
};
/// O(vocabulary). Any NaN makes log_sum a NaN.
[[nodiscard]] logit_summary summarise(std::span<const float> logits);

/// Kullback-Leibler divergence KL(p || q), natural log, of the distributions that two rows of logits stand for. 0 where
/// the rows are equal, never below, and exact also where it is 1e-9: the sum is of p * (exp(d) - 1 - d), d = log q -
/// log p, whose terms are all >= 0, and in which a rounded log_sum matters only by its square. O(vocabulary).
[[nodiscard]] double divergence(std::span<const float> p, const logit_summary& of_p, std::span<const float> q,
                                const logit_summary& of_q);

}  // namespace engine
