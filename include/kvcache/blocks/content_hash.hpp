// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace kvcache::detail {

/// Spreads every bit over all 64 (the finaliser of splitmix64; Steele, Lea and Flood, OOPSLA 2014).
[[nodiscard]] constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Hash of a block's content, without its parent, so that it can be computed before the parent is found. Only narrows a
/// search. Four lanes, so that multiplications overlap.
[[nodiscard]] constexpr std::uint64_t content_hash(content_view content) noexcept {
  constexpr std::uint64_t odd = 0x9e3779b97f4a7c15u;
  std::uint64_t a = 1, b = 2, c = 3, d = 4;
  const std::size_t size = content.size();
  std::size_t i = 0;
  for (; i + 4 <= size; i += 4) {
    a = std::rotl((a ^ content[i]) * odd, 29);
    b = std::rotl((b ^ content[i + 1]) * odd, 29);
    c = std::rotl((c ^ content[i + 2]) * odd, 29);
    d = std::rotl((d ^ content[i + 3]) * odd, 29);
  }
  for (; i < size; ++i) a = std::rotl((a ^ content[i]) * odd, 29);
  return mix(a + std::rotl(b, 17) + std::rotl(c, 34) + std::rotl(d, 51) + size);
}

/// FNV-1a over bytes.
[[nodiscard]] constexpr std::uint64_t bytes_hash(std::uint64_t hash, std::string_view bytes) noexcept {
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

}  // namespace kvcache::detail
