// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/cpu/thread_pool.hpp>

#include <cstddef>
#include <string>

namespace engine {

/// A matrix of f32, rows one after another, `stride` elements apart. Owns nothing.
template <class T>
struct matrix_view {
  T* data = nullptr;
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t stride = 0;
};

/// out = x * transpose(weights): out is [x.rows, weights.rows]. OpenBLAS computes; each thread of the pool does a part
/// of the weights' rows. Throws bad_input where OpenBLAS cannot be loaded.
void multiply(kvcache::thread_pool& workers, matrix_view<const float> x, matrix_view<const float> weights,
              matrix_view<float> out);

/// The processor that OpenBLAS computes for.
[[nodiscard]] std::string blas_core();

}  // namespace engine
