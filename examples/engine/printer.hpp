// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "batcher.hpp"
#include "tokeniser.hpp"

#include <cstddef>
#include <cstdio>
#include <string>
#include <vector>

namespace engine {

struct printer_options {
  std::FILE* text = stdout;  ///< where answers are streamed to
  bool headings = false;     ///< each answer under its request's id
  bool progress = false;     ///< tell on stderr how far long prompts are
};

/// Streams answers as they come. Of several at once the first unfinished one is streamed, in order of submission; the
/// others are kept and follow when it has ended. Only whole characters are written.
class printer final : public listener {
 public:
  printer(const tokeniser& words, const printer_options& options) : words_(words), options_(options) {}

  /// Before a request is submitted.
  void expect(const std::string& id);

  void prompt_progress(std::size_t index, std::uint32_t done, std::uint32_t total) override;
  void token(std::size_t index, token_id chosen) override;
  void finished(std::size_t index, const answer& result) override;

 private:
  struct stream {
    std::string id;
    std::string pending;  ///< not written yet
    std::string error;
    bool begun = false;
    bool ended = false;
  };

  void write();
  void write_some(stream& s);
  void clear_progress();

  const tokeniser& words_;
  printer_options options_;
  std::vector<stream> streams_;
  std::size_t current_ = 0;
  bool progress_shown_ = false;
};

}  // namespace engine
