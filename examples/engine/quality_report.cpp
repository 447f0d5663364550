// SPDX-License-Identifier: Apache-2.0
#include "quality_report.hpp"

#include "report.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>

namespace engine {
namespace {

template <class... Values>
std::string formatted(const char* format, Values... values) {
  char text[96];
  std::snprintf(text, sizeof text, format, values...);
  return text;
}

std::string right(const std::string& text, std::size_t width) {
  return std::string(text.size() < width ? width - text.size() : 1, ' ') + text;
}

/// A table of one figure: a line for each dtype, a column for each bucket of positions.
template <class Figure>
std::string by_position(const char* title, const std::vector<kv_quality>& measured, std::size_t name_width,
                        Figure figure) {
  std::string out = formatted("\n%s at positions\n", title);
  out.append(name_width, ' ');
  for (const position_bucket& b : measured.front().buckets) out += right(formatted("%u-%u", b.first, b.last - 1), 11);
  for (const kv_quality& q : measured) {
    out += '\n';
    out += q.dtype;
    out.append(name_width - q.dtype.size(), ' ');
    for (const position_bucket& b : q.buckets) out += right(figure(b.sums), 11);
  }
  out += '\n';
  return out;
}

bool has_offsets(const std::vector<kv_quality>& measured) {
  return std::any_of(measured.begin(), measured.end(),
                     [](const kv_quality& q) { return q.dtype.ends_with(offset_suffix); });
}

nlohmann::ordered_json json_of(const quality_sums& s) {
  nlohmann::ordered_json out;
  out["tokens"] = s.tokens;
  out["negative_log_likelihood"] = s.negative_log / static_cast<double>(s.tokens);
  out["perplexity"] = s.perplexity();
  out["log_change"] = s.log_change();
  out["log_change_error"] = s.log_change_error();
  out["mean_kl"] = s.mean_divergence();
  out["agreement"] = s.agreement();
  return out;
}

}  // namespace

std::string quality_table(const quality_facts& facts, const std::vector<kv_quality>& measured) {
  std::size_t width = 10;
  for (const kv_quality& q : measured) width = std::max(width, q.dtype.size());
  const quality_sums& baseline = measured.front().all;
  std::string out = "model     " + facts.model + "\ntext      " + facts.text + "\n";
  out += formatted("measured  %llu tokens in windows of %u, chunks of %u, blocks of %u\n",
                   static_cast<unsigned long long>(baseline.tokens), facts.context, facts.chunk, facts.block_size);
  if (has_offsets(measured))
    out += formatted("offset    mean of the keys of the text's last %u tokens\n", facts.calibration);
  out += formatted("time      %.0f s on %u threads\n\n", facts.seconds, facts.threads);
  out += "KV" + std::string(width - 2, ' ') + right("bytes/token", 12) + right("perplexity", 12) +
         right("change %", 10) + right("+- %", 9) + right("mean KL", 11) + right("99 % KL", 11) +
         right("agrees %", 10) + "\n";
  for (const kv_quality& q : measured) {
    out += q.dtype + std::string(width - q.dtype.size(), ' ');
    out += right(std::to_string(q.bytes_per_token), 12) + right(formatted("%.4f", q.all.perplexity()), 12);
    out += right(formatted("%+.4f", 100 * (q.all.perplexity() / baseline.perplexity() - 1)), 10);
    out += right(formatted("%.4f", 100 * q.all.log_change_error()), 9);
    out += right(formatted("%.3g", q.all.mean_divergence()), 11);
    out += right(formatted("%.3g", percentile(q.divergences, 99)), 11);
    out += right(formatted("%.3f", 100 * q.all.agreement()), 10) + "\n";
  }
  out += by_position("mean KL", measured, width,
                     [](const quality_sums& s) { return formatted("%.3g", s.mean_divergence()); });
  out += by_position("perplexity", measured, width,
                     [](const quality_sums& s) { return formatted("%.4f", s.perplexity()); });
  return out;
}

std::string quality_json(const quality_facts& facts, const std::vector<kv_quality>& measured) {
  nlohmann::ordered_json out;
  out["model"] = facts.model;
  out["text"] = facts.text;
  out["context"] = facts.context;
  out["chunk"] = facts.chunk;
  out["block_size"] = facts.block_size;
  if (has_offsets(measured)) out["calibration_tokens"] = facts.calibration;
  out["threads"] = facts.threads;
  out["seconds"] = facts.seconds;
  out["baseline"] = measured.front().dtype;
  out["dtypes"] = nlohmann::ordered_json::array();
  for (const kv_quality& q : measured) {
    nlohmann::ordered_json& entry = out["dtypes"].emplace_back();
    entry["kv_dtype"] = q.dtype;
    entry["bytes_per_token"] = q.bytes_per_token;
    entry.update(json_of(q.all));
    entry["kl_99"] = percentile(q.divergences, 99);
    entry["positions"] = nlohmann::ordered_json::array();
    for (const position_bucket& b : q.buckets) {
      nlohmann::ordered_json& place = entry["positions"].emplace_back();
      place["first"] = b.first;
      place["last"] = b.last - 1;
      place.update(json_of(b.sums));
    }
  }
  return out.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace engine
