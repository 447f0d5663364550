// SPDX-License-Identifier: Apache-2.0
#include "request_file.hpp"

#include "bad_input.hpp"
#include "chat.hpp"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>

namespace engine {
namespace {

using nlohmann::json;

/// For a message. Not a nested value: it may be deeper than the stack of whoever writes it out.
std::string shown(const json& value) {
  if (value.is_array()) return "an array";
  if (value.is_object()) return "an object";
  return value.dump(-1, ' ', false, json::error_handler_t::replace).substr(0, 80);
}

std::string text_of(const json& value, const std::string& key) {
  if (!value.is_string()) throw bad_input("'" + key + "' is " + shown(value) + ", it must be a string");
  return value.get<std::string>();
}

template <class Integer>
Integer count_of(const json& value, const std::string& key) {
  constexpr std::uint64_t most = std::numeric_limits<Integer>::max();
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > most)
    throw bad_input("'" + key + "' is " + shown(value) + ", it must be an integer from 0 to " + std::to_string(most));
  return value.get<Integer>();
}

float real_of(const json& value, const std::string& key) {
  if (!value.is_number()) throw bad_input("'" + key + "' is " + shown(value) + ", it must be a number");
  return value.get<float>();
}

bool flag_of(const json& value, const std::string& key) {
  if (!value.is_boolean()) throw bad_input("'" + key + "' is " + shown(value) + ", it must be true or false");
  return value.get<bool>();
}

std::vector<message> messages_of(const json& value) {
  if (!value.is_array() || value.empty())
    throw bad_input("'messages' must be an array of at least 1 object with role and content");
  std::vector<message> out;
  for (const json& entry : value) {
    if (!entry.is_object() || entry.size() != 2 || !entry.contains("role") || !entry.contains("content"))
      throw bad_input("a message is " + shown(entry) + ", it must have the keys role and content");
    message& m = out.emplace_back();
    m.role = text_of(entry["role"], "role");
    m.content = text_of(entry["content"], "content");
    if (m.role != "system" && m.role != "user" && m.role != "assistant")
      throw bad_input("'role' is '" + m.role.substr(0, 80) + "', it must be system, user or assistant");
  }
  return out;
}

/// What requests and conversations have in common. False: the key is none of these.
bool read_option(const std::string& key, const json& value, request& out) {
  if (key == "id")
    out.id = text_of(value, key);
  else if (key == "max_tokens")
    out.max_tokens = count_of<std::uint32_t>(value, key);
  else if (key == "ignore_end")
    out.ignore_end = flag_of(value, key);
  else if (key == "temperature")
    out.how.temperature = real_of(value, key);
  else if (key == "top_k")
    out.how.top_k = count_of<std::uint32_t>(value, key);
  else if (key == "top_p")
    out.how.top_p = real_of(value, key);
  else if (key == "seed")
    out.how.seed = count_of<std::uint64_t>(value, key);
  else
    return false;
  return true;
}

[[noreturn]] void unknown(const std::string& key) {
  throw bad_input("it has an unknown key '" + key.substr(0, 80) + "'");
}

void check_options(const request& r) {
  if (r.max_tokens == 0) throw bad_input("'max_tokens' is 0, the least is 1");
  validate(r.how);
}

request read_request(const json& object, const tokeniser& words, const request& defaults) {
  request out = defaults;
  std::vector<message> messages;
  if (object.contains("prompt") == object.contains("messages"))
    throw bad_input(std::string("it has ") + (object.contains("prompt") ? "both" : "none") +
                    " of the keys 'prompt' and 'messages', it must have exactly one");
  for (const auto& [key, value] : object.items()) {
    if (key == "prompt")
      messages = {{"user", text_of(value, key)}};
    else if (key == "messages")
      messages = messages_of(value);
    else if (!read_option(key, value, out))
      unknown(key);
  }
  check_options(out);
  out.prompt = encode_chat(words, messages);
  return out;
}

conversation read_conversation(const json& object, const request& defaults) {
  conversation out{defaults, {}, {}};
  for (const auto& [key, value] : object.items()) {
    if (key == "system") {
      out.messages = {{"system", text_of(value, key)}};
    } else if (key == "turns") {
      if (!value.is_array()) throw bad_input("'turns' is " + shown(value) + ", it must be an array of strings");
      for (const json& turn : value) out.turns.push_back(text_of(turn, "a turn"));
    } else if (!read_option(key, value, out.options)) {
      unknown(key);
    }
  }
  if (out.turns.empty()) throw bad_input("it has 0 turns, the least is 1");
  check_options(out.options);
  return out;
}

/// Of two values of one key, in whichever object, one would be lost.
json parse_line(const std::string& line) {
  std::vector<std::set<std::string>> keys;  // of the objects that have begun
  return json::parse(line, [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start)
      keys.emplace_back();
    else if (event == json::parse_event_t::object_end)
      keys.pop_back();
    else if (event == json::parse_event_t::key && !keys.back().insert(parsed.get<std::string>()).second)
      throw bad_input("it has the key '" + parsed.get<std::string>().substr(0, 80) + "' twice in one object");
    return true;
  });
}

/// Calls read_one(object, defaults) for the object on each line; `id_of` finds the id in what it returns.
template <class ReadOne, class IdOf>
auto read_lines(std::istream& in, const std::string& name, const request& defaults, ReadOne&& read_one, IdOf&& id_of) {
  std::vector<decltype(read_one(json(), defaults))> out;
  std::set<std::string> ids;
  std::string line;
  for (std::size_t number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = name + " line " + std::to_string(number) + ": ";
    request with_id = defaults;
    with_id.id = std::to_string(number);
    try {
      // The parser would take it for the end.
      if (const auto at = line.find('\0'); at != std::string::npos)
        throw bad_input("it has a zero byte at column " + std::to_string(at + 1));
      const json object = parse_line(line);
      if (!object.is_object()) throw bad_input("it is no JSON object");
      out.push_back(read_one(object, with_id));
      const std::string& id = id_of(out.back());
      if (!ids.insert(id).second)
        throw bad_input("the id '" + id.substr(0, 80) + "' is that of an earlier line; ids tell answers apart");
    } catch (const json::exception& fault) {
      const std::string text = fault.what();  // begins with a line of its own, which is always 1
      const auto column = text.find("column");
      throw bad_input(where + "it is no JSON (" + (column == std::string::npos ? text : text.substr(column)) + ")");
    } catch (const bad_input& fault) {
      throw bad_input(where + fault.what());
    }
  }
  if (out.empty()) throw bad_input(name + " holds 0 requests, the least is 1");
  return out;
}

std::ifstream open(const std::string& path) {
  if (std::filesystem::is_directory(path)) throw bad_input("cannot read " + path + ": it is a directory");
  std::ifstream in(path);
  if (!in) throw bad_input("cannot open " + path + ": " + std::strerror(errno));
  return in;
}

}  // namespace

std::vector<request> read_requests(std::istream& in, const std::string& name, const tokeniser& words,
                                   const request& defaults) {
  return read_lines(
      in, name, defaults, [&](const json& object, const request& d) { return read_request(object, words, d); },
      [](const request& r) -> const std::string& { return r.id; });
}

std::vector<conversation> read_conversations(std::istream& in, const std::string& name, const request& defaults) {
  return read_lines(in, name, defaults, read_conversation,
                    [](const conversation& c) -> const std::string& { return c.options.id; });
}

std::vector<request> read_request_file(const std::string& path, const tokeniser& words, const request& defaults) {
  std::ifstream in = open(path);
  return read_requests(in, path, words, defaults);
}

std::vector<conversation> read_conversation_file(const std::string& path, const request& defaults) {
  std::ifstream in = open(path);
  return read_conversations(in, path, defaults);
}

}  // namespace engine
