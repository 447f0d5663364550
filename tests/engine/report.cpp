// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include "catch.hpp"
#include "printer.hpp"
#include "support.hpp"

#include <string>
#include <vector>

using namespace engine;
using kvcache_test::contains_text;

TEST_CASE("Percentiles are nearest ranks") {
  CHECK(percentile({}, 50) == 0);
  CHECK(percentile({3}, 95) == 3);
  CHECK(percentile({4, 1, 3, 2}, 50) == 2);
  CHECK(percentile({4, 1, 3, 2}, 95) == 4);
  std::vector<double> hundred;
  for (int i = 100; i > 0; --i) hundred.push_back(i);
  CHECK(percentile(hundred, 95) == 95);
}

TEST_CASE("Table and JSON say the same of a run") {
  const engine_test::small_model small;
  const run_facts facts{.model = "m", .dtype = "f16", .block_size = 8, .pool_blocks = 100, .bytes_per_token = 1024};
  serve_statistics s;
  s.steps = 10;
  s.generated_tokens = 30;
  s.busy_s = 2;
  s.peak_sequences = 3;
  s.preemptions = 2;
  s.recomputed_tokens = 17;
  s.peak_blocks = 7;
  s.peak_contiguous_tokens = 640;
  s.peak_context_tokens = 3072;
  s.allocated_slots = 400;
  s.unused_slots = 10;
  s.window = {4, 80, 60};
  s.again = {2, 30, 6};
  std::vector<answer> answers(3);
  answers[0] = {.id = "a", .tokens = {3 + 0xc3}, .prompt_tokens = 5, .how = finish::end, .first_token_s = 0.25};
  answers[1] = {.id = "b", .prompt_tokens = 6, .reused_tokens = 4, .how = finish::length, .first_token_s = 0.75};
  answers[2] = {.id = "c", .prompt_tokens = 9, .how = finish::failed, .error = "too long"};

  const auto json = nlohmann::json::parse(report_json(facts, s, answers, small.words));
  CHECK(json["requests"] == 2);
  CHECK(json["failed"] == 1);
  CHECK(json["tokens_per_s"] == 15.0);
  CHECK(json["first_token_p50_s"] == 0.25);
  CHECK(json["first_token_p95_s"] == 0.75);
  CHECK(json["peak_blocks"] == 7);
  CHECK(json["peak_bytes"] == 7 * 8 * 1024);
  CHECK(json["wasted_percent"] == 2.5);
  CHECK(json["contiguous_bytes"] == 640 * 1024);
  CHECK(json["contiguous_context_bytes"] == 3072 * 1024);
  CHECK(json["prompt_tokens"] == 11);
  CHECK(json["reused_tokens"] == 4);
  CHECK(json["hit_ratio"] == 4.0 / 11);
  CHECK(json["window_requests"] == 4);
  CHECK(json["window_hit_ratio"] == 0.75);
  CHECK(json["readmitted_requests"] == 2);
  CHECK(json["readmitted_hit_ratio"] == 0.2);
  CHECK(json["preemptions"] == 2);
  CHECK(json["recomputed_tokens"] == 17);
  CHECK(json["answers"][0]["text"] == "\xef\xbf\xbd");  // half a character
  CHECK(json["answers"][2]["error"] == "too long");

  const std::string table = report_table(facts, s, answers);
  for (const char* part : {"2 served, 1 failed", "4 found in the cache (36.4 %)", "2, 17 tokens computed again",
                           "4: 75.0 %; 2 admitted again", "30 in 10 steps, 3 requests at once", "15.0",
                           "0.250 s / 0.750 s", "7\n", "0.1 MiB", "2.50 %", "0.6 MiB", "3.0 MiB"})
    CHECK_THAT(table, contains_text(part));
}

TEST_CASE("Answers that come at once are printed one after another, in whole characters") {
  const engine_test::small_model small;
  std::FILE* file = std::tmpfile();
  REQUIRE(file != nullptr);
  const auto written = [&] {
    std::string out(static_cast<std::size_t>(std::ftell(file)), '\0');
    std::rewind(file);
    out.resize(std::fread(out.data(), 1, out.size(), file));
    return out;
  };
  const auto byte = [](unsigned char b) { return static_cast<token_id>(3 + b); };
  printer shows(small.words, {.text = file, .headings = true});
  shows.expect("one");
  shows.expect("two");
  shows.token(1, byte('x'));
  CHECK(written().empty());
  shows.token(0, byte('a'));
  shows.token(0, byte(0xc3));
  CHECK(written() == "--- one\na");
  shows.token(0, byte(0xa9));
  CHECK(written() == "--- one\na\xc3\xa9");
  shows.finished(1, {});
  CHECK(written() == "--- one\na\xc3\xa9");
  shows.finished(0, {});
  CHECK(written() == "--- one\na\xc3\xa9\n--- two\nx\n");
  std::fclose(file);
}
