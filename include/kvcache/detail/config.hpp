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

#if defined(__CUDACC__)
#define KVCACHE_HOST_DEVICE __host__ __device__
#else
#define KVCACHE_HOST_DEVICE
#endif

#if defined(__GNUC__) || defined(__clang__)
#define KVCACHE_ALWAYS_INLINE inline __attribute__((always_inline))
#define KVCACHE_NOINLINE __attribute__((noinline))
#else
#define KVCACHE_ALWAYS_INLINE inline
#define KVCACHE_NOINLINE
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
