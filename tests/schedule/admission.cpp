// SPDX-License-Identifier: Apache-2.0
// Who is admitted when, what a step is made of, what ends a request.
#include "support.hpp"

using namespace kvcache_test;
using kvcache::errc;

TEST_CASE("Requests of any length end with the tokens they would have alone") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u, 4u);
  CAPTURE(block_size, depth);
  manager m({.blocks = 4096 / block_size, .block_size = block_size});
  scheduler s(m, {.running = 5, .step_tokens = 24});
  hash_engine engine(m);
  for (std::uint32_t i = 0; i < 20; ++i) engine.submit(s, words(i, 1 + i * 7), 1 + i % 9);
  engine.run(s, depth);
  engine.check_tokens();
  check_empty(m, s);
  CHECK(s.statistics().length == 20);
  CHECK(s.statistics().generated_tokens == 20 * 1 + (0 + 1 + 2 + 3 + 4 + 5 + 6 + 7 + 8) * 2 + 0 + 1);
}
