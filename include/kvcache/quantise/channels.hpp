// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/quantise/codes.hpp>
#include <kvcache/quantise/ranges.hpp>
#include <kvcache/quantise/runs.hpp>
#include <kvcache/quantise/scales.hpp>
#include <kvcache/quantization.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

// Scales of a block's channels.

namespace kvcache::detail {

template <unsigned Bits>
void dequantise_channels(quantization q, const std::byte* codes, const std::byte* scales, std::uint32_t dim,
                         float* x) noexcept {
  const std::int32_t offset = q.zero_points ? 0 : 8;
  for (std::uint32_t d = 0; d < dim; d += quantise_width) {
    const std::uint32_t count = dim - d < quantise_width ? dim - d : quantise_width;
    const auto load = [&](std::uint32_t index, run_of<float>& to) {
      run_of<std::uint16_t> bits = {};
      if (count == quantise_width)
        std::memcpy(bits, scales + std::size_t{index} * sizeof(bf16), sizeof bits);
      else
        std::memcpy(bits, scales + std::size_t{index} * sizeof(bf16), count * sizeof(bf16));
      for (std::uint32_t j = 0; j < quantise_width; ++j)
        to[j] = std::bit_cast<float>(static_cast<std::uint32_t>(bits[j]) << 16);
    };
    run_of<float> scale;
    run_of<float> run;
    load(d, scale);
    load_codes<Bits>(codes + d * Bits / 8, count, offset, run);
    for (std::uint32_t j = 0; j < quantise_width; ++j) run[j] *= scale[j];
    if (q.zero_points) {
      run_of<float> zero;
      load(quantization::zero_point(d, dim), zero);
      for (std::uint32_t j = 0; j < quantise_width; ++j) run[j] += zero[j];
    }
    if (count == quantise_width)
      std::memcpy(x + d, run, sizeof run);
    else
      std::memcpy(x + d, run, sizeof(float) * count);
  }
}

/// The channels of one head of a block, while it is being sealed. One array a member, so that a compiler may take
/// channels together; whole runs of them, those too many hold 0.
class channel_encoders {
 public:
  explicit channel_encoders(std::uint32_t dim) noexcept
      : dim_(dim), runs_end_((dim + quantise_width - 1) / quantise_width * quantise_width) {
    start();
  }

  /// To be filled with the head of a token, dim floats of it.
  [[nodiscard]] float* x() noexcept { return x_; }

  /// Ranges grow by what is in x. Unusual elements spoil them.
  void widen() noexcept {
    for (std::uint32_t d = 0; d < runs_end_; d += quantise_width) {
      run_of<float> x;
      run_of<float> low;
      run_of<float> high;
      std::memcpy(x, x_ + d, sizeof x);
      std::memcpy(low, low_ + d, sizeof low);
      std::memcpy(high, high_ + d, sizeof high);
      widen_run(x, low, high, others_);
      std::memcpy(low_ + d, low, sizeof low);
      std::memcpy(high_ + d, high, sizeof high);
    }
  }
  [[nodiscard]] bool spoilt() const noexcept { return any_unusual(others_); }

  /// Begins again, with elements of any kind; then `widen_slowly` for each token, then `close`.
  void start() noexcept {
    for (std::uint32_t d = 0; d < runs_end_; ++d) {
      x_[d] = 0;
      low_[d] = value_range::most;
      high_[d] = -value_range::most;
    }
  }
  void widen_slowly() noexcept {
    for (std::uint32_t d = 0; d < dim_; ++d) {
      value_range r{low_[d], high_[d]};
      r.add(x_[d]);
      low_[d] = r.low;
      high_[d] = r.high;
    }
  }
  void close() noexcept {
    for (std::uint32_t d = 0; d < dim_; ++d) {
      value_range r{low_[d], high_[d]};
      r.close();
      low_[d] = r.low;
      high_[d] = r.high;
    }
  }
  void clean() noexcept {
    for (std::uint32_t d = 0; d < dim_; ++d) x_[d] = value_range{low_[d], high_[d]}.within(x_[d]);
  }

  template <unsigned Bits, bool ZeroPoints>
  void choose(std::byte* scales) noexcept {
    constexpr code_grid grid(Bits, ZeroPoints);
    for (std::uint32_t d = 0; d < dim_; d += quantise_width) {
      run_of<float> low;
      run_of<float> high;
      run_of<std::uint32_t> scale;
      run_of<std::uint32_t> zero;
      run_of<float> origin;
      run_of<float> factor;
      std::memcpy(low, low_ + d, sizeof low);
      std::memcpy(high, high_ + d, sizeof high);
      for (std::uint32_t j = 0; j < quantise_width; ++j) {
        const encoder e = encoder_of(grid, low[j], high[j]);
        scale[j] = e.scale;
        zero[j] = e.zero;
      }
      run_of<bf16> scale_run;
      run_of<bf16> zero_run;
      for (std::uint32_t j = 0; j < quantise_width; ++j) {
        origin[j] = std::bit_cast<float>(zero[j]);
        scale_run[j] = upper_half(scale[j]);
        zero_run[j] = upper_half(zero[j]);
      }
      for (std::uint32_t j = 0; j < quantise_width; ++j) factor[j] = factor_for(scale[j]);
      std::memcpy(origin_ + d, origin, sizeof origin);
      std::memcpy(factor_ + d, factor, sizeof factor);
      const std::size_t bytes = sizeof(bf16) * (dim_ - d < quantise_width ? dim_ - d : quantise_width);
      std::memcpy(scales + std::size_t{d} * sizeof(bf16), scale_run, bytes);
      if (ZeroPoints)
        std::memcpy(scales + quantization::zero_point<std::size_t>(d, dim_) * sizeof(bf16), zero_run, bytes);
    }
  }

  template <unsigned Bits, bool ZeroPoints>
  void encode(std::byte* codes) const noexcept {
    for (std::uint32_t d = 0; d < dim_; d += quantise_width) {
      run_of<float> x;
      run_of<float> origin;
      run_of<float> factor;
      std::memcpy(x, x_ + d, sizeof x);
      std::memcpy(origin, origin_ + d, sizeof origin);
      std::memcpy(factor, factor_ + d, sizeof factor);
      run_of<float> parts;
      for (std::uint32_t j = 0; j < quantise_width; ++j) parts[j] = (ZeroPoints ? x[j] - origin[j] : x[j]) * factor[j];
      run_of<std::int32_t> run_codes;
      nearest_codes<Bits, ZeroPoints>(parts, run_codes);
      store_codes<Bits>(run_codes, dim_ - d, codes + d * Bits / 8);
    }
  }

 private:
  std::uint32_t dim_;
  std::uint32_t runs_end_;
  run_of<std::uint32_t> others_ = {};
  float x_[max_quantised_dim];
  float low_[max_quantised_dim];
  float high_[max_quantised_dim];
  float origin_[max_quantised_dim];
  float factor_[max_quantised_dim];
};

template <unsigned Bits, bool ZeroPoints, class Read>
void seal_channels(std::uint32_t tokens, std::uint32_t dim, const Read& read, std::byte* codes,
                   std::int64_t token_stride, std::byte* scales) noexcept {
  channel_encoders channels(dim);
  for (std::uint32_t t = 0; t < tokens; ++t) {
    read(t, channels.x());
    channels.widen();
  }
  const bool spoilt = channels.spoilt();
  if (spoilt) {
    channels.start();
    for (std::uint32_t t = 0; t < tokens; ++t) {
      read(t, channels.x());
      channels.widen_slowly();
    }
    channels.close();
  }
  channels.choose<Bits, ZeroPoints>(scales);
  for (std::uint32_t t = 0; t < tokens; ++t) {
    read(t, channels.x());
    if (spoilt) channels.clean();
    channels.encode<Bits, ZeroPoints>(codes + static_cast<std::int64_t>(t) * token_stride);
  }
}

}  // namespace kvcache::detail
