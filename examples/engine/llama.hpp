// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gguf.hpp"
#include "tokeniser.hpp"

#include <kvcache/attention/cpu/thread_pool.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace engine {

/// The shape of a Llama model, as its GGUF metadata says.
struct llama_shape {
  std::uint32_t layers = 0;
  std::uint32_t embedding = 0;
  std::uint32_t feed_forward = 0;
  std::uint32_t query_heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t vocabulary = 0;
  std::uint32_t context = 0;  ///< positions the model was trained for
  float rope_base = 0;
  float rms_epsilon = 0;
};

/// Throws bad_input where the metadata is of another architecture, incomplete or contradicts itself.
[[nodiscard]] llama_shape read_llama_shape(const gguf& file);

/// Whoever keeps K and V: called once a layer with the step's rows, q and k already rotated. It stores k and v and
/// writes to `out` what attention gives for each row.
class attention_call {
 public:
  virtual void run(std::uint32_t layer, kvcache::rows_view<const float> q, kvcache::rows_view<const float> k,
                   kvcache::rows_view<const float> v, kvcache::rows_view<float> out) = 0;

 protected:
  ~attention_call() = default;
};

/// One step's rows, of any number of sequences: a token and its position for each row, and the rows whose logits are
/// wanted.
struct llama_batch {
  std::span<const token_id> tokens;
  std::span<const std::uint32_t> positions;
  std::span<const std::uint32_t> logit_rows;
};

/// Weights and forward pass of a Llama-architecture model (Touvron et al. 2023: RMS norm, rotary positions, SwiGLU) in
/// f32. One forward pass at a time. The pool has to outlive the model.
class llama {
 public:
  /// Dequantises every weight. Throws bad_input where a tensor is missing, of the wrong shape, or not part of the
  /// architecture.
  llama(const gguf& file, kvcache::thread_pool& workers);

  [[nodiscard]] const llama_shape& shape() const noexcept { return shape_; }
  [[nodiscard]] std::uint64_t weight_bytes() const noexcept;

  /// [logit_rows, vocabulary], valid until the next call.
  [[nodiscard]] std::span<const float> forward(const llama_batch& batch, attention_call& attention);

 private:
  struct layer {
    std::vector<float> attention_norm;
    std::vector<float> qkv;  ///< q, k and v one below the other: one product gives all three
    std::vector<float> attention_output;
    std::vector<float> feed_forward_norm;
    std::vector<float> gate_up;  ///< gate and up one below the other
    std::vector<float> down;
  };

  void load(const gguf& file);
  void prepare_rotation(std::span<const std::uint32_t> positions);
  void rotate(float* head, std::size_t row) const noexcept;
  void normalise(std::span<const float> weight, const std::vector<float>& in, std::vector<float>& out,
                 std::size_t rows);
  void attend(std::uint32_t index, const layer& weights, std::size_t rows, attention_call& attention);
  void feed_forward(const layer& weights, std::size_t rows);

  llama_shape shape_;
  kvcache::thread_pool& workers_;
  std::vector<layer> layers_;
  std::vector<float> token_embedding_;
  std::vector<float> output_norm_;
  std::vector<float> output_;  ///< empty: tied to the token embedding
  std::vector<float> inverse_frequencies_;

  // Of the step in progress.
  std::vector<float> cosines_;  ///< [rows, head_dim / 2]
  std::vector<float> sines_;
  std::vector<float> hidden_;  ///< [rows, embedding], as the next two
  std::vector<float> normed_;
  std::vector<float> change_;
  std::vector<float> qkv_;       ///< [rows, (query_heads + 2 * kv_heads) * head_dim]
  std::vector<float> attended_;  ///< [rows, query_heads * head_dim]
  std::vector<float> gate_up_;   ///< [rows, 2 * feed_forward]
  std::vector<float> logits_;
};

}  // namespace engine
