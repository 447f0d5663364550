// SPDX-License-Identifier: Apache-2.0
#include "pre_tokeniser.hpp"

#include "bad_input.hpp"
#include "unicode.hpp"

#include <array>
#include <string>

namespace engine {
namespace {

enum class kind { letter, number, space, other };

struct piece {
  code_point point;
  kind what;
};

piece piece_at(std::string_view text, std::size_t at) noexcept {
  const code_point point = decode_utf8(text, at);
  if (is_letter(point.value)) return {point, kind::letter};
  if (is_number(point.value)) return {point, kind::number};
  if (is_space(point.value)) return {point, kind::space};
  return {point, kind::other};
}

/// Bytes of the contraction that the text begins with, or 0.
std::size_t contraction(std::string_view text) noexcept {
  constexpr std::array<std::string_view, 7> endings{"'s", "'t", "'re", "'ve", "'m", "'ll", "'d"};
  for (const std::string_view ending : endings)
    if (text.starts_with(ending)) return ending.size();
  return 0;
}

std::size_t run_of(kind what, std::string_view text, std::size_t from) noexcept {
  std::size_t at = from;
  while (at < text.size()) {
    const piece next = piece_at(text, at);
    if (next.what != what) break;
    at += next.point.bytes;
  }
  return at - from;
}

/// White space before a word leaves its last character to that word; at the text's end it takes all.
std::size_t space_run(std::string_view text) noexcept {
  std::size_t at = 0;
  std::size_t last = 0;
  while (at < text.size()) {
    const piece next = piece_at(text, at);
    if (next.what != kind::space) break;
    last = at;
    at += next.point.bytes;
  }
  return at < text.size() && last > 0 ? last : at;
}

/// Bytes of the first match of GPT-2's pattern (Radford et al. 2019):
/// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
std::size_t first_word(std::string_view text) noexcept {
  if (const std::size_t length = contraction(text); length > 0) return length;
  const std::size_t lead = text[0] == ' ' && text.size() > 1 ? 1 : 0;
  const kind what = piece_at(text, lead).what;
  if (what != kind::space) return lead + run_of(what, text, lead);
  return space_run(text);
}

void split_gpt2(std::string_view text, std::vector<std::string_view>& words) {
  while (!text.empty()) {
    const std::size_t length = first_word(text);
    words.push_back(text.substr(0, length));
    text.remove_prefix(length);
  }
}

}  // namespace

pre_tokeniser pre_tokeniser_named(std::string_view name) {
  if (name == "gpt-2") return pre_tokeniser::gpt2;
  if (name == "smollm") return pre_tokeniser::smollm;
  throw bad_input("tokenizer.ggml.pre is '" + std::string(name) + "', this engine knows 'gpt-2' and 'smollm'");
}

std::vector<std::string_view> split_words(pre_tokeniser how, std::string_view text) {
  std::vector<std::string_view> words;
  if (how == pre_tokeniser::gpt2) {
    split_gpt2(text, words);
    return words;
  }
  std::size_t begin = 0;
  for (std::size_t at = 0; at < text.size();) {
    const piece next = piece_at(text, at);
    if (next.what == kind::number) {
      split_gpt2(text.substr(begin, at - begin), words);
      words.push_back(text.substr(at, next.point.bytes));
      begin = at + next.point.bytes;
    }
    at += next.point.bytes;
  }
  split_gpt2(text.substr(begin), words);
  return words;
}

}  // namespace engine
