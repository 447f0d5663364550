// SPDX-License-Identifier: Apache-2.0
#include "unicode.hpp"

#include <algorithm>
#include <iterator>

namespace engine {
namespace {

struct range {
  std::uint32_t first;
  std::uint32_t last;
};

#include "unicode_tables.inc"

template <std::size_t N>
bool contains(const range (&table)[N], char32_t c) noexcept {
  const auto* after =
      std::upper_bound(std::begin(table), std::end(table), c, [](char32_t x, const range& r) { return x < r.first; });
  return after != std::begin(table) && c <= std::prev(after)->last;
}

/// Bytes of the sequence that this byte begins; 0 where it begins none.
std::size_t sequence_length(unsigned char lead) noexcept {
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead < 0xe0) return 2;
  if (lead >= 0xe0 && lead < 0xf0) return 3;
  if (lead >= 0xf0 && lead < 0xf5) return 4;
  return 0;
}

bool is_continuation(char c) noexcept { return (static_cast<unsigned char>(c) & 0xc0) == 0x80; }

}  // namespace

code_point decode_utf8(std::string_view text, std::size_t at) noexcept {
  constexpr code_point invalid{0xfffd, 1};
  const auto lead = static_cast<unsigned char>(text[at]);
  const std::size_t length = sequence_length(lead);
  if (length == 1) return {lead, 1};
  if (length == 0 || length > text.size() - at) return invalid;
  char32_t value = lead & (0x7fu >> length);
  for (std::size_t i = 1; i < length; ++i) {
    if (!is_continuation(text[at + i])) return invalid;
    value = (value << 6) | (static_cast<unsigned char>(text[at + i]) & 0x3fu);
  }
  constexpr char32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = value >= 0xd800 && value < 0xe000;
  if (value < least[length] || value > 0x10ffff || surrogate) return invalid;
  return {value, length};
}

void append_utf8(std::string& text, char32_t value) {
  const auto push = [&](char32_t byte) { text.push_back(static_cast<char>(static_cast<unsigned char>(byte))); };
  if (value < 0x80) {
    push(value);
  } else if (value < 0x800) {
    push(0xc0 | (value >> 6));
    push(0x80 | (value & 0x3f));
  } else if (value < 0x10000) {
    push(0xe0 | (value >> 12));
    push(0x80 | ((value >> 6) & 0x3f));
    push(0x80 | (value & 0x3f));
  } else {
    push(0xf0 | (value >> 18));
    push(0x80 | ((value >> 12) & 0x3f));
    push(0x80 | ((value >> 6) & 0x3f));
    push(0x80 | (value & 0x3f));
  }
}

bool is_letter(char32_t c) noexcept { return contains(letter_ranges, c); }
bool is_number(char32_t c) noexcept { return contains(number_ranges, c); }

bool is_space(char32_t c) noexcept {
  return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

std::size_t unfinished_utf8(std::string_view text) noexcept {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const char c = text[text.size() - back];
    if (is_continuation(c)) continue;
    return sequence_length(static_cast<unsigned char>(c)) > back ? back : 0;
  }
  return 0;
}

}  // namespace engine
