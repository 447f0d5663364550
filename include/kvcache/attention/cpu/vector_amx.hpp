// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/cpu/vector_dot.hpp>
#include <kvcache/detail/config.hpp>

#include <cstddef>
#include <cstdint>

#if KVCACHE_X86
KVCACHE_AMX_BEGIN
/// Products of matrices of bf16 in AMX's eight registers of 16 rows of 64 bytes, beside the dot products of pairs.
///
/// The compiler's own functions are not used: g++ 12 takes no account of what they read, and both want literals.
namespace kvcache::detail::isa_avx512 {

/// What a register of matrices holds: rows, and bytes of a row.
inline constexpr std::size_t matrix_rows = 16;
inline constexpr std::size_t matrix_bytes = 64;

/// Takes the thread's registers of matrices for as long as it lives. They are nobody's across a call, so nothing of
/// the caller's is lost; left configured, they would be saved at every switch of threads.
class matrix_registers {
 public:
  matrix_registers() noexcept {
    struct alignas(64) {
      std::uint8_t palette = 1;
      std::uint8_t start_row = 0;
      std::uint8_t reserved[14] = {};
      std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shapes;
    static_assert(sizeof shapes == 64);
    __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~matrix_registers() { __asm__ volatile("tilerelease"); }
  matrix_registers(const matrix_registers&) = delete;
  matrix_registers& operator=(const matrix_registers&) = delete;
};

template <int To>
KVCACHE_ALWAYS_INLINE void zero_matrix() noexcept {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(To));
}
/// `stride` in bytes, from row to row.
template <int To>
KVCACHE_ALWAYS_INLINE void load_matrix(const void* from, std::size_t stride) noexcept {
  __asm__ volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(To), "r"(from), "r"(stride) : "memory");
}
template <int From>
KVCACHE_ALWAYS_INLINE void store_matrix(void* to, std::size_t stride) noexcept {
  __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(From), "r"(to), "r"(stride) : "memory");
}
/// Sum[m, n] += A[m, k] . B[k, n]: A of 16 rows of 32 elements, B of 16 rows of 16 pairs of k, as pairs lie. Products
/// of even k and those of odd k are summed apart, in order, as fused multiply-adds of f32, then both join the sum.
template <int Sum, int A, int B>
KVCACHE_ALWAYS_INLINE void multiply_matrices() noexcept {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(A), "i"(B));
}

/// 16 vectors of 16 pairs with rows and columns exchanged.
KVCACHE_ALWAYS_INLINE void transpose(pair_vec (&x)[16]) noexcept {
  pair_vec t[16];
  KVCACHE_UNROLL
  for (std::size_t i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  KVCACHE_UNROLL
  for (std::size_t i = 0; i < 16; i += 4) {  // x[i + j]: of every four columns the one at j, in the rows i to i + 3
    x[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  KVCACHE_UNROLL
  for (std::size_t j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(x[j], x[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(x[j], x[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(x[8 + j], x[12 + j], 0xdd);
  }
  KVCACHE_UNROLL
  for (std::size_t j = 0; j < 4; ++j) {
    x[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    x[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    x[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    x[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}

}  // namespace kvcache::detail::isa_avx512
KVCACHE_ISA_END
#endif
