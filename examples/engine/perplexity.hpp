// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kv_cache.hpp"
#include "llama.hpp"
#include "tokeniser.hpp"

#include <kvcache/attention/cpu/thread_pool.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

namespace engine {

struct perplexity_options {
  std::vector<std::string> dtypes;  ///< of KV, to be held against baseline_dtype
  std::uint32_t block_size = 16;
  std::uint32_t context = 2048;  ///< tokens of a window
  std::uint32_t chunk = 128;     ///< tokens computed at once
  std::uint64_t limit = 0;       ///< predictions at most; 0: all that the text has
  /// Tokens at the text's end, which are not measured then, whose keys give the offset of dtypes that end in
  /// offset_suffix.
  std::uint32_t calibration = 2048;
};

inline constexpr const char* baseline_dtype = "f32";
/// Behind a dtype: keys are stored less their mean, see kvcache::storage::set_key_offset.
inline constexpr const char* offset_suffix = "+offset";

/// Sums over predictions.
struct quality_sums {
  std::uint64_t tokens = 0;
  std::uint64_t agreed = 0;   ///< predictions whose likeliest token is the baseline's
  double negative_log = 0;    ///< -log(probability of the token that follows), natural
  double divergence = 0;      ///< KL(baseline || this)
  double change_squared = 0;  ///< of negative_log, against the baseline's
  double baseline_negative_log = 0;

  void add(const quality_sums& other) noexcept;
  [[nodiscard]] double perplexity() const;
  [[nodiscard]] double agreement() const noexcept;
  [[nodiscard]] double mean_divergence() const noexcept;
  /// log(perplexity / the baseline's), and its standard error from token to token.
  [[nodiscard]] double log_change() const noexcept;
  [[nodiscard]] double log_change_error() const noexcept;
};

/// The predictions made at positions [first, last) of the windows.
struct position_bucket {
  std::uint32_t first = 0;
  std::uint32_t last = 0;
  quality_sums sums;
};

/// What one dtype of KV does to a model.
struct kv_quality {
  std::string dtype;
  std::uint64_t bytes_per_token = 0;
  quality_sums all;
  std::vector<position_bucket> buckets;  ///< doubling: the last is the second half where the context is a power of two
  std::vector<double> divergences;       ///< of each prediction, in the order of the text
};

/// Heard after each forward pass with the share that is done, in (0, 1].
using progress_listener = std::function<void(double)>;

/// Reads a text in windows of `context` tokens, each with an empty cache, and looks at the distribution that the model
/// gives for each next token, with KV kept in each dtype in turn. A window is computed in chunks, so that later chunks
/// read what earlier ones stored, as in serving; within a chunk, too, attention reads what was stored. Every token of
/// the text but the first is predicted once; the last window may be shorter. The baseline is measured first, also where
/// it is not asked for; all dtypes go through a chunk one after another, so what is kept of the logits is two chunks.
///
/// Throws bad_input where the text is shorter than a window, or than that and the tokens to calibrate with where a
/// dtype asks for these, a dtype is unknown or given twice, the context is 0 or beyond the model's, or the chunk is 0.
[[nodiscard]] std::vector<kv_quality> measure_perplexity(llama& model, std::span<const token_id> text,
                                                         const perplexity_options& options,
                                                         kvcache::thread_pool& workers,
                                                         const progress_listener& progress = {});

/// The dtypes as they are measured: by their canonical names, with the suffix where it was, the baseline first. Throws
/// bad_input where one is not compiled in or given twice.
[[nodiscard]] std::vector<std::string> measured_dtypes(const std::vector<std::string>& asked);

}  // namespace engine
