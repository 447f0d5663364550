// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tokeniser.hpp"

#include <string>
#include <vector>

namespace engine {

/// One turn of a chat; `role` is "system", "user" or "assistant".
struct message {
  std::string role;
  std::string content;
};

/// The chat as the model was trained to read it (ChatML), up to where the assistant's answer begins. A chat that does
/// not begin with a system message gets the model's own. What a message says is never read as a special token.
/// Throws bad_input where the vocabulary lacks ChatML's tokens.
[[nodiscard]] std::vector<token_id> encode_chat(const tokeniser& words, const std::vector<message>& messages);

}  // namespace engine
