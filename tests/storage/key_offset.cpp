// SPDX-License-Identifier: Apache-2.0
// Keys stored less an offset: which bytes that makes, how much closer keys with biased channels come, and what is
// refused.
#include <kvcache/fp8.hpp>
#include <kvcache/key_offset.hpp>
#include <kvcache/quantization.hpp>

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "../vocabulary/stored.hpp"
#include "catch.hpp"
#include "pool.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

using bundles =
    std::tuple<bundle<f32, f32, nhd>, bundle<bf16, f16, hnd>, bundle<fp8_e4m3, fp8_e5m2, nhd>,
               bundle<int8_per_token, int4_grouped<32>, hnd>, bundle<rotated<int4_grouped<32>>, rotated<bf16>, nhd>,
               bundle<rotated<fp8_e4m3>, f32, hnd>, bundle<int4_per_channel, int4_grouped<32>, nhd>>;

constexpr geometry shape{.layers = 3, .kv_heads = 2, .head_dim = 48, .head_dim_v = 40};
constexpr std::uint32_t width = 2 * 48;
constexpr std::uint32_t tokens = 40;
constexpr std::uint32_t block_size = 8;
constexpr std::array<std::uint32_t, 1> wide{2};

std::vector<float> some_offset(std::uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, 5.0f);
  std::vector<float> out(width);
  for (float& x : out) x = normal(random);
  return out;
}

/// Rows of all layers in a pool, in chunks, and what it holds then.
template <class Policies, class K>
bytes stored(storage<Policies> pool, const std::vector<K>& k, const std::vector<float>& v,
             const std::vector<std::uint32_t>& chunks) {
  std::vector<slot_id> slots;
  for (std::uint32_t t = 0; t < tokens; ++t) {
    const block_id block = t / block_size;
    slots.push_back(make_slot(pool.tail_blocks() != 0 ? tail_bit | block : block + 1, t % block_size, block_size));
  }
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    std::uint32_t first = 0;
    for (const std::uint32_t count : chunks) {
      pool.append(layer, rows_view<const K>(k.data() + first * width, count, 2, 48),
                  rows_view<const float>(v.data() + first * 80, count, 2, 40),
                  std::span<const slot_id>(slots).subspan(first, count));
      first += count;
    }
  }
  if (pool.tail_blocks() != 0) {
    pool.seal(std::vector<block_seal>{{0, 1, 1}, {0, 3, 2}});
    pool.copy(std::vector<block_copy>{{0, 2, tail_bit | 1, 5}});
  }
  return snapshot(pool);
}

template <class Policies>
storage<Policies> make_pool() {
  const std::uint32_t tails = storage<Policies>::seals_blocks ? 5 : 0;
  constexpr kv_format stored = storage<Policies>::format;
  const bool narrow = bits(stored.k) < 16 || bits(stored.v) < 16;
  return storage<Policies>(shape, {.blocks = 6,
                                   .block_size = block_size,
                                   .tail_blocks = tails,
                                   .wide_layers = std::span(wide).first(narrow ? wide.size() : 0)});
}

/// Keys as they are in layer 1, with an offset in layers 0 and 2.
template <class Policies, class K>
void check_bytes() {
  const auto k = random_values<K>(tokens * width, 5);
  const auto v = random_values<float>(tokens * 80, 6);
  const auto with_offset = [&] {
    storage<Policies> pool = make_pool<Policies>();
    pool.set_key_offset(0, some_offset(1));
    pool.set_key_offset(2, some_offset(2));
    return pool;
  };
  const bytes at_once = stored(with_offset(), k, v, {tokens});
  CHECK(differences(stored(with_offset(), k, v, {3, 20, 1, 16}), at_once) == 0);
  CHECK(differences(stored(with_offset(), k, v, std::vector<std::uint32_t>(tokens, 1)), at_once) == 0);

  // Layer by layer what a pool without an offset makes of floats that were shifted before.
  const storage<Policies> places = make_pool<Policies>();
  const auto planes = [&](const bytes& image, std::uint32_t layer) {
    const auto* const base = reinterpret_cast<const unsigned char*>(places.view(0).k.base);
    const auto* const begin = reinterpret_cast<const unsigned char*>(places.view(layer).k.base) - base + image.data();
    return bytes(begin, begin + 7 * places.view(layer).k.block_stride);
  };
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const std::vector<float> offset = layer == 1 ? std::vector<float>(width) : some_offset(layer == 0 ? 1 : 2);
    std::vector<float> shifted;
    for (std::size_t i = 0; i < k.size(); ++i)
      shifted.push_back(layer == 1 ? to_float(k[i]) : to_float(k[i]) - offset[i % width]);
    INFO("layer " << layer);
    CHECK(differences(planes(stored(make_pool<Policies>(), shifted, v, {tokens}), layer), planes(at_once, layer)) == 0);
  }
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("R16 R20 keys less an offset are stored as keys that were shifted before, however chunked", "",
                        bundles) {
  check_bytes<TestType, float>();
  check_bytes<TestType, bf16>();
}

TEST_CASE("keys with biased channels come closer when their mean is taken from them") {
  constexpr std::uint32_t rows = 1024;
  constexpr std::uint32_t dim = 128;
  const float_rows calibration = biased_rows(rows, dim, 1, {5, 37, 70, 101});
  const float_rows data = biased_rows(rows, dim, 2, {5, 37, 70, 101});
  key_mean mean(1, dim);
  mean.add(rows_view<const float>(calibration.values.data(), rows, 1, dim));
  const std::vector<float> offset = mean.mean();
  const auto error = [&]<class T>(std::type_identity<T>, bool shifted) {
    storage<bundle<T, T, nhd>> pool({.layers = 1, .kv_heads = 1, .head_dim = dim}, {.blocks = rows, .block_size = 1});
    if (shifted) pool.set_key_offset(0, offset);
    std::vector<slot_id> slots;
    for (std::uint32_t r = 0; r < rows; ++r) slots.push_back(r + 1);
    const rows_view<const float> view(data.values.data(), rows, 1, dim);
    pool.append(0, view, view, slots);
    float_rows read = data;
    const kv_view kv = pool.view(0);
    CHECK((kv.key_offset != nullptr) == shifted);
    for (std::uint32_t r = 0; r < rows; ++r) {
      read_head(kv.k_head(r + 1, 0, 0), dim, read.row(r));
      if (is_rotated(kv.k_dtype)) rotate(read.row(r), dim);
      for (std::uint32_t d = 0; shifted && d < dim; ++d) read.row(r)[d] += kv.key_offset[d];
      float value[dim];  // values are as they were
      read_head(kv.v_head(r + 1, 0, 0), dim, value);
      if (r == 7 && !is_rotated(kv.v_dtype)) CHECK(std::abs(value[5] - data.row(r)[5]) < 2);
    }
    return relative_rms(data, read);
  };
  // Of the mean square of 764 in a row, 576 is the square of the offset, and 188 is left.
  const double left = std::sqrt(188.0 / 764.0);
  const auto fp8 = std::type_identity<fp8_e4m3>{};
  CHECK(error(fp8, true) / error(fp8, false) == Approx(left).epsilon(0.05));
  CHECK(error(std::type_identity<rotated<fp8_e4m3>>{}, true) == Approx(0.0266 * left).epsilon(0.05));
  const auto int8 = std::type_identity<int8_per_token>{};
  CHECK(error(int8, true) < 0.6 * error(int8, false));
  const auto int4 = std::type_identity<int4_grouped<32>>{};
  CHECK(error(int4, true) < 0.6 * error(int4, false));
  CHECK(error(std::type_identity<rotated<int4_grouped<32>>>{}, true) <
        0.75 * error(std::type_identity<rotated<int4_grouped<32>>>{}, false));
}

TEST_CASE("a storage shows the offset that it was given, also after it has moved") {
  using pool_type = storage<bundle<bf16, bf16, nhd>>;
  pool_type pool(shape, {.blocks = 2, .block_size = 4});
  CHECK(pool.view(0).key_offset == nullptr);
  const std::vector<float> offset = some_offset(3);
  pool.set_key_offset(1, offset);
  const kv_view view = pool.view(1);
  REQUIRE(view.key_offset != nullptr);
  CHECK(std::vector<float>(view.key_offset, view.key_offset + width) == offset);
  CHECK(pool.view(0).key_offset == nullptr);
  pool_type moved(std::move(pool));
  CHECK(moved.view(1).key_offset == view.key_offset);
  pool_type assigned(shape, {.blocks = 2, .block_size = 4});
  assigned = std::move(moved);
  CHECK(assigned.view(1).key_offset == view.key_offset);
  CHECK(assigned.view(2).key_offset == nullptr);
}

TEST_CASE("offsets that cannot be are refused with value, limit and remedy, and nothing is set") {
  storage<bundle<bf16, bf16, nhd>> pool(shape, {.blocks = 2, .block_size = 4});
  std::vector<float> offset(width);
  CHECK_THROWS_WITH(pool.set_key_offset(3, offset),
                    contains_text("layer 3") && contains_text("has 3 layers") && contains_text("counted from 0"));
  CHECK_THROWS_WITH(pool.set_key_offset(1, std::span(offset).first(95)),
                    contains_text("layer 1") && contains_text("95 floats") && contains_text("96 needed") &&
                        contains_text("one for each kv head"));
  CHECK_THROWS_WITH(pool.set_key_offset(1, std::vector<float>(97)), contains_text("97 floats"));
  for (const std::uint32_t bits : {0x7fc0'0000u, 0xff80'0001u, 0x7f80'0000u, 0xff80'0000u}) {
    offset[50] = std::bit_cast<float>(bits);
    CHECK_THROWS_WITH(pool.set_key_offset(1, offset),
                      contains_text("float 50") && contains_text("head 1") &&
                          contains_text((bits & 0x7f'ffff) != 0 ? "no number" : "infinite") &&
                          contains_text("has to be finite") && contains_text("calibrate"));
  }
  CHECK(pool.view(1).key_offset == nullptr);
  offset[50] = 1;
  pool.set_key_offset(1, offset);
  CHECK_THROWS_WITH(pool.set_key_offset(1, offset), contains_text("set already") && contains_text("once"));

  storage<bundle<bf16, bf16, nhd>> longer({.layers = 1, .kv_heads = 1, .head_dim = 1025},
                                          {.blocks = 2, .block_size = 4});
  const std::vector<float> long_offset(1025);
  CHECK_THROWS_WITH(longer.set_key_offset(0, long_offset), contains_text("1025") && contains_text("at most 1024"));
  // The same for an engine's own view.
  kv_view view = longer.view(0);
  view.key_offset = long_offset.data();
  const rows_view<const float> row(long_offset.data(), 1, 1, 1025);
  CHECK_THROWS_WITH(append(view, row, row, std::vector<slot_id>{4}),
                    contains_text("1025") && contains_text("at most 1024") && contains_text("shifted"));
}

TEST_CASE("an offset is refused for a layer that keys were appended to, and for no other") {
  using pool_type = storage<bundle<bf16, bf16, nhd>>;
  pool_type pool(shape, {.blocks = 2, .block_size = 4});
  const std::vector<float> offset = some_offset(4);
  const std::vector<float> values(2 * width);
  const rows_view<const float> k(values.data(), 2, 2, 48);
  const rows_view<const float> v(values.data(), 2, 2, 40);
  pool.append(1, k, v, std::vector<slot_id>{4, 5});
  const bytes before = snapshot(pool);
  CHECK_THROWS_WITH(pool.set_key_offset(1, offset),
                    contains_text("layer 1") && contains_text("rows of keys were appended") &&
                        contains_text("0 possible") && contains_text("before the first append"));
  CHECK(pool.view(1).key_offset == nullptr);
  pool.set_key_offset(0, offset);

  // What was refused, or had no rows, wrote nothing.
  CHECK_THROWS_AS(pool.append(2, k, v, std::vector<slot_id>{4, 12}), invalid_argument);
  pool.append(2, rows_view<const float>(), rows_view<const float>(), {});
  pool_type moved(std::move(pool));
  moved.set_key_offset(2, offset);
  CHECK_THROWS_WITH(moved.set_key_offset(1, offset), contains_text("were appended"));
  pool_type assigned(shape, {.blocks = 2, .block_size = 4});
  assigned = std::move(moved);
  CHECK_THROWS_WITH(assigned.set_key_offset(1, offset), contains_text("were appended"));
  CHECK(differences(snapshot(assigned), before) == 0);
}

TEST_CASE("the mean of keys is that of all rows, whatever they are and however they come") {
  key_mean mean(2, 3);
  CHECK(mean.mean() == std::vector<float>(6));
  // One matrix of rows [K | V], as a projection leaves them.
  const std::vector<float> fused{1, 2, 3, 4, 5, 6, 99, 99, 3, 2, 1, 0, -5, 10, 99, 99};
  mean.add(rows_view<const float>(fused.data(), 2, 2, 3, 8, 3));
  CHECK(mean.mean() == std::vector<float>{2, 2, 2, 2, 0, 8});
  const std::vector<bf16> more(12, from_float<bf16>(2.0f));
  mean.add(rows_view<const bf16>(more.data(), 2, 2, 3));
  CHECK(mean.rows() == 4);
  CHECK(mean.mean() == std::vector<float>{2, 2, 2, 2, 1, 5});
  CHECK_THROWS_WITH(mean.add(rows_view<const float>(fused.data(), 1, 3, 3)),
                    contains_text("3 heads of 3") && contains_text("2 of 3 needed"));
  CHECK_THROWS_WITH(mean.add(rows_view<const float>(fused.data(), 1, 2, 4)), contains_text("2 heads of 4"));
  const std::vector<float> bad{1, std::numeric_limits<float>::infinity(), 3, 4, 5, 6};
  mean.add(rows_view<const float>(bad.data(), 1, 2, 3));
  storage<bundle<bf16, bf16, nhd>> pool({.layers = 1, .kv_heads = 2, .head_dim = 3}, {.blocks = 2, .block_size = 4});
  CHECK_THROWS_WITH(pool.set_key_offset(0, mean.mean()), contains_text("float 1") && contains_text("finite"));
}
