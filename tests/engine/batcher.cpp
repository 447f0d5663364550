// SPDX-License-Identifier: Apache-2.0
// Continuous batching on the small random model: what is served together is what is served alone, whatever the block
// size, and the pool is whole afterwards.
#include "batcher.hpp"

#include "bad_input.hpp"
#include "catch.hpp"
#include "how_far.hpp"
#include "support.hpp"

#include <kvcache/error.hpp>

#include <algorithm>
#include <string>
#include <vector>

using namespace engine;
using namespace engine_test;
using kvcache_test::contains_text;
using kvcache_test::how_far;

namespace {

request ask(const small_model& small, const std::string& text, std::uint32_t max_tokens) {
  request r;
  r.id = text.substr(0, 12);
  r.prompt = small.words.encode(text, specials::as_text);
  r.max_tokens = max_tokens;
  r.ignore_end = true;
  return r;
}

std::vector<std::vector<token_id>> tokens_of(const std::vector<answer>& answers) {
  std::vector<std::vector<token_id>> out;
  for (const answer& a : answers) out.push_back(a.tokens);
  return out;
}

/// Each request by itself, in a cache of its own.
std::vector<std::vector<token_id>> alone(small_model& small, const std::vector<request>& requests,
                                         unsigned block_size = 16) {
  std::vector<std::vector<token_id>> out;
  for (const request& r : requests) {
    const auto cache = small.cache(block_size, 64);
    out.push_back(serve(small, *cache, {r}).at(0).tokens);
  }
  return out;
}

bool all_available(kv_cache& cache) { return cache.manager().counts().available() == cache.manager().capacity(); }

/// Writes down what it hears.
struct recorder final : listener {
  std::vector<std::vector<token_id>> tokens{16};
  std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>> progress{16};
  std::vector<int> finished_count = std::vector<int>(16, 0);
  std::vector<std::vector<float>> last_logits{16};

  void prompt_progress(std::size_t index, std::uint32_t done, std::uint32_t total) override {
    progress[index].emplace_back(done, total);
  }
  void logits(std::size_t index, std::span<const float> values) override {
    last_logits[index].assign(values.begin(), values.end());
  }
  void token(std::size_t index, token_id chosen) override { tokens[index].push_back(chosen); }
  void finished(std::size_t index, const answer&) override { ++finished_count[index]; }
};

}  // namespace

TEST_CASE("Requests served together get the tokens they get alone, with blocks of 8, 16 and 64") {
  small_model small;
  const std::vector<request> requests = some_requests(small.words);
  const auto expected = alone(small, requests);
  for (std::size_t i = 0; i < requests.size(); ++i) REQUIRE(expected[i].size() == requests[i].max_tokens);
  // The answers differ from each other, so equality below says something.
  CHECK(std::vector(expected[1].begin(), expected[1].begin() + 7) != expected[2]);
  for (const unsigned block_size : {8u, 16u, 64u}) {
    CHECK(alone(small, requests, block_size) == expected);
    for (const std::uint32_t sequences : {2u, 16u}) {
      for (const std::uint32_t chunk : {1u, 7u, 128u}) {
        INFO("block size " << block_size << ", " << sequences << " at once, chunks of " << chunk);
        const auto cache = small.cache(block_size, 64);
        CHECK(tokens_of(serve(small, *cache, requests, {.max_sequences = sequences, .chunk = chunk})) == expected);
        CHECK(all_available(*cache));
      }
    }
  }
}

TEST_CASE("Requests may join at any step") {
  small_model small;
  const std::vector<request> requests = some_requests(small.words);
  const auto expected = alone(small, requests);
  const auto cache = small.cache(8, 64);
  deaf nobody;
  batcher batcher(small.model, *cache, {.chunk = 5}, nobody);
  for (const request& r : requests) {
    batcher.submit(r);
    for (int i = 0; i < 3; ++i) batcher.step();
  }
  batcher.run();
  CHECK(tokens_of(batcher.answers()) == expected);
  CHECK_FALSE(batcher.step());
}

TEST_CASE("The number of threads changes no token") {
  small_model two;
  small_model one(1, 1);
  const std::vector<request> requests = some_requests(two.words);
  CHECK(alone(one, requests) == alone(two, requests));
}

TEST_CASE("K and V are kept in the dtype that was asked for") {
  small_model small;
  const request r = ask(small, "a prompt of some length, so that many rounded keys and values meet", 3);
  const auto logits = [&](const char* dtype) {
    const auto cache = small.cache(16, 32, dtype);
    recorder heard;
    batcher batcher(small.model, *cache, {}, heard);
    batcher.submit(r);
    batcher.step();
    return heard.last_logits[0];
  };
  const auto exact = logits("f32");
  const auto distance = [&](const char* dtype) {
    const auto rounded = logits(dtype);
    double worst = 0;
    for (std::size_t i = 0; i < exact.size(); ++i)
      worst = std::max(worst, how_far(rounded[i], static_cast<double>(exact[i])));
    return worst;
  };
  const double f16 = distance("f16");
  const double bf16 = distance("bf16");
  INFO("largest difference of a logit: f16 " << f16 << ", bf16 " << bf16);
  CHECK((f16 > 0 && f16 < 0.05));
  CHECK((bf16 > f16 && bf16 < 0.4));
  const auto bytes = [&](const char* dtype) { return small.cache(16, 4, dtype)->bytes_per_token(); };
  CHECK(bytes("f32") == 3 * 2 * 64 * 2 * 4);
  CHECK(bytes("f16") == 3 * 2 * 64 * 2 * 2);
  CHECK(bytes("bf16") == 3 * 2 * 64 * 2 * 2);
  CHECK(bytes("bf16:f16") == 3 * 2 * 64 * 2 * 2);
}

TEST_CASE("A name of a KV dtype is one for both or K:V; any other is refused with those that there are") {
  CHECK(canonical_kv_dtype("f16") == "f16");
  CHECK(canonical_kv_dtype("f16:f16") == "f16");
  CHECK(canonical_kv_dtype("bf16:f16") == "bf16:f16");
  for (const std::string& name : kv_dtype_names()) CHECK(canonical_kv_dtype(name) == name);
  for (const char* wrong : {"", ":", "f16:", ":f16", "f16:f16:f16", "f16,f32", "int3", "f16:int3", "F16"})
    CHECK_THROWS_WITH(canonical_kv_dtype(wrong),
                      contains_text("KV dtype '" + std::string(wrong) + "' is not compiled in") &&
                          contains_text("give one name for K and V, or K:V, of f32, f16,"));
}

TEST_CASE("A request longer than the pool fails alone, in a sentence that names value and limit") {
  small_model small;
  const std::vector<request> good = some_requests(small.words);
  const auto expected = alone(small, good);
  std::vector<request> requests = good;
  request large = ask(small, std::string(200, 'x'), 57);  // 200 + 57 - 1 tokens = 32 blocks of 8
  large.id = "large";
  requests.insert(requests.begin() + 2, large);
  const auto cache = small.cache(8, 31);
  recorder heard;
  batcher batcher(small.model, *cache, {}, heard);
  for (const request& r : requests) batcher.submit(r);
  batcher.run();
  auto answers = batcher.answers();
  CHECK(answers[2].how == finish::failed);
  CHECK(
      answers[2].error ==
      "request 'large' has 200 prompt tokens and up to 57 new ones, which take 32 blocks of 8 tokens, the pool has 31; "
      "shorten the prompt, ask for fewer tokens or give the pool more blocks");
  CHECK(answers[2].tokens.empty());
  CHECK(heard.finished_count == std::vector<int>{1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  answers.erase(answers.begin() + 2);
  CHECK(tokens_of(answers) == expected);
  CHECK(all_available(*cache));
}

TEST_CASE("A request that takes the whole pool to its last slot is served; one token more is refused") {
  small_model small;
  const auto cache = small.cache(8, 4);
  const auto answers =
      serve(small, *cache, {ask(small, std::string(20, 'q'), 13), ask(small, std::string(20, 'q'), 14)});
  CHECK(answers[0].how == finish::length);
  CHECK(answers[0].tokens.size() == 13);
  CHECK(answers[1].how == finish::failed);
  CHECK_THAT(answers[1].error, contains_text("5 blocks of 8 tokens, the pool has 4"));
}

TEST_CASE("Requests that can never be served say why") {
  small_model small;
  const auto cache = small.cache(64, 64);
  std::vector<request> requests(3, ask(small, "abc", 4));
  requests[0].prompt.clear();
  requests[1].max_tokens = 0;
  requests[2].max_tokens = 2047;
  const auto answers = serve(small, *cache, requests);
  CHECK_THAT(answers[0].error, contains_text("has a prompt of 0 tokens, the least is 1"));
  CHECK_THAT(answers[1].error, contains_text("asks for 0 tokens, the least is 1"));
  CHECK_THAT(answers[2].error,
             contains_text("3 prompt tokens and up to 2047 new ones, the model knows 2048 positions"));
}

TEST_CASE("A pool that is too small for all at once serves them one after another, to the end") {
  small_model small;
  const std::vector<request> requests = some_requests(small.words);
  const auto expected = alone(small, requests);
  // The largest needs 12 blocks of 8; the pool has little more than that.
  for (const unsigned blocks : {13u, 15u, 20u}) {
    INFO(blocks << " blocks");
    const auto cache = small.cache(8, blocks);
    deaf nobody;
    batcher batcher(small.model, *cache, {.chunk = 9}, nobody);
    for (const request& r : requests) batcher.submit(r);
    batcher.run();
    CHECK(tokens_of(batcher.answers()) == expected);
    CHECK(batcher.statistics().peak_blocks <= blocks);
    CHECK(all_available(*cache));
  }
}

TEST_CASE("Random loads on a tight pool all end and leave the pool whole") {
  small_model small;
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    INFO("seed " << seed);
    std::uint64_t state = seed * 977;
    const auto next = [&](std::uint64_t below) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      return static_cast<std::uint32_t>((state >> 33) % below);
    };
    const auto cache = small.cache(8, 12 + next(6));
    deaf nobody;
    batcher batcher(small.model, *cache, {.max_sequences = 1 + next(8), .chunk = 1 + next(40)}, nobody);
    const std::string shared(16 + next(24), 's');
    std::vector<std::uint32_t> wanted;
    for (int i = 0; i < 20; ++i) {
      wanted.push_back(1 + next(30));
      batcher.submit(ask(small,
                         shared.substr(0, next(40)) + std::string(1 + next(20), static_cast<char>('a' + next(3))),
                         wanted.back()));
      if (next(3) == 0) batcher.step();
    }
    batcher.run();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const answer& a = batcher.answers()[i];
      CHECK((a.how == finish::length || a.how == finish::failed));
      if (a.how == finish::length) CHECK(a.tokens.size() == wanted[i]);
      if (a.how == finish::failed) CHECK_THAT(a.error, contains_text("the pool has"));
    }
    CHECK(all_available(*cache));
  }
}

TEST_CASE("A prompt whose beginning is cached is computed from there, to the same answer") {
  small_model small;
  const std::string beginning = "the same long beginning of two prompts, that is the same";
  const std::vector<request> requests{ask(small, beginning + " and one end", 9),
                                      ask(small, beginning + " or another", 9)};
  const auto expected = alone(small, requests, 8);
  std::size_t shared = 0;
  while (requests[0].prompt[shared] == requests[1].prompt[shared]) ++shared;
  REQUIRE(shared >= 24);

  for (const std::uint32_t chunk : {5u, 128u}) {
    INFO("chunks of " << chunk);
    const auto cache = small.cache(8, 64);
    const auto first = serve(small, *cache, {requests[0]}, {.chunk = chunk});
    const auto second = serve(small, *cache, {requests[1]}, {.chunk = chunk});
    CHECK(first[0].reused_tokens == 0);
    CHECK(second[0].reused_tokens == shared / 8 * 8);
    CHECK(first[0].tokens == expected[0]);
    CHECK(second[0].tokens == expected[1]);
    const auto again = serve(small, *cache, {requests[0]});  // all but the last token may be reused
    CHECK(again[0].reused_tokens == (requests[0].prompt.size() - 1) / 8 * 8);
    CHECK(again[0].tokens == expected[0]);

    // A conversation that goes on finds what was generated too; the last token was never computed.
    request further = requests[0];
    further.prompt.insert(further.prompt.end(), first[0].tokens.begin(), first[0].tokens.end());
    const std::size_t computed = further.prompt.size() - 1;
    further.prompt.push_back(requests[0].prompt[0]);
    const auto on = serve(small, *cache, {further});
    CHECK(on[0].reused_tokens == computed / 8 * 8);
    CHECK(on[0].tokens == alone(small, {further}, 8)[0]);
  }
}

TEST_CASE("Requests that come together compute a common beginning once") {
  small_model small;
  const std::string beginning = "the same long beginning of all prompts, that is the same";
  std::vector<request> requests;
  for (int i = 0; i < 6; ++i) requests.push_back(ask(small, beginning + " and end " + std::to_string(i), 9));
  const auto expected = alone(small, requests, 8);
  std::size_t shared = 0;
  while (requests[0].prompt[shared] == requests[1].prompt[shared]) ++shared;
  for (const std::uint32_t chunk : {7u, 128u}) {
    for (const bool reuse : {true, false}) {
      INFO("chunks of " << chunk << (reuse ? ", reuse" : ", no reuse"));
      const auto cache = small.cache(8, 100);
      deaf nobody;
      batcher batcher(small.model, *cache, {.chunk = chunk, .reuse = reuse}, nobody);
      std::size_t prompts = 0;
      for (const request& r : requests) {
        batcher.submit(r);
        prompts += r.prompt.size();
      }
      batcher.run();
      CHECK(tokens_of(batcher.answers()) == expected);
      std::size_t reused = 0;
      for (const answer& a : batcher.answers()) reused += a.reused_tokens;
      CHECK(reused == (reuse ? 5 * (shared / 8 * 8) : 0));
      CHECK(batcher.statistics().prefilled_tokens == prompts - reused);
      CHECK(all_available(*cache));
    }
  }
}

TEST_CASE("A pool too small for all answers at once: some are preempted and go on, to the same tokens") {
  small_model small;
  const std::vector<request> requests = some_requests(small.words);
  const auto expected = alone(small, requests);
  const auto cache = small.cache(8, 12);
  recorder heard;
  batcher batcher(small.model, *cache, {}, heard);
  for (const request& r : requests) batcher.submit(r);
  batcher.run();
  CHECK(tokens_of(batcher.answers()) == expected);
  const serve_statistics& s = batcher.statistics();
  CHECK(s.preemptions > 0);
  // R13: each request once, and apart from that what came back: the token after what it had computed is new then.
  std::uint64_t prompts = 0;
  for (const request& r : requests) prompts += r.prompt.size();
  CHECK(s.window == kvcache::hit_sums{requests.size(), prompts, 0});
  CHECK(s.again.requests == s.preemptions);
  CHECK(s.again.hit > 0);
  CHECK(s.again.queried - s.again.hit == s.recomputed_tokens + s.again.requests);
  for (std::size_t i = 0; i < requests.size(); ++i) CHECK(heard.tokens[i] == expected[i]);  // each token once
  CHECK(all_available(*cache));
}

TEST_CASE("R13 the hit ratio of the newest requests counts each admitted one once, however many steps it takes") {
  small_model small;
  const auto cache = small.cache(8, 64);
  deaf nobody;
  batcher batcher(small.model, *cache, {.chunk = 3, .window = 2}, nobody);
  const auto serve_one = [&](const std::string& text, std::uint32_t max_tokens) {
    batcher.submit(ask(small, text, max_tokens));
    batcher.run();
    return batcher.statistics().window;
  };
  const std::string same(20, 'w');
  CHECK(serve_one(same, 5) == kvcache::hit_sums{1, 20, 0});
  CHECK(serve_one(same, 5) == kvcache::hit_sums{2, 40, 16});
  CHECK(serve_one(std::string(10, 'x'), 1) == kvcache::hit_sums{2, 30, 16});
  CHECK(serve_one(std::string(1000, 'x'), 1) == kvcache::hit_sums{2, 30, 16});  // refused: the pool has 512 tokens
  CHECK(serve_one(same, 1) == kvcache::hit_sums{2, 30, 16});
  CHECK(batcher.statistics().again == kvcache::hit_sums{});
}

TEST_CASE("Blocks, bytes and wasted slots are counted as they are used") {
  small_model small;
  const auto cache = small.cache(8, 64);
  deaf nobody;
  batcher batcher(small.model, *cache, {}, nobody);
  batcher.submit(ask(small, std::string(20, 'w'), 5));
  batcher.run();
  // 5 steps with 20, 21, 22, 23 and 24 tokens in 3 blocks of 8: 4 + 3 + 2 + 1 + 0 slots unused of 5 * 24.
  const serve_statistics& s = batcher.statistics();
  CHECK(s.steps == 5);
  CHECK(s.prefilled_tokens == 20);
  CHECK(s.generated_tokens == 5);
  CHECK(s.peak_sequences == 1);
  CHECK(s.peak_blocks == 3);
  CHECK(s.allocated_slots == 120);
  CHECK(s.unused_slots == 10);
  CHECK(s.wasted_percent() == Approx(8.3333).epsilon(1e-4));
  CHECK(s.peak_contiguous_tokens == 24);
  CHECK(s.peak_context_tokens == 2048);
}

TEST_CASE("An end-of-sequence token ends an answer, unless it is to be ignored") {
  small_model small;
  request r = ask(small, "tell me when it ends", 12);
  const std::vector<token_id> all = alone(small, {r})[0];
  const token_id third = all[2];
  const auto first_of_it = static_cast<std::size_t>(std::find(all.begin(), all.end(), third) - all.begin());
  deaf nobody;
  const auto cache = small.cache(16, 16);
  batcher batcher(small.model, *cache, {.end_of_sequence = third}, nobody);
  r.ignore_end = false;
  batcher.submit(r);
  r.ignore_end = true;
  batcher.submit(r);
  batcher.run();
  CHECK(batcher.answers()[0].how == finish::end);
  CHECK(batcher.answers()[0].tokens ==
        std::vector(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(first_of_it)));
  CHECK(batcher.answers()[1].how == finish::length);
  CHECK(batcher.answers()[1].tokens == all);
}

TEST_CASE("Sampled tokens depend on the seed and not on what else is served") {
  small_model small;
  std::vector<request> requests = some_requests(small.words);
  for (std::size_t i = 0; i < requests.size(); ++i) requests[i].how = {.temperature = 1, .seed = i};
  const auto expected = alone(small, requests);
  const auto cache = small.cache(8, 64);
  CHECK(tokens_of(serve(small, *cache, requests)) == expected);
  requests[1].how.seed = 99;
  CHECK(alone(small, {requests[1]})[0] != expected[1]);
}

TEST_CASE("Listeners hear progress, every token in order, and the end once") {
  small_model small;
  const std::vector<request> requests{ask(small, std::string(11, 'l'), 6), ask(small, "b", 3)};
  const auto cache = small.cache(8, 32);
  recorder heard;
  batcher batcher(small.model, *cache, {.chunk = 4}, heard);
  for (const request& r : requests) batcher.submit(r);
  batcher.run();
  using pairs = std::vector<std::pair<std::uint32_t, std::uint32_t>>;
  CHECK(heard.progress[0] == pairs{{4, 11}, {8, 11}, {11, 11}});
  CHECK(heard.progress[1].empty());  // took one chunk
  CHECK(heard.tokens[0] == batcher.answers()[0].tokens);
  CHECK(heard.tokens[1] == batcher.answers()[1].tokens);
  CHECK(heard.finished_count[0] == 1);
  CHECK(heard.finished_count[1] == 1);
}

TEST_CASE("A batcher that is dropped between steps gives every block back") {
  small_model small;
  const auto cache = small.cache(8, 64);
  {
    deaf nobody;
    batcher batcher(small.model, *cache, {.chunk = 6}, nobody);
    for (const request& r : some_requests(small.words)) batcher.submit(r);
    for (int i = 0; i < 5; ++i) batcher.step();
    CHECK_FALSE(all_available(*cache));
  }
  CHECK(all_available(*cache));
}

TEST_CASE("Options that can never work are refused") {
  small_model small;
  deaf nobody;
  const auto cache = small.cache(8, 8);
  CHECK_THROWS_WITH(batcher(small.model, *cache, {.max_sequences = 0}, nobody),
                    contains_text("at once is 0, the least is 1"));
  CHECK_THROWS_WITH(batcher(small.model, *cache, {.chunk = 0}, nobody),
                    contains_text("in a step is 0, the least is 1"));
  CHECK_THROWS_WITH(small.cache(0, 8), contains_text("block size is 0, choose one of 8, 16, 64"));
  CHECK_THROWS_WITH(small.cache(12, 8), contains_text("block size is 12, choose one of 8, 16, 64"));
  CHECK_THROWS_AS(small.cache(8, 0), kvcache::invalid_argument);
}
