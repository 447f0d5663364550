// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include "bad_input.hpp"
#include "replay.hpp"

#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <system_error>

namespace replay {
namespace {

/// Decimal, whatever it begins with.
std::uint32_t read_number(const std::string& option, const std::string& text, std::uint32_t most) {
  std::uint32_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [stopped, fault] = std::from_chars(text.data(), end, number);
  if (fault != std::errc{} || stopped != end || number < 1 || number > most)
    throw bad_input(option + " has '" + text + "', it has to be a number from 1 to " + std::to_string(most));
  return number;
}

}  // namespace

std::optional<options> parse_options(int argc, const char* const* argv) {
  CLI::App app{
      "Replays a trace of requests through the prefix index and an eviction policy: how many blocks would have been\n"
      "found in the cache. `optimal` is what a policy that knows the future could reach."};
  std::string known;
  for (const std::string& name : known_policies()) known += (known.empty() ? "" : ", ") + name;
  std::vector<std::string> blocks{"1000", "3000", "10000", "30000", "100000"};
  std::string block_tokens = "512";
  std::string at_once = "1";
  options o;
  o.evictions = known_policies();
  app.add_option("--trace", o.trace,
                 "JSON lines with the key hash_ids, the blocks of a request's prompt,\n"
                 "and perhaps output_hash_ids, those it generates")
      ->required();
  app.add_option("--eviction", o.evictions, "policies, separated by commas: " + known)
      ->delimiter(',')
      ->default_str("all");
  app.add_option("--blocks", blocks, "capacities in blocks, separated by commas")
      ->delimiter(',')
      ->default_str("1000,3000,10000,30000,100000");
  app.add_option("--block-tokens", block_tokens, "tokens that a block of the trace stands for, an even number")
      ->capture_default_str();
  app.add_option("--at-once", at_once, "requests that are open at once, the oldest ends when another comes")
      ->capture_default_str();
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
  for (const std::string& n : blocks) o.blocks.push_back(read_number("--blocks", n, 1u << 24));
  o.block_tokens = read_number("--block-tokens", block_tokens, 1u << 16);
  o.at_once = read_number("--at-once", at_once, 1u << 16);
  if (o.block_tokens % 2 != 0)
    throw bad_input("--block-tokens has " + std::to_string(o.block_tokens) +
                    ", it has to be even; half a block stands " + "for the end of a prompt");
  return o;
}

}  // namespace replay
