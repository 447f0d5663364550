// SPDX-License-Identifier: Apache-2.0
// How far what is read lies from what was stored: relative RMS over 4,096 rows of 128, and bytes per element.
#include <kvcache/geometry.hpp>
#include <kvcache/quantise.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "catch.hpp"
#include "stored.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

constexpr std::uint32_t rows = 4'096;
constexpr std::uint32_t dim = 128;

const float_rows& gaussian() {
  static const float_rows r = gaussian_rows(rows, dim, 1);
  return r;
}
const float_rows& biased() {
  static const float_rows r = biased_rows(rows, dim, 2, {5, 37, 70, 101});  // one in each group of 32
  return r;
}

void check_within(double got, double wanted, double share) {
  CAPTURE(got, wanted);
  CHECK(std::abs(got / wanted - 1) <= share);
}

/// Of a row of 128, the scales of its share of a block included.
double bytes_per_element(dtype_id dtype, std::uint32_t tokens) {
  const double scales = static_cast<double>(scale_bytes(dtype, dim)) / (seals(dtype) ? tokens : 1);
  return (static_cast<double>(code_bytes(dtype, dim)) + scales) / dim;
}

void check_row(dtype_id dtype, std::uint32_t tokens, double bytes, double on_gaussian, double on_biased) {
  CAPTURE(name(dtype), tokens);
  CHECK(bytes_per_element(dtype, tokens) == bytes);
  check_within(stored_error(dtype, gaussian(), tokens), on_gaussian, 0.03);
  check_within(stored_error(dtype, biased(), tokens), on_biased, 0.05);
}

/// Asymmetric quantisation of each channel over blocks of `tokens`, its numbers plain doubles: what a format that
/// stores its scales without loss would do.
double plain_channel_error(const float_rows& data, std::uint32_t tokens, int last) {
  double difference = 0;
  double whole = 0;
  for (std::uint32_t first = 0; first < rows; first += tokens)
    for (std::uint32_t d = 0; d < dim; ++d) {
      double low = 1e30;
      double high = -1e30;
      for (std::uint32_t t = 0; t < tokens; ++t) {
        low = std::min(low, static_cast<double>(data.row(first + t)[d]));
        high = std::max(high, static_cast<double>(data.row(first + t)[d]));
      }
      for (std::uint32_t t = 0; t < tokens; ++t) {
        const double x = static_cast<double>(data.row(first + t)[d]);
        const double step = (high - low) / last;
        const double error = low + std::round((x - low) / step) * step - x;
        difference += error * error;
        whole += x * x;
      }
    }
  return std::sqrt(difference / whole);
}

}  // namespace

TEST_CASE("each format has the error and the bytes per element that it is chosen for") {
  check_row(dtype_id::int8_per_token, 1, 1.015625, 0.00646, 0.015);
  check_row(dtype_id::float8_e4m3, 1, 1, 0.0266, 0.0266);
  check_row(dtype_id::float8_e5m2, 1, 1, 0.0527, 0.0527);
  check_row(dtype_id::int4_grouped_32, 1, 0.5625, 0.086, 0.18);
  check_row(dtype_id::int4_per_channel, 32, 0.625, 0.078, 0.039);
  check_row(dtype_id::int2_per_channel, 32, 0.375, 0.39, 0.195);
}

TEST_CASE("rotated int4 has the same error whatever a channel's bias") {
  const dtype_id dtype = dtype_traits<rotated<int4_grouped<32>>>::id;
  CHECK(bytes_per_element(dtype, 1) == 0.5625);
  check_within(stored_error(dtype, gaussian()), 0.086, 0.03);
  // Four channels with fixed signs make fixed patterns when they are rotated, flatter than a Gaussian and different
  // for each choice of channels: at most the Gaussian's error, some two fifths of what is not rotated at most.
  std::mt19937 random(3);
  double sum = 0;
  constexpr int choices = 12;
  for (int i = 0; i < choices; ++i) {
    std::vector<std::uint32_t> channels;
    while (channels.size() < 4) {
      const auto c = static_cast<std::uint32_t>(random() % dim);
      if (std::find(channels.begin(), channels.end(), c) == channels.end()) channels.push_back(c);
    }
    const float_rows some = biased_rows(rows / 4, dim, static_cast<std::uint32_t>(i), channels);
    const double error = stored_error(dtype, some);
    CAPTURE(channels, error);
    CHECK(error <= 0.086 * 1.05);
    CHECK(error < stored_error(dtype_id::int4_grouped_32, some));
    sum += error;
  }
  CAPTURE(sum / choices);
  CHECK(sum / choices > 0.06);
}

TEST_CASE("the scale from the element of largest magnitude beats the usual one of 4 bits by a tenth") {
  // Magnitude / 7: nothing but the groups' largest magnitudes is needed of the data.
  double difference = 0;
  for (std::size_t first = 0; first < gaussian().values.size(); first += 32) {
    double most = 0;
    for (std::size_t i = 0; i < 32; ++i)
      most = std::max(most, std::abs(static_cast<double>(gaussian().values[first + i])));
    for (std::size_t i = 0; i < 32; ++i) {
      const double x = static_cast<double>(gaussian().values[first + i]);
      const double error = std::round(x / (most / 7)) * (most / 7) - x;
      difference += error * error;
    }
  }
  const double usual = std::sqrt(difference / static_cast<double>(gaussian().values.size()));
  check_within(usual, 0.097, 0.03);
  check_within(stored_error(dtype_id::int4_grouped_32, gaussian()) / usual, 0.89, 0.03);
}

TEST_CASE("per-channel formats err as plain asymmetric quantisation does, for blocks of 16, 32 and 64") {
  for (const std::uint32_t tokens : {16u, 32u, 64u})
    for (const float_rows* data : {&gaussian(), &biased()}) {
      CAPTURE(tokens);
      // Stored scales and zero points are bf16: a range is 1 % larger then, or 1 / 16 of what is farthest from 0.
      check_within(stored_error(dtype_id::int4_per_channel, *data, tokens), plain_channel_error(*data, tokens, 15),
                   0.03);
      check_within(stored_error(dtype_id::int2_per_channel, *data, tokens), plain_channel_error(*data, tokens, 3),
                   0.03);
    }
  CHECK(bytes_per_element(dtype_id::int4_per_channel, 16) == 0.75);
  CHECK(bytes_per_element(dtype_id::int4_per_channel, 64) == 0.5625);
  CHECK(bytes_per_element(dtype_id::int4_per_channel_symmetric, 32) == 0.5625);
  CHECK(bytes_per_element(dtype_id::int8_per_channel, 32) == 1.0625);
  CHECK(bytes_per_element(dtype_id::int2_per_channel, 64) == 0.3125);
}

TEST_CASE("errors are those of a uniform step over the expected largest magnitude of a group") {
  // On unit data a step D errs by D / sqrt(12); the largest of g magnitudes is 2.08, 2.35, 2.60, 2.82 on average.
  const double root_of_12 = std::sqrt(12.0);
  check_within(stored_error(dtype_id::int8_per_token, gaussian()), 2.82 / 127 / root_of_12, 0.03);
  const double largest[] = {2.08, 2.35, 2.60, 2.82};
  const dtype_id grouped[] = {dtype_id::int4_grouped_16, dtype_id::int4_grouped_32, dtype_id::int4_grouped_64,
                              dtype_id::int4_grouped_128};
  const dtype_id asymmetric[] = {dtype_id::int4_grouped_asymmetric_16, dtype_id::int4_grouped_asymmetric_32,
                                 dtype_id::int4_grouped_asymmetric_64, dtype_id::int4_grouped_asymmetric_128};
  for (int i = 0; i < 4; ++i) {
    CAPTURE(name(grouped[i]));
    check_within(stored_error(grouped[i], gaussian()), largest[i] / 8 / root_of_12, 0.03);
    // From the smallest to the largest element is less than twice the largest magnitude, which no side has alone.
    CHECK(stored_error(asymmetric[i], gaussian()) < stored_error(grouped[i], gaussian()));
    const double group = 16 << i;
    CHECK(bytes_per_element(grouped[i], 1) == 0.5 + 2 / group);
    CHECK(bytes_per_element(asymmetric[i], 1) == 0.5 + 4 / group);
  }
}
