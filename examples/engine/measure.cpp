// SPDX-License-Identifier: Apache-2.0
#include "measure.hpp"

#include "bad_input.hpp"
#include "output_file.hpp"
#include "perplexity.hpp"
#include "quality_report.hpp"
#include "utf8.hpp"

#include <chrono>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include <unistd.h>

namespace engine {
namespace {

using clock = std::chrono::steady_clock;

double seconds_since(clock::time_point start) { return std::chrono::duration<double>(clock::now() - start).count(); }

/// One line on stderr, written over and over.
class progress_line {
 public:
  explicit progress_line(bool shown) : shown_(shown) {}
  progress_line(const progress_line&) = delete;
  progress_line& operator=(const progress_line&) = delete;
  ~progress_line() {
    if (shown_) std::fputs("\r\033[K", stderr);
  }

  void tell(double done) {
    if (!shown_) return;
    const double left = seconds_since(start_) * (1 - done) / done;
    const auto seconds = static_cast<unsigned long long>(left + 0.5);
    std::fprintf(stderr, "\r\033[Kmeasuring: %.1f %%, about %llu:%02llu left", 100 * done, seconds / 60, seconds % 60);
    std::fflush(stderr);
  }

 private:
  bool shown_;
  clock::time_point start_ = clock::now();
};

std::vector<token_id> read_text(const std::string& path, const tokeniser& words) {
  const mapped_file file(path);
  const auto bytes = file.bytes();
  if (bytes.empty()) throw bad_input(path + " is empty; give a text");
  return words.encode({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, specials::as_text);
}

}  // namespace

void measure(const options& o, opened_model& model) {
  const std::vector<token_id> text = read_text(o.perplexity, model.words);
  const auto start = clock::now();
  std::vector<kv_quality> measured;
  {
    progress_line line(o.progress || ::isatty(STDERR_FILENO) != 0);
    measured = measure_perplexity(model.weights, text,
                                  {.dtypes = o.dtypes,
                                   .block_size = o.block_size,
                                   .context = o.context,
                                   .chunk = o.chunk,
                                   .limit = o.limit,
                                   .calibration = o.calibration},
                                  model.workers, [&](double done) { line.tell(done); });
  }
  const quality_facts facts{.model = model.name(),
                            .text = printable(o.perplexity),
                            .context = o.context,
                            .chunk = o.chunk,
                            .block_size = o.block_size,
                            .calibration = o.calibration,
                            .threads = model.workers.threads(),
                            .seconds = seconds_since(start)};
  std::fputs(quality_table(facts, measured).c_str(), o.json == "-" ? stderr : stdout);
  if (o.json.empty()) return;
  const std::string json = quality_json(facts, measured);
  if (o.json == "-")
    std::fputs(json.c_str(), stdout);
  else
    write_file(o.json, json);
}

}  // namespace engine
