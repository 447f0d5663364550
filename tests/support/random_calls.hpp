// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace kvcache_test {

/// Calls that a random driver makes: fewer where each takes longer.
constexpr std::size_t calls(std::size_t in_release) {
#if defined(__SANITIZE_ADDRESS__) || !defined(NDEBUG)
  return in_release / 12;
#else
  return in_release;
#endif
}

}  // namespace kvcache_test
