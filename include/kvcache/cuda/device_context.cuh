// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/cuda/context.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/fp8.hpp>

#include <cstdint>
#include <type_traits>

namespace kvcache::device {

/// The context of a thread on the device: empty, every function is an instruction or a few. Compute capability 8.0 and
/// later.
class device_context {
 public:
  KVCACHE_DEVICE_INLINE unsigned thread() const { return threadIdx.x; }
  KVCACHE_DEVICE_INLINE unsigned threads() const { return blockDim.x; }
  KVCACHE_DEVICE_INLINE unsigned lane() const { return threadIdx.x % warp_lanes; }
  KVCACHE_DEVICE_INLINE unsigned warp() const { return threadIdx.x / warp_lanes; }
  KVCACHE_DEVICE_INLINE unsigned block() const { return blockIdx.x; }
  KVCACHE_DEVICE_INLINE unsigned blocks() const { return gridDim.x; }

  template <class T>
  KVCACHE_DEVICE_INLINE std::remove_cv_t<T> load(const T* from) const {
    if constexpr (sizeof(T) == 16) {
      words4 x;
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3])
                   : "l"(from));
      return __builtin_bit_cast(std::remove_cv_t<T>, x);
    } else {
      return *from;
    }
  }
  template <class T>
  KVCACHE_DEVICE_INLINE void store(T* to, std::type_identity_t<T> x) const {
    if constexpr (sizeof(T) == 16) {
      const auto w = __builtin_bit_cast(words4, x);
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                   :
                   : "l"(to), "r"(w.w[0]), "r"(w.w[1]), "r"(w.w[2]), "r"(w.w[3])
                   : "memory");
    } else {
      *to = x;
    }
  }
  KVCACHE_DEVICE_INLINE std::uint32_t atomic_add(std::uint32_t* to, std::uint32_t n) const { return atomicAdd(to, n); }

  KVCACHE_DEVICE_INLINE void sync() const { __syncthreads(); }
  KVCACHE_DEVICE_INLINE void sync_warp() const { __syncwarp(); }
  template <class T>
  KVCACHE_DEVICE_INLINE T shuffle(T x, unsigned from) const {
    return __shfl_sync(0xffff'ffffu, x, static_cast<int>(from));
  }
  template <class T>
  KVCACHE_DEVICE_INLINE T shuffle_xor(T x, unsigned mask) const {
    return __shfl_xor_sync(0xffff'ffffu, x, static_cast<int>(mask));
  }
  KVCACHE_DEVICE_INLINE bool any(bool condition) const { return __any_sync(0xffff'ffffu, condition) != 0; }

  template <unsigned Bytes>
  KVCACHE_DEVICE_INLINE void copy_async(void* shared, const void* global, bool there) const {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "cp.async copies 4, 8 or 16 bytes");
    const unsigned to = address_of(shared);
    const unsigned size = there ? Bytes : 0;
    if constexpr (Bytes == 16)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" : : "r"(to), "l"(global), "r"(size) : "memory");
    else
      asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                   :
                   : "r"(to), "l"(global), "n"(Bytes), "r"(size)
                   : "memory");
  }
  KVCACHE_DEVICE_INLINE void copy_async_commit() const { asm volatile("cp.async.commit_group;" : : : "memory"); }
  template <unsigned Newer>
  KVCACHE_DEVICE_INLINE void copy_async_wait() const {
    asm volatile("cp.async.wait_group %0;" : : "n"(Newer) : "memory");
  }

  KVCACHE_DEVICE_INLINE void load_matrices(const void* row, std::uint32_t (&out)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address_of(row))
                 : "memory");
  }
  KVCACHE_DEVICE_INLINE void load_matrices_transposed(const void* row, std::uint32_t (&out)[4]) const {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(address_of(row))
                 : "memory");
  }

  KVCACHE_DEVICE_INLINE void multiply_add(bf16, float (&c)[4], const std::uint32_t (&a)[4],
                                          const std::uint32_t (&b)[2]) const {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
  KVCACHE_DEVICE_INLINE void multiply_add(f16, float (&c)[4], const std::uint32_t (&a)[4],
                                          const std::uint32_t (&b)[2]) const {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }

  KVCACHE_DEVICE_INLINE std::uint32_t pack(bf16, float x, float y) const {
    std::uint32_t two;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    return two;
  }
  KVCACHE_DEVICE_INLINE std::uint32_t pack(f16, float x, float y) const {
    std::uint32_t two;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(two) : "f"(y), "f"(x));
    return two;
  }
  KVCACHE_DEVICE_INLINE std::uint32_t widen(fp8_e4m3, std::uint16_t two) const {
#if KVCACHE_CONVERTS_FP8
    std::uint32_t out;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(out) : "h"(two));
    return out;
#else
    return pack(f16{}, to_float(fp8_e4m3{static_cast<std::uint8_t>(two)}),
                to_float(fp8_e4m3{static_cast<std::uint8_t>(two >> 8)}));
#endif
  }
  KVCACHE_DEVICE_INLINE std::uint32_t widen(fp8_e5m2, std::uint16_t two) const {
    return (two & 0xffu) << 8 | (two & 0xff00u) << 16;
  }

  KVCACHE_DEVICE_INLINE float exp2(float x) const {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  KVCACHE_DEVICE_INLINE float log2(float x) const {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  KVCACHE_DEVICE_INLINE float tanh(float x) const { return tanhf(x); }
  KVCACHE_DEVICE_INLINE float reciprocal(float x) const {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  }
  KVCACHE_DEVICE_INLINE float divide(float x, float y) const { return __fdiv_rn(x, y); }

 private:
  KVCACHE_DEVICE_INLINE static unsigned address_of(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }
};

static_assert(std::is_empty_v<device_context>);

}  // namespace kvcache::device
