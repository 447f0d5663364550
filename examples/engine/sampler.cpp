// SPDX-License-Identifier: Apache-2.0
#include "sampler.hpp"

#include "bad_input.hpp"

#include <algorithm>
#include <cmath>
#include <string>

namespace engine {

void validate(const sampling& how) {
  if (!std::isfinite(how.temperature))
    throw bad_input("temperature is " + std::to_string(how.temperature) + ", it has to be a finite number from 0 on");
  if (how.temperature < 0) throw bad_input("temperature is " + std::to_string(how.temperature) + ", the least is 0");
  if (!(how.top_p > 0 && how.top_p <= 1))
    throw bad_input("top_p is " + std::to_string(how.top_p) + ", it must be above 0 and at most 1");
}

// SplitMix64 (Steele, Lea and Flood 2014): the same numbers on every platform.
double sampler::uniform() noexcept {
  state_ += 0x9e3779b97f4a7c15u;
  std::uint64_t z = state_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return static_cast<double>(z >> 11) * 0x1p-53;
}

token_id sampler::choose(std::span<const float> logits) {
  if (how_.temperature == 0)
    return static_cast<token_id>(std::max_element(logits.begin(), logits.end()) - logits.begin());

  candidates_.clear();
  for (std::size_t i = 0; i < logits.size(); ++i) candidates_.emplace_back(logits[i], static_cast<token_id>(i));
  const auto before = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  };
  std::size_t kept = candidates_.size();
  if (how_.top_k > 0) kept = std::min<std::size_t>(kept, how_.top_k);
  const auto end = candidates_.begin() + static_cast<std::ptrdiff_t>(kept);
  if (kept < candidates_.size() || how_.top_p < 1)
    std::partial_sort(candidates_.begin(), end, candidates_.end(), before);

  const float largest = std::max_element(candidates_.begin(), end)->first;
  double total = 0;
  for (std::size_t i = 0; i < kept; ++i) {
    candidates_[i].first = std::exp((candidates_[i].first - largest) / how_.temperature);
    total += double{candidates_[i].first};
  }
  if (how_.top_p < 1) {
    const double wanted = total * double{how_.top_p};
    double sum = 0;
    std::size_t i = 0;
    while (i < kept && sum < wanted) sum += double{candidates_[i++].first};
    kept = i;
    total = sum;
  }
  double left = uniform() * total;
  for (std::size_t i = 0; i < kept; ++i) {
    left -= double{candidates_[i].first};
    if (left < 0) return candidates_[i].second;
  }
  return candidates_[kept - 1].second;
}

}  // namespace engine
