// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kv_cache.hpp"
#include "llama.hpp"
#include "request.hpp"
#include "sampler.hpp"
#include "statistics.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
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
  token_id end_of_sequence = 0;
};

/// Continuous batching (Yu et al. 2022, "Orca") over paged KV: requests join and leave at every step, and a step mixes
/// one token of each request that generates with chunks of the prompts that do not yet.
///
/// Admission is first come, first served. A request is admitted when the cache's predictor says that its prompt and all
/// it may generate fit beside what the admitted ones may still need, so an admitted request never waits for a block and
/// none is ever preempted; blocks themselves are taken as tokens come. A request that can never fit fails alone.
class batcher {
 public:
  batcher(llama& model, kv_cache& cache, const batch_options& options, listener& hears);
  batcher(const batcher&) = delete;
  batcher& operator=(const batcher&) = delete;
  ~batcher();

  /// Queues a request. Its index is the number of requests submitted before.
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

  struct waiting {
    std::size_t index = 0;
    request what;
    clock::time_point since;
  };

  struct active {
    std::size_t index = 0;
    kvcache::sequence_id sequence;
    std::vector<token_id> tokens;  ///< prompt and what was generated
    std::uint32_t prompt_tokens = 0;
    std::uint32_t computed = 0;  ///< tokens whose K and V are in the cache
    std::uint32_t max_tokens = 0;
    bool ignore_end = false;
    bool done = false;
    sampler choose;
    clock::time_point since;

    [[nodiscard]] std::uint32_t left() const noexcept { return static_cast<std::uint32_t>(tokens.size()) - computed; }
    /// The last token that may be generated is never computed itself.
    [[nodiscard]] std::uint32_t most_tokens() const noexcept { return prompt_tokens + max_tokens - 1; }
  };

  void admit();
  bool admit_first();
  void fail(std::size_t index, const std::string& why);
  [[nodiscard]] std::string never_fits(const request& what) const;
  [[nodiscard]] std::uint64_t promised_blocks() const;
  void gather();
  void compute();
  void take_tokens(std::span<const float> logits);
  void take_token(active& a, std::span<const float> logits);
  void count_blocks();
  void close_finished();

  llama& model_;
  kv_cache& cache_;
  batch_options options_;
  listener& listener_;
  std::deque<waiting> waiting_;
  std::vector<active> running_;
  std::vector<answer> answers_;
  serve_statistics statistics_;

  // Of the step in progress; one entry a want or row.
  std::vector<kvcache::want> wants_;
  std::vector<std::size_t> members_;  ///< of running_
  std::vector<token_id> tokens_;
  std::vector<std::uint32_t> positions_;
  std::vector<std::uint32_t> logit_rows_;
};

}  // namespace engine
