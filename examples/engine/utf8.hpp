// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string_view>

namespace engine {

/// How many bytes at the text's end begin a UTF-8 sequence that the text does not finish: 0 to 3. Streamed output holds
/// them back until the rest comes.
[[nodiscard]] constexpr std::size_t unfinished_utf8(std::string_view text) noexcept {
  for (std::size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xc0) == 0x80) continue;  // neither begins a sequence nor is one
    const std::size_t length = byte < 0xc2 || byte > 0xf4 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
    return length > back ? back : 0;
  }
  return 0;
}

}  // namespace engine
