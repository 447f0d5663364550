// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

namespace kvcache::detail {

/// All of a vector. What std::span asks of a range before it converts one takes g++ 12 ms for each element type, and
/// there are some fifteen of them behind the umbrella.
template <class T>
[[nodiscard]] constexpr std::span<const T> span_of(const std::vector<T>& v) noexcept {
  return {v.data(), v.size()};
}
template <class T>
[[nodiscard]] constexpr std::span<T> span_of(std::vector<T>& v) noexcept {
  return {v.data(), v.size()};
}

}  // namespace kvcache::detail
