// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tokeniser.hpp"

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace engine {

/// How the next token is chosen from the logits.
struct sampling {
  float temperature = 0;    ///< 0: the largest logit, always
  std::uint32_t top_k = 0;  ///< only so many of the largest logits; 0: all
  float top_p = 1;          ///< of these, the largest that together have this probability (Holtzman et al. 2020)
  std::uint64_t seed = 0;
};

/// Throws bad_input where a value is impossible, naming it and the limit.
void validate(const sampling& how);

/// Chooses one request's tokens. Its random numbers are its own, so that they do not depend on what else is served.
class sampler {
 public:
  explicit sampler(const sampling& how) noexcept : how_(how), state_(how.seed) {}

  /// Among equal logits the smallest id comes first. O(vocabulary), with a sort where top_k or top_p is used.
  [[nodiscard]] token_id choose(std::span<const float> logits);

 private:
  [[nodiscard]] double uniform() noexcept;  ///< in [0, 1)

  sampling how_;
  std::uint64_t state_;
  std::vector<std::pair<float, token_id>> candidates_;
};

}  // namespace engine
