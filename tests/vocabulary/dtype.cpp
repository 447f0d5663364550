// SPDX-License-Identifier: Apache-2.0
#include <kvcache/dtype.hpp>

#include <algorithm>
#include <bit>
#include <cfenv>
#include <cstdint>
#include <string>
#include <vector>

#include "catch.hpp"
#include "nearest_code.hpp"

using kvcache::bf16;
using kvcache::dtype_id;
using kvcache::f16;
using kvcache::from_float;
using kvcache::to_float;

namespace {

std::uint32_t bits_of(float x) { return std::bit_cast<std::uint32_t>(x); }
float of_bits(std::uint32_t b) { return std::bit_cast<float>(b); }
std::uint16_t half(float x) { return from_float<f16>(x).bits; }
std::uint16_t brain(float x) { return from_float<bf16>(x).bits; }

}  // namespace

TEST_CASE(KVCACHE_TEST_BUILD "every f16 widens to its worth and comes back") {
  for (std::uint32_t b = 0; b <= 0xffffu; ++b) {
    const f16 x{static_cast<std::uint16_t>(b)};
    const std::uint32_t wide = bits_of(to_float(x));
    const std::uint32_t magnitude = b & 0x7fffu;
    CAPTURE(b, wide);
    if (magnitude > 0x7c00u) {  // NaN: sign and payload stay, quiet afterwards
      REQUIRE(wide == ((b & 0x8000u) << 16 | 0x7fc0'0000u | (b & 0x3ffu) << 13));
      REQUIRE(half(of_bits(wide)) == (b | 0x0200u));
    } else {
      if (magnitude == 0x7c00u)
        REQUIRE((wide & 0x7fff'ffffu) == 0x7f80'0000u);
      else
        REQUIRE(static_cast<double>(of_bits(wide & 0x7fff'ffffu)) ==
                kvcache_test::worth(magnitude, kvcache_test::format_of<f16>));
      REQUIRE(wide >> 31 == b >> 15);
      REQUIRE(half(of_bits(wide)) == b);
    }
  }
}

TEST_CASE(KVCACHE_TEST_BUILD "every bf16 widens to its worth and comes back") {
  for (std::uint32_t b = 0; b <= 0xffffu; ++b) {
    const bf16 x{static_cast<std::uint16_t>(b)};
    const std::uint32_t wide = bits_of(to_float(x));
    CAPTURE(b, wide);
    REQUIRE(wide == b << 16);
    REQUIRE(brain(of_bits(wide)) == ((b & 0x7fffu) > 0x7f80u ? b | 0x0040u : b));
  }
}

TEST_CASE(KVCACHE_TEST_BUILD "rounding at the edges of f16") {
  CHECK(half(65504.0f) == 0x7bff);
  CHECK(half(65519.996f) == 0x7bff);
  CHECK(half(65520.0f) == 0x7c00);  // half way to 65536: even is infinity
  CHECK(half(-1e30f) == 0xfc00);
  CHECK(half(1.0f + 0x1p-11f) == 0x3c00);             // tie, to even below
  CHECK(half(1.0f + 0x1p-11f + 0x1p-23f) == 0x3c01);  // just above it
  CHECK(half(1.0f + 3 * 0x1p-11f) == 0x3c02);         // tie, to even above
  CHECK(half(0x1p-14f) == 0x0400);                    // the least normal
  CHECK(half(0x1p-14f - 0x1p-26f) == 0x0400);         // rounds up into it
  CHECK(half(0x1p-24f) == 0x0001);                    // the least subnormal
  CHECK(half(0x1p-25f) == 0x0000);                    // tie, to zero
  CHECK(half(of_bits(bits_of(0x1p-25f) + 1)) == 0x0001);
  CHECK(half(3 * 0x1p-25f) == 0x0002);           // tie, to even
  CHECK(half(of_bits(0x8000'0000u)) == 0x8000);  // -0
  CHECK(half(of_bits(0x8000'0001u)) == 0x8000);  // an f32 subnormal
  CHECK(half(of_bits(0x7f80'0000u)) == 0x7c00);
  CHECK(half(of_bits(0x7f80'0001u)) == 0x7e00);  // a signalling NaN with no payload bit left is still a NaN
  CHECK(half(of_bits(0xffff'ffffu)) == 0xffff);
}

TEST_CASE(KVCACHE_TEST_BUILD "rounding at the edges of bf16") {
  CHECK(brain(of_bits(0x3f80'8000u)) == 0x3f80);  // tie, to even below
  CHECK(brain(of_bits(0x3f80'8001u)) == 0x3f81);
  CHECK(brain(of_bits(0x3f81'8000u)) == 0x3f82);  // tie, to even above
  CHECK(brain(of_bits(0x7f7f'7fffu)) == 0x7f7f);  // the largest that stays finite
  CHECK(brain(of_bits(0x7f7f'8000u)) == 0x7f80);
  CHECK(brain(of_bits(0x7f80'0001u)) == 0x7fc0);  // not infinity
  CHECK(brain(of_bits(0xff80'0000u)) == 0xff80);
  CHECK(brain(of_bits(0x0000'8000u)) == 0x0000);  // subnormal ties count too
  CHECK(brain(of_bits(0x0001'8000u)) == 0x0002);
  CHECK(brain(of_bits(0x8000'0000u)) == 0x8000);
}

TEST_CASE(KVCACHE_TEST_BUILD "the rounding mode of the thread changes nothing") {
  const int before = std::fegetround();
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO, FE_TONEAREST}) {
    REQUIRE(std::fesetround(mode) == 0);
    const std::uint16_t tie = half(of_bits(bits_of(1.0f) + 0x1000u));
    const std::uint16_t low = half(of_bits(bits_of(0x1p-25f) + 1));
    const std::uint16_t brain_tie = brain(of_bits(0x3f81'8000u));
    const std::uint32_t widened = bits_of(to_float(f16{0x0003}));
    std::fesetround(before);
    CAPTURE(mode);
    CHECK(tie == 0x3c00);
    CHECK(low == 0x0001);
    CHECK(brain_tie == 0x3f82);
    CHECK(widened == bits_of(3 * 0x1p-24f));
  }
}

TEST_CASE(KVCACHE_TEST_BUILD "conversions are constant expressions") {
  static_assert(from_float<f16>(1.0f) == f16{0x3c00} && from_float<bf16>(1.0f) == bf16{0x3f80});
  static_assert(to_float(f16{0xc000}) == -2.0f && to_float(bf16{0xc000}) == -2.0f);
  static_assert(from_float<float>(0.5f) == 0.5f);
  static_assert(f16{0} != f16{0x8000});  // bits, not numbers
  SUCCEED();
}

TEST_CASE(KVCACHE_TEST_BUILD "every format has a name of its own, rotated or not") {
  std::vector<std::string> names;
  for (std::uint8_t id = 0; id < kvcache::rotated_bit; ++id) {
    const auto plain = static_cast<dtype_id>(id);
    const auto turned = static_cast<dtype_id>(id | kvcache::rotated_bit);
    if (std::string(name(plain)) == "unknown") {
      CHECK(std::string(name(turned)) == "unknown");
      CHECK(bits(turned) == 0);
      continue;
    }
    CHECK(std::string(name(turned)) == "rotated_" + std::string(name(plain)));
    CHECK(bits(turned) == bits(plain));
    CHECK((kvcache::is_rotated(turned) && !kvcache::is_rotated(plain)));
    CHECK(kvcache::without_rotation(turned) == plain);
    names.emplace_back(name(plain));
  }
  std::sort(names.begin(), names.end());
  CHECK(names.size() == 18);
  CHECK(std::unique(names.begin(), names.end()) == names.end());
}

TEST_CASE(KVCACHE_TEST_BUILD "dtypes have names and sizes") {
  using kvcache::dtype_traits;
  CHECK(std::string(name(dtype_id::float32)) == "f32");
  CHECK(std::string(name(dtype_id::float16)) == "f16");
  CHECK(std::string(name(dtype_id::bfloat16)) == "bf16");
  CHECK(std::string(name(static_cast<dtype_id>(99))) == "unknown");
  static_assert(bits(dtype_id::float32) == 32 && bits(dtype_id::float16) == 16 && bits(dtype_id::bfloat16) == 16);
  static_assert(bits(static_cast<dtype_id>(99)) == 0);
  static_assert(dtype_traits<float>::id == dtype_id::float32 && dtype_traits<f16>::id == dtype_id::float16 &&
                dtype_traits<bf16>::id == dtype_id::bfloat16);
  static_assert(kvcache::element<float> && kvcache::element<f16> && kvcache::element<bf16>);
  static_assert(!kvcache::element<double> && !kvcache::element<int>);
}
