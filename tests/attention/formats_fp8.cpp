// SPDX-License-Identifier: Apache-2.0
// Kernels widen fp8 by another way than to_float: every code of both types, byte by byte, on every instruction set.
#include <numbers>

#include "formats.hpp"

using namespace kvcache_test;

TEMPLATE_TEST_CASE("attention takes each code of fp8, in K and in V, for the number that to_float says", "", fp8_e4m3,
                   fp8_e5m2) {
  // A sequence of one token for each code. Its key has the code at the place of the same number and 0 elsewhere, so the
  // lse shows it; its value has all codes, each sequence from another one on, so they come to every lane.
  constexpr std::uint32_t codes = 256;
  std::vector<std::byte> k((codes + 1) * codes);  // the null block first
  std::vector<std::byte> v(k.size());
  std::vector<std::uint32_t> offsets;
  std::vector<block_id> table;
  for (std::uint32_t c = 0; c < codes; ++c) {
    k[(c + 1) * codes + c] = static_cast<std::byte>(c);
    for (std::uint32_t d = 0; d < codes; ++d) v[(c + 1) * codes + d] = static_cast<std::byte>((c + d) % codes);
    offsets.push_back(c);
    table.push_back(c + 1);
  }
  offsets.push_back(codes);
  const std::vector<std::uint32_t> lengths(codes, 1);
  const batch_view batch{offsets, lengths, block_tables::padded(table.data(), codes, 1), {}, 1};
  kv_view view;
  view.k = {k.data(), codes, codes, codes};
  view.v = {v.data(), codes, codes, codes};
  view.blocks = codes + 1;
  view.block_size = 1;
  view.kv_heads = 1;
  view.head_dim = view.head_dim_v = codes;
  view.k_dtype = view.v_dtype = dtype_traits<TestType>::id;
  const auto number = [](std::uint32_t code) { return to_float(TestType{static_cast<std::uint8_t>(code % codes)}); };

  for (const cpu_isa isa : isas())
    for (const std::uint32_t group : {1u, 16u}) {
      const attention<bundle<causal, TestType>> a(
          {.shape = {group, 1, codes, codes}, .threads = 1, .backend = {.isa = isa}});
      const std::vector<float> q(std::size_t{codes} * group * codes, 1.0f);
      outcome o{std::vector<float>(q.size(), poison_value()), std::vector<float>(codes * group, poison_value())};
      run_share(a, a.plan(batch), view, rows_view<const float>(q.data(), codes, group, codes),
                rows_view<float>(o.out.data(), codes, group, codes), {.scale = 1.0f}, {o.lse.data(), group});
      double worst_k = 0;
      std::size_t wrong_v = 0;
      for (std::uint32_t row = 0; row < codes * group; ++row) {
        const std::uint32_t code = row / group;
        const float key = number(code);
        if (is_number(key)) {
          const double lse = static_cast<double>(key) * std::numbers::log2e;
          worst_k = (std::max)(worst_k, how_far(o.lse[row], lse, 1e-5 * (std::max)(1.0, std::fabs(lse))));
        }
        if (std::isinf(key)) continue;  // e5m2: weights are none then
        for (std::uint32_t d = 0; d < codes; ++d) {
          const float value = number(code + d);
          const float found = o.out[std::size_t{row} * codes + d];
          // A key that is no number leaves none in its row, nor does a value, or an infinite one, where it is.
          wrong_v += is_number(key) && is_number(value) ? found != value : is_number(found);
        }
      }
      INFO(name(isa) << " group " << group);
      CHECK(worst_k < 1);
      CHECK(wrong_v == 0);
    }
}
