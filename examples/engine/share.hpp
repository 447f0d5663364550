// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>

namespace engine {

/// The part [begin, end) of `size` things in steps of `grain` that thread `ith` of `nth` does.
struct share {
  std::size_t begin = 0;
  std::size_t end = 0;
};
[[nodiscard]] constexpr share share_of(std::size_t size, std::size_t grain, unsigned ith, unsigned nth) noexcept {
  const std::size_t grains = (size + grain - 1) / grain;
  return {std::min(size, grains * ith / nth * grain), std::min(size, grains * (ith + 1) / nth * grain)};
}

}  // namespace engine
