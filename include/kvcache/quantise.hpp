// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/convert.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/quantization.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace kvcache {

/// The longest vector that can be quantised or rotated.
inline constexpr std::uint32_t max_quantised_dim = 1024;

namespace detail {

/// Elements looked at together: a fixed count lets the compiler use whatever vectors the build allows.
inline constexpr std::uint32_t quantise_width = 16;

[[nodiscard]] constexpr bool is_finite(float x) noexcept {
  return (std::bit_cast<std::uint32_t>(x) & 0x7f80'0000u) != 0x7f80'0000u;
}
[[nodiscard]] constexpr bool is_nan(float x) noexcept {
  return (std::bit_cast<std::uint32_t>(x) & 0x7fff'ffffu) > 0x7f80'0000u;
}

/// The smallest and largest finite element of some, and whether one is no number. Magnitudes beyond 2^126 count as
/// that, so that a range fits an f32.
struct value_range {
  static constexpr float most = 0x1p126f;
  float low = most;
  float high = -most;
  bool nan = false;

  constexpr void add(float x) noexcept {
    if (!is_finite(x)) {
      nan = nan || is_nan(x);
      return;
    }
    low = x < low ? x : low;
    high = x > high ? x : high;
  }
  /// Of at least one element: 0 to 0 where none was finite.
  constexpr void close() noexcept {
    if (low > high) low = high = 0;
    low = low < -most ? -most : low;
    high = high > most ? most : high;
  }
};

KVCACHE_ALWAYS_INLINE value_range range_of(const float* x, std::uint32_t count) noexcept {
  value_range r;
  std::uint32_t i = 0;
  float low[quantise_width];
  float high[quantise_width];
  std::uint32_t others[quantise_width] = {};  // the sign's bit is set where something was not finite
  for (std::uint32_t j = 0; j < quantise_width; ++j) {
    low[j] = value_range::most;
    high[j] = -value_range::most;
  }
  for (; count - i >= quantise_width; i += quantise_width) {
    for (std::uint32_t j = 0; j < quantise_width; ++j) {
      const float y = x[i + j];
      others[j] |= (std::bit_cast<std::uint32_t>(y) & 0x7f80'0000u) + 0x0080'0000u;
      low[j] = y < low[j] ? y : low[j];
      high[j] = y > high[j] ? y : high[j];
    }
  }
  std::uint32_t other = 0;
  for (const std::uint32_t o : others) other |= o;
  if ((other >> 31) != 0) {
    i = 0;
  } else {
    for (std::uint32_t j = 0; j < quantise_width; ++j) {
      r.low = low[j] < r.low ? low[j] : r.low;
      r.high = high[j] > r.high ? high[j] : r.high;
    }
  }
  for (; i < count; ++i) r.add(x[i]);
  r.close();
  return r;
}

/// The bf16 next to x away from 0, or x itself. x is finite and no larger than value_range::most.
[[nodiscard]] constexpr bf16 away_from_zero(float x) noexcept {
  return {static_cast<std::uint16_t>((std::bit_cast<std::uint32_t>(x) + 0xffffu) >> 16)};
}
[[nodiscard]] constexpr bf16 downwards(float x) noexcept {
  return x < 0 ? away_from_zero(x) : bf16{static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16)};
}

/// An element that is to be encoded: what is not finite, or beyond the range, becomes the nearer end of it, and a NaN
/// what is nearest to 0.
[[nodiscard]] KVCACHE_ALWAYS_INLINE constexpr float within(float x, float low, float high) noexcept {
  const std::uint32_t b = std::bit_cast<std::uint32_t>(x);
  const float ends = (b >> 31) != 0 ? low : high;
  const float number = (b & 0x7fff'ffffu) > 0x7f80'0000u ? 0.0f : (b & 0x7fff'ffffu) == 0x7f80'0000u ? ends : x;
  return number < low ? low : number > high ? high : number;
}

[[nodiscard]] KVCACHE_ALWAYS_INLINE constexpr int code_of(float x, float origin, float inverse, float offset,
                                                          int last) noexcept {
  const int c = static_cast<int>((x - origin) * inverse + offset);
  return c < 0 ? 0 : c > last ? last : c;
}

/// What turns the elements of one group into codes: (x - origin) * inverse + offset, rounded down, at most `last`.
struct encoder {
  bf16 scale{0};
  bf16 zero{0};
  float origin = 0;   // taken from x
  float inverse = 0;  // 0 where the scale is
  float offset = 0;
  float low = 0;  // what infinities are taken for
  float high = 0;
  int last = 0;

  constexpr encoder() noexcept = default;
  /// Scales are rounded away from 0 and zero points down, so that all elements stay within the codes. What is smaller
  /// than the least normal number counts as 0.
  constexpr encoder(quantization q, const value_range& r) noexcept : low(r.low), high(r.high) {
    last = q.bits == 8 ? 255 : q.bits == 4 ? 15 : 3;
    float step = 0;
    if (q.zero_points) {
      zero = downwards(r.low);
      origin = to_float(zero);
      step = (r.high - origin) / static_cast<float>(last);
      offset = 0.5f;
    } else {
      const float largest = -r.low > r.high ? r.low : r.high;  // by magnitude
      step = q.bits == 8 ? (largest < 0 ? -largest : largest) / 127.0f : largest / -8.0f;
      offset = q.bits == 8 ? 128.5f : 8.5f;
    }
    constexpr float least = 0x1p-125f;
    if (step < least && step > -least) return;
    scale = away_from_zero(step);
    inverse = 1.0f / to_float(scale);
  }
};

/// Codes of `count` elements, one a byte.
KVCACHE_ALWAYS_INLINE void encode(const encoder& e, const float* x, std::uint32_t count, std::uint8_t* codes) noexcept {
  std::uint32_t i = 0;
  for (; count - i >= quantise_width; i += quantise_width) {
    std::uint8_t run[quantise_width];
    for (std::uint32_t j = 0; j < quantise_width; ++j)
      run[j] =
          static_cast<std::uint8_t>(code_of(within(x[i + j], e.low, e.high), e.origin, e.inverse, e.offset, e.last));
    std::memcpy(codes + i, run, quantise_width);
  }
  for (; i < count; ++i)
    codes[i] = static_cast<std::uint8_t>(code_of(within(x[i], e.low, e.high), e.origin, e.inverse, e.offset, e.last));
}

/// Codes, one a byte, to where they are stored.
inline void pack_codes(unsigned code_bits, const std::uint8_t* codes, std::uint32_t dim, std::byte* to) noexcept {
  constexpr std::uint32_t width = 2 * quantise_width;
  const std::uint32_t each = 8 / code_bits;
  std::uint32_t d = 0;
  for (; dim - d >= width; d += width) {
    std::uint8_t run[width];  // of their own, so that a compiler need not ask whether the two overlap
    std::uint8_t packed[width];
    std::memcpy(run, codes + d, width);
    if (code_bits == 8) {  // signed
      for (std::uint32_t i = 0; i < width; ++i) packed[i] = run[i] ^ 0x80u;
    } else if (code_bits == 4) {
      for (std::uint32_t i = 0; i < width / 2; ++i)
        packed[i] = static_cast<std::uint8_t>(run[2 * i] | run[2 * i + 1] << 4);
    } else {
      for (std::uint32_t i = 0; i < width / 4; ++i)
        packed[i] =
            static_cast<std::uint8_t>(run[4 * i] | run[4 * i + 1] << 2 | run[4 * i + 2] << 4 | run[4 * i + 3] << 6);
    }
    std::memcpy(to + d / each, packed, width / each);
  }
  for (; d < dim; d += each) {
    unsigned byte = code_bits == 8 ? 0x80u : 0;
    for (std::uint32_t i = 0; i < each && d + i < dim; ++i) byte ^= unsigned{codes[d + i]} << (i * code_bits);
    to[d / each] = static_cast<std::byte>(byte);
  }
}

inline void write_scale(std::byte* scales, std::uint32_t index, bf16 x) noexcept {
  std::memcpy(scales + std::size_t{index} * sizeof x, &x, sizeof x);
}
[[nodiscard]] inline float read_scale(const std::byte* scales, std::uint32_t index) noexcept {
  bf16 x;
  std::memcpy(&x, scales + std::size_t{index} * sizeof x, sizeof x);
  return to_float(x);
}

/// The code of element `d`, signed where codes of 8 bits are.
[[nodiscard]] inline int read_code(unsigned code_bits, const std::byte* codes, std::uint32_t d) noexcept {
  if (code_bits == 8) return static_cast<std::int8_t>(codes[d]);
  const std::uint32_t each = 8 / code_bits;
  return (static_cast<int>(codes[d / each]) >> (d % each * code_bits)) & ((1 << code_bits) - 1);
}

}  // namespace detail

/// Multiplies a vector of floats or doubles by an orthogonal, symmetric Hadamard matrix, in place; doing it twice gives
/// back the vector but for rounding. Where `dim` is no power of two, runs of its largest power of two are rotated each
/// by itself. O(dim log dim). Precondition: dim > 0.
template <class T>
void rotate(T* x, std::uint32_t dim) noexcept {
  const std::uint32_t run = dim & (~dim + 1);
  const int log2 = std::countr_zero(run);
  const T factor = static_cast<T>(log2 % 2 == 0 ? 1.0 : 0.70710678118654752) / static_cast<T>(1u << (log2 / 2));
  for (std::uint32_t half = 1; half < run; half *= 2) {
    for (std::uint32_t at = 0; at < dim; at += 2 * half) {
      for (std::uint32_t i = at; i < at + half; ++i) {
        const T a = x[i];
        const T b = x[i + half];
        x[i] = a + b;
        x[i + half] = a - b;
      }
    }
  }
  for (std::uint32_t i = 0; i < dim; ++i) x[i] *= factor;
}

/// Stores one head of a token in a format whose scales are per token. Infinities become the largest or the smallest of
/// the finite elements that share their scale; a NaN makes all of these a NaN. Needs code_bytes at `codes` and
/// scale_bytes at `scales`; of the last byte, what no element takes becomes 0. O(dim). Preconditions: the dtype is such
/// a format, rotated or not (that is the caller's business), and dim is from 1 to max_quantised_dim.
inline void quantise_head(dtype_id dtype, const float* x, std::uint32_t dim, std::byte* codes,
                          std::byte* scales) noexcept {
  const quantization q = quantization_of(dtype);
  KVCACHE_ASSERT(q.bits != 0 && !q.per_channel && dim > 0 && dim <= max_quantised_dim,
                 "quantise_head needs a format with scales per token, and a vector of 1 to 1024 elements");
  std::uint8_t wide[max_quantised_dim];
  const std::uint32_t count = q.scales(dim);
  const std::uint32_t group = q.group == 0 ? dim : q.group;
  for (std::uint32_t g = 0; g < count; ++g) {
    const std::uint32_t first = g * group;
    const std::uint32_t size = dim - first < group ? dim - first : group;
    const detail::value_range range = detail::range_of(x + first, size);
    detail::encoder e(q, range);
    detail::encode(e, x + first, size, wide + first);
    if (range.nan) (q.zero_points ? e.zero : e.scale) = {0x7fc0};
    detail::write_scale(scales, g, e.scale);
    if (q.zero_points) detail::write_scale(scales, count + g, e.zero);
  }
  detail::pack_codes(q.bits, wide, dim, codes);
}

/// Seals one head of a block in a format whose scales are per channel: `read(token, x)` gives the head of a token as
/// dim floats, for each of `tokens` twice; codes of a token lie `token_stride` bytes behind those of the one before.
/// Infinities become the largest or the smallest finite element of their channel, a NaN what is nearest to 0 in it:
/// such a format has nothing that says "no number" of one token. O(tokens * dim). Preconditions: as above.
template <class Read>
void seal_head(dtype_id dtype, std::uint32_t tokens, std::uint32_t dim, const Read& read, std::byte* codes,
               std::int64_t token_stride, std::byte* scales) noexcept {
  const quantization q = quantization_of(dtype);
  KVCACHE_ASSERT(q.per_channel && dim > 0 && dim <= max_quantised_dim,
                 "seal_head needs a format with scales per channel, and vectors of 1 to 1024 elements");
  // One array a member, so that a compiler may take channels together.
  float x[max_quantised_dim];
  float low[max_quantised_dim];
  float high[max_quantised_dim];
  for (std::uint32_t d = 0; d < dim; ++d) {
    low[d] = detail::value_range::most;
    high[d] = -detail::value_range::most;
  }
  for (std::uint32_t t = 0; t < tokens; ++t) {
    read(t, x);
    for (std::uint32_t d = 0; d < dim; ++d) {
      const bool finite = detail::is_finite(x[d]);
      low[d] = finite && x[d] < low[d] ? x[d] : low[d];
      high[d] = finite && x[d] > high[d] ? x[d] : high[d];
    }
  }
  float origin[max_quantised_dim];
  float inverse[max_quantised_dim];
  float offset = 0;
  int last = 0;
  for (std::uint32_t d = 0; d < dim; ++d) {
    detail::value_range range{low[d], high[d]};
    range.close();
    low[d] = range.low;
    high[d] = range.high;
    const detail::encoder e(q, range);
    origin[d] = e.origin;
    inverse[d] = e.inverse;
    offset = e.offset;
    last = e.last;
    detail::write_scale(scales, d, e.scale);
    if (q.zero_points) detail::write_scale(scales, dim + d, e.zero);
  }
  std::uint8_t wide[max_quantised_dim];
  for (std::uint32_t t = 0; t < tokens; ++t) {
    read(t, x);
    for (std::uint32_t d = 0; d < dim; ++d)
      wide[d] = static_cast<std::uint8_t>(
          detail::code_of(detail::within(x[d], low[d], high[d]), origin[d], inverse[d], offset, last));
    detail::pack_codes(q.bits, wide, dim, codes + static_cast<std::int64_t>(t) * token_stride);
  }
}

/// The head of a token as floats, from its codes and from its scales or, per channel, those of its block. Each is the
/// number that the format says, correctly rounded, so it is the same on every processor. O(dim). Precondition: the
/// dtype is a format.
inline void dequantise_head(dtype_id dtype, const std::byte* codes, const std::byte* scales, std::uint32_t dim,
                            float* x) noexcept {
  const quantization q = quantization_of(dtype);
  const std::uint32_t count = q.scales(dim);
  const std::uint32_t group = q.per_channel ? 1 : q.group == 0 ? dim : q.group;
  const int offset = q.zero_points || q.bits == 8 ? 0 : 8;
  for (std::uint32_t g = 0; g < count; ++g) {
    const float scale = detail::read_scale(scales, g);
    const float zero = q.zero_points ? detail::read_scale(scales, count + g) : 0.0f;
    const std::uint32_t end = dim - g * group < group ? dim : (g + 1) * group;
    for (std::uint32_t d = g * group; d < end; ++d)
      x[d] = zero + scale * static_cast<float>(detail::read_code(q.bits, codes, d) - offset);
  }
}

/// The head of a token as floats, whatever it is stored in; a rotated one stays rotated. O(dim).
inline void read_head(const stored_head& from, std::uint32_t dim, float* x) noexcept {
  const dtype_id stored = without_rotation(from.dtype);
  if (quantization_of(stored).bits != 0)
    dequantise_head(stored, from.codes, from.scales, dim, x);
  else
    convert(from.codes, stored, dim, x);
}

}  // namespace kvcache
