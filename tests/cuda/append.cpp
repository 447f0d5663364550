// SPDX-License-Identifier: Apache-2.0
// Appends by the device's body against those of the host, byte for byte.
#include <kvcache/append.hpp>
#include <kvcache/cuda/append_rows.hpp>
#include <kvcache/cuda/seal_blocks.hpp>
#include <kvcache/seal.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <vector>

#include "block_support.hpp"

using namespace kvcache;
using namespace kvcache_test;

namespace {

using device::append_params;
using device::append_rows;
using device::rope_style;

append_params params_of(byte_pool& pool, const given_rows& k, const given_rows& v, const std::vector<slot_id>& slots) {
  append_params p;
  p.kv = pool.view();
  p.k = k.bytes();
  p.v = v.bytes();
  p.k_from = k.from();
  p.v_from = v.from();
  p.slots = slots.data();
  return p;
}
global_memory memory_of(const byte_pool& pool, const given_rows& k, const given_rows& v,
                        const std::vector<slot_id>& slots) {
  global_memory memory;
  pool.name(memory);
  k.name(memory, "rows of K");
  v.name(memory, "rows of V");
  name_memory(memory, slots, "slots");
  return memory;
}

void append_on_device(byte_pool& pool, const given_rows& k, const given_rows& v, const std::vector<slot_id>& slots,
                      thread_order order) {
  run_on_host<append_rows>(2, params_of(pool, k, v, slots), {memory_of(pool, k, v, slots), order});
}
void append_on_host(byte_pool& pool, const given_rows& k, const given_rows& v, const std::vector<slot_id>& slots) {
  k.visit([&](const auto& k_rows) {
    v.visit([&](const auto& v_rows) { append(pool.view(), k_rows, v_rows, std::span<const slot_id>(slots)); });
  });
}

/// Slots of a ragged batch: of two sequences' blocks, and of none; every format takes tokens into the tail pool too.
std::vector<slot_id> some_slots(const pool_form& f, bool tail_too = true) {
  const bool tails = seals(f.k) || seals(f.v);
  std::vector<slot_id> slots;
  for (std::uint32_t offset = 0; offset < f.block_size; offset += 1 + f.block_size / 4)
    for (const block_id block : {2u, 1u}) {
      slots.push_back(make_slot(tails ? tail_bit | block : block + 3, offset, f.block_size));
      slots.push_back(no_slot);
    }
  if (tail_too) slots.push_back(make_slot(tail_bit, f.block_size - 1, f.block_size));
  return slots;
}

struct inverses {
  static constexpr unsigned threads = 128;
  struct shared {};
  using params = std::uint32_t*;
  static void run(host_context& c, shared&, const params& out) {
    c.store(out + c.thread(), device::inverse_of(c, c.thread()));
  }
};

constexpr dtype_id inputs[] = {dtype_id::float32, dtype_id::float16, dtype_id::bfloat16};

}  // namespace

TEST_CASE("device append: codes, scales and elements of every format are the host's, and no other byte changes",
          "[cuda]") {
  std::vector<dtype_id> dtypes = all_dtypes();
  const std::size_t plain = dtypes.size();
  for (std::size_t i = 0; i < plain; ++i) dtypes.push_back(rotated_of(dtypes[i]));
  std::uint32_t turn = 0;
  for (std::size_t i = 0; i < dtypes.size(); ++i)
    for (const std::uint32_t block_size : block_sizes)
      for (const bool heads_outside : {false, true}) {
        ++turn;
        const dtype_id k_id = dtypes[i];
        const dtype_id v_id = dtypes[(i + 5 + turn % 7) % dtypes.size()];
        // A sum of two different NaN, or of infinities, is a NaN that depends on the processor: no bytes to compare.
        const bool turned = is_rotated(k_id) || is_rotated(v_id);
        const auto at_16_bits = [](dtype_id id) { return is_rotated(id) && is_element(id); };
        const bool wild = !at_16_bits(k_id) && !at_16_bits(v_id) && !(turned && (seals(k_id) || seals(v_id)));
        const std::uint32_t dims[][2] = {{64, 80}, {128, 33}, {96, 256}, {7, 1}, {20, 4}, {144, 200}};
        const auto& dim = dims[turn % std::size(dims)];
        const pool_form form{.k = k_id,
                             .v = v_id,
                             .block_size = block_size,
                             .kv_heads = 1 + turn % 3,
                             .head_dim = dim[0],
                             .head_dim_v = dim[1],
                             .heads_outside = heads_outside,
                             .gap = turn % 4 * 4,
                             .first = turn % 2 == 0 ? 16u : 8u,
                             .tail = inputs[turn / 3 % 3]};
        byte_pool host(form);
        byte_pool fiber(form);
        const std::vector<slot_id> slots = some_slots(form, !turned || !wild);
        const auto rows = static_cast<std::uint32_t>(slots.size());
        const given_rows k(inputs[turn % 3], rows, form.kv_heads, dim[0], turn, wild, turn % 5);
        const given_rows v(inputs[turn / 2 % 3], rows, form.kv_heads, dim[1], turn + 1, wild, turn % 3 * 4);
        CAPTURE(name(k_id), name(v_id), name(k.from()), name(v.from()), name(form.tail), block_size, heads_outside,
                dim[0], dim[1], turn);
        append_on_host(host, k, v, slots);
        append_on_device(fiber, k, v, slots, orders[turn % 3]);
        REQUIRE(differences(host, fiber) == 0);
      }
}

TEST_CASE("device append: the inverse of each fraction of a scale is the table's", "[cuda]") {
  std::vector<std::uint32_t> found(128);
  run_on_host<inverses>(1, found.data());
  for (std::uint32_t m = 0; m < 128; ++m) {
    CAPTURE(m);
    CHECK(found[m] == std::bit_cast<std::uint32_t>(65536.0f / (1.0f + static_cast<float>(m) / 128.0f)));
  }
  // And so are the codes of elements whose scales have these fractions.
  for (const dtype_id id :
       {dtype_id::int8_per_token, dtype_id::int4_grouped_16, dtype_id::int4_grouped_asymmetric_16}) {
    const pool_form form{.k = id, .v = id, .kv_heads = 1, .head_dim = 16, .head_dim_v = 16, .blocks = 10};
    byte_pool host(form);
    byte_pool fiber(form);
    std::vector<slot_id> slots;
    for (std::uint32_t m = 0; m < 128; ++m) slots.push_back(make_slot(1 + m / 16, m % 16, 16));
    std::vector<float> x(128 * 16);
    const float steps = id == dtype_id::int8_per_token ? 127.0f : id == dtype_id::int4_grouped_16 ? 8.0f : 15.0f;
    for (std::uint32_t m = 0; m < 128; ++m)
      for (std::uint32_t d = 0; d < 16; ++d)
        x[m * 16 + d] = static_cast<float>(d) / 15 * steps * (1 + static_cast<float>(m) / 128);
    const rows_view<const float> rows(x.data(), 128, 1, 16);
    append(host.view(), rows, rows, std::span<const slot_id>(slots));
    append_params p;
    p.kv = fiber.view();
    p.k = p.v = {reinterpret_cast<const std::byte*>(x.data()), 128, 1, 16};
    p.k_from = p.v_from = dtype_id::float32;
    p.slots = slots.data();
    run_on_host<append_rows>(3, p);
    std::vector<bool> met(128);
    for (const slot_id slot : slots) {
      bf16 scale;
      std::memcpy(&scale, host.view().k_scales.at(static_cast<block_id>(slot / 16), slot % 16 & 15, 0), 2);
      met[scale.bits & 0x7f] = true;
    }
    CHECK(std::count(met.begin(), met.end(), true) == 128);
    CHECK(differences(host, fiber) == 0);
  }
}

TEST_CASE("device append: the offset of keys is subtracted before they are rotated and quantised", "[cuda]") {
  std::uint32_t turn = 0;
  for (const dtype_id id : {dtype_id::float16, dtype_id::float8_e4m3, dtype_id::int4_grouped_32,
                            rotated_of(dtype_id::int8_per_token), dtype_id::int4_per_channel})
    for (const std::uint32_t block_size : block_sizes) {
      ++turn;
      const pool_form form{.k = id, .v = dtype_id::bfloat16, .block_size = block_size, .heads_outside = turn % 2 == 0};
      byte_pool host(form);
      byte_pool fiber(form);
      const std::vector<slot_id> slots = some_slots(form);
      const auto rows = static_cast<std::uint32_t>(slots.size());
      const given_rows k(inputs[turn % 3], rows, 2, 64, turn, false);
      const given_rows v(inputs[turn / 3 % 3], rows, 2, 64, turn + 1, true);
      std::vector<float> offset(2 * 64);
      for (std::size_t i = 0; i < offset.size(); ++i) offset[i] = static_cast<float>(i % 37) / 4 - 3;
      host.view().key_offset = fiber.view().key_offset = offset.data();
      append_on_host(host, k, v, slots);
      global_memory memory = memory_of(fiber, k, v, slots);
      name_memory(memory, offset, "offset of keys");
      run_on_host<append_rows>(2, params_of(fiber, k, v, slots), {memory, orders[turn % 3]});
      CAPTURE(name(id), block_size);
      REQUIRE(differences(host, fiber) == 0);
    }
}

TEST_CASE("device append: rotary embedding of keys, of halves and of neighbours", "[cuda]") {
  std::uint32_t turn = 0;
  for (const dtype_id id : {dtype_id::bfloat16, dtype_id::float32, dtype_id::float8_e5m2, dtype_id::int4_grouped_16,
                            rotated_of(dtype_id::int4_grouped_32), dtype_id::int8_per_channel})
    for (const std::uint32_t block_size : block_sizes)
      for (const rope_style style : {rope_style::halves, rope_style::interleaved})
        for (const std::uint32_t rope_dim : {64u, 96u}) {
          ++turn;
          const pool_form form{.k = id, .v = dtype_id::float16, .block_size = block_size, .head_dim = 96};
          byte_pool host(form);
          byte_pool fiber(form);
          const std::vector<slot_id> slots = some_slots(form);
          const auto rows = static_cast<std::uint32_t>(slots.size());
          const given_rows k(inputs[turn % 3], rows, 2, 96, turn, false, 3);
          const given_rows v(inputs[turn / 3 % 3], rows, 2, 64, turn + 1, true);
          constexpr std::uint32_t positions = 50;
          const std::uint32_t half = rope_dim / 2;
          std::vector<float> cos;
          std::vector<float> sin;
          for (std::uint32_t at = 0; at < positions; ++at)
            for (std::uint32_t i = 0; i < half; ++i) {
              const double angle = at * std::pow(10'000.0, -static_cast<double>(i) / half);
              cos.push_back(static_cast<float>(std::cos(angle)));
              sin.push_back(static_cast<float>(std::sin(angle)));
            }
          std::vector<std::uint32_t> at(rows);
          for (std::uint32_t r = 0; r < rows; ++r) at[r] = (r * 17 + 3) % positions;
          std::vector<float> turned(std::size_t{rows} * 2 * 96);
          k.visit([&](const auto& given) {
            for (std::uint32_t r = 0; r < rows; ++r)
              for (std::uint32_t h = 0; h < 2; ++h) {
                float* const x = turned.data() + (r * 2 + h) * 96;
                for (std::uint32_t d = 0; d < 96; ++d) x[d] = to_float(given.at(r, h)[d]);
                for (std::uint32_t i = 0; i < half; ++i) {
                  float& a = x[style == rope_style::halves ? i : 2 * i];
                  float& b = x[style == rope_style::halves ? i + half : 2 * i + 1];
                  const float co = cos[at[r] * half + i];
                  const float si = sin[at[r] * half + i];
                  const float was = a;
                  a = was * co - b * si;
                  b = b * co + was * si;
                }
              }
          });
          v.visit([&](const auto& v_rows) {
            append(host.view(), rows_view<const float>(turned.data(), rows, 2, 96), v_rows,
                   std::span<const slot_id>(slots));
          });
          append_params p = params_of(fiber, k, v, slots);
          p.rope = {cos.data(), sin.data(), at.data(), rope_dim, style};
          global_memory memory = memory_of(fiber, k, v, slots);
          name_memory(memory, cos, "cosines");
          name_memory(memory, sin, "sines");
          name_memory(memory, at, "positions");
          run_on_host<append_rows>(2, p, {memory, orders[turn % 3]});
          CAPTURE(name(id), block_size, rope_dim, turn);
          REQUIRE(differences(host, fiber) == 0);
        }
}

TEST_CASE("device append: vectors of the greatest length, and of more where they are not quantised", "[cuda]") {
  for (const dtype_id id : {dtype_id::bfloat16, dtype_id::float8_e4m3, dtype_id::int8_per_token,
                            dtype_id::int4_grouped_asymmetric_128, rotated_of(dtype_id::int4_grouped_64)}) {
    const std::uint32_t dim = is_element(id) ? 1500 : max_quantised_dim;
    const pool_form form{.k = id, .v = id, .block_size = 7, .kv_heads = 1, .head_dim = dim, .head_dim_v = dim};
    byte_pool host(form);
    byte_pool fiber(form);
    const std::vector<slot_id> slots = some_slots(form);
    const auto rows = static_cast<std::uint32_t>(slots.size());
    const given_rows k(dtype_id::bfloat16, rows, 1, dim, 4, false);
    const given_rows v(dtype_id::float16, rows, 1, dim, 5, false);
    append_on_host(host, k, v, slots);
    append_on_device(fiber, k, v, slots, thread_order::shuffled);
    CAPTURE(name(id));
    REQUIRE(differences(host, fiber) == 0);
  }
}

TEST_CASE("device append: only as many rows as the device says", "[cuda]") {
  const pool_form form{.k = dtype_id::int8_per_token, .v = dtype_id::bfloat16};
  std::vector<slot_id> slots;
  for (std::uint32_t t = 0; t < 9; ++t) slots.push_back(make_slot(3, t, 16));
  const given_rows k(dtype_id::bfloat16, 9, 2, 64, 1, true);
  const given_rows v(dtype_id::bfloat16, 9, 2, 64, 2, true);
  for (const std::uint32_t count : {0u, 1u, 4u, 9u, 100u}) {
    byte_pool host(form);
    byte_pool fiber(form);
    std::vector<slot_id> fewer = slots;
    for (std::size_t r = count; r < fewer.size(); ++r) fewer[r] = no_slot;
    append_on_host(host, k, v, fewer);
    append_params p = params_of(fiber, k, v, slots);
    p.row_count = &count;
    run_on_host<append_rows>(2, p);
    CAPTURE(count);
    CHECK(differences(host, fiber) == 0);
  }
}

TEST_CASE("device append: slots that the host refuses are not written", "[cuda]") {
  for (const dtype_id id : {dtype_id::bfloat16, dtype_id::int4_per_channel}) {
    const pool_form form{.k = id, .v = dtype_id::float8_e4m3};
    const byte_pool before(form);
    byte_pool fiber(form);
    std::vector<slot_id> slots{make_slot(6, 0, 16),
                               make_slot(tail_bit | 3, 0, 16),
                               -2,
                               slot_id{1} << 62,
                               slot_id{0xffff'ffff} * 16 + 16,
                               make_slot(tail_bit - 1, 15, 16),
                               std::numeric_limits<slot_id>::max(),
                               std::numeric_limits<slot_id>::min()};
    if (seals(id)) slots.push_back(make_slot(2, 3, 16));
    const auto rows = static_cast<std::uint32_t>(slots.size());
    const given_rows k(dtype_id::bfloat16, rows, 2, 64, 1, true);
    const given_rows v(dtype_id::bfloat16, rows, 2, 64, 2, true);
    append_on_device(fiber, k, v, slots, thread_order::forward);
    CHECK(differences(before, fiber) == 0);
  }
}

TEST_CASE("attention_6 device append: slots beyond 2^32", "[cuda]") {
  // Blocks of so many tokens that only the first few of each, all at the same place, are in memory.
  for (const std::uint32_t size : {1u << 24, 3'000'000'001u}) {
    const pool_form form{.block_size = 4, .blocks = 1, .tail_blocks = 1};
    byte_pool host(form);
    byte_pool fiber(form);
    for (byte_pool* pool : {&host, &fiber}) {
      pool->view().block_size = size;
      pool->view().blocks = 5'000;
      pool->view().k.block_stride = pool->view().v.block_stride = 0;
      pool->view().tail_blocks = 0;
    }
    const std::vector<slot_id> slots{make_slot(300, 2, size), make_slot(4'999, 0, size), make_slot(1, 3, size)};
    const given_rows k(dtype_id::bfloat16, 3, 2, 64, 1, false);
    const given_rows v(dtype_id::float32, 3, 2, 64, 2, false);
    append_on_host(host, k, v, slots);
    append_on_device(fiber, k, v, slots, thread_order::backward);
    CHECK(differences(host, fiber) == 0);
  }
}

TEST_CASE("attention_14 device append: slot -1 is not written, and sequences share no group", "[cuda]") {
  for (const dtype_id id : all_dtypes())
    for (const std::uint32_t block_size : block_sizes) {
      const pool_form form{.k = id, .v = id, .block_size = block_size, .head_dim = 48, .head_dim_v = 48};
      const bool tails = seals(id);
      // Rows of two sequences take turns, those of the second are larger by far.
      std::vector<float> x(4 * 2 * 48);
      for (std::size_t i = 0; i < x.size(); ++i)
        x[i] = static_cast<float>(static_cast<int>(i * 7 % 31) - 15) * (i / (2 * 48) % 2 == 1 ? 1000.0f : 1.0f);
      const auto append_to = [&](byte_pool& pool, const std::vector<slot_id>& slots) {
        append_params p;
        p.kv = pool.view();
        p.k = p.v = {reinterpret_cast<const std::byte*>(x.data()), 4, 2, 48};
        p.k_from = p.v_from = dtype_id::float32;
        p.slots = slots.data();
        run_on_host<append_rows>(1, p);
      };
      const slot_id first = make_slot(tails ? tail_bit | 1 : 1, 0, block_size);
      const slot_id second = make_slot(tails ? tail_bit | 2 : 2, block_size - 1, block_size);
      byte_pool together(form);
      byte_pool apart(form);
      append_to(together, {first, second, no_slot, no_slot});
      append_to(apart, {no_slot, second, no_slot, no_slot});
      append_to(apart, {first, no_slot, no_slot, no_slot});
      CAPTURE(name(id), block_size);
      CHECK(differences(together, apart) == 0);
      const byte_pool before(form);
      byte_pool none(form);
      append_to(none, {no_slot, no_slot, no_slot, no_slot});
      CHECK(differences(none, before) == 0);
      CHECK(differences(together, before) != 0);
    }
}

TEST_CASE("attention_13 R20 device append: 200 tokens at once or 32 and then one by one seal to the same bytes",
          "[cuda]") {
  for (const dtype_id id : {dtype_id::int8_per_channel, dtype_id::int4_per_channel, dtype_id::int2_per_channel}) {
    constexpr std::uint32_t block_size = 16;
    constexpr std::uint32_t whole = 200 / block_size;
    const pool_form form{.k = id,
                         .v = dtype_id::int4_grouped_32,
                         .block_size = block_size,
                         .kv_heads = 1,
                         .head_dim = 40,
                         .head_dim_v = 33,
                         .blocks = whole + 1,
                         .tail_blocks = whole + 1};
    const given_rows k(dtype_id::bfloat16, 200, 1, 40, 7, true);
    const given_rows v(dtype_id::float32, 200, 1, 33, 8, true);
    std::vector<slot_id> slots;
    for (std::uint32_t t = 0; t < 200; ++t)
      slots.push_back(make_slot(tail_bit | t / block_size, t % block_size, block_size));
    std::vector<block_seal> all;
    for (std::uint32_t b = 0; b < whole; ++b) all.push_back({0, b, whole - b});
    const auto seal_all = [&](byte_pool& pool) {
      device::seal_params p;
      p.kv = pool.view();
      p.seals = all.data();
      p.most = static_cast<std::uint32_t>(all.size());
      run_on_host<device::seal_blocks>(2, p);
    };
    byte_pool host(form);
    append_on_host(host, k, v, slots);
    seal(host.view(), all);
    byte_pool at_once(form);
    append_on_device(at_once, k, v, slots, thread_order::shuffled);
    seal_all(at_once);
    byte_pool one_by_one(form);
    for (std::uint32_t first = 0; first < 200;) {
      const std::uint32_t count = first == 0 ? 32 : 1;
      append_params p = params_of(one_by_one, k, v, slots);
      p.slots += first;
      for (auto* rows : {&p.k, &p.v}) {
        const std::int64_t size = (rows == &p.k ? k : v).from() == dtype_id::float32 ? 4 : 2;
        rows->data += first * rows->row_stride * size;
        rows->rows = count;
      }
      run_on_host<append_rows>(1, p);
      first += count;
    }
    seal_all(one_by_one);
    CAPTURE(name(id));
    CHECK(differences(host, at_once) == 0);
    CHECK(differences(host, one_by_one) == 0);
  }
}
