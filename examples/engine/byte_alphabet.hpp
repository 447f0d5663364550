// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace engine {

// Byte-level vocabularies spell each byte as a printable character: those that are printable in Latin-1 as themselves,
// the others, in order, as U+0100 and up (GPT-2's convention).

/// The bytes that a vocabulary entry spells; nothing where a character is outside the alphabet.
[[nodiscard]] std::optional<std::string> spelled_bytes(std::string_view entry);

/// How a vocabulary spells these bytes.
[[nodiscard]] std::string spell_bytes(std::string_view bytes);

}  // namespace engine
