// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "trace.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace replay {

/// What a trace is replayed into.
struct pool {
  std::uint32_t blocks = 0;
  std::uint32_t block_tokens = 512;  ///< tokens that a block of the trace stands for; an even number
  std::uint32_t at_once = 1;         ///< requests that are open at once, as far as the pool has room; not for optimal
};

/// Called now and then with the requests done.
using progress = std::function<void(std::size_t requests)>;

/// The policies that can be replayed, `optimal` among them.
const std::vector<std::string>& known_policies();

/// Blocks found, over the whole trace: the leading run of each prompt that is cached when it comes. Requests run one at
/// a time; one with more blocks than the pool keeps its first ones. Everything goes through kvcache::block_manager, so
/// what is measured is what an engine gets. Throws bad_input for an unknown policy.
std::size_t hits(const std::string& policy, const trace& all, const pool& how, const progress& report = {});

}  // namespace replay
