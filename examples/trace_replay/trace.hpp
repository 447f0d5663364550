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
/// integers from 0, and so is `output_hash_ids`, where it is given. Other keys are read over, and so are empty lines.
struct trace {
  std::vector<request> requests;
  std::vector<request> outputs;  ///< for each request the blocks that were generated after its prompt; empty: none
  std::size_t references = 0;    ///< blocks of all prompts
};

/// Throws bad_input, naming the line, where one is torn, holds no such array, or has one of the two keys twice.
trace read_trace(std::istream& in, const std::string& name);
/// The same, from a file.
trace read_trace_file(const std::string& path);

}  // namespace replay
