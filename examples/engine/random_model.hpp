// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine {

/// A small Llama-architecture GGUF with random weights and a byte-level vocabulary, for where no real model can be had:
/// everything runs as with a real one, the answers mean nothing. The default is 3 layers, 4 query heads, 2 kv heads.
struct random_model_shape {
  std::uint32_t layers = 3;
  std::uint32_t query_heads = 4;
  std::uint32_t kv_heads = 2;
};

/// The file's bytes. Equal arguments give equal bytes on every platform.
[[nodiscard]] std::vector<std::byte> random_model(std::uint64_t seed, const random_model_shape& shape = {});

}  // namespace engine
