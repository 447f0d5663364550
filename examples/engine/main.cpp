// SPDX-License-Identifier: Apache-2.0
// Serves a language model, or measures it: see README.md beside this file, or --help.
#include "bad_input.hpp"
#include "batcher.hpp"
#include "chat.hpp"
#include "kv_cache.hpp"
#include "measure.hpp"
#include "opened_model.hpp"
#include "options.hpp"
#include "output_file.hpp"
#include "perplexity.hpp"
#include "printer.hpp"
#include "report.hpp"
#include "request_file.hpp"
#include "tokeniser.hpp"

#include <kvcache/error.hpp>
#include <kvcache/geometry.hpp>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

namespace {

using namespace engine;

/// One sentence for what cannot be: checked before anything costs time.
void check(const options& o) {
  validate_block_size(o.block_size);
  constexpr unsigned most_threads = 1024;
  if (o.threads > most_threads)
    throw bad_input("threads is " + std::to_string(o.threads) + ", at most " + std::to_string(most_threads) +
                    " are possible");
  if (o.defaults.max_tokens == 0) throw bad_input("max tokens is 0, the least is 1");
  validate(o.defaults.how);
  // Said before anything is served, not after.
  for (const std::string& path : {o.json, o.metrics})
    if (!path.empty() && path != "-") check_writable(path);
  if (!o.perplexity.empty()) {
    static_cast<void>(measured_dtypes(o.dtypes));
    return;
  }
  if (o.dtypes.size() != 1)
    throw bad_input(std::to_string(o.dtypes.size()) +
                    " KV dtypes are given, one is served with; several are for --perplexity");
  static_cast<void>(canonical_kv_dtype(o.dtypes.front()));
}

std::uint32_t blocks_of(const options& o) {
  constexpr std::uint64_t tokens = 8192;
  return o.blocks != 0 ? o.blocks : static_cast<std::uint32_t>(kvcache::blocks_for(tokens, o.block_size));
}

kv_options kv_options_of(const options& o) {
  // As the batcher plans its steps: a token of each sequence, and a chunk of prompts.
  constexpr std::uint64_t most = 0xffff'ffffu;
  const std::uint64_t step_tokens = std::uint64_t{o.max_sequences} + o.chunk;
  return {.block_size = o.block_size,
          .dtype = o.dtypes.front(),
          .blocks = blocks_of(o),
          .sequences = o.max_sequences,
          .step_tokens = static_cast<std::uint32_t>(std::min(step_tokens, most))};
}

class program {
 public:
  program(const options& o, opened_model& model)
      : options_(o),
        model_(model),
        words_(model.words),
        cache_(make_kv_cache(model.weights.shape(), kv_options_of(o), model.workers)),
        printer_(words_, {.text = o.json == "-" ? stderr : stdout,
                          .headings = !o.requests.empty() || !o.chats.empty(),
                          .progress = o.progress || ::isatty(STDERR_FILENO) != 0}),
        batcher_(model.weights, *cache_,
                 {.max_sequences = o.max_sequences,
                  .chunk = o.chunk,
                  .reuse = o.reuse,
                  .window = o.window,
                  .end_of_sequence = words_.end_of_sequence()},
                 printer_) {}

  /// 0: all requests were served; 1: some failed; 2: all failed.
  int run() {
    if (options_.chat)
      chat();
    else if (!options_.requests.empty())
      serve_file();
    else if (!options_.chats.empty())
      serve_chats();
    else
      serve(with_prompt({{"user", options_.prompt}}, "prompt"));
    report();
    std::size_t failed = 0;
    for (const answer& a : batcher_.answers()) failed += a.how == finish::failed ? 1 : 0;
    if (failed == 0) return 0;
    return failed == batcher_.answers().size() ? 2 : 1;
  }

 private:
  request with_prompt(const std::vector<message>& messages, const std::string& id) const {
    request out = options_.defaults;
    out.id = id;
    out.prompt = encode_chat(words_, messages);
    return out;
  }

  void submit(request what) {
    printer_.expect(what.id);
    batcher_.submit(std::move(what));
  }

  const answer& serve(request what) {
    submit(std::move(what));
    batcher_.run();
    return batcher_.answers().back();
  }

  void serve_file() {
    for (request& r : read_request_file(options_.requests, words_, options_.defaults)) submit(std::move(r));
    batcher_.run();
  }

  // All chats side by side; the next turn of each follows when its last one is answered.
  void serve_chats() {
    struct open_chat {
      conversation what;
      std::size_t said = 0;    // turns
      std::size_t answer = 0;  // of the last one
    };
    std::vector<open_chat> chats;
    for (conversation& c : read_conversation_file(options_.chats, options_.defaults)) chats.push_back({std::move(c)});
    const auto say = [&](open_chat& chat) {
      chat.what.messages.push_back({"user", chat.what.turns[chat.said++]});
      request turn = chat.what.options;
      if (chat.what.turns.size() > 1) turn.id += " turn " + std::to_string(chat.said);
      turn.prompt = encode_chat(words_, chat.what.messages);
      chat.answer = batcher_.answers().size();
      submit(std::move(turn));
    };
    for (open_chat& chat : chats) say(chat);
    for (bool left = true; left;) {
      left = batcher_.step();
      for (open_chat& chat : chats) {
        const answer& said = batcher_.answers()[chat.answer];
        if (said.how == finish::running || said.how == finish::failed || chat.said == chat.what.turns.size()) continue;
        chat.what.messages.push_back({"assistant", words_.decode(said.tokens)});
        say(chat);
        left = true;
      }
    }
  }

  // Each turn sends the whole conversation; what earlier turns computed is found in the cache.
  void chat() {
    std::vector<message> messages;
    const bool ask = ::isatty(STDIN_FILENO) != 0;
    for (std::string line;;) {
      if (ask) std::fputs("> ", stderr);
      if (!std::getline(std::cin, line)) break;
      if (line.empty()) continue;
      messages.push_back({"user", line});
      const answer& said = serve(with_prompt(messages, "turn " + std::to_string(batcher_.answers().size() + 1)));
      if (said.how == finish::failed)
        messages.pop_back();
      else
        messages.push_back({"assistant", words_.decode(said.tokens)});
    }
  }

  void report() const {
    const run_facts facts{.model = model_.name(),
                          .dtype = canonical_kv_dtype(options_.dtypes.front()),
                          .block_size = options_.block_size,
                          .pool_blocks = cache_->manager().capacity(),
                          .bytes_per_token = cache_->bytes_per_token(),
                          .evicted_blocks = cache_->manager().statistics().evicted_blocks,
                          .threads = model_.workers.threads()};
    const std::string table = report_table(facts, batcher_.statistics(), batcher_.answers());
    std::fprintf(options_.json == "-" ? stderr : stdout, "\n%s", table.c_str());
    if (!options_.metrics.empty())
      write_file(options_.metrics, metrics_page(facts, batcher_.statistics(), cache_->manager().counts(),
                                                cache_->manager().statistics()));
    if (options_.json.empty()) return;
    const std::string json = report_json(facts, batcher_.statistics(), batcher_.answers(), words_);
    if (options_.json == "-") {
      std::fputs(json.c_str(), stdout);
      return;
    }
    write_file(options_.json, json);
  }

  const options& options_;
  const opened_model& model_;
  const tokeniser& words_;
  std::unique_ptr<kv_cache> cache_;
  printer printer_;
  batcher batcher_;
};

}  // namespace

int main(int argc, char** argv) {
  options o;
  if (const auto ends = read_options(argc, argv, o)) return *ends;
  try {
    check(o);
    opened_model model(o.model, o.threads);
    if (model.file.has("kvcache.random_weights"))
      std::fputs("engine: this model has random weights (see make_model); what it says means nothing\n", stderr);
    int status = 0;
    if (o.perplexity.empty())
      status = program(o, model).run();
    else
      measure(o, model);
    check_standard_output();
    return status;
  } catch (const std::exception& fault) {
    std::fprintf(stderr, "engine: %s\n", fault.what());
    return 2;
  }
}
