// SPDX-License-Identifier: Apache-2.0
// Matrix products of floats that are in cache.

/// c[row_block, Vectors * lanes] (+)= a[row_block, depth] * b[depth, Vectors * lanes].
template <std::size_t Vectors>
KVCACHE_ALWAYS_INLINE void multiply_block(float* c, std::size_t c_row, const float* a, std::size_t a_row,
                                          std::size_t a_step, const float* b, std::size_t b_row, std::size_t depth,
                                          bool add_to) noexcept {
  vec sum[row_block][Vectors];
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < row_block; ++r) {
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) sum[r][v] = add_to ? load(c + r * c_row + v * lanes) : set1(0.0f);
  }
  for (std::size_t k = 0; k < depth; ++k) {
    vec right[Vectors];
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) right[v] = load(b + k * b_row + v * lanes);
    KVCACHE_UNROLL
    for (std::size_t r = 0; r < row_block; ++r) {
      const vec left = set1(a[r * a_row + k * a_step]);
      KVCACHE_UNROLL
      for (std::size_t v = 0; v < Vectors; ++v) sum[r][v] = fma(left, right[v], sum[r][v]);
    }
  }
  KVCACHE_UNROLL
  for (std::size_t r = 0; r < row_block; ++r) {
    KVCACHE_UNROLL
    for (std::size_t v = 0; v < Vectors; ++v) store(c + r * c_row + v * lanes, sum[r][v]);
  }
}

/// c[rows, columns] (+)= a[rows, depth] * b[depth, columns]; rows a multiple of row_block, columns of lanes. Element
/// (r, k) of a lies at a[r * a_row + k * a_step].
KVCACHE_NOINLINE inline void multiply(float* c, std::size_t c_row, std::size_t rows, std::size_t columns,
                                      const float* a, std::size_t a_row, std::size_t a_step, const float* b,
                                      std::size_t b_row, std::size_t depth, bool add_to) noexcept {
  for (std::size_t column = 0; column < columns;) {
    const std::size_t left_over = (columns - column) / lanes;
    const std::size_t vectors = column_block < 3 && left_over > column_block ? column_block : left_over;
    for (std::size_t row = 0; row < rows; row += row_block) {
      float* const to = c + row * c_row + column;
      const float* const left = a + row * a_row;
      if (vectors >= 3)
        multiply_block<3>(to, c_row, left, a_row, a_step, b + column, b_row, depth, add_to);
      else if (vectors == 2)
        multiply_block<2>(to, c_row, left, a_row, a_step, b + column, b_row, depth, add_to);
      else
        multiply_block<1>(to, c_row, left, a_row, a_step, b + column, b_row, depth, add_to);
    }
    column += (vectors < 3 ? vectors : 3) * lanes;
  }
}
