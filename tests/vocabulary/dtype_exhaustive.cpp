// SPDX-License-Identifier: Apache-2.0
// All 2^32 floats narrowed to f16 and bf16, one by one and in runs. Unoptimised and sanitised builds take every 257th
// float, and all floats around the points where the rounding changes.
#include <kvcache/convert.hpp>
#include <kvcache/dtype.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "catch.hpp"
#include "nearest_code.hpp"

using kvcache::bf16;
using kvcache::f16;
using kvcache::from_float;

namespace {

#if defined(NDEBUG)
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
    expected_[used_] = {static_cast<std::uint16_t>(code)};
    expected_[used_ + 1] = {static_cast<std::uint16_t>(code | 0x8000u)};
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
        UNSCOPED_INFO("first difference at bits " << first_wrong_ << ": single " << single.bits << ", in a run "
                                                  << run[i].bits << ", expected " << expected_[i].bits);
      }
    }
    checked_ += used_;
    used_ = 0;
  }

  [[nodiscard]] std::uint64_t wrong() const { return wrong_; }
  [[nodiscard]] std::uint64_t checked() const { return checked_; }

 private:
  std::array<float, size> in_;
  std::array<T, size> expected_;
  std::size_t used_ = 0;
  std::uint64_t wrong_ = 0;
  std::uint64_t checked_ = 0;
  std::uint32_t first_wrong_ = 0;
};

template <class T>
void check_numbers(int mantissa_bits) {
  expected_codes<T> values;
  kvcache_test::nearest_code oracle(mantissa_bits);
  for (std::uint64_t b = 0; b < infinity; b += stride)
    values.add(static_cast<std::uint32_t>(b), oracle.of(static_cast<double>(of_bits(static_cast<std::uint32_t>(b)))));
  values.add(infinity, oracle.infinity());
  values.check();
  CHECK(values.wrong() == 0);
  CHECK(values.checked() >= std::uint64_t{infinity} / stride * 2);
}

/// The float on each change of rounding, and its neighbours.
template <class T>
void check_changes(int mantissa_bits) {
  expected_codes<T> values;
  kvcache_test::nearest_code oracle(mantissa_bits);
  for (std::uint32_t code = 0; code < oracle.infinity(); ++code) {
    const auto change = std::bit_cast<std::uint32_t>(static_cast<float>(oracle.middle(code)));
    for (std::uint32_t b = change > 0 ? change - 1 : 0; b <= std::min(change + 1, infinity - 1); ++b)
      values.add(b, oracle.of(static_cast<double>(of_bits(b))));
  }
  values.check();
  CHECK(values.wrong() == 0);
  CHECK(values.checked() >= std::uint64_t{2} * 2 * oracle.infinity());
}

/// A NaN stays a NaN of its sign, quiet, with the leading bits of its payload.
template <class T>
void check_nans(int mantissa_bits) {
  expected_codes<T> values;
  const std::uint32_t payload_bits = static_cast<std::uint32_t>(mantissa_bits);
  const std::uint32_t quiet = 1u << (payload_bits - 1);
  const std::uint32_t infinity_code = ((1u << (15 - payload_bits)) - 1u) << payload_bits;
  for (std::uint64_t b = infinity + 1; b <= 0x7fff'ffffu; b += stride)
    values.add(static_cast<std::uint32_t>(b),
               infinity_code | quiet | ((static_cast<std::uint32_t>(b) & 0x007f'ffffu) >> (23 - payload_bits)));
  values.check();
  CHECK(values.wrong() == 0);
  CHECK(values.checked() >= (std::uint64_t{1} << 23) / stride);
}

}  // namespace

TEST_CASE("all floats become the nearest f16, ties to even") { check_numbers<f16>(10); }
TEST_CASE("all floats become the nearest bf16, ties to even") { check_numbers<bf16>(7); }
TEST_CASE("floats around each change of rounding become the right f16") { check_changes<f16>(10); }
TEST_CASE("floats around each change of rounding become the right bf16") { check_changes<bf16>(7); }
TEST_CASE("all NaNs become f16 NaNs") { check_nans<f16>(10); }
TEST_CASE("all NaNs become bf16 NaNs") { check_nans<bf16>(7); }
