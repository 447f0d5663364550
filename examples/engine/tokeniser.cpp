// SPDX-License-Identifier: Apache-2.0
#include "tokeniser.hpp"

#include "bad_input.hpp"
#include "byte_alphabet.hpp"

#include <algorithm>
#include <queue>
#include <utility>

namespace engine {
namespace {

constexpr std::uint64_t pair_key(token_id left, token_id right) noexcept {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 | static_cast<std::uint32_t>(right);
}

/// GGUF's tokenizer.ggml.token_type.
constexpr std::int64_t control_token = 3;
constexpr std::int64_t user_defined_token = 4;

pre_tokeniser pre_tokeniser_of(const gguf& file) {
  const std::string_view model = file.text("tokenizer.ggml.model");
  if (model != "gpt2")
    throw bad_input("tokenizer.ggml.model is '" + std::string(model) +
                    "', this engine knows 'gpt2' (byte-level byte pair encoding)");
  return pre_tokeniser(file.text("tokenizer.ggml.pre"));
}

}  // namespace

tokeniser::tokeniser(const gguf& file) : pre_tokeniser_(pre_tokeniser_of(file)) {
  read_tokens(file);
  read_merges(file);
  const std::uint64_t end = file.count("tokenizer.ggml.eos_token_id");
  if (end >= tokens_.size())
    throw bad_input("tokenizer.ggml.eos_token_id is " + std::to_string(end) + ", the vocabulary has " +
                    std::to_string(tokens_.size()) + " tokens");
  end_of_sequence_ = static_cast<token_id>(end);
}

void tokeniser::read_tokens(const gguf& file) {
  const auto& entries = file.texts("tokenizer.ggml.tokens");
  const std::vector<std::int64_t> types = file.integers("tokenizer.ggml.token_type");
  if (entries.empty()) throw bad_input("tokenizer.ggml.tokens holds 0 tokens, the least is 1");
  if (types.size() != entries.size())
    throw bad_input("tokenizer.ggml.token_type holds " + std::to_string(types.size()) + " types for " +
                    std::to_string(entries.size()) + " tokens");
  tokens_.reserve(entries.size());
  for (std::size_t i = 0; i < entries.size(); ++i) {
    const auto id = static_cast<token_id>(i);
    const std::string entry(entries[i]);
    ids_.emplace(entry, id);
    const bool is_special = types[i] == control_token || types[i] == user_defined_token;
    if (is_special && !entry.empty()) specials_.emplace_back(entry, id);
    tokens_.push_back(is_special ? entry : spelled_bytes(entry).value_or(entry));
  }
  std::stable_sort(specials_.begin(), specials_.end(),
                   [](const auto& a, const auto& b) { return a.first.size() > b.first.size(); });
  for (std::size_t byte = 0; byte < byte_tokens_.size(); ++byte) {
    const char as_text = static_cast<char>(static_cast<unsigned char>(byte));
    if (const auto found = ids_.find(spell_bytes({&as_text, 1})); found != ids_.end())
      byte_tokens_[byte] = found->second;
  }
}

void tokeniser::read_merges(const gguf& file) {
  const auto& lines = file.texts("tokenizer.ggml.merges");
  merges_.reserve(lines.size());
  for (std::size_t rank = 0; rank < lines.size(); ++rank) {
    const std::string_view line = lines[rank];
    const auto refuse = [&](const std::string& why) {
      throw bad_input("tokenizer.ggml.merges line " + std::to_string(rank) + " '" + std::string(line.substr(0, 80)) +
                      "' " + why);
    };
    const std::size_t space = line.find(' ', 1);
    if (space == std::string_view::npos) refuse("is not two tokens with a space between");
    const std::string left(line.substr(0, space));
    const std::string right(line.substr(space + 1));
    const auto id = [&](const std::string& entry) {
      const auto found = ids_.find(entry);
      if (found == ids_.end()) refuse("needs a token that is not in the vocabulary");
      return found->second;
    };
    merges_.emplace(pair_key(id(left), id(right)), merge{static_cast<std::uint32_t>(rank), id(left + right)});
  }
}

const tokeniser::merge* tokeniser::find_merge(token_id left, token_id right) const {
  const auto found = merges_.find(pair_key(left, right));
  return found == merges_.end() ? nullptr : &found->second;
}

// The pair of lowest rank, leftmost among equals, is merged until none is left. Pieces are a linked list in an array,
// so that a merge costs O(log n).
void tokeniser::encode_word(std::string_view word, std::vector<token_id>& out) const {
  constexpr std::size_t none = ~std::size_t{0};
  struct piece {
    token_id token;
    std::size_t before;
    std::size_t after;
    bool gone = false;
  };
  std::vector<piece> pieces;
  pieces.reserve(word.size());
  for (const char byte : word)
    if (const auto token = byte_tokens_[static_cast<unsigned char>(byte)])
      pieces.push_back({*token, pieces.empty() ? none : pieces.size() - 1, pieces.size() + 1});
  if (pieces.empty()) return;
  pieces.back().after = none;

  struct candidate {
    std::uint32_t rank;
    std::size_t at;
    std::uint64_t pair;
    token_id result;
    bool operator<(const candidate& other) const noexcept {
      return std::pair(other.rank, other.at) < std::pair(rank, at);
    }
  };
  std::priority_queue<candidate> queue;
  const auto consider = [&](std::size_t at) {
    const std::size_t next = pieces[at].after;
    if (next == none) return;
    const std::uint64_t pair = pair_key(pieces[at].token, pieces[next].token);
    if (const merge* found = find_merge(pieces[at].token, pieces[next].token))
      queue.push({found->rank, at, pair, found->result});
  };
  for (std::size_t at = 0; at < pieces.size(); ++at) consider(at);

  while (!queue.empty()) {
    const candidate best = queue.top();
    queue.pop();
    piece& left = pieces[best.at];
    if (left.gone || left.after == none) continue;
    piece& right = pieces[left.after];
    if (pair_key(left.token, right.token) != best.pair) continue;  // one of them was merged meanwhile
    left.token = best.result;
    left.after = right.after;
    right.gone = true;
    if (left.after != none) pieces[left.after].before = best.at;
    if (left.before != none) consider(left.before);
    consider(best.at);
  }
  for (std::size_t at = 0; at != none; at = pieces[at].after) out.push_back(pieces[at].token);
}

void tokeniser::encode_text(std::string_view text, std::vector<token_id>& out) const {
  for (const std::string_view word : pre_tokeniser_.split(text)) encode_word(word, out);
}

std::vector<token_id> tokeniser::encode(std::string_view text, specials how) const {
  std::vector<token_id> out;
  if (how == specials::as_text) {
    encode_text(text, out);
    return out;
  }
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const auto found = std::find_if(specials_.begin(), specials_.end(),
                                    [&](const auto& s) { return text.substr(at).starts_with(s.first); });
    if (found == specials_.end()) {
      ++at;
      continue;
    }
    encode_text(text.substr(begin, at - begin), out);
    out.push_back(found->second);
    at += found->first.size();
    begin = at;
  }
  encode_text(text.substr(begin), out);
  return out;
}

std::string_view tokeniser::bytes_of(token_id token) const {
  if (token < 0 || static_cast<std::size_t>(token) >= tokens_.size())
    throw bad_input("token " + std::to_string(token) + " is none of the vocabulary's " +
                    std::to_string(tokens_.size()));
  return tokens_[static_cast<std::size_t>(token)];
}

std::string tokeniser::decode(const std::vector<token_id>& tokens) const {
  std::string out;
  for (const token_id token : tokens) out += bytes_of(token);
  return out;
}

std::optional<token_id> tokeniser::special(std::string_view name) const {
  const auto found = std::find_if(specials_.begin(), specials_.end(), [&](const auto& s) { return s.first == name; });
  if (found == specials_.end()) return std::nullopt;
  return found->second;
}

}  // namespace engine
