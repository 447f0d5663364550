// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include "bad_input.hpp"
#include "replay.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>

namespace replay {
namespace {

constexpr std::int64_t most_blocks = std::int64_t{1} << 24;

}  // namespace

std::optional<options> parse_options(int argc, const char* const* argv) {
  CLI::App app{
      "Replays a trace of requests through the prefix index and an eviction policy: how many blocks would have been\n"
      "found in the cache. `optimal` is what a policy that knows the future could reach."};
  std::string known;
  for (const std::string& name : known_policies()) known += (known.empty() ? "" : ", ") + name;
  std::vector<std::int64_t> blocks{1'000, 3'000, 10'000, 30'000, 100'000};
  options o;
  o.evictions = known_policies();
  app.add_option("--trace", o.trace, "JSON lines with the key hash_ids: the blocks of a request's prompt")->required();
  app.add_option("--eviction", o.evictions, "policies, separated by commas: " + known)
      ->delimiter(',')
      ->default_str("all");
  app.add_option("--blocks", blocks, "capacities in blocks, separated by commas")
      ->delimiter(',')
      ->default_str("1000,3000,10000,30000,100000");
  app.add_option("--plot", o.plot, "draw hit ratio over capacity into this PNG file (needs gnuplot)");
  app.add_flag("--json", o.json, "print one JSON object a line instead of a table");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return std::nullopt;
  } catch (const CLI::ParseError& refused) {
    throw bad_input(std::string(refused.what()) + "; --help lists the options");
  }
  for (const std::string& name : o.evictions)
    if (std::ranges::find(known_policies(), name) == known_policies().end())
      throw bad_input("--eviction names '" + name + "', choose of " + known);
  for (const std::int64_t n : blocks) {
    if (n < 1 || n > most_blocks)
      throw bad_input("--blocks has " + std::to_string(n) + ", it has to be from 1 to " + std::to_string(most_blocks));
    o.blocks.push_back(static_cast<std::uint32_t>(n));
  }
  return o;
}

}  // namespace replay
