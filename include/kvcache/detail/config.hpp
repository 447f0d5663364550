// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>

/// The one place for compiler macros: what the compiler offers is asked here and nowhere else.

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS)
#define KVCACHE_HAS_EXCEPTIONS 1
#else
#define KVCACHE_HAS_EXCEPTIONS 0
#endif

// Preconditions are checked in Debug builds and wherever the engine asks for it.
#if !defined(KVCACHE_CHECKS)
#if defined(NDEBUG)
#define KVCACHE_CHECKS 0
#else
#define KVCACHE_CHECKS 1
#endif
#endif

// The bodies of device kernels are plain functions to a host compiler, which tests run; nvcc makes them device code
// only, so that they may call what exists only there.
#if defined(__CUDACC__)
#define KVCACHE_HOST_DEVICE __host__ __device__
#define KVCACHE_DEVICE_INLINE __device__ __forceinline__
#else
#define KVCACHE_HOST_DEVICE
#define KVCACHE_DEVICE_INLINE inline
#endif
// A name of the architectures that a file is compiled for, say sm_800_900: kernels of files that are compiled for
// others are not the same.
#if defined(__CUDACC__)
#define KVCACHE_JOIN_1(a) sm_##a
#define KVCACHE_JOIN_2(a, b) sm_##a##_##b
#define KVCACHE_JOIN_3(a, b, c) sm_##a##_##b##_##c
#define KVCACHE_JOIN_4(a, b, c, d) sm_##a##_##b##_##c##_##d
#define KVCACHE_JOIN_5(a, b, c, d, e) sm_##a##_##b##_##c##_##d##_##e
#define KVCACHE_JOIN_6(a, b, c, d, e, f) sm_##a##_##b##_##c##_##d##_##e##_##f
#define KVCACHE_JOIN_7(a, b, c, d, e, f, g) sm_##a##_##b##_##c##_##d##_##e##_##f##_##g
#define KVCACHE_JOIN_8(a, b, c, d, e, f, g, h, ...) sm_##a##_##b##_##c##_##d##_##e##_##f##_##g##_##h
#define KVCACHE_JOIN_OF(a, b, c, d, e, f, g, h, join, ...) join
#define KVCACHE_JOIN(...) \
  KVCACHE_JOIN_OF(__VA_ARGS__, KVCACHE_JOIN_8, KVCACHE_JOIN_7, KVCACHE_JOIN_6, KVCACHE_JOIN_5, KVCACHE_JOIN_4, \
                  KVCACHE_JOIN_3, KVCACHE_JOIN_2, KVCACHE_JOIN_1, ) \
  (__VA_ARGS__)
#define KVCACHE_ARCHITECTURES KVCACHE_JOIN(__CUDA_ARCH_LIST__)
#endif
// Compute capability 8.9 and later have an instruction.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define KVCACHE_CONVERTS_FP8 1
#else
#define KVCACHE_CONVERTS_FP8 0
#endif

#if defined(__GNUC__) || defined(__clang__)
#define KVCACHE_ALWAYS_INLINE inline __attribute__((always_inline))
#define KVCACHE_NOINLINE __attribute__((noinline))
#else
#define KVCACHE_ALWAYS_INLINE inline
#define KVCACHE_NOINLINE
#endif
// Of lambdas, behind noexcept. clang wants it elsewhere, and inlines what is called in one place without being told.
#if defined(__GNUC__) && !defined(__clang__)
#define KVCACHE_INLINED __attribute__((always_inline))
#else
#define KVCACHE_INLINED
#endif

// x86 instruction sets beyond the command line's: code between BEGIN and END may use them, and runs only where cpuid
// has found them. clang needs another pragma than gcc; gcc 12 also warns falsely of uninitialised values inside its own
// intrinsics, whatever the caller does.
#define KVCACHE_PRAGMA(text) _Pragma(#text)
#if defined(__x86_64__) && defined(__clang__)
#define KVCACHE_X86 1
#define KVCACHE_ISA_BEGIN(isa) KVCACHE_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define KVCACHE_ISA_END KVCACHE_PRAGMA(clang attribute pop)
#elif defined(__x86_64__) && defined(__GNUC__)
#define KVCACHE_X86 1
#define KVCACHE_ISA_BEGIN(isa) \
  KVCACHE_PRAGMA(GCC push_options) \
  KVCACHE_PRAGMA(GCC target(isa)) \
  KVCACHE_PRAGMA(GCC diagnostic push) \
  KVCACHE_PRAGMA(GCC diagnostic ignored "-Wuninitialized") \
  KVCACHE_PRAGMA(GCC diagnostic ignored "-Wmaybe-uninitialized")
#define KVCACHE_ISA_END \
  KVCACHE_PRAGMA(GCC diagnostic pop) \
  KVCACHE_PRAGMA(GCC pop_options)
#else
#define KVCACHE_X86 0
#endif
#if KVCACHE_X86
#define KVCACHE_AVX2_BEGIN KVCACHE_ISA_BEGIN("avx2,fma,f16c")
#define KVCACHE_AVX512_BEGIN KVCACHE_ISA_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define KVCACHE_AVX512_DOT_BEGIN \
  KVCACHE_ISA_BEGIN("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx512vbmi")
#define KVCACHE_AMX_BEGIN \
  KVCACHE_ISA_BEGIN( \
      "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx512vbmi,amx-tile,amx-bf16")
#endif

// What every ARMv8 processor of 64 bits has, so nothing is asked at run time. Our shuffles are those of little endian.
#if defined(__aarch64__) && defined(__ARM_NEON) && !defined(__AARCH64EB__) && (defined(__GNUC__) || defined(__clang__))
#define KVCACHE_NEON 1
#else
#define KVCACHE_NEON 0
#endif

#if defined(__CUDACC__)
#define KVCACHE_UNROLL KVCACHE_PRAGMA(unroll)
#elif defined(__clang__)
#define KVCACHE_UNROLL KVCACHE_PRAGMA(clang loop unroll(full))
#elif defined(__GNUC__)
#define KVCACHE_UNROLL KVCACHE_PRAGMA(GCC unroll 32)
#else
#define KVCACHE_UNROLL
#endif

/// g++ unrolls loops of up to 16 before it looks for vectors, and finds few after that; those that it is told to unroll
/// by less than they have it leaves for vectors first. clang finds them either way.
#if defined(__GNUC__) && !defined(__clang__)
#define KVCACHE_UNROLL_BY(n) KVCACHE_PRAGMA(GCC unroll n)
#else
#define KVCACHE_UNROLL_BY(n)
#endif

/// Loops of device code that are not to be unrolled as a whole, so that registers do.
#if defined(__CUDACC__)
#define KVCACHE_DEVICE_UNROLL_BY(n) KVCACHE_PRAGMA(unroll n)
#else
#define KVCACHE_DEVICE_UNROLL_BY(n)
#endif

/// Whether std::fma is an instruction. Then a compiler may also join a product and a sum, here and not there; what must
/// come out the same in several places asks for it.
#if defined(__FP_FAST_FMAF)
#define KVCACHE_FAST_FMA 1
#else
#define KVCACHE_FAST_FMA 0
#endif

// On aarch64 yield does nothing on nearly all processors; isb waits about as long as x86's pause does.
#if KVCACHE_X86
#define KVCACHE_PAUSE() __builtin_ia32_pause()
#elif KVCACHE_NEON
#define KVCACHE_PAUSE() __asm__ volatile("isb")
#else
#define KVCACHE_PAUSE() static_cast<void>(0)
#endif

/// A hint that memory is read soon, for the second level of the cache. g++ takes a function or a loop of nothing but
/// its own built-in hints for one without effects and drops it, so where we know the instruction we say it ourselves.
/// Elsewhere such functions are KVCACHE_ALWAYS_INLINE, and such loops are written out.
#if KVCACHE_X86
#define KVCACHE_PREFETCH(address) __asm__ volatile("prefetcht1 %0" : : "m"(*reinterpret_cast<const char*>(address)))
#elif KVCACHE_NEON
#define KVCACHE_PREFETCH(address) __asm__ volatile("prfm pldl2keep, [%0]" : : "r"(address))
#elif defined(__GNUC__) || defined(__clang__)
#define KVCACHE_PREFETCH(address) __builtin_prefetch(address, 0, 2)
#else
#define KVCACHE_PREFETCH(address) static_cast<void>(address)
#endif

/// Sets a byte that other threads may set at the same time, and that is read where no other call runs. The umbrella
/// does without <atomic>; the byte is written once, so that threads do not take its cache line from each other.
#if defined(__GNUC__) || defined(__clang__)
#define KVCACHE_SET_BYTE(byte) \
  (__atomic_load_n(&(byte), __ATOMIC_RELAXED) != 0 ? static_cast<void>(0) \
                                                   : __atomic_store_n(&(byte), 1, __ATOMIC_RELAXED))
#else
#define KVCACHE_SET_BYTE(byte) static_cast<void>((byte) = 1)
#endif

/// Stops the program with `text` when `condition` is false and checks are on; costs nothing otherwise.
#if KVCACHE_CHECKS
#define KVCACHE_ASSERT(condition, text) \
  ((condition) ? static_cast<void>(0) : ::kvcache::detail::assertion_failed(#condition, text, __FILE__, __LINE__))
#else
#define KVCACHE_ASSERT(condition, text) static_cast<void>(sizeof((condition) ? 1 : 0))
#endif

namespace kvcache::detail {
[[noreturn]] KVCACHE_NOINLINE inline void assertion_failed(const char* condition, const char* text, const char* file,
                                                           int line) noexcept {
  std::fprintf(stderr, "%s:%d: kvcache: %s (broken precondition: %s)\n", file, line, text, condition);
  std::abort();
}
}  // namespace kvcache::detail
