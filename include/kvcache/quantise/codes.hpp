// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/quantise/runs.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvcache::detail {

/// Bytes that a run of codes takes.
template <unsigned Bits>
inline constexpr std::uint32_t run_bytes = quantise_width* Bits / 8;

/// Stores `count` codes of a run, at most all; what no code takes of the last byte becomes 0.
template <unsigned Bits>
KVCACHE_ALWAYS_INLINE void store_codes(run_of<std::int32_t>& codes, std::uint32_t count, std::byte* to) noexcept {
  if (count < quantise_width)
    for (std::uint32_t j = count; j < quantise_width; ++j) codes[j] = 0;
  constexpr std::uint32_t size = run_bytes<Bits>;
  // Codes of a byte are joined before they are made bytes: as bytes, each would be packed by itself.
  std::int32_t joined[size];
  KVCACHE_UNROLL_BY(8)
  for (std::uint32_t i = 0; i < size; ++i) {
    if constexpr (Bits == 8)
      joined[i] = codes[i];
    else if constexpr (Bits == 4)
      joined[i] = codes[2 * i] | codes[2 * i + 1] << 4;
    else
      joined[i] = codes[4 * i] | codes[4 * i + 1] << 2 | codes[4 * i + 2] << 4 | codes[4 * i + 3] << 6;
  }
  std::uint8_t packed[size];
  KVCACHE_UNROLL_BY(8)
  for (std::uint32_t i = 0; i < size; ++i) packed[i] = static_cast<std::uint8_t>(joined[i]);
  if (count >= quantise_width)
    std::memcpy(to, packed, sizeof packed);
  else
    std::memcpy(to, packed, (count * Bits + 7) / 8);
}

/// The codes of a run, or the first `count` of them, less `offset`.
template <unsigned Bits>
KVCACHE_ALWAYS_INLINE void load_codes(const std::byte* from, std::uint32_t count, std::int32_t offset,
                                      run_of<float>& x) noexcept {
  std::uint8_t packed[run_bytes<Bits>] = {};
  if (count >= quantise_width)
    std::memcpy(packed, from, sizeof packed);
  else
    std::memcpy(packed, from, (count * Bits + 7) / 8);
  run_of<std::uint8_t> codes;
  for (std::uint32_t i = 0; i < run_bytes<Bits>; ++i)
    for (std::uint32_t j = 0; j < 8 / Bits; ++j)
      codes[i * (8 / Bits) + j] = static_cast<std::uint8_t>((packed[i] >> (j * Bits)) & ((1u << Bits) - 1u));
  for (std::uint32_t i = 0; i < quantise_width; ++i)
    x[i] = static_cast<float>(Bits == 8 ? std::int32_t{static_cast<std::int8_t>(codes[i])} : codes[i] - offset);
}

}  // namespace kvcache::detail
