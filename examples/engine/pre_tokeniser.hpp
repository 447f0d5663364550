// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

namespace engine {

/// How a text is cut into words before byte pairs are merged; the name is GGUF's `tokenizer.ggml.pre`.
enum class pre_tokeniser {
  gpt2,    ///< "gpt-2": GPT-2's pattern
  smollm,  ///< "smollm": every number character alone, then GPT-2's pattern on what lies between
};

/// Throws bad_input for a name that is none of these.
[[nodiscard]] pre_tokeniser pre_tokeniser_named(std::string_view name);

/// The words in order; together they are the text. O(length).
[[nodiscard]] std::vector<std::string_view> split_words(pre_tokeniser how, std::string_view text);

}  // namespace engine
