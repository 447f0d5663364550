// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvcache {

/// A value that one thread writes and any number of others read, whole and without a lock: figures that a thread
/// serving metrics takes from the thread that owns the cache. A sequence lock over atomic words (Boehm, Can Seqlocks
/// Get Along With Programming Language Memory Models?, MSPC 2012). Writing is wait-free and waits for no reader. A
/// reader starts again where a write came between, so one that is always overtaken by writes does not end; `try_load`
/// tries once. Writers: one thread at a time. On x86 an access costs what an ordinary one does.
template <class T>
class published {
 public:
  /// O(sizeof(T)), as all below.
  explicit published(const T& initial = T{}) noexcept { put(initial); }
  published(const published&) = delete;
  published& operator=(const published&) = delete;

  void store(const T& value) noexcept {
    const std::uint64_t before = turn_.load(std::memory_order_relaxed);
    turn_.store(before + 1, std::memory_order_relaxed);  // odd: being written
    put(value);
    turn_.store(before + 2, std::memory_order_release);
  }

  /// The value of the newest store that has ended, or of one that ended meanwhile.
  [[nodiscard]] T load() const noexcept {
    T value{};
    while (!try_load(value)) {
    }
    return value;
  }
  /// False where a store came between; `value` is then as it was.
  [[nodiscard]] bool try_load(T& value) const noexcept {
    const std::uint64_t before = turn_.load(std::memory_order_acquire);
    if (before % 2 != 0) return false;
    std::uint64_t copy[words];
    // Each word is read with acquire and written with release: who reads a word of a later store sees its odd turn
    // below. Relaxed words and two fences would do the same, but ThreadSanitizer does not know fences.
    for (std::size_t i = 0; i < words; ++i) copy[i] = words_[i].load(std::memory_order_acquire);
    if (turn_.load(std::memory_order_relaxed) != before) return false;
    std::memcpy(&value, copy, sizeof(T));
    return true;
  }

 private:
  static constexpr std::size_t words = (sizeof(T) + 7) / 8;

  void put(const T& value) noexcept {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&value);
    for (std::size_t i = 0; i < words; ++i) {
      std::uint64_t word = 0;
      const std::size_t left = sizeof(T) - 8 * i;
      std::memcpy(&word, bytes + 8 * i, left < 8 ? left : 8);
      words_[i].store(word, std::memory_order_release);
    }
  }

  std::atomic<std::uint64_t> turn_{0};
  std::atomic<std::uint64_t> words_[words];

  static_assert(
      std::is_trivially_copyable_v<T> && std::is_default_constructible_v<T>,
      "kvcache::published<T> needs a trivially copyable T with a default constructor: it is copied word by word");
};

}  // namespace kvcache
