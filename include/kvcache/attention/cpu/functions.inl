// SPDX-License-Identifier: Apache-2.0
// Exponentials and conversions over the vector interface of the namespace that includes this.

/// 2^x, to 1.2 units in the last place for x in [-126, 128); 0 below. 2^x = 2^n * 2^f with n whole and |f| <= 1/2,
/// the latter by a polynomial fitted at Chebyshev nodes. Exactly 1 at 0. No number stays none.
KVCACHE_ALWAYS_INLINE vec exp2(vec x) noexcept {
  x = larger(set1(-1000.0f), x);
  const vec n = round(x);
  const vec f = sub(x, n);
  vec p = set1(0.00015453163359779865f);
  p = fma(p, f, set1(0.0013390863314270973f));
  p = fma(p, f, set1(0.009618083015084267f));
  p = fma(p, f, set1(0.055503569543361664f));
  p = fma(p, f, set1(0.24022650718688965f));
  p = fma(p, f, set1(0.6931471824645996f));
  p = fma(p, f, set1(1.0f));
  return scale(p, n);
}

/// tanh(x): near 0 an odd polynomial fitted at Chebyshev nodes, elsewhere 1 - 2 / (e^2x + 1).
KVCACHE_ALWAYS_INLINE vec tanh(vec x) noexcept {
  const vec square = mul(x, x);
  vec p = set1(-0.006096714176237583f);
  p = fma(p, square, set1(0.020997179672122f));
  p = fma(p, square, set1(-0.05385090783238411f));
  p = fma(p, square, set1(0.1333276927471161f));
  p = fma(p, square, set1(-0.333333283662796f));
  const vec small_x = fma(mul(p, square), x, x);
  const vec bounded = smaller(set1(10.0f), larger(set1(-10.0f), x));
  const vec power = exp2(mul(bounded, set1(2 * log2_e)));
  const vec large_x = sub(set1(1.0f), div(set1(2.0f), add(power, set1(1.0f))));
  return select(less(magnitude(x), set1(0.625f)), small_x, large_x);
}

/// A masked logit. Finite, so that no arithmetic needs infinities; told from the real ones by `masked_below`.
inline constexpr float masked_logit = -3.4e38f;
inline constexpr float masked_below = -3.3e38f;
/// A row's maximum is followed only when it grows by more than this, in base 2: then the sums so far are scaled.
/// Weights stay below 2^8, so nothing is lost (the lazy rescale of Dao et al.'s later FlashAttention kernels).
inline constexpr float rescale_threshold = 8.0f;

/// One vector of K, V or Q as floats, padded with zeros to whole vectors.
template <class T>
KVCACHE_NOINLINE void widen_row(const std::byte* from, std::size_t dim, float* to) noexcept {
  std::size_t d = 0;
  for (; d + lanes <= dim; d += lanes) store(to + d, widen<T>(from + d * sizeof(T)));
  if (d < cpu::padded(dim)) {
    T rest[cpu::padding] = {};
    std::memcpy(rest, from + d * sizeof(T), (dim - d) * sizeof(T));
    for (std::size_t i = 0; d + i < cpu::padded(dim); i += lanes)
      store(to + d + i, widen<T>(reinterpret_cast<const std::byte*>(rest + i)));
  }
}

/// 16 elements of fp8, by way of f16: e5m2 is its upper half, and e4m3 shifted into it is 256 times too small.
template <class T>
KVCACHE_ALWAYS_INLINE void widen_fp8(const std::byte* from, float* to) noexcept {
  constexpr bool shifted = std::is_same_v<T, fp8_e4m3>;
  std::uint16_t halves[cpu::padding];
  for (std::size_t i = 0; i < cpu::padding; ++i) {
    const auto code = std::to_integer<std::uint16_t>(from[i]);
    const auto sign = static_cast<std::uint16_t>((code & 0x80u) << 8);
    const auto rest = static_cast<std::uint16_t>((code & 0x7fu) << (shifted ? 7 : 8));
    const auto number = static_cast<std::uint16_t>(shifted && rest == 0x3f80u ? 0x7e00u : rest);
    halves[i] = static_cast<std::uint16_t>(sign | number);
  }
  for (std::size_t i = 0; i < cpu::padding; i += lanes) {
    const vec x = widen<f16>(reinterpret_cast<const std::byte*>(halves + i));
    store(to + i, shifted ? mul(x, set1(256.0f)) : x);
  }
}
template <class T>
KVCACHE_NOINLINE void widen_fp8_row(const std::byte* from, std::size_t dim, float* to) noexcept {
  std::size_t d = 0;
  for (; d + cpu::padding <= dim; d += cpu::padding) widen_fp8<T>(from + d, to + d);
  if (d == dim) return;
  std::byte rest[cpu::padding] = {};
  std::memcpy(rest, from + d, dim - d);
  widen_fp8<T>(rest, to + d);
}

/// A head of K, V or Q as floats, padded with zeros to whole vectors; a rotated one stays rotated.
inline void widen_head(const stored_head& from, std::size_t dim, float* to) noexcept {
  switch (without_rotation(from.dtype)) {
    case dtype_id::float32: return widen_row<f32>(from.codes, dim, to);
    case dtype_id::float16: return widen_row<f16>(from.codes, dim, to);
    case dtype_id::bfloat16: return widen_row<bf16>(from.codes, dim, to);
    case dtype_id::float8_e4m3: return widen_fp8_row<fp8_e4m3>(from.codes, dim, to);
    case dtype_id::float8_e5m2: return widen_fp8_row<fp8_e5m2>(from.codes, dim, to);
    default:
      read_head(from, static_cast<std::uint32_t>(dim), to);
      for (std::size_t d = dim; d < cpu::padded(dim); ++d) to[d] = 0;
  }
}

/// One query of one head as floats, padded with zeros to whole vectors, and rotated as the keys are.
inline void read_query(const attention_call& call, std::uint32_t row, std::uint32_t head, float* to) noexcept {
  const std::int64_t first = row * call.q.row_stride + head * call.q.head_stride;
  widen_head({call.q.data + first * std::int64_t{bits(call.q_dtype) / 8}, nullptr, call.q_dtype}, call.q.head_dim, to);
  if (is_rotated(call.kv.k_dtype)) rotate(to, call.q.head_dim);
}

/// Whether any of `count` floats is infinite or no number, by bits.
inline bool not_finite(const float* x, std::size_t count) noexcept {
  bool found = false;
  for (std::size_t i = 0; i < count; ++i) found |= (std::bit_cast<std::uint32_t>(x[i]) & 0x7f80'0000u) == 0x7f80'0000u;
  return found;
}
