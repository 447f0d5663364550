// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gguf.hpp"

#include <cstddef>
#include <span>

namespace engine {

/// Writes the tensor's elements as f32. Each value is rounded as scale * code (+ minimum) in f32, step by step, so that
/// every reader of the format that does the same gets the same bits. `bytes` and `out` hold whole quantised blocks of
/// the type (its layout_of): bytes.size() / layout.bytes * layout.elements == out.size().
void dequantise(tensor_type type, std::span<const std::byte> bytes, std::span<float> out);

}  // namespace engine
