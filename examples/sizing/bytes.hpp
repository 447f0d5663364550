// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

namespace sizing {

inline constexpr std::array<std::pair<std::string_view, std::uint64_t>, 9> byte_units{{
    {"TiB", 1ull << 40},
    {"GiB", 1ull << 30},
    {"MiB", 1ull << 20},
    {"KiB", 1ull << 10},
    {"TB", 1'000'000'000'000},
    {"GB", 1'000'000'000},
    {"MB", 1'000'000},
    {"kB", 1'000},
    {"B", 1},
}};

/// "24GiB", "80 GB", "1048576": whole numbers with an optional unit. Throws std::invalid_argument.
inline std::uint64_t parse_bytes(std::string_view text) {
  std::uint64_t value = 0;
  const auto [end, status] = std::from_chars(text.data(), text.data() + text.size(), value);
  std::string_view rest = text.substr(static_cast<std::size_t>(end - text.data()));
  while (!rest.empty() && rest.front() == ' ') rest.remove_prefix(1);
  std::uint64_t scale = rest.empty() ? 1 : 0;
  for (const auto& [unit, bytes] : byte_units)
    if (rest == unit) scale = bytes;
  if (status != std::errc{} || scale == 0)
    throw std::invalid_argument("memory '" + std::string(text) + "' is not a size; write a whole number of bytes, " +
                                "or one with B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 24GiB");
  if (value == 0) throw std::invalid_argument("memory '" + std::string(text) + "' is 0 bytes, the least is 1");
  if (value > UINT64_MAX / scale)
    throw std::invalid_argument("memory '" + std::string(text) + "' is more than the limit of 2^64-1 bytes");
  return value * scale;
}

/// One decimal and a binary unit.
inline std::string format_bytes(std::uint64_t bytes) {
  for (const auto& [unit, scale] : byte_units) {
    if (unit.size() != 3 || bytes < scale) continue;
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.1f %.*s", static_cast<double>(bytes) / static_cast<double>(scale),
                  static_cast<int>(unit.size()), unit.data());
    return text.data();
  }
  return std::to_string(bytes) + " B";
}

}  // namespace sizing
