// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <kvcache/observe/prometheus.hpp>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace engine {
namespace {

/// Everything that is computed from what was gathered, once for both forms.
struct figures {
  std::size_t served = 0;
  std::size_t failed = 0;
  std::uint64_t prompt_tokens = 0;
  std::uint64_t reused_tokens = 0;
  double hit_ratio = 0;
  double tokens_per_s = 0;
  double first_token_p50_s = 0;
  double first_token_p95_s = 0;
  std::uint64_t peak_bytes = 0;
  std::uint64_t pool_bytes = 0;
  std::uint64_t contiguous_bytes = 0;
  std::uint64_t context_bytes = 0;
};

figures compute(const run_facts& facts, const serve_statistics& s, const std::vector<answer>& answers) {
  figures out;
  std::vector<double> first;
  for (const answer& a : answers) {
    if (a.how == finish::failed) {
      ++out.failed;
      continue;
    }
    ++out.served;
    out.prompt_tokens += a.prompt_tokens;
    out.reused_tokens += a.reused_tokens;
    first.push_back(a.first_token_s);
  }
  out.tokens_per_s = s.busy_s > 0 ? static_cast<double>(s.generated_tokens) / s.busy_s : 0;
  if (out.prompt_tokens != 0)
    out.hit_ratio = static_cast<double>(out.reused_tokens) / static_cast<double>(out.prompt_tokens);
  out.first_token_p50_s = percentile(first, 50);
  out.first_token_p95_s = percentile(first, 95);
  const std::uint64_t block_bytes = facts.bytes_per_token * facts.block_size;
  out.peak_bytes = s.peak_blocks * block_bytes;
  out.pool_bytes = facts.pool_blocks * block_bytes;
  out.contiguous_bytes = s.peak_contiguous_tokens * facts.bytes_per_token;
  out.context_bytes = s.peak_context_tokens * facts.bytes_per_token;
  return out;
}

std::string mib(std::uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1024.0 * 1024.0));
  return text;
}

std::string fixed(double value, int digits) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

}  // namespace

double percentile(std::vector<double> values, double percent) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const auto rank = static_cast<std::size_t>(std::ceil(percent / 100.0 * static_cast<double>(values.size())));
  return values[std::clamp<std::size_t>(rank, 1, values.size()) - 1];
}

std::string report_table(const run_facts& facts, const serve_statistics& s, const std::vector<answer>& answers) {
  const figures f = compute(facts, s, answers);
  std::string out;
  const auto row = [&](const std::string& what, const std::string& value) {
    out += what + std::string(what.size() < 34 ? 34 - what.size() : 1, ' ') + value + '\n';
  };
  row("model", facts.model);
  row("KV", facts.dtype + ", blocks of " + std::to_string(facts.block_size) + " tokens, pool of " +
                std::to_string(facts.pool_blocks) + " (" + mib(f.pool_bytes) + ")");
  row("requests", std::to_string(f.served) + " served, " + std::to_string(f.failed) + " failed");
  row("prompt tokens", std::to_string(f.prompt_tokens) + ", " + std::to_string(f.reused_tokens) +
                           " found in the cache (" + fixed(100 * f.hit_ratio, 1) + " %)");
  row("found, newest requests", std::to_string(s.window.requests) + ": " + fixed(100 * s.window.ratio(), 1) + " %; " +
                                    std::to_string(s.again.requests) + " admitted again, which are not in it");
  row("generated tokens", std::to_string(s.generated_tokens) + " in " + std::to_string(s.steps) + " steps, " +
                              std::to_string(s.peak_sequences) + " requests at once at most");
  row("preemptions",
      std::to_string(s.preemptions) + ", " + std::to_string(s.recomputed_tokens) + " tokens computed again");
  row("tokens/s", fixed(f.tokens_per_s, 1) + " (" + std::to_string(facts.threads) + " threads)");
  row("time to first token p50 / p95",
      f.served == 0 ? "-" : fixed(f.first_token_p50_s, 3) + " s / " + fixed(f.first_token_p95_s, 3) + " s");
  row("blocks in use at peak", std::to_string(s.peak_blocks));
  row("bytes in use at peak", mib(f.peak_bytes));
  row("slots wasted", fixed(s.wasted_percent(), 2) + " %");
  row("contiguous, prompt + max_tokens", mib(f.contiguous_bytes));
  row("contiguous, the model's context", mib(f.context_bytes));
  return out;
}

std::string metrics_page(const run_facts& facts, const serve_statistics& s, const kvcache::block_counts& counts,
                         const kvcache::block_statistics& blocks) {
  const kvcache::prometheus_label model{"model", facts.model};
  const kvcache::cache_figures figures{
      .labels = {&model, 1}, .counts = &counts, .statistics = &blocks, .window = &s.window, .again = &s.again};
  std::string text;
  kvcache::prometheus_text page(text);
  kvcache::write_prometheus(page, {&figures, 1});
  return text;
}

std::string report_json(const run_facts& facts, const serve_statistics& s, const std::vector<answer>& answers,
                        const tokeniser& words) {
  const figures f = compute(facts, s, answers);
  nlohmann::ordered_json out;
  out["model"] = facts.model;
  out["kv_dtype"] = facts.dtype;
  out["block_size"] = facts.block_size;
  out["pool_blocks"] = facts.pool_blocks;
  out["pool_bytes"] = f.pool_bytes;
  out["bytes_per_token"] = facts.bytes_per_token;
  out["threads"] = facts.threads;
  out["requests"] = f.served;
  out["failed"] = f.failed;
  out["prompt_tokens"] = f.prompt_tokens;
  out["reused_tokens"] = f.reused_tokens;
  out["hit_ratio"] = f.hit_ratio;
  out["window_requests"] = s.window.requests;
  out["window_hit_ratio"] = s.window.ratio();
  out["readmitted_requests"] = s.again.requests;
  out["readmitted_hit_ratio"] = s.again.ratio();
  out["prefilled_tokens"] = s.prefilled_tokens;
  out["recomputed_tokens"] = s.recomputed_tokens;
  out["preemptions"] = s.preemptions;
  out["generated_tokens"] = s.generated_tokens;
  out["steps"] = s.steps;
  out["busy_s"] = s.busy_s;
  out["tokens_per_s"] = f.tokens_per_s;
  out["first_token_p50_s"] = f.first_token_p50_s;
  out["first_token_p95_s"] = f.first_token_p95_s;
  out["peak_sequences"] = s.peak_sequences;
  out["peak_blocks"] = s.peak_blocks;
  out["peak_bytes"] = f.peak_bytes;
  out["wasted_percent"] = s.wasted_percent();
  out["contiguous_bytes"] = f.contiguous_bytes;
  out["contiguous_context_bytes"] = f.context_bytes;
  out["evicted_blocks"] = facts.evicted_blocks;
  out["answers"] = nlohmann::ordered_json::array();
  for (const answer& a : answers) {
    nlohmann::ordered_json& entry = out["answers"].emplace_back();
    entry["id"] = a.id;
    entry["finish"] = name(a.how);
    if (a.how == finish::failed) entry["error"] = a.error;
    entry["prompt_tokens"] = a.prompt_tokens;
    entry["reused_tokens"] = a.reused_tokens;
    entry["first_token_s"] = a.first_token_s;
    entry["last_token_s"] = a.last_token_s;
    entry["tokens"] = a.tokens;
    entry["text"] = words.decode(a.tokens);
  }
  // An answer may end inside a character.
  return out.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace engine
