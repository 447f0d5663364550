// SPDX-License-Identifier: Apache-2.0
// No heap allocation per call once arrays have grown: every allocation of the program is counted.
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/schedule/scheduler.hpp>

#include <array>
#include <cstdint>
#include <span>

#include "catch.hpp"
#include "counting_new.hpp"

namespace {

using manager = kvcache::block_manager<kvcache::lru>;
using scheduler = kvcache::scheduler<manager>;

/// A day of an engine in short: requests with common heads, keys and drafts, waiters, preemptions, aborts, two steps in
/// flight. True where everything succeeded.
bool turn(scheduler& s, std::span<std::int32_t> content, std::int32_t number) {
  const std::array keys{kvcache::extra_key{kvcache::key_kind::adapter, "an adapter with a long name of its own"},
                        kvcache::extra_key{kvcache::key_kind::salt, number % 2 == 0 ? "even tenants" : "odd tenants"}};
  std::array<kvcache::request_id, 12> ids{};
  bool good = true;
  for (std::uint32_t i = 0; i < ids.size(); ++i) {
    for (std::size_t t = content.size() / 2; t < content.size(); ++t)
      content[t] = number * 1'000 + static_cast<std::int32_t>(i / 3 * 100 + t);
    const auto some = i % 2 == 0 ? std::span<const kvcache::extra_key>{} : std::span<const kvcache::extra_key>(keys);
    const auto id = s.submit({.prompt = content.first(content.size() - i % 4),
                              .keys = some,
                              .max_tokens = 40,
                              .priority = static_cast<std::int32_t>(i % 3),
                              .drafts = i % 4});
    if (!id) return false;
    ids[i] = *id;
  }
  const std::int32_t token = 7;
  std::array<kvcache::row_result, 16> results{};
  std::array<kvcache::step_plan, 2> flights{};
  std::size_t in_flight = 0;
  for (int n = 0;; ++n) {
    if (n == 5) good = good && s.abort(ids[4]);
    while (in_flight < flights.size()) {
      const auto p = s.next();
      if (p.empty()) break;
      flights[in_flight++] = p;
    }
    if (in_flight == 0) break;
    const auto rows = flights[0].rows;
    for (std::size_t i = 0; i < rows.size(); ++i)
      results[i] = {.tokens = rows[i].samples ? kvcache::content_view(&token, 1) : kvcache::content_view()};
    good = good && s.finish(flights[0], std::span(results).first(rows.size()));
    flights[0] = flights[1];
    --in_flight;
  }
  return good && s.idle();
}

}  // namespace

TEST_CASE("No heap allocation per call: submit, next, finish, abort") {
  const std::uint32_t block_size = GENERATE(1u, 4u, 16u);
  CAPTURE(block_size);
  manager m({.blocks = 300 / block_size, .block_size = block_size});
  scheduler s(m, {.running = 8, .step_tokens = 64, .watermark = 0});
  std::array<std::int32_t, 60> content{};
  for (std::int32_t number = 0; number < 60; ++number) REQUIRE(turn(s, content, number));
  const std::uint64_t before = allocations;
  const auto preemptions = s.statistics().preemptions;
  bool good = true;
  for (std::int32_t number = 60; number < 200; ++number) good = good && turn(s, content, number);
  const std::uint64_t after = allocations;
  CHECK(good);
  CHECK(after == before);
  CHECK(s.statistics().preemptions > preemptions + 50);
  CHECK(s.statistics().hit_tokens > 0);
}
