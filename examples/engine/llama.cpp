// SPDX-License-Identifier: Apache-2.0
#include "llama.hpp"

#include "bad_input.hpp"
#include "blas.hpp"
#include "dequantise.hpp"
#include "share.hpp"

#include <algorithm>
#include <cmath>
#include <unordered_set>

namespace engine {
namespace {

/// Hands out tensors by name and shape and knows at the end which were never asked for.
class weight_reader {
 public:
  explicit weight_reader(const gguf& file) : file_(file) {}

  /// Appends the tensor to `out`. `rows` of `columns`; a vector is one row.
  void append(const std::string& name, std::uint64_t rows, std::uint64_t columns, std::vector<float>& out) {
    const gguf_tensor* tensor = file_.find(name);
    if (tensor == nullptr)
      throw bad_input("the model has no tensor '" + name + "', which the llama architecture needs");
    const bool fits = tensor->shape[0] == columns && tensor->shape[1] == rows && tensor->elements == rows * columns;
    if (!fits)
      throw bad_input("tensor '" + name + "' is " + std::to_string(tensor->shape[0]) + " x " +
                      std::to_string(tensor->elements / tensor->shape[0]) + ", the metadata needs " +
                      std::to_string(columns) + " x " + std::to_string(rows));
    used_.insert(tensor->name);
    const std::size_t before = out.size();
    out.resize(before + tensor->elements);
    dequantise(tensor->type, tensor->bytes, std::span(out).subspan(before));
  }

  void require_all_used() const {
    for (const gguf_tensor& tensor : file_.tensors())
      if (!used_.contains(tensor.name))
        throw bad_input("the model has a tensor '" + std::string(tensor.name.substr(0, 80)) +
                        "', which this engine's llama does not use; its answers would be wrong");
  }

 private:
  const gguf& file_;
  std::unordered_set<std::string_view> used_;
};

}  // namespace

llama::llama(const gguf& file, kvcache::thread_pool& workers) : shape_(read_llama_shape(file)), workers_(workers) {
  load(file);
  for (std::uint32_t i = 0; i < shape_.head_dim / 2; ++i)
    inverse_frequencies_.push_back(
        static_cast<float>(1.0 / std::pow(double{shape_.rope_base}, 2.0 * i / shape_.head_dim)));
}

void llama::load(const gguf& file) {
  const std::uint64_t width = shape_.embedding;
  const std::uint64_t q_rows = std::uint64_t{shape_.query_heads} * shape_.head_dim;
  const std::uint64_t kv_rows = std::uint64_t{shape_.kv_heads} * shape_.head_dim;
  weight_reader weights(file);
  weights.append("token_embd.weight", shape_.vocabulary, width, token_embedding_);
  weights.append("output_norm.weight", 1, width, output_norm_);
  if (file.find("output.weight") != nullptr) weights.append("output.weight", shape_.vocabulary, width, output_);
  for (std::uint32_t i = 0; i < shape_.layers; ++i) {
    const std::string prefix = "blk." + std::to_string(i) + ".";
    layer& l = layers_.emplace_back();
    weights.append(prefix + "attn_norm.weight", 1, width, l.attention_norm);
    weights.append(prefix + "attn_q.weight", q_rows, width, l.qkv);
    weights.append(prefix + "attn_k.weight", kv_rows, width, l.qkv);
    weights.append(prefix + "attn_v.weight", kv_rows, width, l.qkv);
    weights.append(prefix + "attn_output.weight", width, q_rows, l.attention_output);
    weights.append(prefix + "ffn_norm.weight", 1, width, l.feed_forward_norm);
    weights.append(prefix + "ffn_gate.weight", shape_.feed_forward, width, l.gate_up);
    weights.append(prefix + "ffn_up.weight", shape_.feed_forward, width, l.gate_up);
    weights.append(prefix + "ffn_down.weight", width, shape_.feed_forward, l.down);
  }
  weights.require_all_used();
}

std::uint64_t llama::weight_bytes() const noexcept {
  std::uint64_t elements = token_embedding_.size() + output_norm_.size() + output_.size();
  for (const layer& l : layers_)
    elements += l.attention_norm.size() + l.qkv.size() + l.attention_output.size() + l.feed_forward_norm.size() +
                l.gate_up.size() + l.down.size();
  return elements * sizeof(float);
}

void llama::prepare_rotation(std::span<const std::uint32_t> positions) {
  const std::size_t half = inverse_frequencies_.size();
  cosines_.resize(positions.size() * half);
  sines_.resize(positions.size() * half);
  for (std::size_t row = 0; row < positions.size(); ++row) {
    for (std::size_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(positions[row]) * inverse_frequencies_[i];
      cosines_[row * half + i] = std::cos(angle);
      sines_[row * half + i] = std::sin(angle);
    }
  }
}

// Rotary positions (Su et al. 2021). GGUF stores Q and K of this architecture permuted, so that the two elements of a
// pair lie side by side.
void llama::rotate(float* head, std::size_t row) const noexcept {
  const std::size_t half = inverse_frequencies_.size();
  const float* cosines = cosines_.data() + row * half;
  const float* sines = sines_.data() + row * half;
  for (std::size_t i = 0; i < half; ++i) {
    const float x = head[2 * i];
    const float y = head[2 * i + 1];
    head[2 * i] = x * cosines[i] - y * sines[i];
    head[2 * i + 1] = x * sines[i] + y * cosines[i];
  }
}

void llama::normalise(std::span<const float> weight, const std::vector<float>& in, std::vector<float>& out,
                      std::size_t rows) {
  const std::size_t width = weight.size();
  workers_.run([&](unsigned ith, unsigned nth) {
    const share mine = share_of(rows, 1, ith, nth);
    for (std::size_t row = mine.begin; row < mine.end; ++row) {
      const float* x = in.data() + row * width;
      float* y = out.data() + row * width;
      double squares = 0;
      for (std::size_t i = 0; i < width; ++i) squares += double{x[i]} * x[i];
      const auto scale =
          static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(width) + double{shape_.rms_epsilon}));
      for (std::size_t i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
    }
  });
}

void llama::attend(std::uint32_t index, const layer& weights, std::size_t rows, attention_call& attention) {
  const std::size_t width = shape_.embedding;
  const std::size_t q_width = std::size_t{shape_.query_heads} * shape_.head_dim;
  const std::size_t kv_width = std::size_t{shape_.kv_heads} * shape_.head_dim;
  const std::size_t qkv_width = q_width + 2 * kv_width;
  normalise(weights.attention_norm, hidden_, normed_, rows);
  multiply(workers_, {normed_.data(), rows, width, width}, {weights.qkv.data(), qkv_width, width, width},
           {qkv_.data(), rows, qkv_width, qkv_width});
  workers_.run([&](unsigned ith, unsigned nth) {
    const share mine = share_of(rows, 1, ith, nth);
    for (std::size_t row = mine.begin; row < mine.end; ++row)
      for (std::uint32_t head = 0; head < shape_.query_heads + shape_.kv_heads; ++head)
        rotate(qkv_.data() + row * qkv_width + std::size_t{head} * shape_.head_dim, row);
  });
  const auto slice = [&](std::size_t offset, std::uint32_t heads) {
    return kvcache::rows_view<const float>(qkv_.data() + offset, static_cast<std::uint32_t>(rows), heads,
                                           shape_.head_dim, static_cast<std::int64_t>(qkv_width), shape_.head_dim);
  };
  attention.run(index, slice(0, shape_.query_heads), slice(q_width, shape_.kv_heads),
                slice(q_width + kv_width, shape_.kv_heads),
                kvcache::rows_view<float>(attended_.data(), static_cast<std::uint32_t>(rows), shape_.query_heads,
                                          shape_.head_dim));
  multiply(workers_, {attended_.data(), rows, q_width, q_width},
           {weights.attention_output.data(), width, q_width, q_width}, {change_.data(), rows, width, width});
}

void llama::feed_forward(const layer& weights, std::size_t rows) {
  const std::size_t width = shape_.embedding;
  const std::size_t inner = shape_.feed_forward;
  normalise(weights.feed_forward_norm, hidden_, normed_, rows);
  multiply(workers_, {normed_.data(), rows, width, width}, {weights.gate_up.data(), 2 * inner, width, width},
           {gate_up_.data(), rows, 2 * inner, 2 * inner});
  // SwiGLU: silu(gate) * up, written over the gate.
  workers_.run([&](unsigned ith, unsigned nth) {
    const share mine = share_of(rows * inner, 64, ith, nth);
    for (std::size_t at = mine.begin; at < mine.end; ++at) {
      float* gate = gate_up_.data() + at / inner * 2 * inner + at % inner;
      *gate = *gate / (1.0f + std::exp(-*gate)) * gate[inner];
    }
  });
  multiply(workers_, {gate_up_.data(), rows, inner, 2 * inner}, {weights.down.data(), width, inner, inner},
           {change_.data(), rows, width, width});
}

std::span<const float> llama::forward(const llama_batch& batch, attention_call& attention) {
  const std::size_t rows = batch.tokens.size();
  const std::size_t width = shape_.embedding;
  const std::size_t q_width = std::size_t{shape_.query_heads} * shape_.head_dim;
  hidden_.resize(rows * width);
  normed_.resize(rows * width);
  change_.resize(rows * width);
  qkv_.resize(rows * (q_width + std::size_t{2} * shape_.kv_heads * shape_.head_dim));
  attended_.resize(rows * q_width);
  gate_up_.resize(rows * 2 * shape_.feed_forward);

  for (std::size_t row = 0; row < rows; ++row)
    std::copy_n(token_embedding_.data() + static_cast<std::size_t>(batch.tokens[row]) * width, width,
                hidden_.data() + row * width);
  prepare_rotation(batch.positions);
  const auto add_change = [&] {
    for (std::size_t i = 0; i < hidden_.size(); ++i) hidden_[i] += change_[i];
  };
  for (std::uint32_t i = 0; i < shape_.layers; ++i) {
    attend(i, layers_[i], rows, attention);
    add_change();
    feed_forward(layers_[i], rows);
    add_change();
  }

  // Only the rows whose logits are wanted meet the vocabulary.
  const std::size_t wanted = batch.logit_rows.size();
  for (std::size_t i = 0; i < wanted; ++i)
    std::copy_n(hidden_.data() + std::size_t{batch.logit_rows[i]} * width, width, change_.data() + i * width);
  normalise(output_norm_, change_, normed_, wanted);
  logits_.resize(wanted * shape_.vocabulary);
  const std::vector<float>& output = output_.empty() ? token_embedding_ : output_;
  multiply(workers_, {normed_.data(), wanted, width, width}, {output.data(), shape_.vocabulary, width, width},
           {logits_.data(), wanted, shape_.vocabulary, shape_.vocabulary});
  return logits_;
}

}  // namespace engine
