// SPDX-License-Identifier: Apache-2.0
// The real model against expected.json: what an independent implementation (Hugging Face transformers in float32, from
// the same file) makes of it. Without the model each test says so in one line and passes.
#include "batcher.hpp"
#include "catch.hpp"
#include "chat.hpp"
#include "how_far.hpp"
#include "mapped_file.hpp"
#include "sanitized.hpp"
#include "support.hpp"

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

using namespace engine;
using engine_test::loaded_model;
using engine_test::sanitized;
using kvcache_test::how_far;
using kvcache_test::is_number;
using kvcache_test::too_far;

namespace {

/// All of them, but in builds that are many times slower.
constexpr std::size_t prompts_used = sanitized ? 3 : 10000;
constexpr std::uint32_t steps_used = sanitized ? 12 : 64;
/// Alone, each step reads all weights for one token, as fast as memory gives them: the first ten have to do, in two
/// tests of equal length, so that both cores have work to the end.
constexpr std::size_t prompts_alone = sanitized ? 2 : 10;

constexpr double logit_tolerance = 1e-3;
constexpr double near_tie = 1e-4;

struct expected_prompt {
  std::vector<message> messages;
  std::vector<token_id> prompt;
  std::vector<token_id> tokens;
  std::vector<double> gaps;
  std::map<std::uint32_t, std::vector<std::pair<token_id, float>>> logits;  // by step
};

std::vector<message> messages_of(const nlohmann::json& list) {
  std::vector<message> out;
  for (const auto& m : list) out.push_back({m.at("role"), m.at("content")});
  return out;
}

std::vector<expected_prompt> read_expected() {
  std::vector<expected_prompt> out;
  const nlohmann::json file = engine_test::read_json("expected.json");
  for (const auto& entry : file.at("prompts")) {
    if (out.size() == prompts_used) break;
    expected_prompt& p = out.emplace_back();
    p.messages = messages_of(entry.at("messages"));
    p.prompt = entry.at("prompt").get<std::vector<token_id>>();
    p.tokens = entry.at("tokens").get<std::vector<token_id>>();
    p.gaps = entry.at("gaps").get<std::vector<double>>();
    p.tokens.resize(std::min<std::size_t>(p.tokens.size(), steps_used));
    for (const auto& [step, slice] : entry.at("logits").items())
      for (std::size_t i = 0; i < slice.at("ids").size(); ++i)
        p.logits[static_cast<std::uint32_t>(std::stoul(step))].emplace_back(slice.at("ids")[i], slice.at("values")[i]);
  }
  return out;
}

/// Holds the logits of the steps that the file has against the file.
struct logit_judge final : listener {
  explicit logit_judge(const std::vector<const expected_prompt*>& of) : prompts(of), steps(of.size(), 0) {}

  void logits(std::size_t index, std::span<const float> values) override {
    const std::uint32_t step = steps[index]++;
    // At every step the distance of the two largest, of which the file has four digits.
    if (!std::all_of(values.begin(), values.end(), is_number)) worst = worst_gap = too_far;  // comparisons skip a NaN
    float largest = values[0];
    float second = values[1];
    if (second > largest) std::swap(largest, second);
    for (const float x : values.subspan(2)) {
      second = std::max(second, std::min(x, largest));
      largest = std::max(largest, x);
    }
    const double gap = prompts[index]->gaps[step];
    worst_gap = std::max(worst_gap, how_far(largest - second, gap) - 5e-4 * gap);
    const auto found = prompts[index]->logits.find(step);
    if (found == prompts[index]->logits.end()) return;
    for (const auto& [id, value] : found->second) {
      worst = std::max(worst, how_far(values[static_cast<std::size_t>(id)], static_cast<double>(value)));
      ++compared;
    }
  }

  std::vector<const expected_prompt*> prompts;
  std::vector<std::uint32_t> steps;
  double worst = 0;
  double worst_gap = 0;
  std::size_t compared = 0;
};

void report_near_ties(const std::vector<expected_prompt>& expected) {
  std::size_t ties = 0;
  double smallest = 1e30;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    for (std::size_t step = 0; step < expected[i].tokens.size(); ++step) {
      smallest = std::min(smallest, expected[i].gaps[step]);
      if (expected[i].gaps[step] >= near_tie) continue;
      ++ties;
      std::printf("near-tie: prompt %zu, step %zu, the top two logits are %g apart\n", i, step, expected[i].gaps[step]);
    }
  }
  std::printf("%zu near-ties in %zu prompts; the closest two top logits are %g apart\n", ties, expected.size(),
              smallest);
}

/// Serves the prompts [first, last) at once and compares tokens and logits.
void judge(loaded_model& model, unsigned block_size, const std::vector<expected_prompt>& expected, std::size_t first,
           std::size_t last, logit_judge& judge) {
  // Without reuse between runs: a fresh pool each time.
  const auto cache = model.cache(block_size, 2048 / block_size * 2);
  batcher batcher(model.model, *cache, {.max_sequences = 16, .chunk = 64}, judge);
  for (std::size_t i = first; i < last; ++i) {
    request r;
    r.id = std::to_string(i);
    r.prompt = expected[i].prompt;
    r.max_tokens = static_cast<std::uint32_t>(expected[i].tokens.size());
    r.ignore_end = true;
    batcher.submit(r);
    batcher.step();  // each joins while the ones before it are being served
  }
  batcher.run();
  for (std::size_t i = first; i < last; ++i) {
    INFO("prompt " << i << ", block size " << block_size);
    CHECK(batcher.answers()[i - first].tokens == expected[i].tokens);
  }
}

struct expectation {
  mapped_file file;
  loaded_model model;
  std::vector<expected_prompt> expected;

  expectation(const std::string& path, unsigned threads)
      : file(path), model(file.bytes(), threads), expected(read_expected()) {
    REQUIRE(expected.size() >= (sanitized ? 3 : 10));
    report_near_ties(expected);
  }
};

void judge_batched(unsigned block_size) {
  const auto path = engine_test::real_model();
  if (!path) return;
  expectation e(*path, 2);
  std::vector<const expected_prompt*> all;
  for (const expected_prompt& p : e.expected) all.push_back(&p);
  logit_judge logits(all);
  judge(e.model, block_size, e.expected, 0, e.expected.size(), logits);
  std::printf("%zu prompts batched, block size %u: %zu logits compared, %g apart at most\n", e.expected.size(),
              block_size, logits.compared, logits.worst);
  CHECK(logits.compared >= e.expected.size() * 64);
  CHECK(logits.worst < logit_tolerance);
  CHECK(logits.worst_gap < 2 * logit_tolerance);
}

void judge_alone(unsigned block_size, std::size_t first, std::size_t last) {
  const auto path = engine_test::real_model();
  if (!path) return;
  expectation e(*path, 1);  // reading weights is all the work; tests beside this one have the other core
  double worst = 0;
  for (std::size_t i = first; i < last; ++i) {
    logit_judge logits({&e.expected[i]});
    judge(e.model, block_size, e.expected, i, i + 1, logits);
    CHECK(logits.compared >= 64);
    CHECK(logits.worst < logit_tolerance);
    CHECK(logits.worst_gap < 2 * logit_tolerance);
    worst = std::max(worst, logits.worst);
  }
  std::printf("prompts %zu to %zu alone, block size %u: logits %g apart at most\n", first, last - 1, block_size, worst);
}

}  // namespace

TEST_CASE("Texts and chats are tokenised as by Hugging Face's tokenisers") {
  const auto path = engine_test::real_model();
  if (!path) return;
  const mapped_file mapped(*path);
  const gguf file(mapped.bytes());
  const tokeniser words(file);
  const nlohmann::json expected = engine_test::read_json("expected.json");
  CHECK(expected.at("samples").size() >= 30);
  for (const auto& sample : expected.at("samples")) {
    INFO(sample.at("text").dump());
    CHECK(words.encode(sample.at("text").get<std::string>(), specials::parse) ==
          sample.at("ids").get<std::vector<token_id>>());
  }
  for (const auto& entry : expected.at("prompts")) {
    INFO(entry.at("messages").dump());
    CHECK(encode_chat(words, messages_of(entry.at("messages"))) == entry.at("prompt").get<std::vector<token_id>>());
  }
}

TEST_CASE("Greedy tokens and logits are the expected ones, batched, block size 8") { judge_batched(8); }
TEST_CASE("Greedy tokens and logits are the expected ones, batched, block size 16") { judge_batched(16); }
TEST_CASE("Greedy tokens and logits are the expected ones, batched, block size 64") { judge_batched(64); }
TEST_CASE("Greedy tokens and logits are the expected ones, alone, block size 8, first half") {
  judge_alone(8, 0, prompts_alone / 2);
}
TEST_CASE("Greedy tokens and logits are the expected ones, alone, block size 8, second half") {
  judge_alone(8, prompts_alone / 2, prompts_alone);
}
TEST_CASE("Greedy tokens and logits are the expected ones, alone, block size 16, first half") {
  judge_alone(16, 0, prompts_alone / 2);
}
TEST_CASE("Greedy tokens and logits are the expected ones, alone, block size 16, second half") {
  judge_alone(16, prompts_alone / 2, prompts_alone);
}
TEST_CASE("Greedy tokens and logits are the expected ones, alone, block size 64, first half") {
  judge_alone(64, 0, prompts_alone / 2);
}
TEST_CASE("Greedy tokens and logits are the expected ones, alone, block size 64, second half") {
  judge_alone(64, prompts_alone / 2, prompts_alone);
}
