// SPDX-License-Identifier: Apache-2.0
#include "pre_tokeniser.hpp"

#include "bad_input.hpp"

#include <new>
#include <string>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

namespace engine {
namespace {

// \s is not used: in PCRE2 it also means U+180E, which has not been white space since Unicode 6.3.
constexpr const char* gpt2_words =
    R"('(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\p{wspace}\p{L}\p{N}]+|\p{wspace}+(?!\P{wspace})|\p{wspace}+)";
// The model's own way is to take the number characters out and to cut what lies between as GPT-2 does; so white space
// before a number ends a text.
constexpr const char* smollm_words =
    R"(\p{N}|'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?[^\p{wspace}\p{L}\p{N}]+|\p{wspace}+(?![^\p{wspace}\p{N}])|\p{wspace}+)";

const char* words_named(std::string_view name) {
  if (name == "gpt-2") return gpt2_words;
  if (name == "smollm") return smollm_words;
  throw bad_input("tokenizer.ggml.pre is '" + std::string(name) + "', this engine knows 'gpt-2' and 'smollm'");
}

std::string message_of(int status) {
  char text[128] = "";
  ::pcre2_get_error_message(status, reinterpret_cast<PCRE2_UCHAR*>(text), sizeof text);
  return text;
}

bool is_utf8_error(int status) noexcept { return status <= PCRE2_ERROR_UTF8_ERR1 && status >= PCRE2_ERROR_UTF8_ERR21; }

class matcher {
 public:
  explicit matcher(const pcre2_code* pattern)
      : pattern_(pattern), found_(::pcre2_match_data_create_from_pattern(pattern, nullptr)) {
    if (!found_) throw std::bad_alloc();
  }

  /// Bytes of whole characters that the text begins with.
  std::size_t valid(std::string_view text) const {
    const int status = match(text, 0, 0);
    return is_utf8_error(status) ? ::pcre2_get_startchar(found_.get()) : text.size();
  }

  /// The end of the word that begins at `at`, in a valid text.
  std::size_t word_end(std::string_view text, std::size_t at) const {
    // What was checked once is not checked again for each word.
    if (const int status = match(text, at, PCRE2_NO_UTF_CHECK); status < 0)
      throw bad_input("the text cannot be cut into words after byte " + std::to_string(at) + ": " + message_of(status));
    return ::pcre2_get_ovector_pointer(found_.get())[1];
  }

 private:
  struct free_match_data {
    void operator()(pcre2_match_data* data) const noexcept { ::pcre2_match_data_free(data); }
  };

  int match(std::string_view text, std::size_t at, std::uint32_t options) const {
    return ::pcre2_match(pattern_, reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(), at, options | PCRE2_ANCHORED,
                         found_.get(), nullptr);
  }

  const pcre2_code* pattern_;
  std::unique_ptr<pcre2_match_data, free_match_data> found_;
};

}  // namespace

pre_tokeniser::pre_tokeniser(std::string_view name) {
  int fault = 0;
  PCRE2_SIZE where = 0;
  pcre2_code* pattern = ::pcre2_compile(reinterpret_cast<PCRE2_SPTR>(words_named(name)), PCRE2_ZERO_TERMINATED,
                                        PCRE2_UTF | PCRE2_UCP, &fault, &where, nullptr);
  if (pattern == nullptr)
    throw bad_input("PCRE2 refuses the words of '" + std::string(name) + "' (" + message_of(fault) +
                    "); this engine needs PCRE2 10.40 or later");
  pattern_ = {pattern, ::pcre2_code_free};
}

std::vector<std::string_view> pre_tokeniser::split(std::string_view text) const {
  const matcher matcher(static_cast<const pcre2_code*>(pattern_.get()));
  std::vector<std::string_view> words;
  while (!text.empty()) {
    const std::size_t valid = matcher.valid(text);
    const std::string_view whole = text.substr(0, valid);
    for (std::size_t at = 0; at < valid;) {
      const std::size_t end = matcher.word_end(whole, at);
      words.push_back(whole.substr(at, end - at));
      at = end;
    }
    if (valid < text.size()) words.push_back(text.substr(valid, 1));
    text.remove_prefix(valid < text.size() ? valid + 1 : valid);
  }
  return words;
}

}  // namespace engine
