// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gguf.hpp"
#include "llama.hpp"
#include "mapped_file.hpp"
#include "tokeniser.hpp"

#include <kvcache/attention/cpu/thread_pool.hpp>

#include <string>

namespace engine {

/// A model file with everything that is read out of it, and the threads that compute.
struct opened_model {
  /// `threads`: 0: one a core. Throws bad_input where the file cannot be used, kvcache::system_failure where the system
  /// gives fewer threads.
  opened_model(const std::string& path, unsigned threads);
  opened_model(const opened_model&) = delete;
  opened_model& operator=(const opened_model&) = delete;

  /// As the file says, fit for a terminal.
  [[nodiscard]] std::string name() const;

  mapped_file mapped;
  gguf file;
  tokeniser words;
  kvcache::thread_pool workers;
  llama weights;
};

}  // namespace engine
