// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
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

/// Hash of a block's content alone. Four lanes, so that multiplications overlap.
[[nodiscard]] constexpr std::uint64_t content_hash(content_view content) noexcept {
  return content.visit([](auto units) {
    constexpr std::uint64_t odd = 0x9e3779b97f4a7c15u;
    std::uint64_t a = 1, b = 2, c = 3, d = 4;
    const std::size_t size = units.size();
    const auto unit = [&](std::size_t i) { return content_view::unit(units[i]); };
    std::size_t i = 0;
    for (; i + 4 <= size; i += 4) {
      a = std::rotl((a ^ unit(i)) * odd, 29);
      b = std::rotl((b ^ unit(i + 1)) * odd, 29);
      c = std::rotl((c ^ unit(i + 2)) * odd, 29);
      d = std::rotl((d ^ unit(i + 3)) * odd, 29);
    }
    for (; i < size; ++i) a = std::rotl((a ^ unit(i)) * odd, 29);
    return mix(a + std::rotl(b, 17) + std::rotl(c, 34) + std::rotl(d, 51) + size);
  });
}

/// Hash of a block's content and of all before it: equal chains have equal fingerprints at any time and in any process.
/// Only narrows a search. It depends on no serial, so those of a whole prompt can be computed before its first block is
/// found. Inlined by force: with managers of two policies in a program g++ calls it, and a look-up takes 1.7 times as
/// long.
[[nodiscard]] KVCACHE_ALWAYS_INLINE constexpr std::uint64_t chain_fingerprint(std::uint64_t before,
                                                                              content_view content) noexcept {
  return mix(content_hash(content) ^ std::rotl(before * 0xd6e8feb86659fd93u, 32));
}

/// FNV-1a over bytes.
[[nodiscard]] constexpr std::uint64_t bytes_hash(std::uint64_t hash, std::string_view bytes) noexcept {
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3u;
  return hash;
}

}  // namespace kvcache::detail
