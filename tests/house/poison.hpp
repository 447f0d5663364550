// SPDX-License-Identifier: Apache-2.0
// Names that system headers and careless projects define as macros. The standard headers come first, so that only the
// library's own text meets the poison.
#pragma once

#include <algorithm>
#include <any>
#include <array>
#include <atomic>
#include <bit>
#include <bitset>
#include <cassert>
#include <cerrno>
#include <cfloat>
#include <chrono>
#include <cinttypes>
#include <climits>
#include <cmath>
#include <compare>
#include <concepts>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <new>
#include <numbers>
#include <numeric>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#if defined(__unix__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#undef I
#undef NULL
#undef assert
#undef major
#undef makedev
#undef minor
#undef unix
#undef linux

// <windows.h>
#define min(a, b) poisoned macro min
#define max(a, b) poisoned macro max
#define near poisoned macro near
#define far poisoned macro far
#define small poisoned macro small
#define interface poisoned macro interface
#define IN poisoned macro IN
#define OUT poisoned macro OUT
#define ERROR poisoned macro ERROR
#define DELETE poisoned macro DELETE
#define TRUE poisoned macro TRUE
#define FALSE poisoned macro FALSE
#define VOID poisoned macro VOID
#define CONST poisoned macro CONST
// <complex.h>, <sys/sysmacros.h>, gnu++20, termios
#define I poisoned macro I
#define complex poisoned macro complex
#define major poisoned macro major
#define minor poisoned macro minor
#define makedev poisoned macro makedev
#define unix poisoned macro unix
#define linux poisoned macro linux
#define B0 poisoned macro B0
// tensor and test frameworks, kernels
#define CHECK poisoned macro CHECK
#define ASSERT poisoned macro ASSERT
#define check poisoned macro check
#define verify poisoned macro verify
#define require poisoned macro require
#define likely poisoned macro likely
#define unlikely poisoned macro unlikely
#define assume poisoned macro assume
#define Success poisoned macro Success
#define None poisoned macro None
#define Bool poisoned macro Bool
#define Status poisoned macro Status
