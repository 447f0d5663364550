// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <thread>
#include <vector>

#include "catch.hpp"
#include "pool.hpp"

using namespace kvcache;
using namespace kvcache_test;

TEMPLATE_TEST_CASE("threads that share an append write what one thread writes", "", nhd, hnd) {
  constexpr geometry shape{.layers = 1, .kv_heads = 2, .head_dim = 33};
  constexpr std::uint32_t rows = 301;
  const auto k = random_values<float>(std::size_t{rows} * 2 * 33, 5);
  const auto v = random_values<float>(std::size_t{rows} * 2 * 33, 6);
  const rows_view<const float> k_rows(k.data(), rows, 2, 33);
  const rows_view<const float> v_rows(v.data(), rows, 2, 33);
  std::vector<slot_id> slots;
  for (std::uint32_t r = 0; r < rows; ++r) slots.push_back(7 + (r * 101) % rows);  // 101 and 301 share no factor

  storage<bundle<f16, bf16, TestType>> alone(shape, {.blocks = 43, .block_size = 7});
  alone.append(0, k_rows, v_rows, slots);
  for (const unsigned nth : {2u, 4u}) {
    storage<bundle<f16, bf16, TestType>> shared(shape, {.blocks = 43, .block_size = 7});
    std::vector<std::thread> threads;
    for (unsigned ith = 0; ith < nth; ++ith)
      threads.emplace_back([&, ith] { shared.append(0, k_rows, v_rows, slots, ith, nth); });
    for (std::thread& t : threads) t.join();
    CHECK(differences(snapshot(shared), snapshot(alone)) == 0);
  }
}
