// SPDX-License-Identifier: Apache-2.0
// A long sequence loses no more behind than in front: every token is quantised once, from what was given.
#include <kvcache/storage.hpp>

#include <numeric>

#include "formats.hpp"

using namespace kvcache_test;

namespace {

constexpr std::uint32_t length = 8190;
constexpr geometry model{.layers = 1, .kv_heads = 2, .head_dim = 64};
constexpr std::uint32_t width = 2 * 64;

/// A sequence of `length` tokens in a storage: block b + 1 has tokens from b * block_size on. The last ones, which fill
/// no block, are left out.
template <class Dtype>
class long_sequence {
 public:
  using policy = bundle<causal, typename Dtype::k, typename Dtype::v>;

  long_sequence(const std::vector<float>& k, const std::vector<float>& v, const std::vector<float>& offset,
                std::uint32_t block_size)
      : pool_(
            model,
            {.blocks = length / block_size, .block_size = block_size, .tail_blocks = seals ? length / block_size : 0}) {
    if (!offset.empty()) pool_.set_key_offset(0, offset);
    const std::uint32_t blocks = length / block_size;
    const std::uint32_t tokens = blocks * block_size;
    std::vector<slot_id> slots;
    for (std::uint32_t t = 0; t < tokens; ++t) {
      const block_id block = t / block_size;
      slots.push_back(make_slot(seals ? tail_bit | block : block + 1, t % block_size, block_size));
    }
    std::uint32_t chunk = 1;
    for (std::uint32_t first = 0; first < tokens; first += chunk) {
      chunk = (std::min)(first % 700 + 1, tokens - first);
      pool_.append(0, rows_view<const float>(k.data() + std::size_t{first} * width, chunk, 2, 64),
                   rows_view<const float>(v.data() + std::size_t{first} * width, chunk, 2, 64),
                   std::span<const slot_id>(slots).subspan(first, chunk));
    }
    std::vector<block_seal> all;
    for (std::uint32_t b = 0; seals && b < blocks; ++b) all.push_back({0, b, b + 1});
    pool_.seal(all);
  }

  [[nodiscard]] kv_view view() const { return pool_.view(0); }

 private:
  static constexpr bool seals = storage<policy>::seals_blocks;
  storage<policy> pool_;
};

/// Root of the mean square of what K (or V) of the tokens [first, last) is off by, over that of the numbers.
double stored_error(const kv_view& view, const std::vector<float>& wanted, bool keys, std::uint32_t first,
                    std::uint32_t last) {
  double difference = 0;
  double whole = 0;
  float x[64];
  for (std::uint32_t t = first; t < last; ++t)
    for (std::uint32_t h = 0; h < 2; ++h) {
      const block_id block = t / view.block_size + 1;
      const stored_head from =
          keys ? view.k_head(block, t % view.block_size, h) : view.v_head(block, t % view.block_size, h);
      read_head(from, 64, x);
      if (is_rotated(from.dtype)) rotate(x, 64u);
      for (std::uint32_t d = 0; d < 64; ++d) {
        const double w = static_cast<double>(wanted[std::size_t{t} * width + h * 64 + d]);
        const double offset = keys && view.key_offset != nullptr ? static_cast<double>(view.key_offset[h * 64 + d]) : 0;
        difference += (static_cast<double>(x[d]) + offset - w) * (static_cast<double>(x[d]) + offset - w);
        whole += w * w;
      }
    }
  return std::sqrt(difference / whole);
}

}  // namespace

TEMPLATE_TEST_CASE("R20 K, V and attention are off by as much at position 8,000 as at 100", "", kv_dtype<bf16>,
                   fp8_small, int8, int4, int8_beside_int4, channels_beside_rotated) {
  std::mt19937 random(8);
  std::normal_distribution<float> normal;
  std::vector<float> k(std::size_t{length} * width);
  std::vector<float> v(k.size());
  for (float& x : k) x = normal(random);
  for (float& x : v) x = normal(random);
  for (std::uint32_t t = 0; t < length; ++t) k[std::size_t{t} * width + 9] += 8;  // a channel with a bias
  std::vector<float> offset(width);
  offset[9] = 8;

  // 32 queries at positions about 100 and as many about 8,000.
  constexpr std::uint32_t each = 32;
  constexpr std::uint32_t heads = 4;
  std::vector<std::uint32_t> offsets(2 * each + 1);
  std::iota(offsets.begin(), offsets.end(), 0u);
  std::vector<std::uint32_t> lengths;
  for (std::uint32_t i = 0; i < 2 * each; ++i) lengths.push_back((i < each ? 85 : 7985) + i % each);
  std::vector<block_id> tables;
  const auto batch_of = [&](std::uint32_t block_size) {
    const std::uint32_t blocks = length / block_size;
    tables.resize(std::size_t{2} * each * blocks);
    for (std::size_t i = 0; i < tables.size(); ++i) tables[i] = static_cast<block_id>(i % blocks + 1);
    return batch_view{offsets, lengths, block_tables::padded(tables.data(), 2 * each, blocks), {}, block_size};
  };
  std::vector<float> q(std::size_t{2} * each * heads * 64);
  for (float& x : q) x = normal(random);
  const rows_view<const float> queries(q.data(), 2 * each, heads, 64);

  const long_sequence<kv_dtype<f32>> plain(k, v, {}, 64);
  std::vector<double> wanted(q.size());
  reference_attention<causal>(batch_of(64), plain.view(), queries,
                              rows_view<double>(wanted.data(), 2 * each, heads, 64));

  const std::uint32_t block_size = GENERATE(7u, 16u, 64u);
  for (const bool shifted : {false, true}) {
    const long_sequence<TestType> s(k, v, shifted ? offset : std::vector<float>(), block_size);
    for (const bool keys : {true, false}) {
      const double early = stored_error(s.view(), keys ? k : v, keys, 64, 192);
      const double late = stored_error(s.view(), keys ? k : v, keys, 7936, 8064);
      CAPTURE(block_size, shifted, keys, early, late);
      CHECK(late / early == Approx(1).epsilon(0.05));
    }
    const attention<typename long_sequence<TestType>::policy> a({.threads = 1});
    std::vector<float> out(q.size());
    a.run(a.plan(batch_of(block_size)), s.view(), queries, rows_view<float>(out.data(), 2 * each, heads, 64));
    double error[2]{};
    double whole[2]{};
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::size_t late = i < out.size() / 2 ? 0 : 1;
      error[late] += (static_cast<double>(out[i]) - wanted[i]) * (static_cast<double>(out[i]) - wanted[i]);
      whole[late] += wanted[i] * wanted[i];
    }
    const double early = std::sqrt(error[0] / whole[0]);
    const double late = std::sqrt(error[1] / whole[1]);
    CAPTURE(block_size, shifted, early, late);
    CHECK(late / early < 1.25);
    CHECK(late / early > 0.75);
  }
}
