// SPDX-License-Identifier: Apache-2.0
#include "trace.hpp"

#include "bad_input.hpp"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

namespace replay {
namespace {

/// For a message. Not a nested value: it may be deeper than the stack of whoever writes it out.
std::string shown(const nlohmann::json& value) {
  if (value.is_array()) return "an array";
  if (value.is_object()) return "an object";
  return value.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace).substr(0, 80);
}

request read_request(const std::string& line) {
  const auto object = nlohmann::json::parse(line);
  if (!object.is_object()) throw bad_input("it is no JSON object");
  const auto found = object.find("hash_ids");
  if (found == object.end()) throw bad_input("it lacks the key 'hash_ids'");
  if (!found->is_array()) throw bad_input("'hash_ids' is " + shown(*found) + ", it must be an array");
  request blocks;
  blocks.reserve(found->size());
  for (const auto& id : *found) {
    if (!id.is_number_unsigned())
      throw bad_input("'hash_ids' holds " + shown(id) + ", its elements must be integers from 0");
    blocks.push_back(id.get<kvcache::content_unit>());
  }
  return blocks;
}

}  // namespace

trace read_trace(std::istream& in, const std::string& name) {
  trace t;
  std::string line;
  for (std::size_t number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = name + " line " + std::to_string(number) + ": ";
    try {
      t.requests.push_back(read_request(line));
    } catch (const nlohmann::json::exception& fault) {
      throw bad_input(where + "it is no JSON (" + fault.what() + ")");
    } catch (const bad_input& fault) {
      throw bad_input(where + fault.what());
    }
    t.references += t.requests.back().size();
  }
  if (t.references == 0) throw bad_input(name + " holds 0 blocks, the least is 1");
  return t;
}

trace read_trace_file(const std::string& path) {
  if (std::filesystem::is_directory(path)) throw bad_input("cannot read " + path + ": it is a directory");
  std::ifstream in(path);
  if (!in) throw bad_input("cannot open " + path + ": " + std::strerror(errno));
  return read_trace(in, path);
}

}  // namespace replay
