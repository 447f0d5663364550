// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gguf.hpp"
#include "pre_tokeniser.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace engine {

using token_id = std::int32_t;  ///< what kvcache reads as content

/// What the names of special tokens in a text mean.
enum class specials {
  as_text,  ///< nothing: they are text like any other (for what a user typed)
  parse,    ///< each becomes its token
};

/// Byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) with the vocabulary and merges of a GGUF file. Const
/// calls may run at the same time.
class tokeniser {
 public:
  /// Throws bad_input where the file's tokeniser is of another kind or contradicts itself.
  explicit tokeniser(const gguf& file);

  /// A byte that the vocabulary has no token for is left out, as the file's other readers do. O(n log n).
  [[nodiscard]] std::vector<token_id> encode(std::string_view text, specials how) const;

  /// The bytes a token stands for; of a special token, its name. Throws bad_input where there is no such token.
  [[nodiscard]] std::string_view bytes_of(token_id token) const;
  [[nodiscard]] std::string decode(const std::vector<token_id>& tokens) const;

  /// The special token of this name.
  [[nodiscard]] std::optional<token_id> special(std::string_view name) const;

  [[nodiscard]] token_id end_of_sequence() const noexcept { return end_of_sequence_; }
  [[nodiscard]] std::size_t size() const noexcept { return tokens_.size(); }

 private:
  struct merge {
    std::uint32_t rank;
    token_id result;
  };

  void read_tokens(const gguf& file);
  void read_merges(const gguf& file);
  void encode_word(std::string_view word, std::vector<token_id>& out) const;
  void encode_text(std::string_view text, std::vector<token_id>& out) const;
  [[nodiscard]] const merge* find_merge(token_id left, token_id right) const;

  std::vector<std::string> tokens_;
  std::unordered_map<std::string, token_id> ids_;  ///< by the vocabulary's own spelling
  std::unordered_map<std::uint64_t, merge> merges_;
  std::vector<std::pair<std::string, token_id>> specials_;  ///< longest first
  std::array<std::optional<token_id>, 256> byte_tokens_{};
  pre_tokeniser pre_tokeniser_;
  token_id end_of_sequence_ = 0;
};

}  // namespace engine
