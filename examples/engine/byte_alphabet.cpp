// SPDX-License-Identifier: Apache-2.0
#include "byte_alphabet.hpp"

#include <array>
#include <unordered_map>

namespace engine {
namespace {

/// The character of each byte in UTF-8: one byte or two.
std::array<std::string, 256> make_alphabet() {
  std::array<std::string, 256> out;
  unsigned next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || (byte >= 0xae && byte <= 0xff);
    const unsigned character = printable ? byte : next++;
    if (character >= 0x80) out[byte].push_back(static_cast<char>(0xc0 | character >> 6));
    out[byte].push_back(static_cast<char>(character < 0x80 ? character : 0x80 | (character & 0x3f)));
  }
  return out;
}

const std::array<std::string, 256>& alphabet() {
  static const std::array<std::string, 256> made = make_alphabet();
  return made;
}

std::unordered_map<std::string_view, char> make_bytes() {
  std::unordered_map<std::string_view, char> out;
  for (std::size_t byte = 0; byte < 256; ++byte)
    out.emplace(alphabet()[byte], static_cast<char>(static_cast<unsigned char>(byte)));
  return out;
}

}  // namespace

std::optional<std::string> spelled_bytes(std::string_view entry) {
  static const std::unordered_map<std::string_view, char> bytes = make_bytes();
  std::string out;
  while (!entry.empty()) {
    const auto found = bytes.find(entry.substr(0, static_cast<unsigned char>(entry[0]) < 0x80 ? 1 : 2));
    if (found == bytes.end()) return std::nullopt;
    out.push_back(found->second);
    entry.remove_prefix(found->first.size());
  }
  return out;
}

std::string spell_bytes(std::string_view bytes) {
  std::string out;
  for (const char byte : bytes) out += alphabet()[static_cast<unsigned char>(byte)];
  return out;
}

}  // namespace engine
