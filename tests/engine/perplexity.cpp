// SPDX-License-Identifier: Apache-2.0
#include "perplexity.hpp"

#include "bad_input.hpp"
#include "catch.hpp"
#include "support.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

using namespace engine;
using engine_test::small_model;
using kvcache_test::contains_text;

namespace {

/// Attention by its definition, in double, over K and V that it keeps in f32; no cache, one window.
class plain_attention final : public attention_call {
 public:
  explicit plain_attention(const llama_shape& shape) : shape_(shape), keys_(shape.layers), values_(shape.layers) {}

  void run(std::uint32_t layer, kvcache::rows_view<const float> q, kvcache::rows_view<const float> k,
           kvcache::rows_view<const float> v, kvcache::rows_view<float> out) override {
    const auto at = [](const auto& rows, std::size_t row, std::size_t head) {
      return rows.data + static_cast<std::int64_t>(row) * rows.row_stride +
             static_cast<std::int64_t>(head) * rows.head_stride;
    };
    const std::size_t before = keys_[layer].size() / (std::size_t{shape_.kv_heads} * shape_.head_dim);
    for (std::size_t row = 0; row < k.rows; ++row)
      for (std::size_t head = 0; head < shape_.kv_heads; ++head) {
        keys_[layer].insert(keys_[layer].end(), at(k, row, head), at(k, row, head) + shape_.head_dim);
        values_[layer].insert(values_[layer].end(), at(v, row, head), at(v, row, head) + shape_.head_dim);
      }
    for (std::size_t row = 0; row < q.rows; ++row)
      for (std::size_t head = 0; head < shape_.query_heads; ++head)
        attend(layer, at(q, row, head), head / (shape_.query_heads / shape_.kv_heads), before + row + 1,
               at(out, row, head));
  }

 private:
  void attend(std::uint32_t layer, const float* q, std::size_t kv_head, std::size_t seen, float* out) const {
    const auto slot = [&](std::size_t token) { return (token * shape_.kv_heads + kv_head) * shape_.head_dim; };
    std::vector<double> weights(seen);
    double sum = 0;
    for (std::size_t t = 0; t < seen; ++t) {
      double dot = 0;
      for (std::size_t i = 0; i < shape_.head_dim; ++i) dot += double{q[i]} * double{keys_[layer][slot(t) + i]};
      sum += weights[t] = std::exp(dot / std::sqrt(static_cast<double>(shape_.head_dim)));
    }
    for (std::size_t i = 0; i < shape_.head_dim; ++i) {
      double value = 0;
      for (std::size_t t = 0; t < seen; ++t) value += weights[t] / sum * double{values_[layer][slot(t) + i]};
      out[i] = static_cast<float>(value);
    }
  }

  const llama_shape& shape_;
  std::vector<std::vector<float>> keys_;
  std::vector<std::vector<float>> values_;
};

/// -log of the probability of each token of the text but the first, windows of `context`.
std::vector<double> direct_negative_logs(small_model& small, const std::vector<token_id>& text, std::size_t context) {
  std::vector<double> out;
  for (std::size_t first = 0; first + 1 < text.size(); first += context) {
    const std::size_t size = std::min(context, text.size() - 1 - first);
    std::vector<std::uint32_t> rows(size);
    std::iota(rows.begin(), rows.end(), 0u);
    plain_attention attention(small.model.shape());
    const auto logits = small.model.forward({std::span(text).subspan(first, size), rows, rows}, attention);
    for (std::size_t row = 0; row < size; ++row) {
      const auto all = logits.subspan(row * small.model.shape().vocabulary, small.model.shape().vocabulary);
      double sum = 0;
      for (const float x : all) sum += std::exp(double{x});
      out.push_back(std::log(sum) - double{all[static_cast<std::size_t>(text[first + row + 1])]});
    }
  }
  return out;
}

std::vector<token_id> some_text(const small_model& small, std::size_t tokens) {
  std::string text;
  for (int i = 0; text.size() < 4 * tokens; ++i) text += "the fox and the " + std::to_string(i * i % 91) + " things; ";
  std::vector<token_id> out = small.words.encode(text, specials::as_text);
  out.resize(tokens);
  return out;
}

std::vector<kv_quality> measured(small_model& small, const std::vector<token_id>& text,
                                 const perplexity_options& options) {
  return measure_perplexity(small.model, text, options, small.workers);
}

}  // namespace

TEST_CASE("The perplexity is that of a direct computation without a cache") {
  small_model small;
  const auto text = some_text(small, 231);  // two windows of 100, and one of 30
  const std::vector<double> expected = direct_negative_logs(small, text, 100);
  const auto all = measured(small, text, {.dtypes = {"f32"}, .context = 100, .chunk = 17});
  REQUIRE(all.size() == 1);
  CHECK(all[0].dtype == "f32");
  CHECK(all[0].all.tokens == 230);
  const double mean = std::accumulate(expected.begin(), expected.end(), 0.0) / 230;
  CHECK(all[0].all.negative_log / 230 == Approx(mean).epsilon(1e-5));
  CHECK(all[0].all.perplexity() == Approx(std::exp(mean)).epsilon(1e-4));

  // And position by position.
  REQUIRE(all[0].buckets.size() == 2);
  std::vector<double> sums(2, 0.0);
  std::vector<std::uint64_t> counts(2, 0);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    sums[i % 100 < 64 ? 0 : 1] += expected[i];
    ++counts[i % 100 < 64 ? 0 : 1];
  }
  for (std::size_t b = 0; b < 2; ++b) {
    CHECK(all[0].buckets[b].sums.tokens == counts[b]);
    CHECK(all[0].buckets[b].sums.negative_log == Approx(sums[b]).epsilon(1e-5));
  }
}

TEST_CASE("f32 against itself differs in nothing; f16 a little, bf16 more") {
  small_model small;
  const auto text = some_text(small, 301);
  const auto all = measured(small, text, {.dtypes = {"bf16", "f32", "f16", "bf16:f16"}, .context = 150, .chunk = 32});
  REQUIRE(all.size() == 4);
  const kv_quality& f32 = all[0];  // the baseline comes first
  const kv_quality& bf16 = all[1];
  const kv_quality& f16 = all[2];
  const kv_quality& mixed = all[3];
  CHECK((f32.dtype == "f32" && bf16.dtype == "bf16" && f16.dtype == "f16" && mixed.dtype == "bf16:f16"));
  CHECK(f32.all.divergence == 0);
  CHECK(f32.all.agreement() == 1);
  CHECK((f32.all.log_change() == 0 && f32.all.log_change_error() == 0));
  INFO("KL: f16 " << f16.all.mean_divergence() << ", bf16 " << bf16.all.mean_divergence() << ", bf16:f16 "
                  << mixed.all.mean_divergence());
  CHECK((f16.all.mean_divergence() > 0 && f16.all.mean_divergence() < 1e-5));
  CHECK((bf16.all.mean_divergence() > 8 * f16.all.mean_divergence() && bf16.all.mean_divergence() < 1e-3));
  CHECK((mixed.all.mean_divergence() > f16.all.mean_divergence() &&
         mixed.all.mean_divergence() < bf16.all.mean_divergence()));
  CHECK(f16.all.agreement() > 0.98);
  CHECK(f16.all.log_change() != 0);
  CHECK(f16.all.log_change_error() > 0);
  CHECK((f32.bytes_per_token == 3 * 2 * 64 * 2 * 4 && f16.bytes_per_token == f32.bytes_per_token / 2));
  for (const kv_quality& q : all) {
    CHECK(q.all.tokens == 300);
    REQUIRE(q.divergences.size() == 300);
    CHECK(std::accumulate(q.divergences.begin(), q.divergences.end(), 0.0) == Approx(q.all.divergence));
  }
}

TEST_CASE("Results depend on the chunk by no more than rounding") {
  small_model small;
  const auto text = some_text(small, 121);
  const auto with = [&](std::uint32_t chunk, std::uint32_t block_size) {
    return measured(small, text, {.dtypes = {"f16", "bf16"}, .block_size = block_size, .context = 60, .chunk = chunk});
  };
  const auto whole = with(1000, 16);
  for (const std::uint32_t chunk : {1u, 7u, 60u}) {
    const auto parts = with(chunk, chunk == 7 ? 64 : 8);
    INFO("chunk " << chunk);
    for (std::size_t i = 0; i < whole.size(); ++i) {
      CHECK(parts[i].all.negative_log == Approx(whole[i].all.negative_log).epsilon(1e-5));
      CHECK(parts[i].all.divergence == Approx(whole[i].all.divergence).epsilon(0.05));
    }
  }
}

TEST_CASE("A limit ends the text; the last window may be shorter, and windows know nothing of each other") {
  small_model small;
  const auto text = some_text(small, 200);
  const auto limited = [&](std::uint64_t limit) {
    return measured(small, text, {.dtypes = {"f16"}, .context = 80, .chunk = 30, .limit = limit});
  };
  CHECK(limited(0)[1].all.tokens == 199);
  CHECK(limited(1000)[1].all.tokens == 199);
  CHECK(limited(100)[1].all.tokens == 100);
  CHECK(limited(1)[0].all.tokens == 1);
  // The second window alone gives what it gave behind the first.
  const auto two = limited(160);
  const auto one = limited(80);
  const auto other = measure_perplexity(small.model, std::span(text).subspan(80),
                                        {.dtypes = {"f16"}, .context = 80, .chunk = 30, .limit = 80}, small.workers);
  CHECK(two[1].all.negative_log == Approx(one[1].all.negative_log + other[1].all.negative_log));
  CHECK(two[1].all.divergence == Approx(one[1].all.divergence + other[1].all.divergence));
}

TEST_CASE("Buckets of positions double, and their sums are the whole's") {
  small_model small;
  const auto text = some_text(small, 600);
  const auto all = measured(small, text, {.dtypes = {"bf16"}, .context = 256, .chunk = 100});
  REQUIRE(all[1].buckets.size() == 3);
  const std::uint32_t edges[]{0, 64, 128, 256};
  quality_sums sums;
  for (std::size_t b = 0; b < 3; ++b) {
    CHECK((all[1].buckets[b].first == edges[b] && all[1].buckets[b].last == edges[b + 1]));
    sums.add(all[1].buckets[b].sums);
  }
  // Windows of 256, 256 and 87.
  CHECK(all[1].buckets[0].sums.tokens == 3 * 64);
  CHECK(all[1].buckets[1].sums.tokens == 2 * 64 + 23);
  CHECK(all[1].buckets[2].sums.tokens == 2 * 128);
  CHECK(sums.tokens == all[1].all.tokens);
  CHECK(sums.divergence == Approx(all[1].all.divergence));
}

TEST_CASE("Keys less their mean change nothing in f32, and the end of the text that gave it is not measured") {
  small_model small;
  const auto text = some_text(small, 400);
  const auto all = measured(small, text,
                            {.dtypes = {"f32+offset", "fp8_e4m3", "fp8_e4m3:fp8_e4m3+offset", "bf16+offset"},
                             .context = 150,
                             .chunk = 32,
                             .calibration = 100});
  REQUIRE(all.size() == 5);
  CHECK((all[0].dtype == "f32" && all[1].dtype == "f32+offset" && all[2].dtype == "fp8_e4m3" &&
         all[3].dtype == "fp8_e4m3+offset" && all[4].dtype == "bf16+offset"));
  for (const kv_quality& q : all) CHECK(q.all.tokens == 299);
  CHECK(std::abs(all[1].all.mean_divergence()) < 1e-9);
  CHECK(all[1].all.negative_log == Approx(all[0].all.negative_log).epsilon(1e-5));
  CHECK(all[3].bytes_per_token == all[2].bytes_per_token);
  CHECK(all[3].all.divergence != all[2].all.divergence);
  CHECK((all[4].all.mean_divergence() > 0 && all[4].all.mean_divergence() < 1e-3));
  // Other tokens at the end, another mean; those before it are measured, all the same.
  auto other = text;
  std::reverse(other.end() - 100, other.end());
  other[320] = other[10];
  const perplexity_options options{.dtypes = {"fp8_e4m3+offset"}, .context = 150, .chunk = 32, .calibration = 100};
  const auto again = measured(small, other, options);
  CHECK(again[0].all.negative_log == all[0].all.negative_log);
  CHECK(again[1].all.divergence != all[3].all.divergence);
  // Windows of calibration are no longer than those of measuring, whatever it takes.
  perplexity_options longer = options;
  longer.calibration = 245;
  CHECK(measured(small, text, longer)[1].all.tokens == 154);
}

TEST_CASE("Progress grows to 1") {
  small_model small;
  const auto text = some_text(small, 100);
  std::vector<double> heard;
  static_cast<void>(measure_perplexity(small.model, text, {.dtypes = {"f16"}, .context = 50, .chunk = 20},
                                       small.workers, [&](double done) { heard.push_back(done); }));
  REQUIRE(heard.size() == 2 * 6);  // two dtypes; chunks of 20, 20, 10, 20, 20, 9
  for (std::size_t i = 1; i < heard.size(); ++i) CHECK(heard[i] > heard[i - 1]);
  CHECK(heard.front() > 0);
  CHECK(heard.back() == Approx(1));
}

TEST_CASE("What cannot be measured is refused in a sentence") {
  small_model small;
  const auto text = some_text(small, 100);
  const auto refused = [&](const perplexity_options& o, const std::string& why) {
    CHECK_THROWS_WITH(measured(small, text, o), contains_text(why));
    CHECK_THROWS_AS(measured(small, text, o), bad_input);
  };
  refused({.dtypes = {"f16"}, .context = 100},
          "the text has 100 tokens, a window of 100 and the token after it need 101; give a longer text or a smaller");
  refused({.dtypes = {"f16"}, .context = 0}, "context is 0, the model knows 1 to 2048 positions");
  refused({.dtypes = {"f16"}, .context = 2049}, "context is 2049, the model knows 1 to 2048 positions");
  refused({.dtypes = {"f16"}, .context = 50, .chunk = 0}, "chunk is 0, the least is 1");
  refused({.dtypes = {"f16", "f32", "f16:f16"}, .context = 50}, "KV dtype f16 is given twice");
  refused({.dtypes = {"f32", "f32"}, .context = 50}, "KV dtype f32 is given twice");
  refused({.dtypes = {"f16", "f15"}, .context = 50}, "KV dtype 'f15' is not compiled in");
  refused({.dtypes = {"f16"}, .block_size = 12, .context = 50}, "block size is 12, choose one of 8, 16, 64");
  refused({.dtypes = {"f16+offset", "f16:f16+offset"}, .context = 50, .calibration = 10}, "f16+offset is given twice");
  refused({.dtypes = {"f15+offset"}, .context = 50, .calibration = 10}, "KV dtype 'f15' is not compiled in");
  refused({.dtypes = {"f16", "f16+offset"}, .context = 50, .calibration = 50},
          "the text has 100 tokens, a window of 50 and the token after it need 51 beside the 50 to calibrate with");
  refused({.dtypes = {"f16+offset"}, .context = 50, .calibration = 0}, "0 tokens to calibrate with, the least is 1");
}

TEST_CASE("The standard error is that of the mean change") {
  quality_sums s;
  for (const double change : {1.0, 2.0, 3.0, 6.0})
    s.add({.tokens = 1, .negative_log = 10 + change, .change_squared = change * change, .baseline_negative_log = 10});
  CHECK(s.log_change() == Approx(3));
  // Variance with n - 1: (4 + 1 + 0 + 9) / 3.
  CHECK(s.log_change_error() == Approx(std::sqrt(14.0 / 3 / 4)));
}
