// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string_view>
#include <vector>

namespace engine {

/// Cuts a text into words before byte pairs are merged, by a regular expression. Const calls may run at the same time.
class pre_tokeniser {
 public:
  /// By GGUF's `tokenizer.ggml.pre`: "gpt-2", GPT-2's words (Radford et al. 2019), or "smollm", where every number
  /// character is a word of its own as well. Throws bad_input for any other.
  explicit pre_tokeniser(std::string_view name);

  /// The words in order; together they are the text. A byte that is not part of a UTF-8 character is a word of its own.
  /// O(length).
  [[nodiscard]] std::vector<std::string_view> split(std::string_view text) const;

 private:
  std::shared_ptr<const void> pattern_;  ///< PCRE2's
};

}  // namespace engine
