// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace kvcache {

/// Outcomes that a caller handles. A call that fails with one of these has changed nothing.
enum class errc : std::uint8_t {
  out_of_blocks,       ///< value: blocks needed, limit: blocks available
  out_of_tail_blocks,  ///< value: blocks of a tail pool needed, limit: blocks of it available
  exceeds_pool,        ///< value: blocks needed, limit: blocks in the pool; waiting cannot help
  stale_id,            ///< value: a sequence's index, a step's stamp or a block; limit: generation or stamp now, or 0
  beyond_length,       ///< value: tokens or entries asked for, limit: how many are there or possible
  step_order,     ///< value: number of the step, limit: number of the step that has to be accepted or dropped first
  duplicate_id,   ///< value: a sequence's index or a block named twice in one call, limit: times allowed
  empty_content,  ///< value: tokens given, limit: tokens needed at least
  behind_window,  ///< value: tokens to keep, limit: fewest of which every window still has what it sees
  bad_range,      ///< value: number of the range in its list, limit: first token that it may begin with
  unsupported,    ///< value: number of the range in its list, limit: 0; the eviction policy keeps no priorities
  in_use,         ///< value: blocks that are referenced or held, limit: how many may be
};

/// Short name of an outcome, for logs and statistics.
[[nodiscard]] constexpr const char* name(errc code) noexcept {
  switch (code) {
    case errc::out_of_blocks: return "out_of_blocks";
    case errc::out_of_tail_blocks: return "out_of_tail_blocks";
    case errc::exceeds_pool: return "exceeds_pool";
    case errc::stale_id: return "stale_id";
    case errc::beyond_length: return "beyond_length";
    case errc::step_order: return "step_order";
    case errc::duplicate_id: return "duplicate_id";
    case errc::empty_content: return "empty_content";
    case errc::behind_window: return "behind_window";
    case errc::bad_range: return "bad_range";
    case errc::unsupported: return "unsupported";
    case errc::in_use: return "in_use";
  }
  return "unknown";
}

/// Why a call failed: the outcome, the value that caused it and the limit it met.
struct failure {
  errc code{};
  std::uint64_t value = 0;
  std::uint64_t limit = 0;

  friend constexpr bool operator==(const failure&, const failure&) = default;
};

/// One sentence for a person: value, limit and remedy. Allocates.
[[nodiscard]] inline std::string message(const failure& f) {
  const std::string value = std::to_string(f.value);
  const std::string limit = std::to_string(f.limit);
  switch (f.code) {
    case errc::out_of_blocks:
      return "out of blocks: " + value + " needed, " + limit +
             " available; retire steps, close or preempt a sequence, then try again";
    case errc::out_of_tail_blocks:
      return "out of tail blocks: " + value + " needed, " + limit +
             " available; retire steps, compute fewer tokens in a step, or make the tail pool larger (tail_blocks_for)";
    case errc::exceeds_pool:
      return "larger than the pool: " + value + " blocks needed, the pool has " + limit +
             "; shorten the request or make the pool larger";
    case errc::stale_id:
      return "stale id: " + value + " names nothing that is open (now: " + limit +
             "); forget an id when you close what it names";
    case errc::beyond_length:
      return "beyond the length: " + value + " asked for, " + limit +
             " possible; accept the tokens first, or ask for fewer";
    case errc::step_order:
      return "step " + value + " out of order: step " + limit + " has to be accepted or dropped first";
    case errc::duplicate_id:
      return "id " + value + " named more than " + limit + " time in one call; merge its entries";
    case errc::empty_content: return "empty content: " + value + " tokens given, at least " + limit + " needed";
    case errc::behind_window:
      return "behind the window: " + value + " tokens to keep, of which a window has given up what it sees; " + limit +
             " or more can be kept, or open the content anew";
    case errc::bad_range:
      return "bad range: number " + value + " of the list has to begin at token " + limit +
             " or later and end after it begins, with a priority of at most 100; ranges stand in order and do not "
             "overlap";
    case errc::unsupported:
      return "unsupported: range " + value +
             " asks for a priority, which this eviction policy does not keep; use one that does, such as "
             "kvcache::priority";
    case errc::in_use:
      return "in use: " + value + " blocks are referenced or held, " + limit +
             " allowed; close the sequences and retire the steps first";
  }
  return "unknown failure";
}

/// Base of everything this library throws, beside the standard exception that each class refines.
class error {
 public:
  virtual ~error() = default;
  [[nodiscard]] virtual const char* message() const noexcept = 0;
};

/// A configuration or argument that can never work. The text names value, limit and remedy.
class invalid_argument : public error, public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
  [[nodiscard]] const char* message() const noexcept override { return what(); }
};

/// The system refused something (memory, a file). The text names what was asked for and what it said.
class system_failure : public error, public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  [[nodiscard]] const char* message() const noexcept override { return what(); }
};

namespace detail {

/// Throws `Exception(text)`; without exceptions prints the text and aborts.
template <class Exception>
[[noreturn]] KVCACHE_NOINLINE void raise(const std::string& text) {
#if KVCACHE_HAS_EXCEPTIONS
  throw Exception(text);
#else
  std::fprintf(stderr, "kvcache: %s\n", text.c_str());
  std::abort();
#endif
}

}  // namespace detail

/// A value or the reason why there is none. Never throws by itself; `value()` raises invalid_argument with the
/// failure's message where there is no value. Moves as T moves.
template <class T>
class [[nodiscard]] result {
  static_assert(std::is_nothrow_move_constructible_v<T>, "result<T> needs a T that moves without throwing");

 public:
  using value_type = T;

  result(T value) noexcept : has_value_(true) { ::new (static_cast<void*>(&value_)) T(std::move(value)); }
  result(failure f) noexcept : failure_(f), has_value_(false) {}
  result(result&& other) noexcept : has_value_(other.has_value_) {
    if (has_value_)
      ::new (static_cast<void*>(&value_)) T(std::move(other.value_));
    else
      ::new (static_cast<void*>(&failure_)) failure(other.failure_);
  }
  result& operator=(result&& other) noexcept {
    if (this != &other) {
      this->~result();
      ::new (static_cast<void*>(this)) result(std::move(other));
    }
    return *this;
  }
  ~result() {
    if (has_value_) value_.~T();
  }

  [[nodiscard]] explicit operator bool() const noexcept { return has_value_; }
  [[nodiscard]] bool has_value() const noexcept { return has_value_; }

  [[nodiscard]] T& operator*() & noexcept { return checked(); }
  [[nodiscard]] const T& operator*() const& noexcept { return const_cast<result*>(this)->checked(); }
  [[nodiscard]] T&& operator*() && noexcept { return std::move(checked()); }
  [[nodiscard]] T* operator->() noexcept { return &checked(); }
  [[nodiscard]] const T* operator->() const noexcept { return &const_cast<result*>(this)->checked(); }

  [[nodiscard]] T& value() & { return has_value_ ? value_ : fail(); }
  [[nodiscard]] const T& value() const& { return has_value_ ? value_ : fail(); }
  [[nodiscard]] T&& value() && { return std::move(has_value_ ? value_ : fail()); }

  /// Precondition: no value.
  [[nodiscard]] const failure& error() const noexcept {
    KVCACHE_ASSERT(!has_value_, "result::error() of a result that holds a value");
    return failure_;
  }

 private:
  T& checked() noexcept {
    KVCACHE_ASSERT(has_value_, "result dereferenced though the call failed; test it first");
    return value_;
  }
  [[noreturn]] T& fail() const { detail::raise<invalid_argument>(message(failure_)); }

  union {
    T value_;
    failure failure_;
  };
  bool has_value_;
};

/// Success, or the reason for failure.
template <>
class [[nodiscard]] result<void> {
 public:
  using value_type = void;

  constexpr result() noexcept = default;
  constexpr result(failure f) noexcept : failure_(f), has_value_(false) {}

  [[nodiscard]] constexpr explicit operator bool() const noexcept { return has_value_; }
  [[nodiscard]] constexpr bool has_value() const noexcept { return has_value_; }

  void value() const {
    if (!has_value_) detail::raise<invalid_argument>(message(failure_));
  }

  /// Precondition: no value.
  [[nodiscard]] constexpr const failure& error() const noexcept {
    KVCACHE_ASSERT(!has_value_, "result::error() of a result that succeeded");
    return failure_;
  }

 private:
  failure failure_{};
  bool has_value_ = true;
};

}  // namespace kvcache
