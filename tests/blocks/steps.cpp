// SPDX-License-Identifier: Apache-2.0
// Steps: begin, accept, drop, retire, and steps that overlap.
#include <array>
#include <optional>
#include <tuple>
#include <utility>

#include "support.hpp"

using namespace kvcache_test;
using kvcache::block_copy;
using kvcache::block_counts;
using kvcache::block_state;
using kvcache::errc;
using kvcache::want;

namespace {

kvcache::sequence_id open_empty(manager& m, int topic) {
  const text content = words(topic, 1);
  const auto s = m.open({.content = content});
  REQUIRE(s.has_value());
  return s->sequence;
}

std::vector<kvcache::slot_id> slots_of(const kvcache::batch_view& batch) {
  return {batch.slots.begin(), batch.slots.end()};
}

}  // namespace

TEST_CASE("Steps show tables, lengths, offsets and slots of every want in order") {
  manager m({.blocks = 10, .block_size = 4});
  const auto a = open_empty(m, 1);
  const auto b = open_empty(m, 2);
  compute(m, a, 3);
  compute(m, b, 8);
  const std::array wants{want{b, 1}, want{a, 6}};
  auto step = m.begin(wants);
  REQUIRE(step.has_value());
  const kvcache::batch_view batch = step->batch();
  CHECK(batch.rows() == 2);
  CHECK(batch.tokens() == 7);
  CHECK(batch.block_size == 4);
  CHECK(std::vector(batch.kv_lengths.begin(), batch.kv_lengths.end()) == std::vector{9u, 9u});
  CHECK(std::vector(batch.query_offsets.begin(), batch.query_offsets.end()) == std::vector{0u, 1u, 7u});
  CHECK(row(batch.tables, 0) == ids{2, 3, 4});
  CHECK(row(batch.tables, 1) == ids{1, 5, 6});
  CHECK(slots_of(batch) == std::vector<kvcache::slot_id>{16, 7, 20, 21, 22, 23, 24});
  const kvcache::block_tables padded = step->padded();
  CHECK(row(padded, 0) == ids{2, 3, 4});
  CHECK(row(padded, 1) == ids{1, 5, 6});
  CHECK(step->copies().empty());
}

TEST_CASE("R3 padding of tables is the null block") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  CAPTURE(block_size);
  manager m({.blocks = 10, .block_size = block_size});
  const auto a = open_empty(m, 1);
  const auto b = open_empty(m, 2);
  const std::array wants{want{a, 2 * block_size + 1}, want{b, 1}};
  auto step = m.begin(wants);
  REQUIRE(step.has_value());
  CHECK(row(step->padded(), 0) == ids{1, 2, 3});
  CHECK(row(step->padded(), 1) == ids{4, kvcache::null_block, kvcache::null_block});
  CHECK(row(step->batch().tables, 1) == ids{4});
}

TEST_CASE("Steps: the table of a batch covers the step's length, not what is reserved beyond it") {
  manager m({.blocks = 10, .block_size = 4});
  const text content = words(1, 20);
  const auto s = m.open({.content = content, .reserve = 20})->sequence;
  CHECK(table(m, s).size() == 5);
  const want w{s, 6};
  CHECK(m.blocks_needed({&w, 1}).value() == 0);
  auto step = m.begin({&w, 1});
  CHECK(row(step->batch().tables, 0) == ids{1, 2});
  CHECK(m.counts().referenced == 5);
  REQUIRE(step->accept(std::array{2u}).has_value());
  // What was reserved stays, though the step did not need it.
  CHECK(table(m, s).size() == 5);
}

TEST_CASE("Steps begun and dropped leave lengths, tables, counts and free order exactly as before") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  CAPTURE(block_size);
  const auto run = [&](int drops, bool by_destructor) {
    manager m({.blocks = 24, .block_size = block_size});
    const auto a = open_empty(m, 1);
    const auto b = open_empty(m, 2);
    const auto gone = open_empty(m, 3);
    compute(m, a, 2 * block_size + 1);
    compute(m, gone, 3 * block_size);
    compute(m, b, block_size + (block_size + 1) / 2);
    close(m, gone);
    const auto c = m.fork(a).value();
    const auto counts = m.counts();
    const ids ta = table(m, a), tb = table(m, b), tc = table(m, c);
    for (int i = 0; i < drops; ++i) {
      const std::array wants{want{a, 3 * block_size}, want{b, 2 * block_size}, want{c, 1}};
      auto step = m.begin(wants);
      REQUIRE(step.has_value());
      CHECK(m.counts() != counts);
      if (!by_destructor) step->drop();
      { [[maybe_unused]] const auto gone_step = std::move(*step); }
      check_counts(m);
    }
    CHECK(m.counts() == counts);
    CHECK(*m.length(a) == 2 * block_size + 1);
    CHECK(*m.length(b) == block_size + (block_size + 1) / 2);
    CHECK(table(m, a) == ta);
    CHECK(table(m, b) == tb);
    CHECK(table(m, c) == tc);
    CHECK(m.steps_in_flight() == 0);
    for (const kvcache::block_id block : ta) CHECK(m.ref_count(block) == 2);
    const want w{b, 3};
    auto next = m.begin({&w, 1});
    const ids after = row(next->batch().tables, 0);
    next->drop();
    return std::pair(after, drain(m));
  };
  const auto plain = run(0, true);
  CHECK(run(1, true) == plain);
  CHECK(run(3, false) == plain);
}

TEST_CASE("Steps dropped after evicting leave the order of ids, though the keys stay evicted") {
  const auto run = [](bool drop) {
    manager m({.blocks = 6, .block_size = 4});
    const text cached_text = words(1, 16);
    close(m, prompt(m, cached_text).sequence);
    const auto s = open_empty(m, 2);
    if (drop) {
      const want w{s, 16};
      auto step = m.begin({&w, 1});
      CHECK(row(step->batch().tables, 0) == ids{5, 6, 4, 3});
      step->drop();
      CHECK(m.counts() == block_counts{.free = 4, .evictable = 2});
      CHECK(m.probe(cached_text).tokens == 8);
    }
    return drain(m);
  };
  CHECK(run(false) == ids{5, 6, 4, 3, 2, 1});
  CHECK(run(true) == ids{5, 6, 4, 3, 2, 1});
}

TEST_CASE("Steps accepted with fewer tokens than begun give the rest back, held until they retire") {
  manager m({.blocks = 10, .block_size = 4});
  const auto a = open_empty(m, 1);
  const auto b = open_empty(m, 2);
  compute(m, a, 4);
  const std::array wants{want{a, 12}, want{b, 5}};
  auto step = m.begin(wants);
  CHECK(row(step->batch().tables, 0) == ids{1, 2, 3, 4});
  CHECK(row(step->batch().tables, 1) == ids{5, 6});
  REQUIRE(step->accept(std::array{1u, 5u}).has_value());
  CHECK(*m.length(a) == 5);
  CHECK(*m.length(b) == 5);
  CHECK(table(m, a) == ids{1, 2});
  CHECK(m.counts() == block_counts{.free = 4, .referenced = 4, .held = 2});
  // The step's own arrays are what they were.
  CHECK(row(step->batch().tables, 0) == ids{1, 2, 3, 4});
  REQUIRE(m.retire(*step).has_value());
  CHECK(m.counts() == block_counts{.free = 6, .referenced = 4});
  CHECK(drain(m) == ids{4, 3, 7, 8, 9, 10});
}

TEST_CASE("Steps: of two open, a sequence closed after the first began holds its blocks until that step retires") {
  manager m({.blocks = 10, .block_size = 4});
  const auto a = open_empty(m, 1);
  const auto b = open_empty(m, 2);
  const want first{a, 12};
  auto one = m.begin({&first, 1});
  const want second{b, 4};
  auto two = m.begin({&second, 1});
  CHECK(m.steps_in_flight() == 2);
  close(m, a);
  CHECK(m.counts() == block_counts{.free = 6, .referenced = 1, .held = 3});
  for (const kvcache::block_id block : {1u, 2u, 3u}) CHECK(m.state(block) == block_state::held);
  CHECK(m.blocks_needed({&second, 1}).value() == 1);
  REQUIRE(one->accept().has_value());
  CHECK(m.counts().held == 3);
  REQUIRE(m.retire(*one).has_value());
  CHECK_FALSE(one->open());
  CHECK(m.counts() == block_counts{.free = 9, .referenced = 1});
  REQUIRE(two->accept().has_value());
  REQUIRE(m.retire(*two).has_value());
  CHECK(drain(m) == ids{3, 2, 1, 5, 6, 7, 8, 9, 10});
}

TEST_CASE("R2 deferred releases keep the order of immediate ones") {
  const std::uint32_t size = GENERATE(2u, 4u, 16u);
  CAPTURE(size);
  const auto run = [&](bool deferred) {
    manager m({.blocks = 20, .block_size = size});
    const text a_text = words(1, 4 * size - 1);
    const text b_text = head(a_text, 2 * size) + words(2, 2 * size + 1);
    const auto a = prompt(m, a_text).sequence;
    const auto b = prompt(m, b_text).sequence;
    const auto c = prompt(m, words(3, 2 * size - 1)).sequence;
    const std::array wants{want{a, 0}, want{b, 0}, want{c, 0}};
    std::optional<kvcache::step> step;
    if (deferred) {
      step = std::move(*m.begin(wants));
      REQUIRE(step->accept().has_value());
    }
    close(m, b);
    close(m, a);
    close(m, c);
    if (deferred) {
      CHECK(m.counts().available() == 20 - 9);
      CHECK(m.counts().held == 9);
      REQUIRE(m.retire(*step).has_value());
    }
    CHECK(m.counts().available() == 20);
    return drain(m);
  };
  const ids at_once = run(false);
  CHECK(at_once == ids{9, 4, 7, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 6, 5, 3, 2, 1, 8});
  CHECK(run(true) == at_once);
}

TEST_CASE("Steps: one begun before the last one's tokens are known; keys come out as without overlap") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const text content = words(1, 6 * block_size);
  const auto run = [&](bool overlap) {
    manager m({.blocks = 10, .block_size = block_size});
    const auto s = m.open({.content = content})->sequence;
    const want w{s, 1};
    if (overlap) {
      kvcache::step last;
      std::size_t known = 0;
      for (std::size_t i = 0; i < content.size(); ++i) {
        auto step = m.begin({&w, 1});
        REQUIRE(step.has_value());
        CHECK(step->batch().kv_lengths[0] == i + 1);
        if (last.open()) {
          REQUIRE(last.accept().has_value());
          REQUIRE(m.retire(last).has_value());
          REQUIRE(m.commit(s, text{content[known++]}).has_value());
        }
        last = std::move(*step);
      }
      REQUIRE(last.accept().has_value());
      REQUIRE(m.retire(last).has_value());
      REQUIRE(m.commit(s, text{content[known]}).has_value());
    } else {
      for (const std::int32_t token : content) extend(m, s, {token});
    }
    std::vector<std::uint32_t> found;
    for (std::size_t n = 0; n <= content.size(); ++n) found.push_back(m.probe(head(content, n)).tokens);
    const ids blocks = table(m, s);
    close(m, s);
    return std::tuple(found, blocks, drain(m));
  };
  CHECK(run(true) == run(false));
}

TEST_CASE("Steps: a batch is a snapshot that later calls do not change") {
  manager m({.blocks = 20, .block_size = 4});
  const auto a = open_empty(m, 1);
  const want w{a, 5};
  auto one = m.begin({&w, 1});
  const kvcache::batch_view batch = one->batch();
  const kvcache::block_tables padded = one->padded();
  const auto slots = slots_of(batch);
  auto two = m.begin({&w, 1});
  REQUIRE(one->accept().has_value());
  const auto other = open_empty(m, 2);
  const want wo{other, 40};
  auto three = m.begin({&wo, 1});
  REQUIRE(three.has_value());
  close(m, a);
  CHECK(row(batch.tables, 0) == ids{1, 2});
  CHECK(row(padded, 0) == ids{1, 2});
  CHECK(batch.kv_lengths[0] == 5);
  CHECK(slots_of(batch) == slots);
  CHECK(two->batch().kv_lengths[0] == 10);
}

TEST_CASE("Steps end in order: accepting or retiring ahead of an earlier one is refused") {
  manager m({.blocks = 10, .block_size = 4});
  const auto a = open_empty(m, 1);
  const auto b = open_empty(m, 2);
  const want wa{a, 1};
  const want wb{b, 1};
  auto one = m.begin({&wa, 1});
  auto two = m.begin({&wb, 1});
  CHECK(two->accept().error() == kvcache::failure{errc::step_order, 2, 1});
  CHECK(m.retire(*one).error() == kvcache::failure{errc::step_order, 1, 1});
  REQUIRE(one->accept().has_value());
  CHECK(m.retire(*two).error() == kvcache::failure{errc::step_order, 2, 2});
  REQUIRE(two->accept().has_value());
  CHECK(two->accept().error().code == errc::stale_id);
  REQUIRE(m.retire(*two).has_value());
  CHECK_FALSE(one->open());
  CHECK_FALSE(two->open());
  CHECK(m.retire(*one).error().code == errc::stale_id);
  CHECK(m.retire(*two).error().code == errc::stale_id);
  kvcache::step none;
  CHECK(none.accept().error().code == errc::stale_id);
  CHECK(m.retire(none).error().code == errc::stale_id);
}

TEST_CASE("Steps: accepting fewer tokens is refused while a later step relies on all of them") {
  manager m({.blocks = 10, .block_size = 4});
  const auto a = open_empty(m, 1);
  const want w{a, 3};
  auto one = m.begin({&w, 1});
  auto two = m.begin({&w, 1});
  CHECK(one->accept(std::array{2u}).error() == kvcache::failure{errc::step_order, 1, 2});
  CHECK(*m.length(a) == 0);
  two->drop();
  REQUIRE(one->accept(std::array{2u}).has_value());
  CHECK(*m.length(a) == 2);
  // And where the sequence is gone, its count does not matter.
  const auto b = open_empty(m, 2);
  const want wb{b, 3};
  auto three = m.begin({&wb, 1});
  auto four = m.begin({&wb, 1});
  close(m, b);
  REQUIRE(three->accept(std::array{1u}).has_value());
  REQUIRE(four->accept(std::array{0u}).has_value());
  REQUIRE(m.retire(*four).has_value());
  CHECK(m.counts().held == 0);
}

TEST_CASE("Steps: counts must be as many as wants and no larger than begun") {
  manager m({.blocks = 10, .block_size = 4});
  const auto a = open_empty(m, 1);
  const want w{a, 3};
  auto step = m.begin({&w, 1});
  CHECK(step->accept(std::array{1u, 1u}).error() == kvcache::failure{errc::beyond_length, 2, 1});
  CHECK(step->accept(std::span<const std::uint32_t>{}).error() == kvcache::failure{errc::beyond_length, 0, 1});
  CHECK(step->accept(std::array{4u}).error() == kvcache::failure{errc::beyond_length, 4, 3});
  CHECK(*m.length(a) == 0);
  CHECK(step->accept(std::array{3u}).has_value());
}

TEST_CASE("Steps: dropping one drops every later one, whose handles are stale from then on") {
  manager m({.blocks = 10, .block_size = 4});
  const auto a = open_empty(m, 1);
  const auto b = open_empty(m, 2);
  const want wa{a, 5};
  const want wb{b, 5};
  auto one = m.begin({&wa, 1});
  auto two = m.begin({&wb, 1});
  auto three = m.begin({&wa, 1});
  two->drop();
  CHECK(m.steps_in_flight() == 1);
  CHECK_FALSE(three->open());
  CHECK(three->accept().error().code == errc::stale_id);
  CHECK(m.retire(*three).error().code == errc::stale_id);
  CHECK(m.counts() == block_counts{.free = 8, .referenced = 2});
  // A new step takes the record over; the old handle must not reach it.
  auto four = m.begin({&wb, 1});
  CHECK(three->accept().error().code == errc::stale_id);
  three->drop();
  CHECK(four->open());
  REQUIRE(one->accept().has_value());
  REQUIRE(four->accept().has_value());
  m.retire_accepted();
  CHECK(m.steps_in_flight() == 0);
  CHECK(*m.length(b) == 5);
}

TEST_CASE(
    "Steps: blocks of a sequence closed in a step that is then dropped go back at once, or with the step before") {
  manager m({.blocks = 10, .block_size = 4});
  const auto a = open_empty(m, 1);
  const auto b = open_empty(m, 2);
  const want wa{a, 5};
  const want wb{b, 5};
  {
    auto one = m.begin({&wa, 1});
    close(m, a);
    CHECK(m.counts().held == 2);
    one->drop();
    CHECK(m.counts() == block_counts{.free = 10});
  }
  auto one = m.begin({&wb, 1});
  auto two = m.begin({&wb, 1});
  close(m, b);
  CHECK(m.counts().held == 3);
  two->drop();
  CHECK(m.counts().held == 3);
  check_counts(m);
  REQUIRE(one->accept().has_value());
  REQUIRE(m.retire(*one).has_value());
  CHECK(m.counts() == block_counts{.free = 10});
}

TEST_CASE("Steps: begin is all or nothing, and its predictor exact") {
  manager m({.blocks = 5, .block_size = 4});
  const auto a = open_empty(m, 1);
  const auto b = open_empty(m, 2);
  compute(m, a, 4);
  const std::array too_much{want{a, 4}, want{b, 16}};
  CHECK(m.blocks_needed(too_much).value() == 5);
  CHECK(m.begin(too_much).error() == kvcache::failure{errc::out_of_blocks, 5, 4});
  CHECK(m.counts() == block_counts{.free = 4, .referenced = 1});
  const std::array twice{want{a, 1}, want{b, 1}, want{a, 1}};
  CHECK(m.begin(twice).error() == kvcache::failure{errc::duplicate_id, a.index, 1});
  CHECK(m.blocks_needed(twice).error().code == errc::duplicate_id);
  close(m, b);
  const std::array gone{want{a, 1}, want{b, 1}};
  CHECK(m.begin(gone).error() == kvcache::failure{errc::stale_id, b.index, 1});
  const std::array fits{want{a, 16}};
  CHECK(m.blocks_needed(fits).value() == 4);
  auto step = m.begin(fits);
  REQUIRE(step.has_value());
  CHECK(m.counts().available() == 0);
}

TEST_CASE("Steps: an empty one, and wants of no tokens, are allowed") {
  manager m({.blocks = 2, .block_size = 4});
  auto none = m.begin({});
  REQUIRE(none.has_value());
  CHECK(none->batch().rows() == 0);
  CHECK(none->batch().tokens() == 0);
  CHECK(none->padded().rows() == 0);
  const auto a = open_empty(m, 1);
  const want w{a, 0};
  auto step = m.begin({&w, 1});
  CHECK(step->batch().rows() == 1);
  CHECK(step->batch().kv_lengths[0] == 0);
  REQUIRE(none->accept(std::span<const std::uint32_t>{}).has_value());
  REQUIRE(step->accept().has_value());
}

TEST_CASE("Steps: a handle moves, and an accepted step outlives it") {
  manager m({.blocks = 4, .block_size = 4});
  const auto a = open_empty(m, 1);
  const want w{a, 5};
  {
    auto begun = m.begin({&w, 1});
    kvcache::step other = std::move(*begun);
    CHECK_FALSE(begun->open());
    CHECK(other.open());
    REQUIRE(other.accept().has_value());
    CHECK(other.accepted());
  }
  CHECK(m.steps_in_flight() == 1);
  close(m, a);
  CHECK(m.counts().held == 2);
  m.retire_accepted();
  CHECK(m.counts().free == 4);

  const auto b = open_empty(m, 2);
  const want wb{b, 5};
  auto first = m.begin({&wb, 1});
  auto second = m.begin({&wb, 1});
  // Assigning over an unaccepted step drops it, and with it the one that came after.
  *first = kvcache::step{};
  CHECK_FALSE(second->open());
  CHECK(m.counts().free == 4);
}

TEST_CASE("Steps: a held block that was opened again and released in a later step is held until that one retires") {
  manager m({.blocks = 6, .block_size = 4});
  const text content = words(1, 4);
  const text longer = words(1, 5);
  const auto a = prompt(m, content).sequence;
  const want wa{a, 0};
  auto one = m.begin({&wa, 1});
  close(m, a);
  CHECK(m.state(1) == block_state::held);
  const auto b = m.open({.content = longer})->sequence;
  CHECK(m.state(1) == block_state::referenced);
  const want wb{b, 0};
  auto two = m.begin({&wb, 1});
  close(m, b);
  REQUIRE(one->accept().has_value());
  REQUIRE(m.retire(*one).has_value());
  CHECK(m.state(1) == block_state::held);
  REQUIRE(two->accept().has_value());
  REQUIRE(m.retire(*two).has_value());
  CHECK(m.state(1) == block_state::evictable);
}

TEST_CASE("Steps: a dropped one leaves no trace of the copy it would have made") {
  manager m({.blocks = 10, .block_size = 4});
  const auto a = open_empty(m, 1);
  extend(m, a, words(1, 3));
  const auto b = m.fork(a);
  REQUIRE(b.has_value());
  {
    const std::array wants{want{*b, 1}};  // shared with a: would copy the tail
    auto dropped = m.begin(wants);
    REQUIRE(dropped.has_value());
    CHECK(dropped->copies().size() == 1);
  }
  // Now b is the last holder; a step in flight of somebody else does not touch its tail.
  const auto other = open_empty(m, 2);
  REQUIRE(m.close(a).has_value());
  const std::array unrelated{want{other, 0}};
  auto in_flight = m.begin(unrelated);
  REQUIRE(in_flight.has_value());
  const std::array wants{want{*b, 1}};
  const auto needed = m.blocks_needed(wants);
  REQUIRE(needed.has_value());
  CHECK(*needed == 0);
  auto step = m.begin(wants);
  REQUIRE(step.has_value());
  CHECK(step->copies().empty());
}

TEST_CASE("Steps: a dropped one does not mark what it would have copied as released") {
  manager m({.blocks = 2, .block_size = 4});
  const auto a = open_empty(m, 1);
  const std::array first{want{a, 2}};
  auto running = m.begin(first);
  REQUIRE(running.has_value());
  REQUIRE(running->accept().has_value());  // in flight
  const auto b = m.fork(a);
  REQUIRE(b.has_value());
  {
    const std::array wants{want{a, 1}};
    auto dropped = m.begin(wants);
    REQUIRE(dropped.has_value());
    CHECK(dropped->copies().size() == 1);
  }
  // One of the two copies the tail, the other is then its last holder and writes in place.
  const std::array wants{want{*b, 1}, want{a, 1}};
  const auto needed = m.blocks_needed(wants);
  REQUIRE(needed.has_value());
  CHECK(*needed == 1);
  CHECK(m.begin(wants).has_value());
}

TEST_CASE("Steps: a tail that a closed sequence still computes on is not written in place after a drop") {
  manager m({.blocks = 4, .block_size = 4});
  const auto a = open_empty(m, 1);
  const std::array first{want{a, 2}};
  auto running = m.begin(first);
  REQUIRE(running.has_value());
  REQUIRE(running->accept().has_value());  // in flight
  const auto b = m.fork(a);
  REQUIRE(b.has_value());
  const std::array wants_a{want{a, 1}};
  auto dropped = m.begin(wants_a);  // copies the shared tail
  REQUIRE(dropped.has_value());
  REQUIRE(m.close(a).has_value());
  dropped->drop();
  const std::array wants_b{want{*b, 1}};
  {
    const auto needed = m.blocks_needed(wants_b);
    REQUIRE(needed.has_value());
    CHECK(*needed == 1);
  }
  REQUIRE(m.retire(*running).has_value());
  const auto needed = m.blocks_needed(wants_b);
  REQUIRE(needed.has_value());
  CHECK(*needed == 0);
}

TEST_CASE("R2 two closes held by a step that is dropped keep their order, one batch after the other") {
  // What the drop passes on to the step before it has to go back as two batches: the later close in front.
  const auto run = [](bool dropped) {
    manager m({.blocks = 8, .block_size = 4});
    const auto a = open_empty(m, 1);
    const auto b = open_empty(m, 2);
    const auto c = open_empty(m, 3);
    const std::array fill{want{a, 8}, want{b, 8}, want{c, 1}};
    auto first = m.begin(fill);
    REQUIRE(first->accept().has_value());
    const std::array wants{want{a, 0}, want{b, 0}, want{c, 1}};
    std::optional<kvcache::step> second;
    if (dropped) second.emplace(std::move(m.begin(wants).value()));
    close(m, a);
    close(m, b);
    if (dropped) second->drop();
    REQUIRE(m.retire(*first).has_value());
    close(m, c);
    return drain(m);
  };
  CHECK(run(false) == run(true));
}

TEST_CASE("Steps: a handle that was retired is empty and may outlive the manager") {
  std::optional<manager> m;
  m.emplace(kvcache::block_manager_options{.blocks = 4, .block_size = 4});
  const auto a = open_empty(*m, 1);
  const want w{a, 1};
  kvcache::step step = std::move(m->begin({&w, 1}).value());
  REQUIRE(step.accept().has_value());
  REQUIRE(m->retire(step).has_value());
  CHECK_FALSE(step.open());
  m.reset();
  CHECK_FALSE(step.open());  // under AddressSanitizer a look at the manager's memory would end the test
}

TEST_CASE("Steps: begun and dropped, nobody has written over what another sequence still has") {
  const bool longer_first = GENERATE(false, true);
  CAPTURE(longer_first);
  manager m({.blocks = 8, .block_size = 8});
  const text content = words(1, 7);
  const auto a = m.open({.content = content})->sequence;
  compute(m, a, 7);
  const auto b = m.fork(a, 3).value();
  const std::array wants{want{longer_first ? a : b, 1}, want{longer_first ? b : a, 1}};
  {
    auto step = m.begin(wants);
    REQUIRE(step.has_value());
    // Of the block that both had, tokens 0 to 6 are the longer one's: only it may write there, after them.
    for (const auto slot : step->batch().slots) CHECK((slot / 8 != 1 || slot % 8 == 7));
  }
  CHECK(table(m, a) == ids{1});
  CHECK(table(m, b) == ids{1});
}

TEST_CASE("Steps: after one that was dropped the next needs no more than before it") {
  manager m({.blocks = 2, .block_size = 4});
  const auto a = m.open({.content = words(1, 2), .reserve = 1})->sequence;
  compute(m, a, 1);
  const auto b = m.fork(a).value();
  const std::array both{want{b, 1}, want{a, 1}};
  auto first = m.begin(both);  // b copies the tail that they share, a writes into it
  REQUIRE(first.has_value());
  REQUIRE(first->accept().has_value());
  const want w{a, 1};
  REQUIRE(m.blocks_needed({&w, 1}).value() == 0);
  if (auto dropped = m.begin({&w, 1})) dropped->drop();
  CHECK(m.blocks_needed({&w, 1}).value() == 0);
  auto next = m.begin({&w, 1});
  REQUIRE(next.has_value());
  CHECK(next->copies().empty());
}
