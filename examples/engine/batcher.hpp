// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kv_cache.hpp"
#include "llama.hpp"
#include "request.hpp"
#include "sampler.hpp"
#include "statistics.hpp"

#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/observe/hit_window.hpp>
#include <kvcache/schedule/scheduler.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace engine {

/// Hears what happens while requests are served; `index` counts requests in order of submission.
class listener {
 public:
  virtual ~listener() = default;
  /// So many of a prompt's tokens are computed; called after each chunk of a prompt that took more than one.
  virtual void prompt_progress(std::size_t /*index*/, std::uint32_t /*done*/, std::uint32_t /*total*/) {}
  /// The logits that the next token is chosen from.
  virtual void logits(std::size_t /*index*/, std::span<const float> /*values*/) {}
  virtual void token(std::size_t /*index*/, token_id /*chosen*/) {}
  virtual void finished(std::size_t /*index*/, const answer& /*result*/) {}
};

struct batch_options {
  std::uint32_t max_sequences = 16;  ///< served at once
  std::uint32_t chunk = 128;         ///< prompt tokens computed in one step, over all requests
  bool reuse = true;                 ///< of what other requests have computed
  std::uint32_t window = 100;        ///< requests whose hit ratio is reported
  token_id end_of_sequence = 0;
};

/// Continuous batching (Yu et al. 2022, "Orca") over paged KV: requests join and leave at every step, and a step mixes
/// one token of each request that generates with chunks of the prompts that do not yet. Who computes what,
/// kvcache::scheduler says; this runs the model on it and chooses tokens.
class batcher {
 public:
  batcher(llama& model, kv_cache& cache, const batch_options& options, listener& hears);
  batcher(const batcher&) = delete;
  batcher& operator=(const batcher&) = delete;

  /// Queues a request. Its index is the number of requests submitted before. One that can never be served fails here,
  /// alone.
  void submit(request what);

  /// Admits, computes one step, lets go of what is finished. False: nothing is left to do.
  bool step();
  void run() {
    while (step()) {
    }
  }

  [[nodiscard]] const std::vector<answer>& answers() const noexcept { return answers_; }
  [[nodiscard]] const serve_statistics& statistics() const noexcept { return statistics_; }

 private:
  using clock = std::chrono::steady_clock;

  struct live {
    std::size_t index = 0;
    kvcache::request_id id;
    std::uint32_t prompt_tokens = 0;
    std::uint32_t max_tokens = 0;
    bool ignore_end = false;
    std::uint32_t admitted = 0;  ///< times, as far as steps have had a row of it
    sampler choose;
    clock::time_point since;

    /// The last token that may be generated is never computed itself.
    [[nodiscard]] std::uint32_t most_tokens() const noexcept { return prompt_tokens + max_tokens - 1; }
  };

  [[nodiscard]] std::string never_fits(const request& what) const;
  [[nodiscard]] live& live_one(kvcache::request_id id);
  void fail(std::size_t index, const std::string& why);
  void count_hits(const kvcache::step_plan& plan);
  void compute(const kvcache::step_plan& plan);
  void count_blocks(const kvcache::step_plan& plan);
  void take_tokens(const kvcache::step_plan& plan, std::span<const float> logits);
  void take_token(live& who, std::span<const float> logits, token_id& token, kvcache::row_result& result);
  void note_ends();

  llama& model_;
  kv_cache& cache_;
  batch_options options_;
  listener& listener_;
  kvcache::scheduler<kvcache::block_manager<kvcache::lru>> scheduler_;
  std::vector<live> live_;  ///< neither finished nor failed, in order of submission
  std::vector<answer> answers_;
  serve_statistics statistics_;
  kvcache::hit_window hits_;

  // Of the step in progress.
  std::vector<token_id> tokens_;
  std::vector<std::uint32_t> positions_;
  std::vector<std::uint32_t> logit_rows_;
  std::vector<token_id> chosen_;
  std::vector<kvcache::row_result> results_;
};

}  // namespace engine
