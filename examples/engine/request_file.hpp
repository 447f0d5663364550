// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "chat.hpp"
#include "request.hpp"
#include "tokeniser.hpp"

#include <istream>
#include <string>
#include <vector>

namespace engine {

/// Reads requests, one JSON object a line; empty lines are skipped. Keys: `messages` ([{role, content}, ...]) or
/// `prompt` (a user's only message), and, all optional, `id`, `max_tokens`, `ignore_end`, `temperature`, `top_k`,
/// `top_p`, `seed`. What a line leaves out comes from `defaults`; a line without id is called by its number. Throws
/// bad_input, naming the line, where one is not such an object, has a key twice or a value that is impossible.
[[nodiscard]] std::vector<request> read_requests(std::istream& in, const std::string& name, const tokeniser& words,
                                                 const request& defaults);

/// A chat whose later turns wait for the answers to the earlier ones.
struct conversation {
  request options;                ///< id and all that is the same for every turn; no prompt
  std::vector<message> messages;  ///< what stands before the first turn: nothing or a system message
  std::vector<std::string> turns;
};

/// Reads conversations, one JSON object a line, as read_requests does. Keys: `turns`, what the user says one after
/// another ([text, ...]), and, optional, `system` and those of a request but `prompt` and `messages`.
[[nodiscard]] std::vector<conversation> read_conversations(std::istream& in, const std::string& name,
                                                           const request& defaults);

/// The same from files.
[[nodiscard]] std::vector<request> read_request_file(const std::string& path, const tokeniser& words,
                                                     const request& defaults);
[[nodiscard]] std::vector<conversation> read_conversation_file(const std::string& path, const request& defaults);

}  // namespace engine
