// SPDX-License-Identifier: Apache-2.0
// The least an engine does for a request: two of them share a prefix, and the second computes only what is new.

#include <cstdio>
#include <numeric>
#include <vector>

// [quickstart]
#include <kvcache/attention/cpu/cpu.hpp>
#include <kvcache/kvcache.hpp>

struct mine : kvcache::policies {
  static constexpr unsigned block_size = 16;
  using dtype = kvcache::kv_dtype<kvcache::f16>;
};

constexpr kvcache::geometry model{.layers = 2, .kv_heads = 2, .head_dim = 64};

// Runs one request through the cache; returns how many of its tokens were not computed again.
unsigned serve(kvcache::cache<mine>& cache, kvcache::attention<mine>& attention, const std::vector<int>& prompt) {
  const auto request = cache.open({.content = prompt}).value();  // finds what is cached
  const auto fresh = static_cast<unsigned>(prompt.size()) - request.reused_tokens;
  const kvcache::want wants[]{{request.sequence, fresh}};
  auto step = cache.begin(wants).value();  // reserves the blocks of every sequence of the step, or none
  cache.prepare(step);
  const auto plan = attention.plan(step.batch());

  const unsigned heads = 8;  // query heads, in groups of four for each kv head
  std::vector<float> q(fresh * heads * 64, 0.1f), k(fresh * 2 * 64, 0.2f), v(fresh * 2 * 64, 0.3f), out(q.size());
  for (unsigned layer = 0; layer < model.layers; ++layer) {  // the model computes q, k and v here
    cache.append(step, layer, kvcache::rows_view<const float>(k.data(), fresh, 2, 64),
                 kvcache::rows_view<const float>(v.data(), fresh, 2, 64));
    attention.run(plan, cache, layer, kvcache::rows_view<const float>(q.data(), fresh, heads, 64),
                  kvcache::rows_view<float>(out.data(), fresh, heads, 64));
  }
  step.accept().value();
  cache.commit(request.sequence, kvcache::content_view(prompt).sub(request.reused_tokens, fresh)).value();
  cache.retire(step).value();  // the step's work is done
  cache.close(request.sequence).value();
  return request.reused_tokens;
}
// [quickstart]

int main() {
  kvcache::cache<mine> cache(model, {.blocks = 64});
  kvcache::attention<mine> attention;
  std::vector<int> prompt(100);
  std::iota(prompt.begin(), prompt.end(), 0);

  std::printf("%s\n", kvcache::describe<mine>().c_str());
  std::printf("first request:  %u of 100 tokens reused\n", serve(cache, attention, prompt));
  prompt.back() = 7;  // another question about the same text
  const unsigned reused = serve(cache, attention, prompt);
  std::printf("second request: %u of 100 tokens reused\n", reused);
  return reused == 96 ? 0 : 1;  // six full blocks
}
