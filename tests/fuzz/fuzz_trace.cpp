// SPDX-License-Identifier: Apache-2.0
// Any bytes as a trace of requests: they are read, or refused with the number of the first line that is at fault.
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include "bad_input.hpp"
#include "catch.hpp"
#include "trace.hpp"

namespace {

struct outcome {
  replay::trace read;
  std::string refused;
};

outcome read(const std::string& text) {
  std::istringstream in(text);
  try {
    return {replay::read_trace(in, "trace"), ""};
  } catch (const replay::bad_input& fault) {
    return {{}, fault.what()};
  }
}

/// The line that a refusal names; 0: none.
std::size_t line_of(const std::string& refused) {
  const std::string begin = "trace line ";
  return refused.starts_with(begin) ? std::stoul(refused.substr(begin.size())) : 0;
}

std::string first_lines(const std::string& text, std::size_t count) {
  std::size_t end = 0;
  for (; count > 0 && end < text.size(); --count) {
    const std::size_t found = text.find('\n', end);
    end = found == std::string::npos ? text.size() : found + 1;
  }
  REQUIRE(count == 0);
  return text.substr(0, end);
}

std::string written(const replay::trace& t) {
  std::string text;
  for (const replay::request& r : t.requests) {
    text += "{\"hash_ids\":[";
    for (std::size_t i = 0; i < r.size(); ++i) text += (i == 0 ? "" : ",") + std::to_string(r[i]);
    text += "]}\n";
  }
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(data, data + size);
  const outcome all = read(text);
  INFO("answer: " << all.refused);
  if (all.refused.empty()) {
    std::size_t blocks = 0;
    for (const replay::request& r : all.read.requests) blocks += r.size();
    REQUIRE(blocks > 0);
    REQUIRE(all.read.references == blocks);
    REQUIRE(read(written(all.read)).read.requests == all.read.requests);
  } else if (const std::size_t line = line_of(all.refused); line != 0) {
    // That line is at fault, and no line before it.
    REQUIRE(read(first_lines(text, line)).refused == all.refused);
    REQUIRE(line_of(read(first_lines(text, line - 1)).refused) == 0);
  } else {
    REQUIRE(all.refused == "trace holds 0 blocks, the least is 1");
  }
  return 0;
}
