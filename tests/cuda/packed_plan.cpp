// SPDX-License-Identifier: Apache-2.0
// Plans in one piece of memory, run by the bodies of the device's kernels.
#include <kvcache/cuda/packed_plan.hpp>

#include "attention_support.hpp"

using namespace kvcache_test;
using kvcache::device::packed_plan;
using kvcache::device::plan_capacity;

namespace {

attention_plan plan_of(const any_scene& s, unsigned cut_for) {
  return plan_attention(s.batch(), {.shape = s.heads(), .features = causal::features, .threads = cut_for});
}

/// Both kinds of units by their kernels, from `memory`.
outcome run_packed(const scene<bf16>& s, const packed_plan& room, const std::byte* memory) {
  outcome o = nothing_written(s);
  device_run how;
  device_call call(s, causal::features, {}, how, o);
  std::vector<float> states(std::size_t{1} << 18, poison_value());
  std::vector<float> lses(std::size_t{1} << 12, poison_value());
  call.params.states = states.data();
  call.params.state_lses = lses.data();
  for (const bool many : {false, true}) {
    call.params.work = room.work(memory, many);
    namespace device = kvcache::device;
    if (many)
      run_on_host<device::attention_tile<bf16, bf16, bf16, 64, 64, causal::features, true>>(3, call.params);
    else
      run_on_host<device::attention_tile<bf16, bf16, bf16, 64, 64, causal::features, false>>(3, call.params);
  }
  run_on_host<kvcache::device::attention_merge<bf16, 64, causal::features>>(2, call.params);
  o.rounding = device_rounding<bf16, bf16>(device_kernel::few_rows);
  return o;
}

}  // namespace

TEST_CASE("A packed plan is run from one piece of memory, and the next from the same addresses", "[cuda]") {
  const scene<bf16> mixed({.kv_heads = 2, .group = 3}, {{1, 900}, {40, 70}, {1, 0}, {9, 600}});
  const scene<bf16> decode({.kv_heads = 2, .group = 3}, {{1, 33}, {1, 1200}});
  const packed_plan room({.sequences = 8, .tiles = 16, .units = 64, .blocks = 512});
  std::vector<kvcache::device::words4> memory(room.bytes() / 16);
  auto* const bytes = reinterpret_cast<std::byte*>(memory.data());
  for (const auto* s : {&mixed, &decode, &mixed}) {
    const attention_plan plan = plan_of(*s, 6);
    room.pack(plan, 3, bytes);
    const auto few = room.work(bytes, false);
    const auto many = room.work(bytes, true);
    CHECK(*few.unit_count + *many.unit_count == plan.units().size());
    CHECK((*many.unit_count > 0) == (s == &mixed));
    CHECK(*few.tile_count == plan.tiles().size());
    for (std::uint32_t i = 0; i < *few.unit_count; ++i) {
      const query_tile& tile = plan.tiles()[few.units[i].tile];
      CHECK((tile.query_end - tile.query_begin) * 3 <= packed_plan::few_rows);
    }
    CHECK(distance(run_packed(*s, room, bytes), expected<causal>(*s)) < 1);
  }
}

TEST_CASE("A plan that is larger than there is room for is refused by its numbers, and nothing is written", "[cuda]") {
  const scene<bf16> s({.kv_heads = 1, .group = 1}, {{1, 900}, {40, 70}, {1, 5}});
  const attention_plan plan = plan_of(s, 4);
  const auto sequences = static_cast<std::uint32_t>(plan.sequences().size());
  const auto tiles = static_cast<std::uint32_t>(plan.tiles().size());
  const auto units = static_cast<std::uint32_t>(plan.units().size());
  const std::uint64_t blocks = plan.blocks().size();
  const plan_capacity enough{sequences, tiles, units, blocks};
  const auto try_with = [&](const plan_capacity& capacity) {
    const packed_plan room(capacity);
    std::vector<kvcache::device::words4> memory(room.bytes() / 16, {1, 2, 3, 4});
    const auto before = memory;
    auto* const bytes = reinterpret_cast<std::byte*>(memory.data());
    std::string refused;
    try {
      room.pack(plan, 1, bytes);
    } catch (const invalid_argument& e) {
      refused = e.what();
      CHECK(std::memcmp(before.data(), memory.data(), room.bytes()) == 0);
    }
    return refused;
  };
  CHECK(try_with(enough).empty());
  CHECK_THAT(try_with({sequences - 1, tiles, units, blocks}),
             contains_text("3 sequences, there is room for 2") && contains_text("plan_capacity"));
  CHECK_THAT(try_with({sequences, tiles - 1, units, blocks}), contains_text("tiles"));
  CHECK_THAT(try_with({sequences, tiles, units - 1, blocks}), contains_text("units"));
  CHECK_THAT(try_with({sequences, tiles, units, blocks - 1}), contains_text("blocks in tables"));
  CHECK_THROWS_WITH(packed_plan({1, 1, 1, ~std::uint64_t{0} / 4}), contains_text("2^62"));
}
