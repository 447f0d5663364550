// SPDX-License-Identifier: Apache-2.0
#include <kvcache/fp8.hpp>

#include <bit>
#include <cfenv>
#include <cstdint>
#include <string>

#include "catch.hpp"
#include "nearest_code.hpp"

using kvcache::dtype_id;
using kvcache::f16;
using kvcache::fp8_e4m3;
using kvcache::fp8_e5m2;
using kvcache::from_float;
using kvcache::to_float;
using kvcache_test::format_of;

namespace {

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
float of_bits(std::uint32_t b) { return std::bit_cast<float>(b); }
std::uint32_t e4m3(float x) { return from_float<fp8_e4m3>(x).bits; }
std::uint32_t e5m2(float x) { return from_float<fp8_e5m2>(x).bits; }

constexpr std::uint32_t infinity = 0x7f80'0000u;

/// Every number widens to its worth and comes back. `first_other` is the least code that is no number.
template <class T>
void check_numbers(std::uint32_t first_other) {
  for (std::uint32_t b = 0; b <= 0xffu; ++b) {
    const std::uint32_t wide = bits_of(to_float(T{static_cast<std::uint8_t>(b)}));
    const std::uint32_t magnitude = b & 0x7fu;
    CAPTURE(b, wide);
    REQUIRE(wide >> 31 == b >> 7);
    if (magnitude >= first_other) continue;
    REQUIRE(static_cast<double>(of_bits(wide & 0x7fff'ffffu)) == kvcache_test::worth(magnitude, format_of<T>));
    REQUIRE(from_float<T>(of_bits(wide)).bits == b);
  }
}

/// Every f16 becomes the nearest code.
template <class T>
void check_halves() {
  kvcache_test::nearest_code oracle(format_of<T>);
  for (std::uint32_t b = 0; b <= 0x7fffu; ++b) {
    const float positive = to_float(f16{static_cast<std::uint16_t>(b)});
    const float negative = to_float(f16{static_cast<std::uint16_t>(b | 0x8000u)});
    const std::uint32_t wanted = b > 0x7c00u    ? 0x7fu
                                 : b == 0x7c00u ? oracle.top()
                                                : oracle.of(static_cast<double>(positive));
    CAPTURE(b);
    REQUIRE(from_float<T>(positive).bits == wanted);
    REQUIRE(from_float<T>(negative).bits == (wanted | 0x80u));
  }
}

}  // namespace

TEST_CASE(KVCACHE_TEST_BUILD "attention_15 every e4m3 widens to its worth and comes back") {
  check_numbers<fp8_e4m3>(0x7f);
  CHECK((bits_of(to_float(fp8_e4m3{0x7f})) & 0x7fff'ffffu) > infinity);
  CHECK((bits_of(to_float(fp8_e4m3{0xff})) & 0x7fff'ffffu) > infinity);
}

TEST_CASE(KVCACHE_TEST_BUILD "attention_15 every e5m2 widens to its worth and comes back, infinity apart") {
  check_numbers<fp8_e5m2>(0x7c);
  CHECK(bits_of(to_float(fp8_e5m2{0x7c})) == infinity);
  CHECK(bits_of(to_float(fp8_e5m2{0xfc})) == (infinity | 0x8000'0000u));
  for (const std::uint32_t b : {0x7du, 0x7eu, 0x7fu, 0xfdu, 0xffu})
    CHECK((bits_of(to_float(fp8_e5m2{static_cast<std::uint8_t>(b)})) & 0x7fff'ffffu) > infinity);
}

TEST_CASE(KVCACHE_TEST_BUILD "attention_15 all halves become the nearest e4m3") { check_halves<fp8_e4m3>(); }
TEST_CASE(KVCACHE_TEST_BUILD "attention_15 all halves become the nearest e5m2") { check_halves<fp8_e5m2>(); }

TEST_CASE(KVCACHE_TEST_BUILD "attention_15 rounding at the edges of e4m3") {
  CHECK(e4m3(448.0f) == 0x7e);
  CHECK(e4m3(449.0f) == 0x7e);
  CHECK(e4m3(464.0f) == 0x7e);  // half way to 480, which is NaN's code
  CHECK(e4m3(465.0f) == 0x7e);
  CHECK(e4m3(-1e30f) == 0xfe);
  CHECK(e4m3(of_bits(0x7f7f'ffffu)) == 0x7e);
  CHECK(e4m3(of_bits(infinity)) == 0x7e);
  CHECK(e4m3(of_bits(infinity | 0x8000'0000u)) == 0xfe);
  CHECK(e4m3(of_bits(infinity + 1)) == 0x7f);
  CHECK(e4m3(of_bits(0xffff'ffffu)) == 0xff);
  CHECK(e4m3(1.0f + 0x1p-4f) == 0x38);             // tie, to even below
  CHECK(e4m3(1.0f + 0x1p-4f + 0x1p-23f) == 0x39);  // just above it
  CHECK(e4m3(1.0f + 3 * 0x1p-4f) == 0x3a);         // tie, to even above
  CHECK(e4m3(0x1p-6f) == 0x08);                    // the least normal
  CHECK(e4m3(0x1p-6f - 0x1p-10f) == 0x08);         // tie, rounds up into it
  CHECK(e4m3(0x1p-9f) == 0x01);                    // the least subnormal
  CHECK(e4m3(0x1p-10f) == 0x00);                   // tie, to zero
  CHECK(e4m3(of_bits(bits_of(0x1p-10f) + 1)) == 0x01);
  CHECK(e4m3(3 * 0x1p-10f) == 0x02);           // tie, to even
  CHECK(e4m3(of_bits(0x8000'0000u)) == 0x80);  // -0
  CHECK(e4m3(of_bits(0x8000'0001u)) == 0x80);  // an f32 subnormal
}

TEST_CASE(KVCACHE_TEST_BUILD "attention_15 rounding at the edges of e5m2") {
  CHECK(e5m2(57'344.0f) == 0x7b);
  CHECK(e5m2(61'440.0f) == 0x7b);  // half way to infinity, which is never made
  CHECK(e5m2(61'441.0f) == 0x7b);
  CHECK(e5m2(of_bits(infinity)) == 0x7b);
  CHECK(e5m2(of_bits(infinity | 0x8000'0000u)) == 0xfb);
  CHECK(e5m2(of_bits(infinity + 1)) == 0x7f);
  CHECK(e5m2(1.125f) == 0x3c);    // tie, to even below
  CHECK(e5m2(1.375f) == 0x3e);    // tie, to even above
  CHECK(e5m2(0x1p-14f) == 0x04);  // the least normal
  CHECK(e5m2(0x1p-16f) == 0x01);  // the least subnormal
  CHECK(e5m2(0x1p-17f) == 0x00);  // tie, to zero
  CHECK(e5m2(of_bits(bits_of(0x1p-17f) + 1)) == 0x01);
  CHECK(e5m2(of_bits(0x8000'0000u)) == 0x80);
}

TEST_CASE(KVCACHE_TEST_BUILD "the rounding mode of the thread does not change an fp8") {
  const int before = std::fegetround();
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO, FE_TONEAREST}) {
    REQUIRE(std::fesetround(mode) == 0);
    const std::uint32_t tie = e4m3(of_bits(bits_of(1.0f) + 0x0008'0000u));
    const std::uint32_t low = e4m3(of_bits(bits_of(0x1p-10f) + 1));
    const std::uint32_t brain_tie = e5m2(of_bits(0x3fb0'0000u));
    const std::uint32_t widened = bits_of(to_float(fp8_e4m3{0x03}));
    std::fesetround(before);
    CAPTURE(mode);
    CHECK(tie == 0x38);
    CHECK(low == 0x01);
    CHECK(brain_tie == 0x3e);
    CHECK(widened == bits_of(3 * 0x1p-9f));
  }
}

TEST_CASE(KVCACHE_TEST_BUILD "fp8 converts in constant expressions, and has names and sizes") {
  static_assert(from_float<fp8_e4m3>(1.0f) == fp8_e4m3{0x38} && from_float<fp8_e5m2>(1.0f) == fp8_e5m2{0x3c});
  static_assert(to_float(fp8_e4m3{0xc0}) == -2.0f && to_float(fp8_e5m2{0xc0}) == -2.0f);
  static_assert(fp8_e4m3{0} != fp8_e4m3{0x80});  // bits, not numbers
  static_assert(bits(dtype_id::float8_e4m3) == 8 && bits(dtype_id::float8_e5m2) == 8);
  static_assert(!kvcache::wide_element<fp8_e4m3> && !kvcache::wide_element<fp8_e5m2>);
  CHECK(std::string(name(dtype_id::float8_e4m3)) == "fp8_e4m3");
  CHECK(std::string(name(dtype_id::float8_e5m2)) == "fp8_e5m2");
}
