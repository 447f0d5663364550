// SPDX-License-Identifier: Apache-2.0
#include "random_model.hpp"

#include "byte_alphabet.hpp"
#include "gguf_writer.hpp"

#include <array>
#include <cmath>
#include <string>
#include <utility>

namespace engine {
namespace {

constexpr std::uint32_t embedding = 128;
constexpr std::uint32_t feed_forward = 192;
constexpr std::uint32_t head_dim = 64;
constexpr std::uint32_t context = 2048;

/// Numbers of mean 0 and the given deviation: sums of uniform ones, so that no library function decides a bit.
class random_numbers {
 public:
  explicit random_numbers(std::uint64_t seed) : state_(seed) {}

  std::vector<float> make(std::uint64_t count, float deviation) {
    std::vector<float> out(count);
    for (float& x : out) x = next() * deviation;
    return out;
  }

 private:
  float next() {
    // The sum of 4 uniform 16-bit numbers has the deviation 65536 / sqrt(3).
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    std::uint64_t bits = state_ ^ (state_ >> 29);
    bits *= 0xbf58476d1ce4e5b9u;
    bits ^= bits >> 32;
    std::int32_t sum = -2 * 65535;
    for (int i = 0; i < 4; ++i) sum += static_cast<std::int32_t>(bits >> (16 * i) & 0xffff);
    return static_cast<float>(sum) * (1.7320508f / 65536.0f);
  }

  std::uint64_t state_;
};

void add_vocabulary(gguf_writer& out) {
  constexpr std::int32_t normal = 1;
  constexpr std::int32_t control = 3;
  std::vector<std::string> tokens{"<|endoftext|>", "<|im_start|>", "<|im_end|>"};
  std::vector<std::int32_t> types(tokens.size(), control);
  for (int byte = 0; byte < 256; ++byte) {
    const char as_text = static_cast<char>(static_cast<unsigned char>(byte));
    tokens.push_back(spell_bytes({&as_text, 1}));
  }
  // A few frequent pairs, so that merging is exercised too.
  constexpr std::array<std::pair<const char*, const char*>, 12> pairs{{{"t", "h"},
                                                                       {"th", "e"},
                                                                       {" ", "the"},
                                                                       {"i", "n"},
                                                                       {"e", "r"},
                                                                       {"a", "n"},
                                                                       {" ", "a"},
                                                                       {"o", "u"},
                                                                       {"in", "g"},
                                                                       {"an", "d"},
                                                                       {" ", "and"},
                                                                       {" ", " "}}};
  std::vector<std::string> merges;
  for (const auto& [left, right] : pairs) {
    merges.push_back(spell_bytes(left) + " " + spell_bytes(right));
    tokens.push_back(spell_bytes(std::string(left) + right));
  }
  types.resize(tokens.size(), normal);
  out.add("tokenizer.ggml.model", std::string_view("gpt2"));
  out.add("tokenizer.ggml.pre", std::string_view("smollm"));
  out.add("tokenizer.ggml.tokens", tokens);
  out.add("tokenizer.ggml.token_type", types);
  out.add("tokenizer.ggml.merges", merges);
  out.add("tokenizer.ggml.eos_token_id", std::uint32_t{2});
  out.add("llama.vocab_size", static_cast<std::uint32_t>(tokens.size()));
}

}  // namespace

std::vector<std::byte> random_model(std::uint64_t seed, const random_model_shape& shape) {
  gguf_writer out;
  out.add("general.architecture", std::string_view("llama"));
  out.add("general.name", std::string_view("random weights, seed " + std::to_string(seed)));
  out.add("kvcache.random_weights", true);
  out.add("llama.block_count", shape.layers);
  out.add("llama.context_length", context);
  out.add("llama.embedding_length", embedding);
  out.add("llama.feed_forward_length", feed_forward);
  out.add("llama.attention.head_count", shape.query_heads);
  out.add("llama.attention.head_count_kv", shape.kv_heads);
  out.add("llama.attention.key_length", head_dim);
  out.add("llama.attention.value_length", head_dim);
  out.add("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  out.add("llama.rope.freq_base", 10000.0f);
  out.add("llama.rope.dimension_count", head_dim);
  add_vocabulary(out);

  constexpr std::uint32_t vocabulary = 3 + 256 + 12;
  random_numbers random(seed);
  const auto matrix = [&](const std::string& name, std::uint32_t rows, std::uint32_t columns, tensor_type type) {
    const float deviation = 1.0f / std::sqrt(static_cast<float>(columns));
    out.add_tensor(name, {columns, rows}, type, random.make(std::uint64_t{rows} * columns, deviation));
  };
  const auto norm = [&](const std::string& name) {
    out.add_tensor(name, {embedding}, tensor_type::f32, std::vector<float>(embedding, 1.0f));
  };
  // Embeddings are small beside what the layers add, so that an answer depends on all that came before and not only on
  // the last token.
  out.add_tensor("token_embd.weight", {embedding, vocabulary}, tensor_type::f16,
                 random.make(std::uint64_t{vocabulary} * embedding, 0.3f));
  out.add_tensor("output.weight", {embedding, vocabulary}, tensor_type::f32,
                 random.make(std::uint64_t{vocabulary} * embedding, 0.5f));
  norm("output_norm.weight");
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    norm(prefix + "attn_norm.weight");
    matrix(prefix + "attn_q.weight", shape.query_heads * head_dim, embedding, tensor_type::f32);
    matrix(prefix + "attn_k.weight", shape.kv_heads * head_dim, embedding, tensor_type::f32);
    matrix(prefix + "attn_v.weight", shape.kv_heads * head_dim, embedding, tensor_type::f16);
    matrix(prefix + "attn_output.weight", embedding, shape.query_heads * head_dim, tensor_type::f16);
    norm(prefix + "ffn_norm.weight");
    matrix(prefix + "ffn_gate.weight", feed_forward, embedding, tensor_type::f16);
    matrix(prefix + "ffn_up.weight", feed_forward, embedding, tensor_type::f16);
    matrix(prefix + "ffn_down.weight", embedding, feed_forward, tensor_type::f16);
  }
  return out.bytes();
}

}  // namespace engine
