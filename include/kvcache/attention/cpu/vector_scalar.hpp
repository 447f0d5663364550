// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

/// The vector interface in plain C++: four lanes that a compiler may turn into what its target has.
namespace kvcache::detail::isa_scalar {

inline constexpr std::size_t lanes = 4;
/// Rows of a product that are kept in registers together.
inline constexpr std::size_t row_block = 4;
/// Vectors of each of these rows, at most: 2 or 3.
inline constexpr std::size_t column_block = 3;

struct vec {
  float lane[lanes];
};
struct mask {
  bool lane[lanes];
};

template <class F>
KVCACHE_ALWAYS_INLINE vec lanewise(const F& f) noexcept {
  vec r;
  for (std::size_t i = 0; i < lanes; ++i) r.lane[i] = f(i);
  return r;
}

KVCACHE_ALWAYS_INLINE vec load(const float* from) noexcept {
  vec r;
  std::memcpy(&r, from, sizeof r);
  return r;
}
KVCACHE_ALWAYS_INLINE void store(float* to, const vec& x) noexcept { std::memcpy(to, &x, sizeof x); }
KVCACHE_ALWAYS_INLINE vec set1(float x) noexcept {
  return lanewise([&](std::size_t) { return x; });
}
KVCACHE_ALWAYS_INLINE vec add(const vec& a, const vec& b) noexcept {
  return lanewise([&](std::size_t i) { return a.lane[i] + b.lane[i]; });
}
KVCACHE_ALWAYS_INLINE vec sub(const vec& a, const vec& b) noexcept {
  return lanewise([&](std::size_t i) { return a.lane[i] - b.lane[i]; });
}
KVCACHE_ALWAYS_INLINE vec mul(const vec& a, const vec& b) noexcept {
  return lanewise([&](std::size_t i) { return a.lane[i] * b.lane[i]; });
}
KVCACHE_ALWAYS_INLINE vec div(const vec& a, const vec& b) noexcept {
  return lanewise([&](std::size_t i) { return a.lane[i] / b.lane[i]; });
}
/// a * b + c
KVCACHE_ALWAYS_INLINE vec fma(const vec& a, const vec& b, const vec& c) noexcept {
#if KVCACHE_FAST_FMA
  return lanewise([&](std::size_t i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
#else
  return lanewise([&](std::size_t i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
#endif
}
/// The larger one; b where either is no number.
KVCACHE_ALWAYS_INLINE vec larger(const vec& a, const vec& b) noexcept {
  return lanewise([&](std::size_t i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
KVCACHE_ALWAYS_INLINE vec smaller(const vec& a, const vec& b) noexcept {
  return lanewise([&](std::size_t i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}
KVCACHE_ALWAYS_INLINE vec magnitude(const vec& a) noexcept {
  return lanewise([&](std::size_t i) { return std::fabs(a.lane[i]); });
}
KVCACHE_ALWAYS_INLINE mask less(const vec& a, const vec& b) noexcept {
  mask r;
  for (std::size_t i = 0; i < lanes; ++i) r.lane[i] = a.lane[i] < b.lane[i];
  return r;
}
KVCACHE_ALWAYS_INLINE mask both(const mask& a, const mask& b) noexcept {
  mask r;
  for (std::size_t i = 0; i < lanes; ++i) r.lane[i] = a.lane[i] && b.lane[i];
  return r;
}
KVCACHE_ALWAYS_INLINE bool any(const mask& m) noexcept {
  bool r = false;
  for (std::size_t i = 0; i < lanes; ++i) r = r || m.lane[i];
  return r;
}
/// By bits: what is not chosen may hold anything.
KVCACHE_ALWAYS_INLINE vec select(const mask& m, const vec& yes, const vec& no) noexcept {
  vec r;
  for (std::size_t i = 0; i < lanes; ++i)
    std::memcpy(&r.lane[i], m.lane[i] ? &yes.lane[i] : &no.lane[i], sizeof(float));
  return r;
}
KVCACHE_ALWAYS_INLINE vec round(const vec& a) noexcept {
  return lanewise([&](std::size_t i) { return std::nearbyint(a.lane[i]); });
}
/// a * 2^n for whole n; 0 where n is below -126. What is no number cannot become an integer: it is taken for one below,
/// which leaves an `a` that is none none.
KVCACHE_ALWAYS_INLINE vec scale(const vec& a, const vec& n) noexcept {
  return lanewise([&](std::size_t i) {
    const float whole = n.lane[i] >= -126.0f ? n.lane[i] : -127.0f;
    const auto exponent = static_cast<std::uint32_t>(static_cast<std::int32_t>(whole) + 127) << 23;
    return a.lane[i] * std::bit_cast<float>(exponent);
  });
}

template <class T>
KVCACHE_ALWAYS_INLINE vec widen(const std::byte* from) noexcept {
  T x[lanes];
  std::memcpy(x, from, sizeof x);
  return lanewise([&](std::size_t i) { return to_float(x[i]); });
}

}  // namespace kvcache::detail::isa_scalar
