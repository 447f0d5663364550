// SPDX-License-Identifier: Apache-2.0
#include "quality_report.hpp"

#include "catch.hpp"

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

using namespace engine;
using kvcache_test::contains_text;

TEST_CASE("Table and JSON say the same of a measurement") {
  const quality_facts facts{.model = "m", .text = "t.txt", .context = 128, .chunk = 32, .block_size = 16, .threads = 2};
  const double nll = std::log(20.0);
  const quality_sums base{.tokens = 4, .agreed = 4, .negative_log = 4 * nll, .baseline_negative_log = 4 * nll};
  const quality_sums worse{.tokens = 4,
                           .agreed = 3,
                           .negative_log = 4 * std::log(22.0),
                           .divergence = 0.5,
                           .change_squared = 1,
                           .baseline_negative_log = 4 * nll};
  const std::vector<kv_quality> measured{{"f32", 800, base, {{0, 64, base}}, {0, 0, 0, 0}},
                                         {"bf16:f16", 400, worse, {{0, 64, worse}}, {0, 0.1, 0.4, 0}}};
  const auto json = nlohmann::json::parse(quality_json(facts, measured));
  CHECK(json["baseline"] == "f32");
  CHECK(json["context"] == 128);
  REQUIRE(json["dtypes"].size() == 2);
  const auto& record = json["dtypes"][1];
  CHECK(record["kv_dtype"] == "bf16:f16");
  CHECK(record["bytes_per_token"] == 400);
  CHECK(record["tokens"] == 4);
  CHECK(record["perplexity"] == Approx(22));
  CHECK(record["log_change"] == Approx(std::log(1.1)));
  CHECK(record["mean_kl"] == Approx(0.125));
  CHECK(record["kl_99"] == Approx(0.4));
  CHECK(record["agreement"] == Approx(0.75));
  CHECK((record["positions"][0]["first"] == 0 && record["positions"][0]["last"] == 63));
  CHECK(record["positions"][0]["mean_kl"] == Approx(0.125));
  const std::string table = quality_table(facts, measured);
  for (const char* part : {"4 tokens in windows of 128, chunks of 32", "22.0000", "+10.0000", "0.125", "0.4", "75.000",
                           "mean KL at positions", "0-63", "bf16:f16"})
    CHECK_THAT(table, contains_text(part));
}
