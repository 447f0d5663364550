// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace kvcache::detail {

/// Names a node of the content tree: what one block holds, after all that is before it. Used again once the node is
/// gone.
using content_id = std::uint32_t;
inline constexpr content_id no_content = 0;

}  // namespace kvcache::detail
