// SPDX-License-Identifier: Apache-2.0
#include "chat.hpp"

#include "bad_input.hpp"

namespace engine {
namespace {

token_id chat_token(const tokeniser& words, const char* name) {
  const auto token = words.special(name);
  if (!token) throw bad_input(std::string("the vocabulary has no special token ") + name + ", which chats need");
  return *token;
}

}  // namespace

std::vector<token_id> encode_chat(const tokeniser& words, const std::vector<message>& messages) {
  const token_id start = chat_token(words, "<|im_start|>");
  const token_id end = chat_token(words, "<|im_end|>");
  std::vector<token_id> out;
  const auto text = [&](const std::string& part) {
    const std::vector<token_id> tokens = words.encode(part, specials::as_text);
    out.insert(out.end(), tokens.begin(), tokens.end());
  };
  const auto turn = [&](const std::string& role, const std::string& content) {
    out.push_back(start);
    text(role + "\n" + content);
    out.push_back(end);
    text("\n");
  };
  if (messages.empty() || messages.front().role != "system")
    turn("system", "You are a helpful AI assistant named SmolLM, trained by Hugging Face");
  for (const message& m : messages) turn(m.role, m.content);
  out.push_back(start);
  text("assistant\n");
  return out;
}

}  // namespace engine
