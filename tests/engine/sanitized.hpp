// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace engine_test {

/// Whether this is built for AddressSanitizer or ThreadSanitizer: many times slower, and in need of address space.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif
#else
inline constexpr bool sanitized = false;
#endif

}  // namespace engine_test
