// SPDX-License-Identifier: Apache-2.0
// The loop that docs/scheduling.md shows.
#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/schedule/scheduler.hpp>

#include <cstdint>
#include <vector>

#include "catch.hpp"

namespace {

struct model {
  /// One token for each row that samples.
  void forward(const kvcache::step_plan& plan, std::vector<std::int32_t>& chosen) {
    for (std::size_t i = 0; i < plan.rows.size(); ++i)
      chosen[i] = static_cast<std::int32_t>(plan.rows[i].first + plan.rows[i].tokens);
  }
};

// [loop]
// Serves until nothing is left; `finished` hears of every request that ends.
template <class Manager, class Model, class Finished>
void serve(kvcache::scheduler<Manager>& scheduler, Model& model, Finished&& finished) {
  std::vector<std::int32_t> chosen;
  std::vector<kvcache::row_result> results;
  for (;;) {
    const kvcache::step_plan plan = scheduler.next();
    for (const kvcache::ended_request& e : scheduler.ended()) finished(e);  // those for which there is no room
    if (plan.empty()) return;

    // Tables, slots and copies are in *plan.blocks, a row for each of plan.rows.
    chosen.resize(plan.rows.size());
    model.forward(plan, chosen);

    results.assign(plan.rows.size(), {});
    for (std::size_t i = 0; i < plan.rows.size(); ++i)
      if (plan.rows[i].samples) results[i].tokens = kvcache::content_view(&chosen[i], 1);
    scheduler.finish(plan, results).value();
    for (const kvcache::ended_request& e : scheduler.ended()) finished(e);
  }
}
// [loop]

}  // namespace

TEST_CASE("The loop of docs/scheduling.md serves all requests") {
  kvcache::block_manager<> manager({.blocks = 64, .block_size = 16});
  kvcache::scheduler scheduler(manager, {.running = 4, .step_tokens = 64});
  const std::vector<std::int32_t> prompt(40, 3);
  std::vector<kvcache::request_id> ids;
  for (int i = 0; i < 10; ++i) ids.push_back(scheduler.submit({.prompt = prompt, .max_tokens = 5}).value());
  model m;
  std::vector<kvcache::request_id> ended;
  serve(scheduler, m, [&](const kvcache::ended_request& e) { ended.push_back(e.request); });
  CHECK(ended == ids);
  CHECK(scheduler.idle());
}
