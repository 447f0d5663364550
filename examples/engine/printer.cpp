// SPDX-License-Identifier: Apache-2.0
#include "printer.hpp"

#include "utf8.hpp"

namespace engine {

void printer::expect(const std::string& id) { streams_.emplace_back().id = printable(id); }

void printer::clear_progress() {
  if (progress_shown_) std::fputs("\r\033[K", stderr);
  progress_shown_ = false;
}

void printer::prompt_progress(std::size_t index, std::uint32_t done, std::uint32_t total) {
  if (!options_.progress) return;
  clear_progress();
  std::fprintf(stderr, "reading the prompt of %s: %u of %u tokens (%u %%)", streams_[index].id.c_str(), done, total,
               done * 100 / total);
  std::fflush(stderr);
  progress_shown_ = true;
}

void printer::token(std::size_t index, token_id chosen) {
  streams_[index].pending += words_.bytes_of(chosen);
  write();
}

void printer::finished(std::size_t index, const answer& result) {
  streams_[index].ended = true;
  streams_[index].error = result.error;
  write();
}

void printer::write_some(stream& s) {
  const std::size_t keep = s.ended ? 0 : unfinished_utf8(s.pending);
  const std::size_t size = s.pending.size() - keep;
  if (size == 0) return;
  std::fwrite(s.pending.data(), 1, size, options_.text);
  s.pending.erase(0, size);
}

void printer::write() {
  clear_progress();
  for (; current_ < streams_.size(); ++current_) {
    stream& s = streams_[current_];
    if (!s.begun && (s.ended || !s.pending.empty())) {
      if (options_.headings) std::fprintf(options_.text, "--- %s\n", s.id.c_str());
      s.begun = true;
    }
    write_some(s);
    if (!s.ended) break;
    if (!s.error.empty()) {
      std::fflush(options_.text);
      std::fprintf(stderr, "engine: %s\n", s.error.c_str());
    }
    std::fputc('\n', options_.text);
  }
  std::fflush(options_.text);
}

}  // namespace engine
