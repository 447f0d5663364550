// SPDX-License-Identifier: Apache-2.0
#include "byte_alphabet.hpp"

#include "unicode.hpp"

#include <algorithm>

namespace engine {
namespace {

std::array<char32_t, 256> make_alphabet() noexcept {
  std::array<char32_t, 256> out{};
  char32_t next = 0x100;
  for (char32_t byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
    out[byte] = printable ? byte : next++;
  }
  return out;
}

}  // namespace

const std::array<char32_t, 256>& byte_alphabet() noexcept {
  static const std::array<char32_t, 256> alphabet = make_alphabet();
  return alphabet;
}

std::optional<std::string> spelled_bytes(std::string_view entry) {
  const auto& alphabet = byte_alphabet();
  std::string out;
  for (std::size_t at = 0; at < entry.size();) {
    const code_point point = decode_utf8(entry, at);
    const auto found = std::find(alphabet.begin(), alphabet.end(), point.value);
    if (found == alphabet.end()) return std::nullopt;
    out.push_back(static_cast<char>(static_cast<unsigned char>(found - alphabet.begin())));
    at += point.bytes;
  }
  return out;
}

std::string spell_bytes(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) append_utf8(out, byte_alphabet()[static_cast<unsigned char>(byte)]);
  return out;
}

}  // namespace engine
