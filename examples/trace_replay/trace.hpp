// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/types.hpp>

#include <cstddef>
#include <istream>
#include <string>
#include <vector>

namespace replay {

/// The blocks of one request's prompt, in order. Equal ids are equal content after equal content.
using request = std::vector<kvcache::content_unit>;

/// A trace of requests, in the order of its lines: JSON objects, one a line, whose key `hash_ids` is an array of
/// integers from 0. Other keys are read over, and so are empty lines.
struct trace {
  std::vector<request> requests;
  std::size_t references = 0;  ///< blocks of all requests
};

/// Throws bad_input, naming the line, where one is torn or holds no such array.
trace read_trace(std::istream& in, const std::string& name);
/// The same, from a file.
trace read_trace_file(const std::string& path);

}  // namespace replay
