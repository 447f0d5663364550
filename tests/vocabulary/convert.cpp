// SPDX-License-Identifier: Apache-2.0
#include <kvcache/convert.hpp>
#include <kvcache/fp8.hpp>

#include <bit>
#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "catch.hpp"

using kvcache::bf16;
using kvcache::convert;
using kvcache::f16;
using kvcache::fp8_e4m3;
using kvcache::fp8_e5m2;
using kvcache::from_float;
using kvcache::to_float;

namespace {

template <class T>
std::uint32_t bits_of(T x) {
  if constexpr (sizeof(T) == 4)
    return std::bit_cast<std::uint32_t>(x);
  else
    return x.bits;
}

/// Each way of being special for one of the conversions, as f32 bits, among ordinary values.
const std::vector<std::uint32_t> specials{
    0x0000'0000u, 0x8000'0000u, 0x0000'0001u, 0x3300'0001u, 0x387f'ffffu, 0x3880'0000u, 0x477f'efffu, 0x477f'f000u,
    0x7f7f'ffffu, 0x7f80'0000u, 0xff80'0000u, 0x7f80'0001u, 0xffc0'1234u, 0x43e0'0000u, 0x43e8'0000u, 0x43e8'8000u,
    0x3c7f'ffffu, 0x3a80'0000u, 0x3a80'0001u, 0x4760'0000u, 0x4770'0000u, 0x387f'0000u, 0x3700'0000u, 0xb700'0001u};

template <class From, class To>
void check_same_as_single(const std::vector<From>& in, std::size_t count) {
  std::vector<To> out(count + 2, To{});
  const To guard = from_float<To>(-123.0f);
  out.front() = out.back() = guard;
  convert(in.data(), count, out.data() + 1);
  CHECK(bits_of(out.front()) == bits_of(guard));
  CHECK(bits_of(out.back()) == bits_of(guard));
  for (std::size_t i = 0; i < count; ++i) {
    CAPTURE(i, count, bits_of(in[i]));
    REQUIRE(bits_of(out[i + 1]) == bits_of(from_float<To>(to_float(in[i]))));
  }
}

/// Every special value at every place of every length of run: what a neighbour holds must not matter.
template <class From, class To>
void check_places() {
  for (std::size_t count = 0; count <= 40; ++count) {
    for (const std::uint32_t special : specials) {
      for (std::size_t place = 0; place < count; place += 3) {
        std::vector<From> in;
        for (std::size_t i = 0; i < count; ++i) {
          const float plain = (i % 2 == 0 ? 1.0f : -1.0f) * (0.37f + static_cast<float>(i));
          in.push_back(from_float<From>(i == place ? std::bit_cast<float>(special) : plain));
        }
        check_same_as_single<From, To>(in, count);
      }
    }
  }
}

template <class From, class To>
void check_all_codes() {
  std::vector<From> in;
  using code_type = decltype(From::bits);
  for (std::uint32_t b = 0; b < 1u << (8 * sizeof(From)); ++b) in.push_back({static_cast<code_type>(b)});
  check_same_as_single<From, To>(in, in.size());
}

}  // namespace

TEST_CASE(KVCACHE_TEST_BUILD "a run converts as its elements do") {
  check_places<float, f16>();
  check_places<float, bf16>();
  check_places<f16, float>();
  check_places<bf16, float>();
  check_places<f16, bf16>();
  check_places<bf16, f16>();
  check_places<float, fp8_e4m3>();
  check_places<float, fp8_e5m2>();
  check_places<fp8_e4m3, float>();
  check_places<fp8_e5m2, float>();
  check_places<f16, fp8_e4m3>();
  check_places<fp8_e5m2, bf16>();
}

TEST_CASE(KVCACHE_TEST_BUILD "all codes convert in runs as they do alone") {
  check_all_codes<f16, float>();
  check_all_codes<bf16, float>();
  check_all_codes<f16, bf16>();
  check_all_codes<bf16, f16>();
}

TEST_CASE(KVCACHE_TEST_BUILD
          "attention_15 all codes of 8 and 16 bits convert to and from fp8 in runs as they do alone") {
  check_all_codes<fp8_e4m3, float>();
  check_all_codes<fp8_e5m2, float>();
  check_all_codes<fp8_e4m3, fp8_e5m2>();
  check_all_codes<fp8_e5m2, f16>();
  check_all_codes<f16, fp8_e4m3>();
  check_all_codes<f16, fp8_e5m2>();
  check_all_codes<bf16, fp8_e4m3>();
  check_all_codes<bf16, fp8_e5m2>();
}

TEST_CASE(KVCACHE_TEST_BUILD "no rounding mode changes a result but what is below the normal numbers of fp8") {
  std::vector<float> in;
  for (std::uint32_t i = 0; i < 4096; ++i)
    in.push_back((i % 2 == 0 ? 1.0f : -1.0f) * std::bit_cast<float>(0x3700'0000u + i * 0x0001'2345u));
  const auto hold = [&]<class To>(int mode, float first_normal, To) {
    std::vector<To> out(in.size());
    std::fesetround(mode);
    convert(in.data(), in.size(), out.data());
    std::fesetround(FE_TONEAREST);
    for (std::size_t i = 0; i < in.size(); ++i) {
      const auto nearest = bits_of(from_float<To>(in[i]));
      const bool tiny = in[i] < first_normal && -in[i] < first_normal;
      CAPTURE(mode, in[i]);
      if (tiny)
        REQUIRE(bits_of(out[i]) - nearest + 1 <= 2);  // a code to either side
      else
        REQUIRE(bits_of(out[i]) == nearest);
    }
  };
  for (const int mode : {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO}) {
    hold(mode, 0.0f, f16{});
    hold(mode, 0.0f, bf16{});
    hold(mode, 0x1p-6f, fp8_e4m3{});
    hold(mode, 0x1p-14f, fp8_e5m2{});
  }
}

TEST_CASE(KVCACHE_TEST_BUILD "converting by run-time names is the same conversion") {
  using kvcache::dtype_id;
  const std::vector<float> in{0.3f, -1.7f, 500.0f, 1e-3f, -65'000.0f, 0.0f};
  const auto same = [&]<class T>(dtype_id id, T) {
    std::vector<T> wanted(in.size());
    convert(in.data(), in.size(), wanted.data());
    std::vector<T> stored(in.size());
    convert(in.data(), in.size(), reinterpret_cast<std::byte*>(stored.data()), id);
    CHECK(std::memcmp(stored.data(), wanted.data(), in.size() * sizeof(T)) == 0);
    std::vector<float> back(in.size());
    convert(reinterpret_cast<const std::byte*>(stored.data()), id, in.size(), back.data());
    for (std::size_t i = 0; i < in.size(); ++i) CHECK(bits_of(back[i]) == bits_of(to_float(wanted[i])));
  };
  same(dtype_id::float32, float{});
  same(dtype_id::float16, f16{});
  same(dtype_id::bfloat16, bf16{});
  same(dtype_id::float8_e4m3, fp8_e4m3{});
  same(dtype_id::float8_e5m2, fp8_e5m2{});
}

TEST_CASE(KVCACHE_TEST_BUILD "the same type is copied bit for bit, signalling NaNs included") {
  const std::vector<std::uint32_t> in{0x7f80'0001u, 0xff80'0001u, 0x8000'0000u, 0x0000'0001u};
  std::vector<float> values(in.size());
  std::memcpy(values.data(), in.data(), in.size() * sizeof(float));
  std::vector<float> out(in.size());
  convert(values.data(), values.size(), out.data());
  CHECK(std::memcmp(out.data(), in.data(), in.size() * sizeof(float)) == 0);

  const std::vector<f16> halves{{0x7c01}, {0xfe00}, {0x8000}};
  std::vector<f16> copies(halves.size());
  convert(halves.data(), halves.size(), copies.data());
  CHECK(copies == halves);
  convert(halves.data(), 0, static_cast<f16*>(nullptr));
}
