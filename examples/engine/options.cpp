// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include "kv_cache.hpp"

#include <CLI/CLI.hpp>

#include <cstdio>
#include <string>
#include <vector>

namespace engine {
namespace {

std::string joined(const std::vector<std::string>& names) {
  std::string out;
  for (const std::string& name : names) out += (out.empty() ? "" : ", ") + name;
  return out;
}

std::vector<std::string> split(const std::string& list) {
  std::vector<std::string> out(1);
  for (const char c : list) {
    if (c == ',')
      out.emplace_back();
    else
      out.back() += c;
  }
  return out;
}

/// CLI11 takes -1 for the largest number.
std::string not_negative(const std::string& number) {
  return number.starts_with('-') ? number + " is below 0" : std::string();
}

}  // namespace

std::optional<int> read_options(int argc, const char* const* argv, options& out) {
  CLI::App app(
      "Serves a Llama-architecture GGUF model out of paged KV blocks: continuous batching, prefix reuse, "
      "CPU attention. Measures what a stored type of K and V does to it.");
  app.add_option("--model,-m", out.model, "GGUF file")->envname("KVCACHE_MODEL")->required();

  auto* input = app.add_option_group("input", "what to serve");
  input->add_option("--prompt,-p", out.prompt, "one message of a user");
  input->add_option("--requests,-r", out.requests, "a file of requests, one JSON object a line");
  input->add_option("--chats", out.chats, "a file of chats served side by side, one JSON object a line");
  input->add_flag("--chat,-c", out.chat, "a chat: one message a line on standard input");
  auto* perplexity = input->add_option("--perplexity", out.perplexity,
                                       "a text to measure on what --kv-dtype does to the model, against f32");
  input->require_option(1);

  request& d = out.defaults;
  app.add_option("--max-tokens,-n", d.max_tokens, "tokens to generate at most for a request")->capture_default_str();
  app.add_option("--temperature", d.how.temperature, "0: always the likeliest token")->capture_default_str();
  app.add_option("--top-k", d.how.top_k, "sample from the k likeliest; 0: from all")->capture_default_str();
  app.add_option("--top-p", d.how.top_p, "sample from the likeliest that have this probability together")
      ->capture_default_str();
  app.add_option("--seed", d.how.seed, "of the random numbers")->capture_default_str();
  app.add_flag("--ignore-end", d.ignore_end, "go on after the model has ended its answer");

  app.add_option("--block-size", out.block_size, "tokens in a block: 8, 16 or 64")->capture_default_str();
  std::string dtypes = out.dtypes.front();
  app.add_option("--kv-dtype", dtypes,
                 "stored type of K and V, or K:V where they differ: " + joined(kv_dtype_names()) +
                     "; of several with commas between, --perplexity measures each, and with +offset behind one, what "
                     "it does to keys less their mean")
      ->capture_default_str();
  app.add_option("--blocks", out.blocks, "blocks in the pool; 0: enough for 8192 tokens")
      ->capture_default_str()
      ->excludes(perplexity);
  app.add_option("--max-sequences", out.max_sequences, "requests served at once")->capture_default_str()->take_last();
  app.add_option("--chunk", out.chunk, "prompt tokens computed in one step")->capture_default_str();
  app.add_option("--context", out.context, "tokens of a window of --perplexity")
      ->capture_default_str()
      ->check(not_negative)
      ->needs(perplexity);
  app.add_option("--limit", out.limit, "predictions that --perplexity measures at most; 0: the whole text")
      ->capture_default_str()
      ->check(not_negative)
      ->needs(perplexity);
  app.add_option("--calibrate", out.calibration,
                 "tokens at the end of the text that are not measured where a dtype has +offset, and give the mean of "
                 "the keys")
      ->capture_default_str()
      ->check(not_negative)
      ->needs(perplexity);
  app.add_flag("!--no-reuse", out.reuse, "compute every prompt from its beginning, whatever is cached");
  app.add_option("--threads,-t", out.threads, "threads; 0: one a core")->capture_default_str();

  app.add_option("--json", out.json,
                 "write the table and the answers as JSON to this file; -: to standard output, and "
                 "text to standard error");
  app.add_option("--metrics", out.metrics, "write the cache's figures to this file, a page for Prometheus")
      ->excludes(perplexity);
  app.add_option("--window", out.window, "newest requests whose hit ratio is reported")->capture_default_str();
  app.add_flag("--progress", out.progress, "tell how far long work is, also where standard error is no terminal");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp& call) {
    return app.exit(call);
  } catch (const CLI::ParseError& fault) {
    std::fprintf(stderr, "engine: %s\n", fault.what());
    return 2;
  }
  out.dtypes = split(dtypes);
  return std::nullopt;
}

}  // namespace engine
