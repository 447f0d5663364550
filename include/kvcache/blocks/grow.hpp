// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <vector>

namespace kvcache::detail {

/// Makes room for `size` elements, at least doubling what there is. A vector that was cleared would otherwise grow to
/// just what it is given, and so be reallocated by every longer use.
template <class T>
void grow(std::vector<T>& v, std::size_t size) {
  if (size > v.capacity()) v.reserve(size > 2 * v.capacity() ? size : 2 * v.capacity());
}

}  // namespace kvcache::detail
