// SPDX-License-Identifier: Apache-2.0
#include "bad_input.hpp"
#include "llama.hpp"

#include <cmath>

namespace engine {
namespace {

/// Limits far above any model, so that sizes computed from them fit 64 bits.
constexpr std::uint64_t most = 1u << 24;

std::uint32_t read_count(const gguf& file, const std::string& key) {
  const std::uint64_t value = file.count(key);
  if (value == 0 || value > most)
    throw bad_input(key + " is " + std::to_string(value) + ", 1 to " + std::to_string(most) + " are possible");
  return static_cast<std::uint32_t>(value);
}

std::uint32_t read_count_or(const gguf& file, const std::string& key, std::uint32_t otherwise) {
  return file.has(key) ? read_count(file, key) : otherwise;
}

float read_positive(const gguf& file, const std::string& key) {
  const double value = file.real(key);
  if (!std::isfinite(value) || value <= 0)
    throw bad_input(key + " is " + std::to_string(value) + ", it must be above 0");
  return static_cast<float>(value);
}

void require_equal(const char* what, std::uint32_t value, std::uint32_t limit) {
  if (value != limit)
    throw bad_input(std::string(what) + " is " + std::to_string(value) + ", this engine needs it to be " +
                    std::to_string(limit));
}

}  // namespace

llama_shape read_llama_shape(const gguf& file) {
  const std::string_view architecture = file.text("general.architecture");
  if (architecture != "llama")
    throw bad_input("general.architecture is '" + std::string(architecture.substr(0, 80)) +
                    "', this engine knows 'llama'");
  if (file.has("llama.rope.scaling.type") && file.text("llama.rope.scaling.type") != "none")
    throw bad_input("llama.rope.scaling.type is '" + std::string(file.text("llama.rope.scaling.type").substr(0, 80)) +
                    "', this engine knows 'none'");
  llama_shape out;
  out.layers = read_count(file, "llama.block_count");
  out.embedding = read_count(file, "llama.embedding_length");
  out.feed_forward = read_count(file, "llama.feed_forward_length");
  out.query_heads = read_count(file, "llama.attention.head_count");
  out.kv_heads = read_count_or(file, "llama.attention.head_count_kv", out.query_heads);
  out.context = read_count(file, "llama.context_length");
  if (out.query_heads % out.kv_heads != 0)
    throw bad_input("llama.attention.head_count is " + std::to_string(out.query_heads) +
                    ", it must be a multiple of the kv heads, " + std::to_string(out.kv_heads));
  if (!file.has("llama.attention.key_length") && out.embedding % out.query_heads != 0)
    throw bad_input("llama.embedding_length is " + std::to_string(out.embedding) +
                    ", it must be a multiple of the heads, " + std::to_string(out.query_heads));
  out.head_dim = read_count_or(file, "llama.attention.key_length", out.embedding / out.query_heads);
  if (out.head_dim % 2 != 0)
    throw bad_input("the head dimension is " + std::to_string(out.head_dim) +
                    ", it must be even for rotary positions (a multiple of 2)");
  require_equal("llama.attention.value_length", read_count_or(file, "llama.attention.value_length", out.head_dim),
                out.head_dim);
  require_equal("llama.rope.dimension_count", read_count_or(file, "llama.rope.dimension_count", out.head_dim),
                out.head_dim);
  const std::size_t vocabulary = file.texts("tokenizer.ggml.tokens").size();
  if (vocabulary == 0 || vocabulary > most)
    throw bad_input("tokenizer.ggml.tokens holds " + std::to_string(vocabulary) + " tokens, 1 to " +
                    std::to_string(most) + " are possible");
  out.vocabulary = static_cast<std::uint32_t>(vocabulary);
  require_equal("llama.vocab_size", read_count_or(file, "llama.vocab_size", out.vocabulary), out.vocabulary);
  out.rope_base = file.has("llama.rope.freq_base") ? read_positive(file, "llama.rope.freq_base") : 10000.0f;
  out.rms_epsilon = read_positive(file, "llama.attention.layer_norm_rms_epsilon");
  return out;
}

}  // namespace engine
