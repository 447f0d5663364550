// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/context.hpp>
#include <kvcache/detail/bit_cast.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/quantise/ranges.hpp>
#include <kvcache/quantise/scales.hpp>
#include <kvcache/quantization.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

// Between the floats of a head and what is stored of them. A lane has four neighbours at a time: a warp's are a run of
// 128, and no group of a format ends inside a lane's. Which types they are is known at run time, and the same for all
// lanes.

namespace kvcache::device {

/// kvcache::bits, which reads a table that device code has not.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr unsigned stored_bits(dtype_id id) noexcept {
  const quantization q = quantization_of(id);
  if (q.bits != 0) return q.bits;
  switch (without_rotation(id)) {
    case dtype_id::float32: return 32;
    case dtype_id::float16:
    case dtype_id::bfloat16: return 16;
    default: return 8;
  }
}
static_assert([] {
  for (unsigned i = 0; i < kvcache::detail::dtype_count; ++i)
    if (stored_bits(static_cast<dtype_id>(i)) != bits(static_cast<dtype_id>(i))) return false;
  return true;
}());

/// kvcache::code_bytes.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr std::uint32_t stored_bytes(dtype_id id, std::uint32_t dim) noexcept {
  return (dim * stored_bits(id) + 7) / 8;
}

/// What a view says of K or of V.
struct kv_side {
  plane_view plane;
  plane_view scales;
  plane_view tail;
  dtype_id dtype;
  dtype_id tail_dtype;
  std::uint32_t dim;
};
KVCACHE_DEVICE_INLINE kv_side side_of(const kv_view& view, bool keys) {
  if (keys) return {view.k, view.k_scales, view.k_tail, view.k_dtype, view.k_tail_dtype(), view.head_dim};
  return {view.v, view.v_scales, view.v_tail, view.v_dtype, view.v_tail_dtype(), view.v_dim()};
}

KVCACHE_DEVICE_INLINE bool is_aligned(const void* p, std::size_t to) {
  return reinterpret_cast<std::uintptr_t>(p) % to == 0;
}

/// f(T{}) for the element type that `id` names, rotated or not.
template <class F>
KVCACHE_DEVICE_INLINE void with_element(dtype_id id, const F& f) {
  switch (without_rotation(id)) {
    case dtype_id::float32: return f(f32{});
    case dtype_id::float16: return f(f16{});
    case dtype_id::bfloat16: return f(bf16{});
    case dtype_id::float8_e4m3: return f(fp8_e4m3{});
    default: return f(fp8_e5m2{});
  }
}

template <class T>
struct alignas(4 * sizeof(T)) four_of {
  T x[4];
};

/// `count` elements, one to four; zeros for the others.
template <class T, context C>
KVCACHE_DEVICE_INLINE void load_four(const C& c, const T* from, std::uint32_t count, float (&x)[4]) {
  if (count == 4 && is_aligned(from, sizeof(four_of<T>))) {
    const four_of<T> all = c.load(reinterpret_cast<const four_of<T>*>(from));
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i) x[i] = to_float(all.x[i]);
  } else {
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i) {
      const float y = to_float(c.load(from + (i < count ? i : 0)));
      x[i] = i < count ? y : 0.0f;
    }
  }
}
template <class T, context C>
KVCACHE_DEVICE_INLINE void store_four(const C& c, T* to, std::uint32_t count, const T (&x)[4]) {
  if (count == 4 && is_aligned(to, sizeof(four_of<T>))) {
    c.store(reinterpret_cast<four_of<T>*>(to), {{x[0], x[1], x[2], x[3]}});
  } else {
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i)
      if (i < count) c.store(to + i, x[i]);
  }
}
/// Converts four floats, or `count` of them, to element `first` of a head and the next.
template <context C>
KVCACHE_DEVICE_INLINE void store_elements(const C& c, dtype_id dtype, std::byte* head, std::uint32_t first,
                                          std::uint32_t count, const float (&x)[4]) {
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
    const T y[4] = {from_float<T>(x[0]), from_float<T>(x[1]), from_float<T>(x[2]), from_float<T>(x[3])};
    store_four(c, reinterpret_cast<T*>(head) + first, count, y);
  });
}

/// The codes of `count` elements, one to four, at `from`, each of `bits` bits.
template <context C>
KVCACHE_DEVICE_INLINE std::uint32_t load_codes(const C& c, const std::byte* from, std::uint32_t bits,
                                               std::uint32_t count) {
  if (count == 4 && bits == 8 && is_aligned(from, 4)) return c.load(reinterpret_cast<const std::uint32_t*>(from));
  if (count == 4 && bits == 4 && is_aligned(from, 2)) return c.load(reinterpret_cast<const std::uint16_t*>(from));
  const std::uint32_t size = (count * bits + 7) / 8;
  std::uint32_t codes = 0;
  KVCACHE_UNROLL
  for (unsigned i = 0; i < 4; ++i) {
    const auto byte = static_cast<std::uint32_t>(c.load(from + (i < size ? i : 0)));
    codes |= (i < size ? byte : 0u) << (8 * i);
  }
  return codes;
}
template <context C>
KVCACHE_DEVICE_INLINE void store_codes(const C& c, std::byte* to, std::uint32_t bits, std::uint32_t count,
                                       std::uint32_t codes) {
  if (count == 4 && bits == 8 && is_aligned(to, 4)) {
    c.store(reinterpret_cast<std::uint32_t*>(to), codes);
  } else if (count == 4 && bits == 4 && is_aligned(to, 2)) {
    c.store(reinterpret_cast<std::uint16_t*>(to), static_cast<std::uint16_t>(codes));
  } else {
    const std::uint32_t size = (count * bits + 7) / 8;
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i)
      if (i < size) c.store(to + i, static_cast<std::byte>(codes >> (8 * i)));
  }
}

/// What the table of kvcache's quantisation holds for `fraction`, the 7 bits of a bf16: the same division.
template <context C>
KVCACHE_DEVICE_INLINE std::uint32_t inverse_of(const C& c, std::uint32_t fraction) {
  const auto scale = kvcache::detail::bit_cast<float>(0x3f80'0000u | fraction << 16);
  return kvcache::detail::bit_cast<std::uint32_t>(c.divide(kvcache::detail::code_parts, scale));
}

/// The ranges of a few lanes, a power of two of them, become one in each of these.
template <context C>
KVCACHE_DEVICE_INLINE void join_ranges(C& c, std::uint32_t lanes, kvcache::detail::value_range& r) {
  std::uint32_t nan = r.nan ? 1 : 0;
  KVCACHE_UNROLL
  for (unsigned mask = 1; mask < warp_lanes; mask *= 2) {
    if (mask >= lanes) break;
    const float low = c.shuffle_xor(r.low, mask);
    const float high = c.shuffle_xor(r.high, mask);
    nan |= c.shuffle_xor(nan, mask);
    r.low = low < r.low ? low : r.low;
    r.high = high > r.high ? high : r.high;
  }
  r.nan = nan != 0;
}

/// How codes of a format lie, known at run time: nothing is worked out anew for each of them.
KVCACHE_DEVICE_INLINE kvcache::detail::code_grid grid_of(quantization q) {
  using kvcache::detail::code_grid;
  constexpr code_grid grids[] = {code_grid(8, false), code_grid(4, false), code_grid(4, true), code_grid(2, true)};
  code_grid grid = grids[0];
  const auto take = [&](const code_grid& other) {
    grid.zero_points = other.zero_points;
    grid.signed_scale = other.signed_scale;
    grid.steps = other.steps;
    grid.per_step = other.per_step;
    grid.offset = other.offset;
  };
  if (q.bits == 2)
    take(grids[3]);
  else if (q.bits == 4 && q.zero_points)
    take(grids[2]);
  else if (q.bits == 4)
    take(grids[1]);
  return grid;
}

/// From an element to its code, as kvcache's quantisation does it.
struct code_maker {
  std::uint32_t scale;  ///< f32 bits, the upper half is stored; so are those of the zero point, 0 where there is none
  std::uint32_t zero;
  float factor;
  kvcache::detail::value_range range;

  template <context C>
  KVCACHE_DEVICE_INLINE static code_maker of(const C& c, const kvcache::detail::code_grid& grid,
                                             const kvcache::detail::value_range& range) {
    const kvcache::detail::encoder e = kvcache::detail::encoder_of(grid, range.low, range.high);
    return {e.scale, e.zero, kvcache::detail::factor_from(e.scale, inverse_of(c, (e.scale >> 16) & 0x7fu)), range};
  }
  [[nodiscard]] KVCACHE_DEVICE_INLINE std::uint32_t code(const kvcache::detail::code_grid& grid, std::uint32_t bits,
                                                         float x) const {
    const float parts = (range.within(x) - kvcache::detail::bit_cast<float>(zero)) * factor;
    const std::int32_t nearest = kvcache::detail::nearest_code(grid, parts);
    return static_cast<std::uint32_t>(grid.signed_scale && nearest > 15 ? 15 : nearest) & ((1u << bits) - 1u);
  }
};

/// kvcache::quantise_head, byte for byte, by a warp; `x` lies in shared memory. Scales are aligned to 2 bytes.
template <context C>
KVCACHE_DEVICE_INLINE void quantise_row(C& c, dtype_id dtype, const float* x, std::uint32_t dim, std::byte* codes,
                                        std::byte* scales) {
  using kvcache::detail::upper_half;
  using kvcache::detail::value_range;
  const quantization q = quantization_of(dtype);
  const kvcache::detail::code_grid grid = grid_of(q);
  auto* const scale_of = reinterpret_cast<bf16*>(scales);
  const std::uint32_t groups = q.scales(dim);
  value_range range;
  if (q.group == 0) {
    for (std::uint32_t d = c.lane(); d < dim; d += warp_lanes) range.add(x[d]);
    join_ranges(c, warp_lanes, range);
    range.close();
  }
  for (std::uint32_t begin = 0; begin < dim; begin += 4 * warp_lanes) {
    const std::uint32_t first = begin + 4 * c.lane();
    const std::uint32_t count = first >= dim ? 0 : dim - first < 4 ? dim - first : 4;
    float y[4];
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i) y[i] = i < count ? x[first + i] : 0.0f;
    if (q.group != 0) {
      range = {};
      KVCACHE_UNROLL
      for (unsigned i = 0; i < 4; ++i)
        if (i < count) range.add(y[i]);
      join_ranges(c, q.group / 4, range);
      range.close();
    }
    if (count == 0) continue;
    const code_maker maker = code_maker::of(c, grid, range);
    std::uint32_t word = 0;
    KVCACHE_UNROLL
    for (unsigned i = 0; i < 4; ++i) word |= (i < count ? maker.code(grid, q.bits, y[i]) : 0u) << (i * q.bits);
    store_codes(c, codes + first * q.bits / 8, q.bits, count, word);
    const std::uint32_t g = q.group == 0 ? 0 : first / q.group;
    if (first != g * q.group) continue;
    constexpr bf16 no_number{0x7fc0};
    c.store(scale_of + g, range.nan && !q.zero_points ? no_number : upper_half(maker.scale));
    if (q.zero_points) c.store(scale_of + groups + g, range.nan ? no_number : upper_half(maker.zero));
  }
}

/// Element `first` of a stored head and the next, `count` of them, one to four, as floats; what the others become is of
/// no use.
template <context C>
KVCACHE_DEVICE_INLINE void load_stored(const C& c, dtype_id dtype, const std::byte* head, const std::byte* scales,
                                       std::uint32_t dim, std::uint32_t first, std::uint32_t count, float (&x)[4]) {
  const quantization q = quantization_of(dtype);
  if (q.bits == 0) {
    with_element(dtype, [&](auto element) {
      using T = decltype(element);
      load_four(c, reinterpret_cast<const T*>(head) + first, count, x);
    });
    return;
  }
  const std::uint32_t word = load_codes(c, head + first * q.bits / 8, q.bits, count);
  const auto* const scale_of = reinterpret_cast<const bf16*>(scales);
  const std::uint32_t zeros = q.scales(dim);
  const std::uint32_t group = q.group == 0 ? 0 : first / q.group;
  KVCACHE_UNROLL
  for (unsigned i = 0; i < 4; ++i) {
    const std::uint32_t bits = word >> (i * q.bits) & ((1u << q.bits) - 1u);
    const std::int32_t code = q.bits == 8     ? std::int32_t{static_cast<std::int8_t>(bits)}
                              : q.zero_points ? static_cast<std::int32_t>(bits)
                                              : static_cast<std::int32_t>(bits) - 8;
    const std::uint32_t at = q.per_channel ? first + (i < count ? i : 0) : group;
    x[i] = static_cast<float>(code) * to_float(c.load(scale_of + at));
    if (q.zero_points) x[i] += to_float(c.load(scale_of + zeros + at));
  }
}

}  // namespace kvcache::device
