// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/attention.hpp>
#include <kvcache/detail/config.hpp>

#if KVCACHE_X86
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace kvcache {

[[nodiscard]] constexpr const char* name(cpu_isa isa) noexcept {
  switch (isa) {
    case cpu_isa::best: return "best";
    case cpu_isa::scalar: return "scalar";
    case cpu_isa::neon: return "neon";
    case cpu_isa::avx2: return "avx2";
    case cpu_isa::avx512: return "avx512";
    case cpu_isa::avx512_dot: return "avx512_dot";
    case cpu_isa::amx: return "amx";
  }
  return "unknown";
}

namespace detail {

#if KVCACHE_X86
/// Whether there is AMX with bf16, and the system lets this process use it: its registers are large, so it wants to be
/// asked. It refuses where a thread's stack for signals is too small to hold them.
[[nodiscard]] inline bool may_use_amx() noexcept {
#if defined(__linux__)
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  constexpr unsigned amx = 1u << 22 | 1u << 24;  // BF16 and TILE
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & amx) != amx) return false;
  constexpr long request = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long tile_data = 18;
  return ::syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
  return false;
#endif
}
#endif

/// Whether the processor is one of Intel's, which decides what is fast there.
[[nodiscard]] inline bool made_by_intel() noexcept {
#if KVCACHE_X86
  static const bool intel = [] {
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    constexpr unsigned genu = 0x756e'6547;  // "GenuineIntel" begins so
    return __get_cpuid(0, &a, &b, &c, &d) != 0 && b == genu;
  }();
  return intel;
#else
  return false;
#endif
}

/// Whether hints that the processor has no room for are dropped, so that a line is worth asking for again. Intel's wait
/// until there is room, and a second hint costs as much as the first.
[[nodiscard]] inline bool asks_again() noexcept { return !made_by_intel(); }

/// Whether a dot product of bf16 takes less than the multiply-adds of f32 that it stands for. On Sapphire Rapids it
/// takes as long as four of them.
[[nodiscard]] inline bool dots_are_fast() noexcept { return !made_by_intel(); }

/// Asks the processor what it has, and the operating system whether it keeps the registers.
[[nodiscard]] inline cpu_isa detect_isa() noexcept {
#if KVCACHE_X86
  unsigned a = 0;
  unsigned b = 0;
  unsigned c = 0;
  unsigned d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return cpu_isa::scalar;
  constexpr unsigned fma = 1u << 12;
  constexpr unsigned osxsave = 1u << 27;
  constexpr unsigned avx = 1u << 28;
  constexpr unsigned f16c = 1u << 29;
  if ((c & (fma | osxsave | avx | f16c)) != (fma | osxsave | avx | f16c)) return cpu_isa::scalar;
  unsigned low = 0;
  unsigned high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned ymm = 0x06;  // xmm and ymm state
  constexpr unsigned zmm = 0xe6;  // and mask registers, zmm 0-15, zmm 16-31
  if ((low & ymm) != ymm) return cpu_isa::scalar;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return cpu_isa::scalar;
  constexpr unsigned avx2 = 1u << 5;
  constexpr unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  if ((b & avx2) == 0) return cpu_isa::scalar;
  if ((b & avx512) != avx512 || (low & zmm) != zmm) return cpu_isa::avx2;
  constexpr unsigned bytes = 1u << 11 | 1u << 1;  // VNNI and VBMI
  constexpr unsigned bf16 = 1u << 5;
  if ((c & bytes) != bytes || __get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return cpu_isa::avx512;
  if ((a & bf16) == 0) return cpu_isa::avx512;
  return may_use_amx() ? cpu_isa::amx : cpu_isa::avx512_dot;
#elif KVCACHE_NEON
  return cpu_isa::neon;
#else
  return cpu_isa::scalar;
#endif
}

}  // namespace detail

/// The best instruction set of this machine that kernels are built for. Asked once. Thread safe.
[[nodiscard]] inline cpu_isa best_isa() noexcept {
  static const cpu_isa best = detail::detect_isa();
  return best;
}

/// Whether kernels for `isa` are built and this machine runs them. Thread safe.
[[nodiscard]] inline bool has_isa(cpu_isa isa) noexcept {
  if (isa == cpu_isa::best || isa == cpu_isa::scalar || isa == best_isa()) return true;
  return isa >= cpu_isa::avx2 && isa < best_isa();  // each of x86 has those before it
}

}  // namespace kvcache
