// SPDX-License-Identifier: Apache-2.0
// Observed policies are policies. Replaces operator new, so it is a program of its own.
#include "../eviction/conformance.hpp"

#include <kvcache/eviction/gittins.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/eviction/priority.hpp>
#include <kvcache/eviction/s3fifo.hpp>
#include <kvcache/observe/observed.hpp>

#include <cstdint>

#include "catch.hpp"
#include "counting_new.hpp"

namespace {

std::uint64_t allocations_so_far() { return allocations; }

}  // namespace

// 64 samples, so that the sample is halved again and again.
TEMPLATE_TEST_CASE("R12 an observed policy keeps what every policy has to keep, and never allocates", "",
                   (kvcache::observed<kvcache::lru, 64>), (kvcache::observed<kvcache::gittins>),
                   (kvcache::observed<kvcache::s3fifo, 64>), (kvcache::observed<kvcache::priority, 64>)) {
  const kvcache::block_id blocks = GENERATE(1u, 3u, 24u, 150u);
  const std::uint64_t seed = GENERATE(1u, 2u);
  CAPTURE(TestType::name, blocks, seed);
  const std::string fault = kvcache_test::conformance<TestType>(
      {.seed = seed, .blocks = blocks, .calls = 20'000, .allocations = allocations_so_far});
  CHECK(fault == "");
}
