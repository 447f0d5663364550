// SPDX-License-Identifier: Apache-2.0
#include "trace.hpp"

#include "bad_input.hpp"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <utility>

namespace replay {
namespace {

using nlohmann::json;

/// Takes the blocks from one line as its tokens come, so that a number is told as it was written, and nesting costs no
/// stack.
class line_reader final : public nlohmann::json_sax<json> {
 public:
  request prompt;
  request output;
  bool has_prompt = false;

  bool null() override { return other("null"); }
  bool boolean(bool value) override { return other(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return other(std::to_string(value)); }
  bool number_float(number_float_t, const string_t& written) override { return other(written); }
  bool string(string_t& value) override {
    return other(json(value).dump(-1, ' ', false, json::error_handler_t::replace));
  }
  bool binary(binary_t&) override { return other("bytes"); }
  bool number_unsigned(number_unsigned_t value) override {
    if (blocks_ == nullptr || depth_ != 2) return other(std::to_string(value));
    blocks_->push_back(value);
    return true;
  }
  bool start_array(std::size_t) override {
    if (depth_ != 1 || blocks_ == nullptr) other("an array");
    ++depth_;
    return true;
  }
  bool start_object(std::size_t) override {
    if (depth_ != 0) other("an object");
    ++depth_;
    return true;
  }
  bool end_array() override { return end_object(); }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ != 1) return true;
    key_ = name;
    blocks_ = key_ == "hash_ids" ? &prompt : key_ == "output_hash_ids" ? &output : nullptr;
    if (blocks_ == nullptr) return true;
    bool& has = blocks_ == &prompt ? has_prompt : has_output_;
    if (has) throw bad_input("it has the key '" + key_ + "' twice");
    return has = true;
  }
  bool parse_error(std::size_t, const std::string&, const json::exception& fault) override {
    throw bad_input("it is no JSON (" + std::string(fault.what()) + ")");
  }

 private:
  /// What is no block of the request.
  bool other(const std::string& shown) const {
    if (depth_ == 0) throw bad_input("it is no JSON object");
    if (blocks_ == nullptr || depth_ > 2) return true;
    if (depth_ == 1) throw bad_input("'" + key_ + "' is " + shown.substr(0, 80) + ", it must be an array");
    throw bad_input("'" + key_ + "' holds " + shown.substr(0, 80) + ", its elements must be integers from 0 to " +
                    std::to_string(std::numeric_limits<kvcache::content_unit>::max()));
  }

  std::size_t depth_ = 0;
  std::string key_;            // of the outermost object
  request* blocks_ = nullptr;  // where those of this key go
  bool has_output_ = false;
};

}  // namespace

trace read_trace(std::istream& in, const std::string& name) {
  trace t;
  std::string line;
  for (std::size_t number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = name + " line " + std::to_string(number) + ": ";
    line_reader reader;
    try {
      // The parser would take it for the end.
      if (const auto at = line.find('\0'); at != std::string::npos)
        throw bad_input("it has a zero byte at column " + std::to_string(at + 1));
      json::sax_parse(line, &reader);
      if (!reader.has_prompt) throw bad_input("it lacks the key 'hash_ids'");
    } catch (const bad_input& fault) {
      throw bad_input(where + fault.what());
    }
    t.requests.push_back(std::move(reader.prompt));
    t.outputs.push_back(std::move(reader.output));
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
