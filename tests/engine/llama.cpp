// SPDX-License-Identifier: Apache-2.0
#include "llama.hpp"

#include "bad_input.hpp"
#include "blas.hpp"
#include "catch.hpp"
#include "gguf_writer.hpp"
#include "how_far.hpp"
#include "support.hpp"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

using namespace engine;
using kvcache_test::contains_text;
using kvcache_test::how_far;

namespace {

/// The small model's bytes with another value for one of its numbers.
template <class T>
std::vector<std::byte> with_value(const std::string& key, T value) {
  std::vector<std::byte> bytes = random_model(1);
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::memcpy(bytes.data() + all.find(key) + key.size() + 4, &value, sizeof(T));
  return bytes;
}

std::string fault_of(const std::vector<std::byte>& bytes) {
  kvcache::thread_pool workers(1);
  try {
    const gguf file{bytes};
    llama model(file, workers);
  } catch (const bad_input& fault) {
    return fault.what();
  }
  return {};
}

std::string renamed_tensor(const std::string& from, const std::string& to) {
  std::vector<std::byte> bytes = random_model(1);
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  std::memcpy(bytes.data() + all.find(from), to.data(), to.size());
  return fault_of(bytes);
}

}  // namespace

TEST_CASE("Metadata that no model can have is refused, naming key, value and limit") {
  CHECK(fault_of(random_model(1)).empty());
  const auto zero = [](const std::string& key) { return fault_of(with_value(key, std::uint32_t{0})); };
  CHECK_THAT(zero("llama.attention.head_count"), contains_text("llama.attention.head_count is 0, 1 to 16777216"));
  CHECK_THAT(zero("llama.attention.head_count_kv"), contains_text("llama.attention.head_count_kv is 0, 1 to"));
  CHECK_THAT(zero("llama.block_count"), contains_text("llama.block_count is 0, 1 to"));
  CHECK_THAT(zero("llama.embedding_length"), contains_text("llama.embedding_length is 0, 1 to"));
  CHECK_THAT(zero("llama.feed_forward_length"), contains_text("llama.feed_forward_length is 0, 1 to"));
  CHECK_THAT(zero("llama.context_length"), contains_text("llama.context_length is 0, 1 to"));
  CHECK_THAT(zero("llama.attention.key_length"), contains_text("llama.attention.key_length is 0, 1 to"));
  const auto value = [](const std::string& key, auto v) { return fault_of(with_value(key, v)); };
  CHECK_THAT(value("llama.attention.head_count_kv", 3u),
             contains_text("head_count is 4, it must be a multiple of the kv heads, 3"));
  CHECK_THAT(value("llama.attention.key_length", 63u), contains_text("the head dimension is 63, it must be even"));
  CHECK_THAT(value("llama.attention.value_length", 32u),
             contains_text("value_length is 32, this engine needs it to be 64"));
  CHECK_THAT(value("llama.rope.dimension_count", 32u),
             contains_text("dimension_count is 32, this engine needs it to be 64"));
  CHECK_THAT(value("llama.vocab_size", 5u), contains_text("llama.vocab_size is 5, this engine needs it to be 271"));
  CHECK_THAT(value("llama.attention.layer_norm_rms_epsilon", 0.0f), contains_text("rms_epsilon is 0.0"));
  CHECK_THAT(value("llama.rope.freq_base", std::nanf("")), contains_text("freq_base is nan, it must be above 0"));
}

TEST_CASE("Tensors that do not make the model of the metadata are refused") {
  CHECK_THAT(fault_of(with_value("llama.block_count", std::uint32_t{4})),
             contains_text("no tensor 'blk.3.attn_norm.weight'"));
  CHECK_THAT(fault_of(with_value("llama.block_count", std::uint32_t{2})),
             contains_text("a tensor 'blk.2.attn_norm.weight', which this engine's llama does not use"));
  CHECK_THAT(fault_of(with_value("llama.feed_forward_length", std::uint32_t{191})),
             contains_text("'blk.0.ffn_gate.weight' is 128 x 192, the metadata needs 128 x 191"));
  CHECK_THAT(renamed_tensor("blk.1.attn_q.weight", "blk.1.attn_p.weight"),
             contains_text("no tensor 'blk.1.attn_q.weight'"));
  std::vector<std::byte> other = random_model(1);
  const std::string_view all(reinterpret_cast<const char*>(other.data()), other.size());
  other[all.find("llama")] = static_cast<std::byte>('g');
  CHECK_THAT(fault_of(other), contains_text("general.architecture is 'glama', this engine knows 'llama'"));
}

TEST_CASE("A product with the weights is right for any number of rows and threads") {
  for (const std::size_t rows : {0u, 1u, 2u, 7u, 24u, 25u, 40u}) {
    for (const unsigned threads : {1u, 3u}) {
      kvcache::thread_pool workers(threads);
      constexpr std::size_t inner = 70;
      constexpr std::size_t out_columns = 100;
      constexpr std::size_t x_stride = 75;
      constexpr std::size_t out_stride = 103;
      std::vector<float> x(rows * x_stride + 1), weights(out_columns * inner), out(rows * out_stride + 1, -7.0f);
      for (std::size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i * 37 % 101) / 101.0f - 0.5f;
      for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i * 53 % 97) / 97.0f - 0.5f;
      multiply(workers, {x.data(), rows, inner, x_stride}, {weights.data(), out_columns, inner, inner},
               {out.data(), rows, out_columns, out_stride});
      double worst = 0;
      for (std::size_t r = 0; r < rows; ++r) {
        for (std::size_t c = 0; c < out_columns; ++c) {
          double sum = 0;
          for (std::size_t i = 0; i < inner; ++i) sum += double{x[r * x_stride + i]} * weights[c * inner + i];
          worst = std::fmax(worst, how_far(out[r * out_stride + c], sum));
        }
        for (std::size_t c = out_columns; c < out_stride; ++c) CHECK(out[r * out_stride + c] == -7.0f);
      }
      INFO(rows << " rows, " << threads << " threads, OpenBLAS for " << blas_core());
      CHECK(worst < 1e-5);
    }
  }
}
