// SPDX-License-Identifier: Apache-2.0
// What the machine can do at most: reading memory, and multiplying and adding. Measured, never assumed.
#pragma once

#include <kvcache/attention/cpu/cpu.hpp>
#include <kvcache/memory/huge_page_allocator.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcache_bench {

inline double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Zeroed memory on huge pages where the system gives them.
class big_buffer {
 public:
  explicit big_buffer(std::size_t bytes) : bytes_(bytes), first_(allocator_.allocate(whole(bytes), alignment)) {
    std::memset(first_, 0, bytes);
  }
  big_buffer(const big_buffer&) = delete;
  big_buffer& operator=(const big_buffer&) = delete;
  ~big_buffer() { allocator_.deallocate(first_, whole(bytes_), alignment); }

  [[nodiscard]] std::byte* data() const { return static_cast<std::byte*>(first_); }
  [[nodiscard]] std::size_t size() const { return bytes_; }

 private:
  static constexpr std::size_t alignment = std::size_t{2} << 20;
  [[nodiscard]] static std::size_t whole(std::size_t bytes) { return (bytes + alignment - 1) / alignment * alignment; }

  kvcache::huge_page_allocator allocator_;
  std::size_t bytes_;
  void* first_;
};

#if defined(__x86_64__)
__attribute__((target("avx512f"))) inline std::uint64_t read_avx512(const std::byte* from, std::size_t bytes) {
  __m512i sum[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512()};
  for (std::size_t i = 0; i < bytes; i += 256) {
    for (std::size_t j = 0; j < 4; ++j) {
      __builtin_prefetch(from + i + j * 64 + 2048);
      sum[j] = _mm512_xor_si512(sum[j], _mm512_loadu_si512(from + i + j * 64));
    }
  }
  std::uint64_t words[8];
  _mm512_storeu_si512(words, _mm512_xor_si512(_mm512_xor_si512(sum[0], sum[1]), _mm512_xor_si512(sum[2], sum[3])));
  return words[0] ^ words[3] ^ words[7];
}

__attribute__((target("avx2"))) inline std::uint64_t read_avx2(const std::byte* from, std::size_t bytes) {
  __m256i sum[8] = {};
  for (std::size_t i = 0; i < bytes; i += 256) {
    for (std::size_t j = 0; j < 8; ++j) {
      if (j % 2 == 0) __builtin_prefetch(from + i + j * 32 + 2048);
      sum[j] = _mm256_xor_si256(sum[j], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + j * 32)));
    }
  }
  for (std::size_t j = 1; j < 8; ++j) sum[0] = _mm256_xor_si256(sum[0], sum[j]);
  return static_cast<std::uint64_t>(_mm256_extract_epi64(sum[0], 0));
}

__attribute__((target("avx512f"))) inline float multiply_add_avx512(std::size_t rounds) {
  __m512 sum[16];
  for (int i = 0; i < 16; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));  // all different, so none is spared
  const __m512 by = _mm512_set1_ps(0.5f);
  for (std::size_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (auto& x : sum) x = _mm512_fmadd_ps(x, by, by);
  }
  float total = 0;
  for (auto& x : sum) {
    float lane[16];
    _mm512_storeu_ps(lane, x);
    total += lane[0] + lane[15];
  }
  return total;
}

__attribute__((target("avx512f,avx512bf16"))) inline float dot_bf16(std::size_t rounds) {
  __m512 sum[16];
  for (int i = 0; i < 16; ++i) sum[i] = _mm512_set1_ps(static_cast<float>(i));
  const auto by = (__m512bh)_mm512_set1_epi32(0x3f803f80);  // ones
  for (std::size_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 16
    for (auto& x : sum) x = _mm512_dpbf16_ps(x, by, by);
  }
  float total = 0;
  for (auto& x : sum) {
    float lane[16];
    _mm512_storeu_ps(lane, x);
    total += lane[0] + lane[15];
  }
  return total;
}

/// Products of 16 x 32 and 32 x 16 elements.
__attribute__((target("amx-tile,amx-bf16"))) inline float multiply_matrices_bf16(std::size_t rounds) {
  struct alignas(64) {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } shapes;
  alignas(64) float sums[16 * 16] = {};
  __asm__ volatile("ldtilecfg %0" : : "m"(shapes));
  for (std::size_t i = 0; i < rounds; ++i)
    __asm__ volatile(
        "tdpbf16ps %tmm6, %tmm4, %tmm0\n tdpbf16ps %tmm7, %tmm4, %tmm1\n"
        "tdpbf16ps %tmm6, %tmm5, %tmm2\n tdpbf16ps %tmm7, %tmm5, %tmm3");
  __asm__ volatile("tilestored %%tmm0, (%0,%1,1)\n tilerelease" : : "r"(sums), "r"(std::size_t{64}) : "memory");
  return sums[0];
}

__attribute__((target("avx2,fma"))) inline float multiply_add_avx2(std::size_t rounds) {
  __m256 sum[12];
  for (int i = 0; i < 12; ++i) sum[i] = _mm256_set1_ps(static_cast<float>(i));
  const __m256 by = _mm256_set1_ps(0.5f);
  for (std::size_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (auto& x : sum) x = _mm256_fmadd_ps(x, by, by);
  }
  float total = 0;
  for (auto& x : sum) total += _mm256_cvtss_f32(x);
  return total;
}
#endif

inline std::uint64_t read_plain(const std::byte* from, std::size_t bytes) {
  std::uint64_t sum[4] = {};
  for (std::size_t i = 0; i < bytes; i += 32) {
    std::uint64_t x[4];
    std::memcpy(x, from + i, 32);
    for (std::size_t j = 0; j < 4; ++j) sum[j] += x[j];
  }
  return sum[0] + sum[1] + sum[2] + sum[3];
}

inline float multiply_add_plain(std::size_t rounds) {
  float sum[16];
  for (int i = 0; i < 16; ++i) sum[i] = static_cast<float>(i);
  for (std::size_t i = 0; i < rounds; ++i)
    for (auto& x : sum) x = x * 0.5f + 0.5f;
  float total = 0;
  for (auto& x : sum) total += x;
  return total;
}

/// Bytes per second that the pool's threads read together, streaming through `memory` once.
inline double read_bandwidth(kvcache::thread_pool& pool, const big_buffer& memory) {
  std::vector<std::uint64_t> sums(pool.threads() * std::size_t{8});
  const double begin = seconds();
  pool.run([&](unsigned ith, unsigned nth) {
    const std::size_t share = memory.size() / nth / 4096 * 4096;
    const std::byte* const from = memory.data() + ith * share;
#if defined(__x86_64__)
    if (kvcache::best_isa() >= kvcache::cpu_isa::avx512)
      sums[ith * 8] = read_avx512(from, share);
    else if (kvcache::best_isa() == kvcache::cpu_isa::avx2)
      sums[ith * 8] = read_avx2(from, share);
    else
#endif
      sums[ith * 8] = read_plain(from, share);
  });
  const double time = seconds() - begin;
  volatile std::uint64_t keep = 0;
  for (const std::uint64_t s : sums) keep = keep + s;
  return static_cast<double>(memory.size() / pool.threads() / 4096 * 4096 * pool.threads()) / time;
}

/// What a peak is made of.
enum class operation : std::uint8_t { multiply_add, dot, matrix };

/// Floating point operations per second that the pool's threads do together: f32 multiply-adds, dot products of bf16,
/// or AMX's products of matrices of bf16. 0 where the processor has no such.
inline double peak_flops(kvcache::thread_pool& pool, operation kind) {
  const auto least = kind == operation::matrix ? kvcache::cpu_isa::amx
                     : kind == operation::dot  ? kvcache::cpu_isa::avx512_dot
                                               : kvcache::cpu_isa::scalar;
  if (kvcache::best_isa() < least) return 0;
  std::vector<float> sums(pool.threads() * std::size_t{16});
  const std::size_t rounds = kind == operation::matrix ? 200'000 : 2'000'000;
  double per_round = 32;
  const double begin = seconds();
  pool.run([&](unsigned ith, unsigned) {
    double flops = 16 * 2;
    float sum = 0;
#if defined(__x86_64__)
    if (kind == operation::matrix) {
      sum = multiply_matrices_bf16(rounds);
      flops = 4 * 2 * 16 * 16 * 32;
    } else if (kind == operation::dot) {
      sum = dot_bf16(rounds);
      flops = 16 * 64;
    } else if (kvcache::best_isa() >= kvcache::cpu_isa::avx512) {
      sum = multiply_add_avx512(rounds);
      flops = 16 * 32;
    } else if (kvcache::best_isa() == kvcache::cpu_isa::avx2) {
      sum = multiply_add_avx2(rounds);
      flops = 12 * 16;
    } else
#endif
    {
      sum = multiply_add_plain(rounds);
    }
    sums[ith * 16] = sum;
    if (ith == 0) per_round = flops;
  });
  const double time = seconds() - begin;
  volatile float keep = 0;
  for (const float s : sums) keep = keep + s;
  return per_round * static_cast<double>(rounds) * pool.threads() / time;
}

}  // namespace kvcache_bench
