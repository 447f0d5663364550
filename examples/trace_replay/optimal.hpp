// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "trace.hpp"

#include <cstddef>
#include <cstdint>

namespace replay {

/// The most hits that any policy can have which knows the future: Belady's rule (1966) with bypass. After each request,
/// of the resident blocks and its own, those are kept whose next use is nearest; where it is equally near, the deepest
/// go first, since they are of no use without those before them. O(references * log(blocks)).
std::size_t optimal_hits(const trace& all, std::uint32_t blocks);

}  // namespace replay
