// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <string_view>
#include <type_traits>

namespace kvcache {

/// What an extra key means. Equal text under two kinds is two keys.
enum class key_kind : std::uint8_t {
  adapter = 1,     ///< weights that change K and V, such as a LoRA adapter
  image = 2,       ///< an image whose patches stand in the content
  salt = 3,        ///< a tenant that shares with no other
  generation = 4,  ///< the version of the model's weights
};

/// Part of a sequence's identity beside its content: only sequences with equal sets of keys share blocks. Compared
/// byte for byte. Owns nothing.
struct extra_key {
  key_kind kind = key_kind::salt;
  std::string_view value;

  friend constexpr auto operator<=>(const extra_key&, const extra_key&) = default;
};

static_assert(std::is_trivially_copyable_v<extra_key>);

}  // namespace kvcache
