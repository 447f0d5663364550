// SPDX-License-Identifier: Apache-2.0
// Perplexity of the real model. Without the model the test says so in one line and passes.
#include "catch.hpp"
#include "perplexity.hpp"
#include "sanitized.hpp"
#include "support.hpp"

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

using namespace engine;

namespace {

/// Lincoln at Gettysburg, 1863.
constexpr std::string_view famous =
    "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, "
    "and "
    "dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
    "whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great "
    "battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for those "
    "who "
    "here gave their lives that that nation might live. It is altogether fitting and proper that we should do this.";

}  // namespace

TEST_CASE("The real model finds a famous text likely, and f16 and bf16 KV change that hardly") {
  const auto path = engine_test::real_model();
  if (!path) return;
  const mapped_file file(*path);
  engine_test::loaded_model model(file.bytes(), 2);
  const auto text = model.words.encode(famous, specials::as_text);
  REQUIRE(text.size() > 101);
  constexpr std::uint64_t limit = engine_test::sanitized ? 40 : 100;
  const auto all = measure_perplexity(
      model.model, text, {.dtypes = {"f16", "bf16"}, .context = 100, .chunk = 32, .limit = limit}, model.workers);
  for (const kv_quality& q : all)
    std::printf("%s: perplexity %.4f, mean KL %.3g, agreement %.3f\n", q.dtype.c_str(), q.all.perplexity(),
                q.all.mean_divergence(), q.all.agreement());
  CHECK((all[0].all.perplexity() > 1 && all[0].all.perplexity() < 20));
  const std::vector<token_id> backwards(text.rbegin(), text.rend());
  const auto salad = measure_perplexity(
      model.model, backwards, {.dtypes = {"f32"}, .context = 100, .chunk = 32, .limit = limit}, model.workers);
  CHECK(salad[0].all.perplexity() > 50 * all[0].all.perplexity());
  CHECK((all[1].all.mean_divergence() > 0 && all[1].all.mean_divergence() < 1e-5));
  CHECK((all[2].all.mean_divergence() > all[1].all.mean_divergence() && all[2].all.mean_divergence() < 1e-3));
  CHECK((all[1].all.agreement() > 0.98 && all[2].all.agreement() > 0.95));
}
