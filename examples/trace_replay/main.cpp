// SPDX-License-Identifier: Apache-2.0
// Which eviction policy suits a load? Replays a trace through the library's index at several capacities. Exit status 2:
// the input cannot be used.
#include "bad_input.hpp"
#include "options.hpp"
#include "plot.hpp"
#include "replay.hpp"
#include "trace.hpp"

#include <nlohmann/json.hpp>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include <unistd.h>

namespace {

/// What is printed is whole, or the program fails.
void flush_output() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw replay::bad_input(std::string("cannot write to the standard output: ") + std::strerror(errno) +
                            "; what was printed is not whole");
}

void print_row(const replay::options& o, const std::string& name, std::uint32_t blocks, std::size_t hits,
               std::size_t references) {
  const double ratio = static_cast<double>(hits) / static_cast<double>(references);
  if (o.json) {
    const nlohmann::ordered_json row{
        {"eviction", name}, {"blocks", blocks}, {"hits", hits}, {"references", references}, {"hit_ratio", ratio}};
    std::printf("%s\n", row.dump().c_str());
  } else {
    std::printf("%-12s %10u %12zu %12zu %9.4f\n", name.c_str(), blocks, hits, references, ratio);
  }
  flush_output();
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto options = replay::parse_options(argc, argv);
    if (!options) {
      flush_output();
      return 0;
    }
    if (!options->plot.empty()) replay::check_plot(options->plot);
    const replay::trace all = replay::read_trace_file(options->trace);
    if (!options->json)
      std::printf("%zu requests, %zu blocks\n\n%-12s %10s %12s %12s %9s\n", all.requests.size(), all.references,
                  "eviction", "blocks", "hits", "references", "hit ratio");
    const bool watched = ::isatty(STDERR_FILENO) != 0;
    std::vector<replay::curve> curves;
    for (const std::string& name : options->evictions) {
      replay::curve& curve = curves.emplace_back();
      curve.name = name;
      for (const std::uint32_t blocks : options->blocks) {
        const auto report = [&](std::size_t done) {
          if (done % 1024 == 0)
            std::fprintf(stderr, "\r%s, %u blocks: %zu %% ", name.c_str(), blocks, 100 * done / all.requests.size());
        };
        const std::size_t hits = replay::hits(name, all, {blocks, options->block_tokens, options->at_once},
                                              watched ? replay::progress(report) : nullptr);
        if (watched) std::fprintf(stderr, "\r%40s\r", "");
        print_row(*options, name, blocks, hits, all.references);
        curve.blocks.push_back(blocks);
        curve.hit_ratio.push_back(static_cast<double>(hits) / static_cast<double>(all.references));
      }
    }
    if (!options->plot.empty()) replay::plot(curves, options->plot);
    return 0;
  } catch (const std::exception& refused) {
    std::fprintf(stderr, "trace_replay: %s\n", refused.what());
    return 2;
  }
}
