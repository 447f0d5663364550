// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/geometry.hpp>

#include <array>
#include <string_view>

namespace sizing {

struct model {
  std::string_view name;
  kvcache::geometry shape;
};

/// Shapes as the models' published configurations give them; the "MHA" row is Llama-3-70B with one kv head for each
/// of its query heads, to show what grouping saves.
inline constexpr std::array models{
    model{"Llama-3-8B", {.layers = 32, .kv_heads = 8, .head_dim = 128}},
    model{"Llama-3-70B", {.layers = 80, .kv_heads = 8, .head_dim = 128}},
    model{"Llama-3-70B-MHA", {.layers = 80, .kv_heads = 64, .head_dim = 128}},
    model{"Llama-3.2-1B", {.layers = 16, .kv_heads = 8, .head_dim = 64}},
    model{"Llama-2-7B", {.layers = 32, .kv_heads = 32, .head_dim = 128}},
    model{"Mistral-7B", {.layers = 32, .kv_heads = 8, .head_dim = 128}},
    model{"Qwen2.5-7B", {.layers = 28, .kv_heads = 4, .head_dim = 128}},
    model{"Qwen3-8B", {.layers = 36, .kv_heads = 8, .head_dim = 128}},
    model{"Qwen3-32B", {.layers = 64, .kv_heads = 8, .head_dim = 128}},
    model{"Phi-3-mini", {.layers = 32, .kv_heads = 32, .head_dim = 96}},
    model{"Falcon-7B", {.layers = 32, .kv_heads = 1, .head_dim = 64}},
    model{"SmolLM2-135M", {.layers = 30, .kv_heads = 3, .head_dim = 64}},
};

}  // namespace sizing
