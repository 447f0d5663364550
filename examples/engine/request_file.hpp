// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "request.hpp"
#include "tokeniser.hpp"

#include <istream>
#include <string>
#include <vector>

namespace engine {

/// Reads requests, one JSON object a line; empty lines are skipped. Keys: `messages` ([{role, content}, ...]) or
/// `prompt` (a user's only message), and, all optional, `id`, `max_tokens`, `ignore_end`, `temperature`, `top_k`,
/// `top_p`, `seed`. What a line leaves out comes from `defaults`; a line without id is called by its number. Throws
/// bad_input, naming the line, where one is not such an object or a value is impossible.
[[nodiscard]] std::vector<request> read_requests(std::istream& in, const std::string& name, const tokeniser& words,
                                                 const request& defaults);

/// The same from a file.
[[nodiscard]] std::vector<request> read_request_file(const std::string& path, const tokeniser& words,
                                                     const request& defaults);

}  // namespace engine
