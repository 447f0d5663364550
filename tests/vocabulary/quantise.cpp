// SPDX-License-Identifier: Apache-2.0
// Every scale, zero point and code that formats store, and every float read back, against an oracle in double
// precision.
#include <kvcache/quantise.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "catch.hpp"
#include "quantise_oracle.hpp"
#include "stored.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

const std::vector<dtype_id> per_token{dtype_id::int8_per_token,
                                      dtype_id::int4_grouped_16,
                                      dtype_id::int4_grouped_32,
                                      dtype_id::int4_grouped_64,
                                      dtype_id::int4_grouped_128,
                                      dtype_id::int4_grouped_asymmetric_16,
                                      dtype_id::int4_grouped_asymmetric_32,
                                      dtype_id::int4_grouped_asymmetric_64,
                                      dtype_id::int4_grouped_asymmetric_128};
const std::vector<dtype_id> per_channel{dtype_id::int8_per_channel, dtype_id::int4_per_channel,
                                        dtype_id::int4_per_channel_symmetric, dtype_id::int2_per_channel};

constexpr std::byte guard{0xa5};
constexpr std::uint16_t nan_scale = 0x7fc0;

/// What is stored in `scale` and `zero` of a group, one of them a NaN where the group has one and says so.
void check_scales(const expected_group& e, const std::byte* scales, std::size_t index, std::size_t zero_index,
                  bool says_nan) {
  if (says_nan && e.nan && !e.q.zero_points)
    REQUIRE(bits_at(scales, index) == nan_scale);
  else
    REQUIRE(bf16_at(scales, index) == e.scale);
  if (!e.q.zero_points) return;
  if (says_nan && e.nan)
    REQUIRE(bits_at(scales, zero_index) == nan_scale);
  else
    REQUIRE(bf16_at(scales, zero_index) == e.zero);
}

/// Element i of a group: its code, and what is read back.
void check_element(const expected_group& e, std::size_t i, int code, float read, bool says_nan) {
  const bool right =
      e.nearest(i, code) && (says_nan && e.nan ? no_number(read) : read == static_cast<float>(e.worth(code)));
  if (right) return;  // millions of assertions take their time
  CAPTURE(i, e.encoded[i], code, e.worth(code), read);
  REQUIRE(right);
}

void check_token(dtype_id dtype, const std::vector<float>& x) {
  const quantization q = quantization_of(dtype);
  const auto dim = static_cast<std::uint32_t>(x.size());
  CAPTURE(name(dtype), dim);
  std::vector<std::byte> codes(code_bytes(dtype, dim) + 2, guard);
  std::vector<std::byte> scales(scale_bytes(dtype, dim) + 2, guard);
  quantise_head(dtype, x.data(), dim, codes.data() + 1, scales.data() + 1);
  REQUIRE((codes.front() == guard && codes.back() == guard && scales.front() == guard && scales.back() == guard));
  if (q.bits == 4 && dim % 2 == 1) REQUIRE(std::to_integer<int>(codes[codes.size() - 2]) >> 4 == 0);
  std::vector<float> read(dim + 1, -7.0f);
  dequantise_head(dtype, codes.data() + 1, scales.data() + 1, dim, read.data());
  REQUIRE(read[dim] == -7.0f);

  const std::uint32_t group = q.group == 0 ? dim : q.group;
  const std::uint32_t groups = (dim + group - 1) / group;
  for (std::uint32_t g = 0; g < groups; ++g) {
    const std::uint32_t end = std::min((g + 1) * group, dim);
    const expected_group e(q, std::vector<float>(x.begin() + g * group, x.begin() + end));
    CAPTURE(g, e.scale, e.zero);
    check_scales(e, scales.data() + 1, g, groups + g, true);
    for (std::uint32_t d = g * group; d < end; ++d)
      check_element(e, d - g * group, code_at(q.bits, codes.data() + 1, d), read[d], true);
  }
}

/// `rows` is one head of a block; codes of a token lie in memory with a gap behind them.
void check_block(dtype_id dtype, const float_rows& rows) {
  const quantization q = quantization_of(dtype);
  const std::uint32_t dim = rows.dim;
  const std::uint32_t tokens = rows.count();
  CAPTURE(name(dtype), dim, tokens);
  const std::size_t stride = code_bytes(dtype, dim) + 3;
  std::vector<std::byte> codes(stride * tokens, guard);
  std::vector<std::byte> scales(scale_bytes(dtype, dim) + 2, guard);
  seal_head(
      dtype, tokens, dim, [&](std::uint32_t t, float* x) { std::memcpy(x, rows.row(t), dim * sizeof(float)); },
      codes.data(), static_cast<std::int64_t>(stride), scales.data() + 1);
  REQUIRE((scales.front() == guard && scales.back() == guard));
  std::vector<std::vector<float>> read(tokens, std::vector<float>(dim));
  for (std::uint32_t t = 0; t < tokens; ++t) {
    for (std::size_t b = code_bytes(dtype, dim); b < stride; ++b) REQUIRE(codes[t * stride + b] == guard);
    dequantise_head(dtype, codes.data() + t * stride, scales.data() + 1, dim, read[t].data());
  }
  for (std::uint32_t d = 0; d < dim; ++d) {
    std::vector<float> channel;
    for (std::uint32_t t = 0; t < tokens; ++t) channel.push_back(rows.row(t)[d]);
    const expected_group e(q, channel);
    CAPTURE(d, e.scale, e.zero);
    check_scales(e, scales.data() + 1, d, dim + d, false);
    for (std::uint32_t t = 0; t < tokens; ++t)
      check_element(e, t, code_at(q.bits, codes.data() + t * stride, d), read[t][d], false);
  }
}

enum class kind { gaussian, biased, constant, tiny, huge, largest, mixed, special, subnormal, never_finite };
constexpr kind kinds[] = {kind::gaussian, kind::biased, kind::constant, kind::tiny,      kind::huge,
                          kind::largest,  kind::mixed,  kind::special,  kind::subnormal, kind::never_finite};

float_rows rows_of(kind what, std::uint32_t rows, std::uint32_t dim, std::uint32_t seed) {
  float_rows out = gaussian_rows(rows, dim, seed);
  std::mt19937 random(seed + 1);
  const std::uint32_t specials[] = {0x7fc0'0000u, 0xffc0'0001u, 0x7f80'0001u, 0x7f80'0000u, 0xff80'0000u, 0x8000'0000u,
                                    0x0000'0000u, 0x0000'0001u, 0x8000'0001u, 0x807f'ffffu, 0x7f7f'ffffu, 0xff7f'ffffu};
  for (float& x : out.values) {
    switch (what) {
      case kind::gaussian: break;
      case kind::biased: x = x * 0.25f + 5.5f; break;
      case kind::constant: x = -3.3f; break;
      case kind::tiny: x *= 1e-30f; break;
      case kind::huge: x *= 1e30f; break;
      case kind::largest: x = x < 0 ? -3.4028234e38f : 3.4028234e38f; break;
      case kind::mixed: x = std::ldexp(x, static_cast<int>(random() % 120) - 60); break;
      case kind::special:
        if (random() % 11 == 0) x = std::bit_cast<float>(specials[random() % 12]);
        break;
      case kind::subnormal:
        x = std::bit_cast<float>(static_cast<std::uint32_t>(0x8000'0000u | random() % 0x0080'0000u));
        break;
      case kind::never_finite: x = std::bit_cast<float>(specials[3 + random() % 2]); break;
    }
  }
  return out;
}

}  // namespace

TEST_CASE(KVCACHE_TEST_BUILD "formats with scales per token store what their documentation says") {
  std::uint32_t seed = 0;
  for (const kind what : kinds)
    for (const std::uint32_t dim :
         {1u, 2u, 7u, 16u, 17u, 31u, 32u, 33u, 48u, 64u, 80u, 96u, 100u, 128u, 192u, 1'000u, 1'024u}) {
      const float_rows rows = rows_of(what, dim > 200 ? 1 : 8, dim, ++seed);
      CAPTURE(static_cast<int>(what), seed);
      for (const dtype_id dtype : per_token)
        for (std::uint32_t r = 0; r < rows.count(); ++r)
          check_token(dtype, std::vector<float>(rows.row(r), rows.row(r) + dim));
    }
}

TEST_CASE(KVCACHE_TEST_BUILD "formats with scales per channel store what their documentation says") {
  std::uint32_t seed = 1'000;
  for (const kind what : kinds)
    for (const std::uint32_t dim : {1u, 2u, 7u, 16u, 31u, 33u, 80u, 128u, 1'024u})
      for (const std::uint32_t tokens : {1u, 7u, 16u, 64u}) {
        if (dim * tokens > 8'192) continue;
        const float_rows rows = rows_of(what, tokens, dim, ++seed);
        CAPTURE(static_cast<int>(what), seed);
        for (const dtype_id dtype : per_channel) check_block(dtype, rows);
      }
}

TEST_CASE(KVCACHE_TEST_BUILD "a special element at any place changes its group alone, and is stored as documented") {
  const std::uint32_t specials[] = {0x7fc0'0000u, 0x7f80'0000u, 0xff80'0000u, 0x8000'0000u, 0x7f7f'ffffu, 0x8000'0001u};
  for (const std::uint32_t special : specials)
    for (std::uint32_t place = 0; place < 72; place += 5) {
      float_rows rows = gaussian_rows(3, 72, place);
      rows.row(1)[place] = std::bit_cast<float>(special);
      CAPTURE(special, place);
      for (const dtype_id dtype : per_token) check_token(dtype, std::vector<float>(rows.row(1), rows.row(1) + 72));
      for (const dtype_id dtype : per_channel) check_block(dtype, rows);
    }
}

TEST_CASE(KVCACHE_TEST_BUILD
          "infinity reads as the largest finite element that shares its scale, NaN spoils a token's group") {
  const float infinity = std::bit_cast<float>(0x7f80'0000u);
  const float nan = std::bit_cast<float>(0x7fc0'0000u);
  float_rows in{32, std::vector<float>(64)};
  for (std::uint32_t i = 0; i < 64; ++i) in.values[i] = i % 2 == 0 ? 2.0f : -1.0f;
  in.values[3] = infinity;
  in.values[4] = -infinity;
  in.values[40] = nan;
  const float_rows out = stored_and_read(dtype_id::int8_per_token, in, 1);
  CHECK(out.values[3] == out.values[0]);
  CHECK(out.values[4] == out.values[1]);
  for (std::uint32_t i = 32; i < 64; ++i) CHECK(no_number(out.values[i]));
  // Per channel: channel 8 holds 2 and a NaN, channel 3 infinity and -1.
  const float_rows sealed = stored_and_read(dtype_id::int8_per_channel, in, 2);
  CHECK(std::abs(sealed.values[40] - 2.0f) < 0.02f);
  CHECK(std::abs(sealed.values[3] + 1.0f) < 0.01f);
}

TEST_CASE(KVCACHE_TEST_BUILD "attention_9 a range away from 0 is not stretched to it, and padding is not counted") {
  std::mt19937 random(9);
  std::uniform_real_distribution<float> between(5.0f, 6.0f);
  for (const std::uint32_t dim : {80u, 96u})
    for (const dtype_id dtype :
         {dtype_id::int4_grouped_asymmetric_16, dtype_id::int4_grouped_asymmetric_32,
          dtype_id::int4_grouped_asymmetric_64, dtype_id::int4_grouped_asymmetric_128, dtype_id::int4_per_channel}) {
      float_rows rows{dim, std::vector<float>(dim * 32)};
      for (float& x : rows.values) x = between(random);
      CAPTURE(name(dtype), dim);
      const float_rows out = stored_and_read(dtype, rows, 32);
      // A 15th of the range, with 1 / 32 for a zero point that is a bf16 at 5 and 1 / 128 for the scale: half of it.
      for (std::size_t i = 0; i < out.values.size(); ++i)
        REQUIRE(std::abs(out.values[i] - rows.values[i]) <= (1.0f + 0x1p-5f) * (1.0f + 0x1p-7f) / 15 / 2 + 1e-4f);
      // The last 16 of 80 elements are a group of their own where groups hold 32 or 64: alike, they are exact.
      if (quantization_of(dtype).group != 32 && quantization_of(dtype).group != 64) continue;
      if (dim != 80) continue;
      for (std::uint32_t d = 64; d < 80; ++d) rows.row(0)[d] = 5.5f;
      const float_rows alike = stored_and_read(dtype, rows, 1);
      for (std::uint32_t d = 64; d < 80; ++d) REQUIRE(alike.row(0)[d] == 5.5f);
    }
}

TEST_CASE(KVCACHE_TEST_BUILD "a scale is the least bf16 that reaches all elements") {
  // Ranges that some bf16 reaches exactly, and the floats around them.
  for (std::uint32_t m = 0; m < 128; ++m)
    for (const float steps : {127.0f, 15.0f, 8.0f, 3.0f})
      for (int away = -2; away <= 2; ++away) {
        const float reached = std::bit_cast<float>(0x3f80'0000u | m << 16) * steps;
        const auto bits = static_cast<std::uint32_t>(static_cast<int>(std::bit_cast<std::uint32_t>(reached)) + away);
        const std::vector<float> x{0.0f, std::bit_cast<float>(bits), std::bit_cast<float>(bits) / 3};
        for (const dtype_id dtype :
             {dtype_id::int8_per_token, dtype_id::int4_grouped_16, dtype_id::int4_grouped_asymmetric_16})
          check_token(dtype, x);
        for (const dtype_id dtype : per_channel) check_block(dtype, {1, x});
      }
}

TEST_CASE(KVCACHE_TEST_BUILD "elements that are all alike keep their worth") {
  for (const float x : {0.0f, 1.0f, -1.0f, 5.123f, -0.001f, 1e30f, -1e-20f, 1e-30f}) {
    const float_rows rows{96, std::vector<float>(96 * 16, x)};
    for (const auto* formats : {&per_token, &per_channel})
      for (const dtype_id dtype : *formats) {
        CAPTURE(name(dtype), x);
        for (const float y : stored_and_read(dtype, rows, 16).values)
          REQUIRE(std::abs(y - x) <= std::abs(x) * (quantization_of(dtype).bits == 8 ? 0x1p-7f : 0x1p-6f));
      }
  }
}

TEST_CASE(KVCACHE_TEST_BUILD "a rotation turned twice is the vector, and keeps its length") {
  std::uint32_t seed = 0;
  for (const std::uint32_t dim :
       {1u, 2u, 3u, 4u, 8u, 12u, 16u, 32u, 48u, 64u, 80u, 96u, 112u, 128u, 192u, 256u, 512u, 1'024u}) {
    const float_rows rows = gaussian_rows(4, dim, ++seed);
    for (std::uint32_t r = 0; r < 4; ++r) {
      std::vector<float> x(rows.row(r), rows.row(r) + dim);
      rotate(x.data(), dim);
      double before = 0;
      double after = 0;
      for (std::uint32_t d = 0; d < dim; ++d) {
        before += static_cast<double>(rows.row(r)[d]) * static_cast<double>(rows.row(r)[d]);
        after += static_cast<double>(x[d]) * static_cast<double>(x[d]);
      }
      CAPTURE(dim);
      REQUIRE(std::abs(after / before - 1) < 1e-5);
      rotate(x.data(), dim);
      for (std::uint32_t d = 0; d < dim; ++d) REQUIRE(std::abs(x[d] - rows.row(r)[d]) < 2e-6f);
    }
  }
}

TEST_CASE(KVCACHE_TEST_BUILD "a rotation is the Hadamard matrix of Sylvester, divided by the root of its size") {
  for (const std::uint32_t dim : {1u, 2u, 4u, 8u, 16u, 32u, 48u, 64u, 80u, 96u, 128u, 256u, 1'024u}) {
    const std::uint32_t run = dim & (~dim + 1);
    for (std::uint32_t column = 0; column<dim; column += dim> 64 ? 13 : 1) {
      std::vector<double> unit(dim);
      unit[column] = 1;
      rotate(unit.data(), dim);
      std::vector<float> narrow(dim);
      narrow[column] = 1;
      rotate(narrow.data(), dim);
      for (std::uint32_t row = 0; row < dim; ++row) {
        const bool together = row / run == column / run;
        const int sign = std::popcount((row % run) & (column % run)) % 2 == 0 ? 1 : -1;
        const double wanted = together ? sign / std::sqrt(static_cast<double>(run)) : 0;
        CAPTURE(dim, row, column);
        REQUIRE(std::abs(unit[row] - wanted) < 1e-15);
        REQUIRE(std::abs(static_cast<double>(narrow[row]) - wanted) < 1e-7);
      }
    }
  }
}

TEST_CASE(KVCACHE_TEST_BUILD "read_head reads element types and formats, rotated or not, as they are stored") {
  const float_rows rows = gaussian_rows(1, 48, 5);
  std::vector<std::byte> codes(48 * 4);
  std::vector<std::byte> scales(64);
  std::vector<float> read(48);
  for (const dtype_id dtype : {dtype_id::float32, dtype_id::bfloat16, dtype_id::float8_e5m2}) {
    convert(rows.row(0), 48, codes.data(), dtype);
    std::vector<float> wanted(48);
    convert(codes.data(), dtype, 48, wanted.data());
    for (const std::uint8_t bit : {std::uint8_t{0}, rotated_bit}) {
      const auto id = static_cast<dtype_id>(static_cast<std::uint8_t>(dtype) | bit);
      read_head({codes.data(), nullptr, id}, 48, read.data());
      CHECK(read == wanted);
    }
  }
  quantise_head(dtype_traits<rotated<int4_grouped<16>>>::id, rows.row(0), 48, codes.data(), scales.data());
  std::vector<float> wanted(48);
  dequantise_head(dtype_id::int4_grouped_16, codes.data(), scales.data(), 48, wanted.data());
  read_head({codes.data(), scales.data(), dtype_traits<rotated<int4_grouped<16>>>::id}, 48, read.data());
  CHECK(read == wanted);
}
