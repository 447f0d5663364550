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
#include <type_traits>

// What is stored must not depend on how a program was compiled. So nothing here divides or sums up floats in a way that
// -ffast-math might change, no sum follows a product that it could be fused with, and subnormal numbers count as 0.

namespace kvcache {

/// The longest vector that can be quantised or rotated.
inline constexpr std::uint32_t max_quantised_dim = 1024;

namespace detail {

/// Elements worked on together, in arrays of their own: a fixed count of what nothing else can point to lets the
/// compiler use whatever vectors the build allows. Loops of 16 g++ would unroll before it looks for vectors.
inline constexpr std::uint32_t quantise_width = 32;
template <class T>
using run_of = T[quantise_width];

[[nodiscard]] constexpr bool is_finite(float x) noexcept {
  return (std::bit_cast<std::uint32_t>(x) & 0x7f80'0000u) != 0x7f80'0000u;
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
      nan = nan || (std::bit_cast<std::uint32_t>(x) & 0x007f'ffffu) != 0;
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
  /// An element as it is encoded: what is not finite, or beyond the range, becomes the nearer end of it, and a NaN what
  /// is nearest to 0.
  [[nodiscard]] constexpr float within(float x) const noexcept {
    const std::uint32_t b = std::bit_cast<std::uint32_t>(x);
    const float ends = (b >> 31) != 0 ? low : high;
    const float number = is_finite(x) ? x : (b & 0x007f'ffffu) != 0 ? 0.0f : ends;
    return number < low ? low : number > high ? high : number;
  }
};

/// The sign's bit is set where x is not finite, or 2^126 or more in magnitude: such elements are rare, and encoded as
/// `value_range::within` says.
[[nodiscard]] KVCACHE_ALWAYS_INLINE constexpr std::uint32_t unusual(float x) noexcept {
  return (std::bit_cast<std::uint32_t>(x) & 0x7fff'ffffu) + 0x0180'0000u;
}

/// `count` elements, at most a run. What a run has too much repeats the first.
KVCACHE_ALWAYS_INLINE void load_run(const float* x, std::uint32_t count, run_of<float>& run) noexcept {
  if (count >= quantise_width) {
    std::memcpy(run, x, sizeof run);
  } else if (count == quantise_width / 2) {
    std::memcpy(run, x, sizeof run / 2);
    std::memcpy(run + quantise_width / 2, x, sizeof run / 2);
  } else {
    for (std::uint32_t j = 0; j < quantise_width; ++j) run[j] = x[j < count ? j : 0];
  }
}

/// Widens ranges, an element each, and says what is unusual.
KVCACHE_ALWAYS_INLINE void widen_run(const run_of<float>& x, run_of<float>& low, run_of<float>& high,
                                     run_of<std::uint32_t>& others) noexcept {
  for (std::uint32_t j = 0; j < quantise_width; ++j) {
    others[j] |= unusual(x[j]);
    low[j] = x[j] < low[j] ? x[j] : low[j];
    high[j] = x[j] > high[j] ? x[j] : high[j];
  }
}
[[nodiscard]] KVCACHE_ALWAYS_INLINE bool any_unusual(const run_of<std::uint32_t>& others) noexcept {
  std::uint32_t other = 0;
  for (const std::uint32_t o : others) other |= o;
  return (other >> 31) != 0;
}

/// The range of `count` elements, at least one. False where one is unusual; the range is then of no use.
[[nodiscard]] KVCACHE_ALWAYS_INLINE bool usual_range(const float* x, std::uint32_t count, value_range& r) noexcept {
  run_of<float> low;
  run_of<float> high;
  run_of<std::uint32_t> others = {};
  load_run(x, count, low);
  std::memcpy(high, low, sizeof high);
  for (std::uint32_t i = 0; i < count; i += quantise_width) {
    run_of<float> run;
    load_run(x + i, count - i, run);
    widen_run(run, low, high, others);
  }
  for (std::uint32_t j = 0; j < 16; ++j) {
    low[j] = low[j + 16] < low[j] ? low[j + 16] : low[j];
    high[j] = high[j + 16] > high[j] ? high[j + 16] : high[j];
  }
  for (std::uint32_t j = 0; j < 8; ++j) {
    low[j] = low[j + 8] < low[j] ? low[j + 8] : low[j];
    high[j] = high[j + 8] > high[j] ? high[j + 8] : high[j];
  }
  for (std::uint32_t j = 0; j < 4; ++j) {
    low[j] = low[j + 4] < low[j] ? low[j + 4] : low[j];
    high[j] = high[j + 4] > high[j] ? high[j + 4] : high[j];
  }
  r.low = low[0];
  r.high = high[0];
  for (std::uint32_t j = 1; j < 4; ++j) {
    r.low = low[j] < r.low ? low[j] : r.low;
    r.high = high[j] > r.high ? high[j] : r.high;
  }
  return !any_unusual(others);
}

/// The range of elements some of which are unusual, and the elements as they are encoded.
KVCACHE_NOINLINE inline value_range clean(const float* x, std::uint32_t count, float* encoded) noexcept {
  value_range r;
  for (std::uint32_t i = 0; i < count; ++i) r.add(x[i]);
  r.close();
  for (std::uint32_t i = 0; i < count; ++i) encoded[i] = r.within(x[i]);
  return r;
}

/// How the codes of a format lie: code = (x - origin) / scale + offset.
struct code_grid {
  bool zero_points;
  bool signed_scale;  ///< the scale has the sign that brings the element of largest magnitude to the lowest code
  float steps;        ///< scales from the origin to the element that is farthest from it
  float top;          ///< the largest (x - origin) / scale that has a code
  float offset;

  explicit constexpr code_grid(quantization q) noexcept
      : zero_points(q.zero_points),
        signed_scale(!q.zero_points && q.bits == 4),
        steps(q.zero_points ? static_cast<float>((1 << q.bits) - 1)
              : q.bits == 8 ? 127.0f
                            : 8.0f),
        top(signed_scale ? 7.0f : steps),
        offset(q.zero_points ? 0.0f
               : q.bits == 8 ? 128.0f
                             : 8.0f) {}
};

/// Codes are worked out in parts of so many to a step, so that rounding is a matter of integers.
inline constexpr float code_parts = 65536.0f;

/// code_parts / (1 + m / 128), as f32 bits, by m, the fraction of a bf16: a quotient worked out by the program would be
/// another one under -ffast-math.
struct inverse_table {
  std::uint32_t bits[128] = {};
  constexpr inverse_table() noexcept {
    for (std::uint32_t m = 0; m < 128; ++m)
      bits[m] = std::bit_cast<std::uint32_t>(code_parts / (1.0f + static_cast<float>(m) / 128.0f));
  }
};
inline constexpr inverse_table inverses;

/// code_parts / scale, where the scale is the upper half of a normal f32 of magnitude 2^-109 to 2^126, and 0 for 0.
[[nodiscard]] KVCACHE_ALWAYS_INLINE constexpr float factor_for(std::uint32_t scale) noexcept {
  const std::uint32_t exponent = (scale & 0x7f80'0000u) - 0x3f80'0000u;
  const std::uint32_t magnitude = inverses.bits[(scale >> 16) & 0x7fu] - exponent;
  return std::bit_cast<float>(scale == 0 ? 0u : magnitude | (scale & 0x8000'0000u));
}

/// What turns the elements of one group into codes.
struct encoder {
  std::uint32_t scale;  ///< f32 bits, of which the upper half is stored; so are those of the zero point
  std::uint32_t zero;
};
[[nodiscard]] constexpr bf16 upper_half(std::uint32_t bits) noexcept {
  return {static_cast<std::uint16_t>(bits >> 16)};
}

/// The scale is the least bf16 that reaches all elements, the zero point the greatest one that is not above them. A
/// scale below 2^-109, whose inverse would not fit, is 0. Without branches, so that a compiler can do some at once.
[[nodiscard]] KVCACHE_ALWAYS_INLINE constexpr encoder encoder_of(const code_grid& grid, float low,
                                                                 float high) noexcept {
  constexpr std::uint32_t sign_bit = 0x8000'0000u;
  // Upper halves of an f32; those of a negative number have to be rounded up for the number to go down.
  const std::uint32_t l = std::bit_cast<std::uint32_t>(low);
  const std::uint32_t down = (l + ((l >> 31) != 0 ? 0xffffu : 0u)) & 0xffff'0000u;
  const std::uint32_t zero = grid.zero_points && (l & 0x7f80'0000u) != 0 ? down : 0u;
  const float origin = std::bit_cast<float>(zero);

  const float largest = -low > high ? low : high;  // by magnitude
  const std::uint32_t largest_bits = std::bit_cast<std::uint32_t>(largest);
  // Of subnormal elements below a zero point of 0 the span may have a sign, and is 0 then.
  const std::uint32_t above = std::bit_cast<std::uint32_t>(high - origin);
  const std::uint32_t positive = (above & sign_bit) != 0 ? 0u : above;
  const float span = std::bit_cast<float>(grid.zero_points ? positive : largest_bits & ~sign_bit);
  // At most one bf16 beside what is looked for. The products are exact.
  const std::uint32_t about = (std::bit_cast<std::uint32_t>(span * (1.0f / grid.steps)) + 0xffffu) & 0xffff'0000u;
  const std::uint32_t below = about < 0x0001'0000u ? 0u : about - 0x0001'0000u;
  std::uint32_t scale = std::bit_cast<float>(about) * grid.steps < span ? about + 0x0001'0000u : about;
  scale = std::bit_cast<float>(below) * grid.steps >= span ? below : scale;
  constexpr std::uint32_t least = 18u << 23;  // 2^-109
  const bool none = scale < least;
  const std::uint32_t sign = grid.signed_scale ? ~largest_bits & sign_bit : 0u;
  return {none ? 0u : scale | sign, zero};
}

/// The code nearest to x, of two the upper one, within 1 / code_parts of a step.
[[nodiscard]] KVCACHE_ALWAYS_INLINE constexpr std::uint8_t code_of(float x, float origin, float factor, float top,
                                                                   std::int32_t offset) noexcept {
  const float parts = (x - origin) * factor;
  const float within = parts < top ? parts : top;
  return static_cast<std::uint8_t>((static_cast<std::int32_t>(within) + offset) >> 16);
}
[[nodiscard]] constexpr float top_parts(const code_grid& grid) noexcept { return grid.top * code_parts; }
[[nodiscard]] constexpr std::int32_t offset_parts(const code_grid& grid) noexcept {
  return static_cast<std::int32_t>((grid.offset + 0.5f) * code_parts);
}

/// Bytes that a run of codes takes.
template <unsigned Bits>
inline constexpr std::uint32_t run_bytes = quantise_width* Bits / 8;

/// Stores `count` codes of a run, at most all; what no code takes of the last byte becomes 0. Codes of 8 bits are
/// signed.
template <unsigned Bits>
KVCACHE_ALWAYS_INLINE void store_codes(run_of<std::uint8_t>& codes, std::uint32_t count, std::byte* to) noexcept {
  if (count < quantise_width)
    for (std::uint32_t j = count; j < quantise_width; ++j) codes[j] = 0;
  std::uint8_t packed[run_bytes<Bits>];
  for (std::uint32_t i = 0; i < run_bytes<Bits>; ++i) {
    if constexpr (Bits == 8)
      packed[i] = codes[i] ^ 0x80u;
    else if constexpr (Bits == 4)
      packed[i] = static_cast<std::uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
    else
      packed[i] = static_cast<std::uint8_t>(codes[4 * i] | codes[4 * i + 1] << 2 | codes[4 * i + 2] << 4 |
                                            codes[4 * i + 3] << 6);
  }
  if (count >= quantise_width)
    std::memcpy(to, packed, sizeof packed);
  else
    std::memcpy(to, packed, (count * Bits + 7) / 8);
}

/// The codes of a run, or the first `count` of them, less `offset`.
template <unsigned Bits>
KVCACHE_ALWAYS_INLINE void load_codes(const std::byte* from, std::uint32_t count, std::int32_t offset,
                                      run_of<float>& x) noexcept {
  std::uint8_t packed[run_bytes<Bits>] = {};
  if (count >= quantise_width)
    std::memcpy(packed, from, sizeof packed);
  else
    std::memcpy(packed, from, (count * Bits + 7) / 8);
  run_of<std::uint8_t> codes;
  for (std::uint32_t i = 0; i < run_bytes<Bits>; ++i)
    for (std::uint32_t j = 0; j < 8 / Bits; ++j)
      codes[i * (8 / Bits) + j] = static_cast<std::uint8_t>((packed[i] >> (j * Bits)) & ((1u << Bits) - 1u));
  for (std::uint32_t i = 0; i < quantise_width; ++i)
    x[i] = static_cast<float>(Bits == 8 ? std::int32_t{static_cast<std::int8_t>(codes[i])} : codes[i] - offset);
}

inline void write_scale(std::byte* scales, std::uint32_t index, bf16 x) noexcept {
  std::memcpy(scales + std::size_t{index} * sizeof x, &x, sizeof x);
}
[[nodiscard]] inline float read_scale(const std::byte* scales, std::uint32_t index) noexcept {
  bf16 x;
  std::memcpy(&x, scales + std::size_t{index} * sizeof x, sizeof x);
  return to_float(x);
}

/// Elements in the group that begins at `first`.
[[nodiscard]] constexpr std::uint32_t group_size(quantization q, std::uint32_t dim, std::uint32_t first) noexcept {
  return q.group == 0 || dim - first < q.group ? dim - first : q.group;
}

/// The ranges of all groups, in what their scales and zero points are, and `x` itself or, where something is unusual,
/// a copy in `encoded` that is not. `origin` and `factor` are those of the groups' codes.
inline const float* choose_groups(quantization q, const float* x, std::uint32_t dim, std::byte* scales, float* encoded,
                                  float* origin, float* factor) noexcept {
  const code_grid grid(q);
  const std::uint32_t count = q.scales(dim);
  const float* from = x;
  std::uint32_t first = 0;
  for (std::uint32_t g = 0; g < count; ++g) {
    const std::uint32_t size = group_size(q, dim, first);
    value_range range;
    if (!usual_range(x + first, size, range)) {
      if (from == x) {
        std::memcpy(encoded, x, dim * sizeof(float));
        from = encoded;
      }
      range = clean(x + first, size, encoded + first);
    }
    const encoder e = encoder_of(grid, range.low, range.high);
    origin[g] = std::bit_cast<float>(e.zero);
    factor[g] = factor_for(e.scale);
    constexpr bf16 no_number{0x7fc0};
    write_scale(scales, g, range.nan && !q.zero_points ? no_number : upper_half(e.scale));
    if (q.zero_points) write_scale(scales, count + g, range.nan ? no_number : upper_half(e.zero));
    first += size;
  }
  return from;
}

template <unsigned Bits>
void quantise_groups(quantization q, const float* x, std::uint32_t dim, std::byte* codes, std::byte* scales) noexcept {
  constexpr std::uint32_t most_groups = max_quantised_dim / 16;
  float encoded[max_quantised_dim];
  float origin[most_groups + 1];
  float factor[most_groups + 1];
  const float* const from = choose_groups(q, x, dim, scales, encoded, origin, factor);
  const code_grid grid(q);
  const float top = top_parts(grid);
  const std::int32_t offset = offset_parts(grid);
  for (std::uint32_t i = 0; i < dim; i += quantise_width) {
    run_of<float> run;
    run_of<std::uint8_t> run_codes;
    load_run(from + i, dim - i, run);
    if (q.group == quantise_width / 2) {  // two groups to a run
      const std::uint32_t g = i / (quantise_width / 2);
      const std::uint32_t next = dim - i > quantise_width / 2 ? g + 1 : g;
      const float origins[] = {origin[g], origin[next]};
      const float factors[] = {factor[g], factor[next]};
      run_of<float> from_there;
      run_of<float> by;
      for (std::uint32_t j = 0; j < quantise_width; ++j) {
        from_there[j] = j < quantise_width / 2 ? origins[0] : origins[1];
        by[j] = j < quantise_width / 2 ? factors[0] : factors[1];
      }
      for (std::uint32_t j = 0; j < quantise_width; ++j)
        run_codes[j] = code_of(run[j], from_there[j], by[j], top, offset);
    } else {
      const std::uint32_t g = q.group == 0 ? 0 : i / q.group;
      const float from_there = origin[g];
      const float by = factor[g];
      for (std::uint32_t j = 0; j < quantise_width; ++j) run_codes[j] = code_of(run[j], from_there, by, top, offset);
    }
    store_codes<Bits>(run_codes, dim - i, codes + i * Bits / 8);
  }
}

template <unsigned Bits>
void dequantise_groups(quantization q, const std::byte* codes, const std::byte* scales, std::uint32_t dim,
                       float* x) noexcept {
  const std::uint32_t count = q.scales(dim);
  const std::int32_t offset = q.zero_points ? 0 : 8;
  const std::uint32_t group = q.group == 0 ? dim : q.group;
  for (std::uint32_t i = 0; i < dim; i += quantise_width) {
    const std::uint32_t size = dim - i < quantise_width ? dim - i : quantise_width;
    run_of<float> run;
    load_codes<Bits>(codes + i * Bits / 8, size, offset, run);
    const std::uint32_t g = i / group;
    const std::uint32_t next = group == quantise_width / 2 && g + 1 < count ? g + 1 : g;  // of the second half
    const float scale = read_scale(scales, g);
    const float next_scale = read_scale(scales, next);
    for (std::uint32_t j = 0; j < quantise_width; ++j) run[j] *= j < quantise_width / 2 ? scale : next_scale;
    if (q.zero_points) {
      const float zero = read_scale(scales, count + g);
      const float next_zero = read_scale(scales, count + next);
      for (std::uint32_t j = 0; j < quantise_width; ++j) run[j] += j < quantise_width / 2 ? zero : next_zero;
    }
    if (size == quantise_width)
      std::memcpy(x + i, run, sizeof run);
    else
      std::memcpy(x + i, run, size * sizeof(float));
  }
}

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
      load(dim + d, zero);
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

  void choose(const code_grid& grid, std::byte* scales) noexcept {
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
      if (grid.zero_points) std::memcpy(scales + (std::size_t{dim_} + d) * sizeof(bf16), zero_run, bytes);
    }
  }

  template <unsigned Bits>
  void encode(const code_grid& grid, std::byte* codes) const noexcept {
    const float top = top_parts(grid);
    const std::int32_t offset = offset_parts(grid);
    for (std::uint32_t d = 0; d < dim_; d += quantise_width) {
      run_of<float> x;
      run_of<float> origin;
      run_of<float> factor;
      run_of<std::uint8_t> run_codes;
      std::memcpy(x, x_ + d, sizeof x);
      std::memcpy(origin, origin_ + d, sizeof origin);
      std::memcpy(factor, factor_ + d, sizeof factor);
      for (std::uint32_t j = 0; j < quantise_width; ++j)
        run_codes[j] = code_of(x[j], origin[j], factor[j], top, offset);
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

template <class T>
using rotated_bits = std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>;

/// x. The compiler does not know that `nothing` is 0, so -ffast-math cannot take the sum that x is apart.
template <class T>
[[nodiscard]] KVCACHE_ALWAYS_INLINE T settled(T x, rotated_bits<T> nothing) noexcept {
  return std::bit_cast<T>(static_cast<rotated_bits<T>>(std::bit_cast<rotated_bits<T>>(x) ^ nothing));
}

/// Two steps of a rotation: a, b, c and d become sums and differences of each other.
template <class T>
KVCACHE_ALWAYS_INLINE void rotate_four(T& a, T& b, T& c, T& d, rotated_bits<T> nothing) noexcept {
  const T sum = settled(a + b, nothing);
  const T difference = settled(a - b, nothing);
  const T other_sum = settled(c + d, nothing);
  const T other_difference = settled(c - d, nothing);
  a = sum + other_sum;
  b = difference + other_difference;
  c = sum - other_sum;
  d = difference - other_difference;
}

/// The first two steps for neighbours.
template <std::uint32_t Fours, class T>
KVCACHE_ALWAYS_INLINE void rotate_neighbours(T* x, rotated_bits<T> nothing) noexcept {
  T y[4 * Fours];
  std::memcpy(y, x, sizeof y);
  for (std::uint32_t i = 0; i < 4 * Fours; i += 4) rotate_four(y[i], y[i + 1], y[i + 2], y[i + 3], nothing);
  std::memcpy(x, y, sizeof y);
}

/// Two steps for what is `half`, two and three times as far apart.
template <std::uint32_t Width, class T>
KVCACHE_ALWAYS_INLINE void rotate_apart(T* x, std::uint32_t half, rotated_bits<T> nothing) noexcept {
  T y[4][Width];
  for (std::uint32_t k = 0; k < 4; ++k) std::memcpy(y[k], x + k * half, sizeof y[k]);
  for (std::uint32_t i = 0; i < Width; ++i) rotate_four(y[0][i], y[1][i], y[2][i], y[3][i], nothing);
  for (std::uint32_t k = 0; k < 4; ++k) std::memcpy(x + k * half, y[k], sizeof y[k]);
}

}  // namespace detail

/// Multiplies a vector of floats or doubles by an orthogonal, symmetric Hadamard matrix, in place; doing it twice gives
/// back the vector but for rounding. Where `dim` is no power of two, runs of its largest power of two are rotated each
/// by itself. O(dim log dim). Precondition: dim > 0 and below 2^31.
template <class T>
KVCACHE_NOINLINE void rotate(T* x, std::uint32_t dim) noexcept {
  const std::uint32_t run = dim & (~dim + 1);
  const int log2 = std::countr_zero(run);
  const T factor = static_cast<T>(log2 % 2 == 0 ? 1.0 : 0.70710678118654752) / static_cast<T>(1u << (log2 / 2));
  const detail::rotated_bits<T> nothing = dim >> 31;
  std::uint32_t half = 1;
  if (run >= 16) {
    std::uint32_t at = 0;
    for (; dim - at >= 64; at += 64) detail::rotate_neighbours<16>(x + at, nothing);
    for (; at < dim; at += 16) detail::rotate_neighbours<4>(x + at, nothing);
    for (at = 0; at < dim; at += 16) detail::rotate_apart<4>(x + at, 4, nothing);
    for (half = 16; 4 * half <= run; half *= 4)
      for (at = 0; at < dim; at += 4 * half)
        for (std::uint32_t i = at; i < at + half; i += 16) detail::rotate_apart<16>(x + i, half, nothing);
  }
  for (; half < run; half *= 2) {
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
/// scale_bytes at `scales`; of the last byte, what no element takes becomes 0. Each code is the nearest, but for 1 /
/// 65,536 of a step; all bytes are the same whatever the compiler and its options, -ffast-math included. O(dim).
/// Preconditions: the dtype is such a format, rotated or not (that is the caller's business), and dim is from 1 to
/// max_quantised_dim.
inline void quantise_head(dtype_id dtype, const float* x, std::uint32_t dim, std::byte* codes,
                          std::byte* scales) noexcept {
  const quantization q = quantization_of(dtype);
  KVCACHE_ASSERT(q.bits != 0 && !q.per_channel && dim > 0 && dim <= max_quantised_dim,
                 "quantise_head needs a format with scales per token, and a vector of 1 to 1024 elements");
  if (q.bits == 8)
    detail::quantise_groups<8>(q, x, dim, codes, scales);
  else
    detail::quantise_groups<4>(q, x, dim, codes, scales);
}

/// Seals one head of a block in a format whose scales are per channel: `read(token, x)` gives the head of a token as
/// dim floats, for each of `tokens` two times or more; codes of a token lie `token_stride` bytes behind those of the
/// one before. Infinities become the largest or the smallest finite element of their channel, a NaN what is nearest to
/// 0 in it: such a format has nothing that says "no number" of one token. Bytes as quantise_head says. O(tokens * dim).
/// Preconditions: as above, and tokens > 0.
template <class Read>
void seal_head(dtype_id dtype, std::uint32_t tokens, std::uint32_t dim, const Read& read, std::byte* codes,
               std::int64_t token_stride, std::byte* scales) noexcept {
  const quantization q = quantization_of(dtype);
  KVCACHE_ASSERT(q.per_channel && tokens > 0 && dim > 0 && dim <= max_quantised_dim,
                 "seal_head needs a format with scales per channel, a token, and vectors of 1 to 1024 elements");
  detail::channel_encoders channels(dim);
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
  const detail::code_grid grid(q);
  channels.choose(grid, scales);
  for (std::uint32_t t = 0; t < tokens; ++t) {
    read(t, channels.x());
    if (spoilt) channels.clean();
    std::byte* const to = codes + static_cast<std::int64_t>(t) * token_stride;
    if (q.bits == 8)
      channels.encode<8>(grid, to);
    else if (q.bits == 4)
      channels.encode<4>(grid, to);
    else
      channels.encode<2>(grid, to);
  }
}

/// The head of a token as floats, from its codes and from its scales or, per channel, those of its block. Each is the
/// number that the format says, correctly rounded, so it is the same on every processor. O(dim). Precondition: the
/// dtype is a format.
inline void dequantise_head(dtype_id dtype, const std::byte* codes, const std::byte* scales, std::uint32_t dim,
                            float* x) noexcept {
  const quantization q = quantization_of(dtype);
  if (q.per_channel) {
    if (q.bits == 8)
      detail::dequantise_channels<8>(q, codes, scales, dim, x);
    else if (q.bits == 4)
      detail::dequantise_channels<4>(q, codes, scales, dim, x);
    else
      detail::dequantise_channels<2>(q, codes, scales, dim, x);
  } else if (q.bits == 8) {
    detail::dequantise_groups<8>(q, codes, scales, dim, x);
  } else {
    detail::dequantise_groups<4>(q, codes, scales, dim, x);
  }
}

/// The head of a token as floats, whatever it is stored in; a rotated one stays rotated, a shifted one shifted. O(dim).
inline void read_head(const stored_head& from, std::uint32_t dim, float* x) noexcept {
  const dtype_id stored = without_rotation(from.dtype);
  if (quantization_of(stored).bits != 0)
    dequantise_head(stored, from.codes, from.scales, dim, x);
  else
    convert(from.codes, stored, dim, x);
}

}  // namespace kvcache
