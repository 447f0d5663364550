// SPDX-License-Identifier: Apache-2.0
// All 2^32 floats narrowed to the types of 16 and 8 bits, one by one and in runs. Unoptimised and sanitised builds take
// every 257th float, and all floats around the points where the rounding changes.
#include <kvcache/convert.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/fp8.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "catch.hpp"
#include "nearest_code.hpp"

using kvcache::bf16;
using kvcache::f16;
using kvcache::fp8_e4m3;
using kvcache::fp8_e5m2;
using kvcache::from_float;
using kvcache_test::format_of;

namespace {

#if defined(NDEBUG) && !defined(KVCACHE_TEST_EMULATED)
constexpr std::uint32_t stride = 1;
#else
constexpr std::uint32_t stride = 257;
#endif

constexpr std::uint32_t infinity = 0x7f80'0000u;

float of_bits(std::uint32_t b) { return std::bit_cast<float>(b); }

/// Floats of both signs with the codes expected for them, narrowed one by one and in a run.
template <class T>
class expected_codes {
 public:
  static constexpr std::size_t size = 1024;

  void add(std::uint32_t magnitude, std::uint32_t code) {
    in_[used_] = of_bits(magnitude);
    in_[used_ + 1] = of_bits(magnitude | 0x8000'0000u);
    expected_[used_] = {static_cast<code_type>(code)};
    expected_[used_ + 1] = {static_cast<code_type>(code | format_of<T>.sign())};
    used_ += 2;
    if (used_ == size) check();
  }

  /// Counts differences, since a billion assertions are too slow.
  void check() {
    std::array<T, size> run;
    kvcache::convert(in_.data(), used_, run.data());
    for (std::size_t i = 0; i < used_; ++i) {
      const T single = from_float<T>(in_[i]);
      if (single == expected_[i] && run[i] == expected_[i]) continue;
      if (wrong_++ == 0) {
        first_wrong_ = std::bit_cast<std::uint32_t>(in_[i]);
        UNSCOPED_INFO("first difference at bits " << first_wrong_ << ": single " << unsigned{single.bits}
                                                  << ", in a run " << unsigned{run[i].bits} << ", expected "
                                                  << unsigned{expected_[i].bits});
      }
    }
    checked_ += used_;
    used_ = 0;
  }

  [[nodiscard]] std::uint64_t wrong() const { return wrong_; }
  [[nodiscard]] std::uint64_t checked() const { return checked_; }

 private:
  using code_type = decltype(T::bits);

  std::array<float, size> in_;
  std::array<T, size> expected_;
  std::size_t used_ = 0;
  std::uint64_t wrong_ = 0;
  std::uint64_t checked_ = 0;
  std::uint32_t first_wrong_ = 0;
};

template <class T>
void check_numbers() {
  expected_codes<T> values;
  kvcache_test::nearest_code oracle(format_of<T>);
  for (std::uint64_t b = 0; b < infinity; b += stride)
    values.add(static_cast<std::uint32_t>(b), oracle.of(static_cast<double>(of_bits(static_cast<std::uint32_t>(b)))));
  values.add(infinity, oracle.top());
  values.check();
  CHECK(values.wrong() == 0);
  CHECK(values.checked() >= std::uint64_t{infinity} / stride * 2);
}

/// The float on each change of rounding, and its neighbours.
template <class T>
void check_changes() {
  expected_codes<T> values;
  kvcache_test::nearest_code oracle(format_of<T>);
  for (std::uint32_t code = 0; code < oracle.top(); ++code) {
    const auto change = std::bit_cast<std::uint32_t>(static_cast<float>(oracle.middle(code)));
    for (std::uint32_t b = change > 0 ? change - 1 : 0; b <= std::min(change + 1, infinity - 1); ++b)
      values.add(b, oracle.of(static_cast<double>(of_bits(b))));
  }
  values.check();
  CHECK(values.wrong() == 0);
  CHECK(values.checked() >= std::uint64_t{2} * 2 * oracle.top());
}

/// The code of a NaN: quiet, with the leading bits of its payload where codes have infinity; there is but one
/// otherwise.
template <class T>
std::uint32_t code_of_nan(std::uint32_t b) {
  constexpr kvcache_test::small_float f = format_of<T>;
  if (sizeof(T) == 1) return 0x7f;
  const auto payload_bits = static_cast<std::uint32_t>(f.mantissa_bits);
  return f.top | 1u << (payload_bits - 1) | ((b & 0x007f'ffffu) >> (23 - payload_bits));
}

/// A NaN stays a NaN of its sign.
template <class T>
void check_nans() {
  expected_codes<T> values;
  for (std::uint64_t b = infinity + 1; b <= 0x7fff'ffffu; b += stride)
    values.add(static_cast<std::uint32_t>(b), code_of_nan<T>(static_cast<std::uint32_t>(b)));
  values.check();
  CHECK(values.wrong() == 0);
  CHECK(values.checked() >= (std::uint64_t{1} << 23) / stride);
}

}  // namespace

TEST_CASE("all floats become the nearest f16, ties to even") { check_numbers<f16>(); }
TEST_CASE("all floats become the nearest bf16, ties to even") { check_numbers<bf16>(); }
TEST_CASE("attention_15 all floats become the nearest e4m3, ties to even") { check_numbers<fp8_e4m3>(); }
TEST_CASE("attention_15 all floats become the nearest e5m2, ties to even") { check_numbers<fp8_e5m2>(); }
TEST_CASE("floats around each change of rounding become the right f16") { check_changes<f16>(); }
TEST_CASE("floats around each change of rounding become the right bf16") { check_changes<bf16>(); }
TEST_CASE("attention_15 floats around each change of rounding become the right e4m3") { check_changes<fp8_e4m3>(); }
TEST_CASE("attention_15 floats around each change of rounding become the right e5m2") { check_changes<fp8_e5m2>(); }
TEST_CASE("all NaNs become f16 NaNs") { check_nans<f16>(); }
TEST_CASE("all NaNs become bf16 NaNs") { check_nans<bf16>(); }
TEST_CASE("attention_15 all NaNs become e4m3 NaNs") { check_nans<fp8_e4m3>(); }
TEST_CASE("attention_15 all NaNs become e5m2 NaNs") { check_nans<fp8_e5m2>(); }
