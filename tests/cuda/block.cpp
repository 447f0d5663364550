// SPDX-License-Identifier: Apache-2.0
// What the host finds wrong with kernels, each planted here.
#include "catch.hpp"
#include "host_context.hpp"

#include <array>
#include <cstdint>
#include <functional>

using namespace kvcache_test;

namespace {

struct block_body {
  static constexpr unsigned threads = 64;
  struct shared {
    alignas(16) std::uint32_t words[256];
  };
  using params = std::function<void(host_context&, shared&)>;
  static void run(host_context& c, shared& s, const params& p) { p(c, s); }
};

/// What a body does wrong, in words; nothing where it does not.
std::string fault_of(const block_body::params& body, const host_options& options = {}) {
  try {
    run_on_host<block_body>(2, body, options);
  } catch (const kernel_fault& e) {
    return e.what();
  }
  return {};
}

}  // namespace

TEST_CASE("device block: all threads of all blocks run, in any order", "[cuda]") {
  for (const thread_order order : {thread_order::forward, thread_order::backward, thread_order::shuffled}) {
    std::array<unsigned, 128> seen{};
    const auto body = [&](host_context& c, block_body::shared& s) {
      s.words[c.thread()] = c.thread();
      c.sync();
      ++seen[c.block() * 64 + s.words[63 - c.thread()]];
    };
    CHECK(fault_of(body, {{}, order}).empty());
    for (const unsigned n : seen) CHECK(n == 1);
  }
}

TEST_CASE("device block: a missing barrier shows in one of the orders", "[cuda]") {
  unsigned wrong = 0;
  for (const thread_order order : {thread_order::forward, thread_order::backward, thread_order::shuffled})
    CHECK(fault_of(
              [&](host_context& c, block_body::shared& s) {
                s.words[c.thread()] = c.thread();
                if (s.words[63 - c.thread()] != 63 - c.thread()) ++wrong;
              },
              {{}, order})
              .empty());
  CHECK(wrong > 0);
}

TEST_CASE("device block: faults are told in words", "[cuda]") {
  CHECK_THAT(fault_of([](host_context& c, block_body::shared&) {
               if (c.thread() < 32) c.sync();
             }),
             contains_text("from thread 0 on at sync, from 32 on at the end"));
  CHECK_THAT(fault_of([](host_context& c, block_body::shared&) {
               if (c.warp() == 0)
                 c.sync();
               else
                 c.sync_warp();
               c.sync();
               if (c.lane() == 0) c.sync_warp();
             }),
             contains_text("returned already"));
  CHECK_THAT(fault_of([](host_context& c, block_body::shared&) {
               if (c.lane() == 3)
                 static_cast<void>(c.any(true));
               else
                 c.sync_warp();
             }),
             contains_text("different places"));
  CHECK_THAT(fault_of([](host_context& c, block_body::shared&) {
               if (c.thread() == 0) c.sync_warp();
               c.sync();
             }),
             contains_text("wait for each other"));
  CHECK_THAT(fault_of([](host_context& c, block_body::shared& s) {
               std::uint32_t out[4];
               c.load_matrices(s.words + 1, out);
             }),
             contains_text("aligned"));
  CHECK_THAT(fault_of([](host_context& c, block_body::shared& s) {
               std::uint32_t out[4];
               c.load_matrices(s.words + 256, out);
             }),
             contains_text("outside shared memory"));
  alignas(16) const std::uint32_t global[4] = {};
  CHECK_THAT(fault_of([&](host_context& c, block_body::shared& s) {
               c.copy_async<16>(s.words, global, true);
               c.copy_async_commit();
             }),
             contains_text("not waited for"));
  CHECK_THAT(fault_of([&](host_context& c, block_body::shared& s) { c.copy_async<16>(s.words, global, true); }),
             contains_text("not committed"));
}

TEST_CASE("device block: memory is what is named, and written where that is allowed", "[cuda]") {
  alignas(16) std::uint32_t words[8] = {};
  global_memory memory;
  memory.add(words, 16, "the first four");
  memory.add(words + 4, 16, "the others", true);
  const auto fault = [&](const auto& body) { return fault_of(body, {memory, thread_order::forward}); };
  CHECK(fault([&](host_context& c, block_body::shared&) { c.store(words + 4, c.load(words)); }).empty());
  CHECK_THAT(fault([&](host_context& c, block_body::shared&) { c.store(words, 1u); }), contains_text("read only"));
  CHECK_THAT(fault([&](host_context& c, block_body::shared&) { static_cast<void>(c.load(words + 8)); }),
             contains_text("0 bytes behind the others"));
  CHECK_THAT(fault([&](host_context& c, block_body::shared& s) { c.copy_async<16>(s.words, words + 2, true); }),
             contains_text("aligned to"));
}
