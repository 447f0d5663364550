// SPDX-License-Identifier: Apache-2.0
// Found by the fuzzers in place of tests/support/catch.hpp: the same checks, but one that fails prints its message and
// aborts, which is what a fuzzer waits for.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

namespace kvcache_test {

/// What a failure is to say besides, as long as it lives.
class message {
 public:
  explicit message(const std::ostream& text) { all().push_back(static_cast<const std::ostringstream&>(text).str()); }
  message(const message&) = delete;
  message& operator=(const message&) = delete;
  ~message() { all().pop_back(); }

  static std::vector<std::string>& all() {
    static std::vector<std::string> messages;
    return messages;
  }
};

template <class... Values>
std::ostringstream captured(const char* names, const Values&... values) {
  std::ostringstream text;
  text << names << " =";
  ((text << ' ' << values), ...);
  return text;
}

[[noreturn]] inline void failed(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
  for (const std::string& m : message::all()) std::fprintf(stderr, "  with %s\n", m.c_str());
  std::abort();
}

}  // namespace kvcache_test

#define KVCACHE_TEST_JOIN_TOKENS(a, b) a##b
#define KVCACHE_TEST_JOIN(a, b) KVCACHE_TEST_JOIN_TOKENS(a, b)
#define KVCACHE_TEST_MESSAGE(text) const ::kvcache_test::message KVCACHE_TEST_JOIN(message_, __LINE__)(text)

#define INFO(...) KVCACHE_TEST_MESSAGE(std::ostringstream() << __VA_ARGS__)
#define CAPTURE(...) KVCACHE_TEST_MESSAGE(::kvcache_test::captured(#__VA_ARGS__, __VA_ARGS__))
#define REQUIRE(...) ((__VA_ARGS__) ? static_cast<void>(0) : ::kvcache_test::failed(__FILE__, __LINE__, #__VA_ARGS__))
#define REQUIRE_FALSE(...) REQUIRE(!(__VA_ARGS__))
#define FAIL(text) ::kvcache_test::failed(__FILE__, __LINE__, text)
