// SPDX-License-Identifier: Apache-2.0
// Compiled without contraction of a * b + c (see CMakeLists.txt): a fused multiply-add would round differently.
#include "dequantise.hpp"

#include <kvcache/dtype.hpp>

#include <cstdint>
#include <cstring>
#include <utility>

namespace engine {
namespace {

using byte = std::uint8_t;

float half_at(const byte* from) {
  kvcache::f16 x;
  std::memcpy(&x.bits, from, sizeof(x.bits));
  return kvcache::to_float(x);
}

float f32_block(const byte* from) {
  float x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

float bf16_block(const byte* from) {
  kvcache::bf16 x;
  std::memcpy(&x.bits, from, sizeof(x.bits));
  return kvcache::to_float(x);
}

// Q4_0, Q4_1: 32 codes of 4 bits; the low halves of 16 bytes come first, then the high halves.
void q4_0_block(const byte* from, float* out) {
  const float scale = half_at(from);
  const byte* codes = from + 2;
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * static_cast<float>((codes[i] & 0xf) - 8);
    out[i + 16] = scale * static_cast<float>((codes[i] >> 4) - 8);
  }
}

void q4_1_block(const byte* from, float* out) {
  const float scale = half_at(from);
  const float minimum = half_at(from + 2);
  const byte* codes = from + 4;
  for (int i = 0; i < 16; ++i) {
    out[i] = scale * static_cast<float>(codes[i] & 0xf) + minimum;
    out[i + 16] = scale * static_cast<float>(codes[i] >> 4) + minimum;
  }
}

// Q5_0, Q5_1: as Q4, with the fifth bit of code i in bit i of a 32-bit word.
std::pair<int, int> five_bits(const byte* high, const byte* codes, int i) {
  std::uint32_t fifth;
  std::memcpy(&fifth, high, sizeof(fifth));
  const auto bit = [&](int at) { return static_cast<int>((fifth >> at) & 1u) << 4; };
  return {(codes[i] & 0xf) | bit(i), (codes[i] >> 4) | bit(i + 16)};
}

void q5_0_block(const byte* from, float* out) {
  const float scale = half_at(from);
  for (int i = 0; i < 16; ++i) {
    const auto [low, high] = five_bits(from + 2, from + 6, i);
    out[i] = scale * static_cast<float>(low - 16);
    out[i + 16] = scale * static_cast<float>(high - 16);
  }
}

void q5_1_block(const byte* from, float* out) {
  const float scale = half_at(from);
  const float minimum = half_at(from + 2);
  for (int i = 0; i < 16; ++i) {
    const auto [low, high] = five_bits(from + 4, from + 8, i);
    out[i] = scale * static_cast<float>(low) + minimum;
    out[i + 16] = scale * static_cast<float>(high) + minimum;
  }
}

void q8_0_block(const byte* from, float* out) {
  const float scale = half_at(from);
  for (int i = 0; i < 32; ++i) out[i] = scale * static_cast<float>(static_cast<std::int8_t>(from[2 + i]));
}

// Q4_K, Q5_K: 8 groups of 32; each has a 6-bit scale and a 6-bit minimum, packed into 12 bytes: the first four of each
// lie in the low bits of bytes 0-3 and 4-7, the others are split between bytes 8-11 and the two high bits of 0-7.
std::pair<float, float> scale_and_minimum(const byte* packed, int group) {
  if (group < 4) return {static_cast<float>(packed[group] & 63), static_cast<float>(packed[group + 4] & 63)};
  const int scale = (packed[group + 4] & 0xf) | ((packed[group - 4] >> 6) << 4);
  const int minimum = (packed[group + 4] >> 4) | ((packed[group] >> 6) << 4);
  return {static_cast<float>(scale), static_cast<float>(minimum)};
}

void q4_k_block(const byte* from, float* out) {
  const float scale = half_at(from);
  const float minimum = half_at(from + 2);
  const byte* codes = from + 16;
  for (int group = 0; group < 8; ++group) {
    const auto [s, m] = scale_and_minimum(from + 4, group);
    const float group_scale = scale * s;
    const float group_minimum = minimum * m;
    const int shift = (group % 2) * 4;
    for (int i = 0; i < 32; ++i)
      out[group * 32 + i] =
          group_scale * static_cast<float>((codes[group / 2 * 32 + i] >> shift) & 0xf) - group_minimum;
  }
}

void q5_k_block(const byte* from, float* out) {
  const float scale = half_at(from);
  const float minimum = half_at(from + 2);
  const byte* fifth = from + 16;
  const byte* codes = from + 48;
  for (int group = 0; group < 8; ++group) {
    const auto [s, m] = scale_and_minimum(from + 4, group);
    const float group_scale = scale * s;
    const float group_minimum = minimum * m;
    const int shift = (group % 2) * 4;
    for (int i = 0; i < 32; ++i) {
      const int code = ((codes[group / 2 * 32 + i] >> shift) & 0xf) | (((fifth[i] >> group) & 1) << 4);
      out[group * 32 + i] = group_scale * static_cast<float>(code) - group_minimum;
    }
  }
}

// Q6_K: two halves of 128; in each, 64 bytes of low nibbles, 32 bytes of high bit pairs and 8 signed scales of 16
// elements each.
void q6_k_block(const byte* from, float* out) {
  const float scale = half_at(from + 208);
  for (int half = 0; half < 2; ++half) {
    const byte* low = from + half * 64;
    const byte* high = from + 128 + half * 32;
    const byte* scales = from + 192 + half * 8;
    for (int quarter = 0; quarter < 4; ++quarter) {
      for (int i = 0; i < 32; ++i) {
        const int nibble = (low[quarter % 2 * 32 + i] >> (quarter / 2 * 4)) & 0xf;
        const int pair = (high[i] >> (quarter * 2)) & 3;
        const auto group_scale = static_cast<float>(static_cast<std::int8_t>(scales[quarter * 2 + i / 16]));
        out[half * 128 + quarter * 32 + i] = scale * group_scale * static_cast<float>((nibble | (pair << 4)) - 32);
      }
    }
  }
}

template <class Block>
void each_block(tensor_type type, std::span<const std::byte> bytes, float* out, Block block) {
  const tensor_type_layout layout = layout_of(type);
  const auto* from = reinterpret_cast<const byte*>(bytes.data());
  for (std::size_t at = 0; at < bytes.size(); at += layout.bytes, out += layout.elements) block(from + at, out);
}

}  // namespace

void dequantise(tensor_type type, std::span<const std::byte> bytes, std::span<float> out) {
  const auto each = [&](auto block) { each_block(type, bytes, out.data(), block); };
  switch (type) {
    case tensor_type::f32: return each([](const byte* from, float* to) { *to = f32_block(from); });
    case tensor_type::f16: return each([](const byte* from, float* to) { *to = half_at(from); });
    case tensor_type::bf16: return each([](const byte* from, float* to) { *to = bf16_block(from); });
    case tensor_type::q4_0: return each(q4_0_block);
    case tensor_type::q4_1: return each(q4_1_block);
    case tensor_type::q5_0: return each(q5_0_block);
    case tensor_type::q5_1: return each(q5_1_block);
    case tensor_type::q8_0: return each(q8_0_block);
    case tensor_type::q4_k: return each(q4_k_block);
    case tensor_type::q5_k: return each(q5_k_block);
    case tensor_type::q6_k: return each(q6_k_block);
  }
}

}  // namespace engine
