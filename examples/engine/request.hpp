// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "sampler.hpp"
#include "tokeniser.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace engine {

/// What a user asks for.
struct request {
  std::string id{};
  std::vector<token_id> prompt{};
  std::uint32_t max_tokens = 64;  ///< tokens to generate at most
  bool ignore_end = false;        ///< go on after an end-of-sequence token
  sampling how{};
};

enum class finish {
  running,
  end,     ///< the model ended its answer
  length,  ///< max_tokens
  failed,  ///< see answer::error
};

[[nodiscard]] constexpr const char* name(finish f) noexcept {
  switch (f) {
    case finish::running: return "running";
    case finish::end: return "end";
    case finish::length: return "length";
    case finish::failed: return "failed";
  }
  return "unknown";
}

/// What came of it.
struct answer {
  std::string id{};
  std::vector<token_id> tokens{};  ///< without the end-of-sequence token that ended it
  std::uint32_t prompt_tokens = 0;
  std::uint32_t reused_tokens = 0;  ///< of the prompt, found in the cache
  finish how = finish::running;
  std::string error{};       ///< where failed: one sentence
  double first_token_s = 0;  ///< seconds from submission to the first token
  double last_token_s = 0;   ///< and to the last
};

}  // namespace engine
