// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvcache_test {

/// Choices that bytes decide: a byte for one of up to 256, two bytes for one of more, none where there is but one.
/// After the last byte the choice is always 0.
class byte_choices {
 public:
  explicit byte_choices(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}
  std::uint32_t below(std::uint32_t limit) {
    if (limit == 1) return 0;
    std::uint32_t value = next();
    if (limit > 256) value = value * 256 + next();
    return value % limit;
  }
  [[nodiscard]] bool ended() const { return bytes_.empty(); }

 private:
  std::uint32_t next() {
    if (bytes_.empty()) return 0;
    const std::uint8_t byte = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return byte;
  }

  std::span<const std::uint8_t> bytes_;
};

}  // namespace kvcache_test
