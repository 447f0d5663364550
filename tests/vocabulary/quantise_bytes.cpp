// SPDX-License-Identifier: Apache-2.0
// The bytes that formats store, as one number: the same in every build of this file, whatever its options.
#include <kvcache/quantise.hpp>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "catch.hpp"

using namespace kvcache;

namespace {

/// Floats that no compiler can make others of: from integers, by one product at most.
class exact_values {
 public:
  float next(std::uint32_t kind) {
    const float x = static_cast<float>(static_cast<std::int32_t>(bits() & 0x00ff'ffffu) - 0x0080'0000) * 0x1p-22f;
    switch (kind % 6) {
      case 0: return x;
      case 1: return static_cast<float>(bits() & 0x00ff'ffffu);
      case 2: return std::bit_cast<float>((bits() & 0x807f'ffffu) | (bits() % 8 + 20) << 23);  // around 1e-31
      case 3: return std::bit_cast<float>(bits());                                             // anything
      case 4: return std::bit_cast<float>(bits() & 0x807f'ffffu);                              // subnormal
      default: return bits() % 9 == 0 ? std::bit_cast<float>(0x7f80'0000u | bits() << 31) : x;
    }
  }

 private:
  std::uint32_t bits() {
    state_ = state_ * 6'364'136'223'846'793'005ull + 1'442'695'040'888'963'407ull;
    return static_cast<std::uint32_t>(state_ >> 32);
  }
  std::uint64_t state_ = 1;
};

class fingerprint {
 public:
  void add(const std::vector<std::byte>& bytes) {
    for (const std::byte b : bytes) value_ = (value_ ^ std::to_integer<std::uint64_t>(b)) * 0x100'0000'01b3ull;
  }
  [[nodiscard]] std::uint64_t value() const { return value_; }

 private:
  std::uint64_t value_ = 0xcbf2'9ce4'8422'2325ull;
};

}  // namespace

TEST_CASE(KVCACHE_TEST_BUILD "the bytes of formats do not depend on the build") {
  exact_values values;
  fingerprint stored;
  fingerprint read;
  constexpr std::uint32_t tokens = 16;
  for (std::uint32_t round = 0; round < 60; ++round)
    for (const std::uint32_t dim : {128u, 80u, 64u, 33u, 7u, 1u}) {
      std::vector<float> x(dim * tokens);
      for (float& y : x) y = values.next(round);
      for (std::uint8_t id = 0; name(static_cast<dtype_id>(id)) != name(static_cast<dtype_id>(99)); ++id) {
        const auto dtype = static_cast<dtype_id>(id);
        if (quantization_of(dtype).bits == 0) continue;
        const std::size_t size = code_bytes(dtype, dim);
        std::vector<std::byte> codes(size * tokens);
        std::vector<std::byte> scales(scale_bytes(dtype, dim) * (seals(dtype) ? 1 : tokens));
        if (seals(dtype))
          seal_head(
              dtype, tokens, dim, [&](std::uint32_t t, float* to) { std::memcpy(to, x.data() + t * dim, dim * 4); },
              codes.data(), static_cast<std::int64_t>(size), scales.data());
        std::vector<std::byte> floats(dim * tokens * 4);
        for (std::uint32_t t = 0; t < tokens; ++t) {
          std::byte* const scale = scales.data() + (seals(dtype) ? 0 : t * scale_bytes(dtype, dim));
          if (!seals(dtype)) quantise_head(dtype, x.data() + t * dim, dim, codes.data() + t * size, scale);
          std::vector<float> y(dim);
          dequantise_head(dtype, codes.data() + t * size, scale, dim, y.data());
          std::memcpy(floats.data() + t * dim * 4, y.data(), dim * 4);
        }
        stored.add(codes);
        stored.add(scales);
        if (round % 6 < 3) read.add(floats);  // no NaN among them, whose payload is the processor's business
      }
    }
  CHECK(stored.value() == 0xcd3a'6c1b'bc0b'31a0ull);
  CHECK(read.value() == 0x1d77'703e'7fad'9841ull);
}

TEST_CASE(KVCACHE_TEST_BUILD "a rotation does not depend on the build") {
  exact_values values;
  fingerprint rotated;
  for (std::uint32_t round = 0; round < 200; ++round)
    for (const std::uint32_t dim : {256u, 128u, 96u, 80u, 64u, 32u, 16u, 8u, 6u, 2u}) {
      std::vector<float> x(dim);
      for (float& y : x) y = values.next(round % 2);
      rotate(x.data(), dim);
      std::vector<std::byte> bytes(dim * 4);
      std::memcpy(bytes.data(), x.data(), bytes.size());
      rotated.add(bytes);
    }
  CHECK(rotated.value() == 0x0444'f834'd8d3'af71ull);
}
