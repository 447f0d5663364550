// SPDX-License-Identifier: Apache-2.0
// Vectors stored in a format through the public functions, and read back.
#pragma once

#include <kvcache/quantise.hpp>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace kvcache_test {

/// Rows of `dim` floats, one after another.
struct float_rows {
  std::uint32_t dim = 0;
  std::vector<float> values;

  [[nodiscard]] std::uint32_t count() const { return static_cast<std::uint32_t>(values.size() / dim); }
  [[nodiscard]] float* row(std::uint32_t r) { return values.data() + std::size_t{r} * dim; }
  [[nodiscard]] const float* row(std::uint32_t r) const { return values.data() + std::size_t{r} * dim; }
};

inline float_rows gaussian_rows(std::uint32_t rows, std::uint32_t dim, std::uint32_t seed) {
  float_rows out{dim, std::vector<float>(std::size_t{rows} * dim)};
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (float& x : out.values) x = normal(random);
  return out;
}

/// Unit Gaussian, and Gaussian of sigma 4 around +12 or -12 in the four channels named.
inline float_rows biased_rows(std::uint32_t rows, std::uint32_t dim, std::uint32_t seed,
                              const std::vector<std::uint32_t>& channels) {
  float_rows out = gaussian_rows(rows, dim, seed);
  for (std::uint32_t r = 0; r < rows; ++r)
    for (std::size_t i = 0; i < channels.size(); ++i) {
      float& x = out.row(r)[channels[i]];
      x = x * 4 + (i % 2 == 0 ? 12.0f : -12.0f);
    }
  return out;
}

/// What rows become when they are stored in `dtype`, `tokens` to a block where scales are per channel, and read again.
/// Rotated ones are turned back.
inline float_rows stored_and_read(kvcache::dtype_id dtype, const float_rows& rows, std::uint32_t tokens) {
  using namespace kvcache;
  const dtype_id stored = without_rotation(dtype);
  const std::uint32_t dim = rows.dim;
  float_rows in = rows;
  if (is_rotated(dtype))
    for (std::uint32_t r = 0; r < in.count(); ++r) rotate(in.row(r), dim);
  float_rows out = in;
  const std::size_t code_size = code_bytes(stored, dim);
  std::vector<std::byte> codes(code_size * tokens);
  std::vector<std::byte> scales(scale_bytes(stored, dim) + 1);
  for (std::uint32_t first = 0; first < in.count(); first += tokens) {
    const std::uint32_t count = in.count() - first < tokens ? in.count() - first : tokens;
    if (seals(stored))
      seal_head(
          stored, count, dim,
          [&](std::uint32_t t, float* x) { std::memcpy(x, in.row(first + t), dim * sizeof(float)); }, codes.data(),
          static_cast<std::int64_t>(code_size), scales.data());
    for (std::uint32_t t = 0; t < count; ++t) {
      std::byte* const at = codes.data() + t * code_size;
      if (quantization_of(stored).bits == 0)
        convert(in.row(first + t), dim, at, stored);
      else if (!seals(stored))
        quantise_head(stored, in.row(first + t), dim, at, scales.data());
      read_head({at, scales.data(), dtype}, dim, out.row(first + t));
    }
  }
  if (is_rotated(dtype))
    for (std::uint32_t r = 0; r < out.count(); ++r) rotate(out.row(r), dim);
  return out;
}

/// The root of the mean square of the differences, over that of the values.
inline double relative_rms(const float_rows& wanted, const float_rows& got) {
  double difference = 0;
  double whole = 0;
  for (std::size_t i = 0; i < wanted.values.size(); ++i) {
    const double w = static_cast<double>(wanted.values[i]);
    const double d = static_cast<double>(got.values[i]) - w;
    difference += d * d;
    whole += w * w;
  }
  return std::sqrt(difference / whole);
}

inline double stored_error(kvcache::dtype_id dtype, const float_rows& rows, std::uint32_t tokens = 32) {
  return relative_rms(rows, stored_and_read(dtype, rows, tokens));
}

}  // namespace kvcache_test
