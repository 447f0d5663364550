// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace engine {

/// One code point of a UTF-8 text and the bytes it takes. A byte that begins no valid sequence is a code point of its
/// own: U+FFFD of one byte.
struct code_point {
  char32_t value = 0;
  std::size_t bytes = 0;
};

/// The code point at `at`, which lies inside the text.
[[nodiscard]] code_point decode_utf8(std::string_view text, std::size_t at) noexcept;

void append_utf8(std::string& text, char32_t value);

[[nodiscard]] bool is_letter(char32_t c) noexcept;  ///< general category L
[[nodiscard]] bool is_number(char32_t c) noexcept;  ///< general category N
[[nodiscard]] bool is_space(char32_t c) noexcept;   ///< property White_Space

/// How many bytes at the text's end begin a UTF-8 sequence that the text does not finish: 0 to 3. Streamed output holds
/// them back until the rest comes.
[[nodiscard]] std::size_t unfinished_utf8(std::string_view text) noexcept;

}  // namespace engine
