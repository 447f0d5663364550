// SPDX-License-Identifier: Apache-2.0
#include "perplexity.hpp"

#include "bad_input.hpp"
#include "divergence.hpp"
#include "share.hpp"

#include <kvcache/geometry.hpp>
#include <kvcache/key_offset.hpp>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>

namespace engine {
namespace {

/// Positions of the first bucket; each further one ends at twice the position.
constexpr std::uint32_t first_bucket = 64;

std::vector<position_bucket> make_buckets(std::uint32_t context) {
  std::vector<position_bucket> out;
  for (std::uint64_t first = 0, last = first_bucket; first < context; first = last, last *= 2)
    out.push_back(
        {static_cast<std::uint32_t>(first), static_cast<std::uint32_t>(std::min<std::uint64_t>(last, context)), {}});
  return out;
}

bool has_offset(const std::string& dtype) { return dtype.ends_with(offset_suffix); }

std::string without_offset(const std::string& dtype) {
  return has_offset(dtype) ? dtype.substr(0, dtype.size() - std::string_view(offset_suffix).size()) : dtype;
}

/// How many tokens at the text's end are for calibration alone.
std::size_t calibration_tokens(const perplexity_options& o) {
  if (std::none_of(o.dtypes.begin(), o.dtypes.end(), has_offset)) return 0;
  if (o.calibration == 0) throw bad_input("0 tokens to calibrate with, the least is 1");
  return o.calibration;
}

std::uint64_t checked_predictions(const llama_shape& shape, std::size_t tokens, const perplexity_options& o) {
  if (o.context == 0 || o.context > shape.context)
    throw bad_input("context is " + std::to_string(o.context) + ", the model knows 1 to " +
                    std::to_string(shape.context) + " positions");
  if (o.chunk == 0) throw bad_input("chunk is 0, the least is 1");
  const std::size_t kept = calibration_tokens(o);
  if (tokens <= o.context + kept)
    throw bad_input("the text has " + std::to_string(tokens) + " tokens, a window of " + std::to_string(o.context) +
                    " and the token after it need " + std::to_string(std::uint64_t{o.context} + 1) +
                    (kept != 0 ? " beside the " + std::to_string(kept) + " to calibrate with" : "") +
                    "; give a longer text or a smaller context");
  tokens -= kept;
  const std::uint64_t most = tokens - 1;
  return o.limit == 0 ? most : std::min(o.limit, most);
}

/// Adds a step's keys to their means on the way to a cache.
class calibration final : public attention_call {
 public:
  calibration(const llama_shape& shape, attention_call& cache)
      : cache_(cache), means_(shape.layers, kvcache::key_mean(shape.kv_heads, shape.head_dim)) {}

  void run(std::uint32_t layer, kvcache::rows_view<const float> q, kvcache::rows_view<const float> k,
           kvcache::rows_view<const float> v, kvcache::rows_view<float> out) override {
    means_[layer].add(k);
    cache_.run(layer, q, k, v, out);
  }

  /// [layers, kv_heads, head_dim]
  [[nodiscard]] std::vector<float> offset() const {
    std::vector<float> out;
    for (const kvcache::key_mean& m : means_) {
      const std::vector<float> mean = m.mean();
      out.insert(out.end(), mean.begin(), mean.end());
    }
    return out;
  }

 private:
  attention_call& cache_;
  std::vector<kvcache::key_mean> means_;
};

/// One dtype: its cache and what is known of it.
struct candidate {
  std::unique_ptr<kv_cache> cache;
  kvcache::sequence_id sequence;
  kv_quality quality;
};

class measurement {
 public:
  measurement(llama& model, std::span<const token_id> text, const perplexity_options& options,
              kvcache::thread_pool& workers, const progress_listener& progress)
      : model_(model),
        text_(text),
        options_(options),
        workers_(workers),
        progress_(progress),
        predictions_(checked_predictions(model.shape(), text.size(), options)) {
    const auto window = static_cast<std::uint32_t>(std::min<std::uint64_t>(options.context, predictions_));
    validate_block_size(options.block_size);
    const std::vector<std::string> dtypes = measured_dtypes(options.dtypes);
    const std::vector<float> offset = calibrate(text.last(calibration_tokens(options)));
    for (const std::string& dtype : dtypes) {
      candidate& c = candidates_.emplace_back();
      c.cache = make_cache(without_offset(dtype), window, has_offset(dtype) ? offset : std::span<const float>());
      c.quality.dtype = dtype;
      c.quality.bytes_per_token = c.cache->bytes_per_token();
      c.quality.buckets = make_buckets(window);
      c.quality.divergences.reserve(predictions_);
    }
  }

  std::vector<kv_quality> run() {
    for (std::uint64_t first = 0; first < predictions_; first += options_.context)
      read_window(first, static_cast<std::uint32_t>(std::min<std::uint64_t>(options_.context, predictions_ - first)));
    std::vector<kv_quality> out;
    for (candidate& c : candidates_) {
      for (const position_bucket& b : c.quality.buckets) c.quality.all.add(b.sums);
      out.push_back(std::move(c.quality));
    }
    return out;
  }

 private:
  [[nodiscard]] std::unique_ptr<kv_cache> make_cache(const std::string& dtype, std::uint32_t window,
                                                     std::span<const float> key_offset) const {
    const auto blocks = static_cast<std::uint32_t>(kvcache::blocks_for(window, options_.block_size));
    return make_kv_cache(model_.shape(), {options_.block_size, dtype, blocks, 1, options_.chunk, key_offset}, workers_);
  }

  /// The mean of the keys of some tokens, in windows as they are measured; nothing of none.
  std::vector<float> calibrate(std::span<const token_id> tokens) {
    if (tokens.empty()) return {};
    candidate c;
    c.cache = make_cache(baseline_dtype, options_.context, {});
    calibration keys(model_.shape(), *c.cache);
    for (std::size_t first = 0; first < tokens.size(); first += options_.context) {
      const auto window = tokens.subspan(first, std::min<std::size_t>(options_.context, tokens.size() - first));
      c.sequence = c.cache->manager().open({.content = window}).value().sequence;
      for (std::size_t at = 0; at < window.size(); at += options_.chunk)
        static_cast<void>(compute(c, window.subspan(at, std::min<std::size_t>(options_.chunk, window.size() - at)),
                                  static_cast<std::uint32_t>(at), keys));
      c.cache->manager().close(c.sequence).value();
    }
    return keys.offset();
  }

  void read_window(std::uint64_t first, std::uint32_t size) {
    const auto tokens = text_.subspan(first, size);
    // Nothing is committed, so no window finds what another has computed.
    for (candidate& c : candidates_)
      c.sequence = c.cache->manager().open({.content = tokens, .reserve = size}).value().sequence;
    for (std::uint32_t at = 0; at < size; at += options_.chunk) {
      const std::uint32_t rows = std::min(options_.chunk, size - at);
      for (std::size_t index = 0; index < candidates_.size(); ++index) {
        candidate& c = candidates_[index];
        const auto logits = compute(c, tokens.subspan(at, rows), at, *c.cache);
        if (index == 0) keep_baseline(logits, rows);
        judge(c, logits, text_.subspan(first + at + 1, rows), at);
        if (!progress_) continue;
        const double part = static_cast<double>(index + 1) / static_cast<double>(candidates_.size());
        progress_((static_cast<double>(first + at) + rows * part) / static_cast<double>(predictions_));
      }
    }
    for (candidate& c : candidates_) c.cache->manager().close(c.sequence).value();
  }

  std::span<const float> compute(candidate& c, std::span<const token_id> tokens, std::uint32_t position,
                                 attention_call& attention) {
    rows_.resize(tokens.size());
    positions_.resize(tokens.size());
    std::iota(rows_.begin(), rows_.end(), 0u);
    std::iota(positions_.begin(), positions_.end(), position);
    const kvcache::want want{c.sequence, static_cast<std::uint32_t>(tokens.size())};
    kvcache::step step = c.cache->manager().begin({&want, 1}).value();
    c.cache->prepare(step);
    const auto logits = model_.forward({tokens, positions_, rows_}, attention);
    step.accept().value();
    c.cache->manager().retire(step).value();
    return logits;
  }

  [[nodiscard]] std::span<const float> row(std::span<const float> logits, std::size_t index) const {
    return logits.subspan(index * model_.shape().vocabulary, model_.shape().vocabulary);
  }

  void keep_baseline(std::span<const float> logits, std::uint32_t rows) {
    baseline_.assign(logits.begin(), logits.end());
    baseline_summaries_.resize(rows);
    workers_.run([&](unsigned ith, unsigned nth) {
      const share mine = share_of(rows, 1, ith, nth);
      for (std::size_t i = mine.begin; i < mine.end; ++i) baseline_summaries_[i] = summarise(row(baseline_, i));
    });
  }

  /// Holds a chunk's logits against the baseline's. Sums are made in the order of the text, whatever the threads.
  void judge(candidate& c, std::span<const float> logits, std::span<const token_id> next, std::uint32_t position) {
    judged_.resize(next.size());
    workers_.run([&](unsigned ith, unsigned nth) {
      const share mine = share_of(next.size(), 1, ith, nth);
      for (std::size_t i = mine.begin; i < mine.end; ++i) {
        const auto p = row(baseline_, i);
        const auto q = row(logits, i);
        const logit_summary& of_p = baseline_summaries_[i];
        const logit_summary of_q = summarise(q);
        const auto token = static_cast<std::size_t>(next[i]);
        quality_sums& out = judged_[i];
        out.tokens = 1;
        out.agreed = of_p.best == of_q.best ? 1 : 0;
        out.negative_log = of_q.log_sum - double{q[token]};
        out.baseline_negative_log = of_p.log_sum - double{p[token]};
        const double change = out.negative_log - out.baseline_negative_log;
        out.change_squared = change * change;
        out.divergence = divergence(p, of_p, q, of_q);
      }
    });
    auto bucket = c.quality.buckets.begin();
    for (std::size_t i = 0; i < judged_.size(); ++i) {
      while (position + i >= bucket->last) ++bucket;
      bucket->sums.add(judged_[i]);
      c.quality.divergences.push_back(judged_[i].divergence);
    }
  }

  llama& model_;
  std::span<const token_id> text_;
  const perplexity_options& options_;
  kvcache::thread_pool& workers_;
  const progress_listener& progress_;
  std::uint64_t predictions_;
  std::vector<candidate> candidates_;

  // Of the chunk in progress.
  std::vector<std::uint32_t> rows_;
  std::vector<std::uint32_t> positions_;
  std::vector<float> baseline_;
  std::vector<logit_summary> baseline_summaries_;
  std::vector<quality_sums> judged_;
};

}  // namespace

void quality_sums::add(const quality_sums& other) noexcept {
  tokens += other.tokens;
  agreed += other.agreed;
  negative_log += other.negative_log;
  divergence += other.divergence;
  change_squared += other.change_squared;
  baseline_negative_log += other.baseline_negative_log;
}

double quality_sums::perplexity() const { return std::exp(negative_log / static_cast<double>(tokens)); }

double quality_sums::agreement() const noexcept { return static_cast<double>(agreed) / static_cast<double>(tokens); }

double quality_sums::mean_divergence() const noexcept { return divergence / static_cast<double>(tokens); }

double quality_sums::log_change() const noexcept {
  return (negative_log - baseline_negative_log) / static_cast<double>(tokens);
}

double quality_sums::log_change_error() const noexcept {
  const auto n = static_cast<double>(tokens);
  const double mean = log_change();
  return tokens < 2 ? 0 : std::sqrt(std::max(0.0, change_squared / n - mean * mean) / (n - 1));
}

std::vector<std::string> measured_dtypes(const std::vector<std::string>& asked) {
  std::vector<std::string> out{baseline_dtype};
  std::vector<std::string> seen;
  for (const std::string& name : asked) {
    const std::string dtype = canonical_kv_dtype(without_offset(name)) + (has_offset(name) ? offset_suffix : "");
    if (std::find(seen.begin(), seen.end(), dtype) != seen.end())
      throw bad_input("KV dtype " + dtype + " is given twice, once is enough");
    seen.push_back(dtype);
    if (dtype != baseline_dtype) out.push_back(dtype);
  }
  return out;
}

std::vector<kv_quality> measure_perplexity(llama& model, std::span<const token_id> text,
                                           const perplexity_options& options, kvcache::thread_pool& workers,
                                           const progress_listener& progress) {
  return measurement(model, text, options, workers, progress).run();
}

}  // namespace engine
