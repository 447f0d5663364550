// SPDX-License-Identifier: Apache-2.0
// --perplexity as a user runs it.
#include "catch.hpp"
#include "run_command.hpp"

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

using kvcache_test::contains_text;
using namespace engine_test;

namespace {

std::string some_text() {
  std::string out;
  for (int i = 0; i < 60; ++i) out += "There were " + std::to_string(i) + " foxes in the house.\n";
  return out;
}

}  // namespace

TEST_CASE("--perplexity prints a table and writes one record a dtype, f32 first") {
  const folder f;
  const std::vector<std::string> arguments{"-m",           f.at("model.gguf"),
                                           "--perplexity", f.write("text", some_text()),
                                           "--kv-dtype",   "bf16,f16:bf16",
                                           "--context",    "100",
                                           "--limit",      "250",
                                           "--json"};
  std::vector<std::string> to_file = arguments;
  to_file.insert(to_file.end(), {f.at("report.json"), "--progress"});
  const outcome o = run(f, to_file);
  INFO(o.err);
  REQUIRE(o.status == 0);
  CHECK_THAT(o.out, contains_text("250 tokens in windows of 100") && contains_text("\nbf16 ") &&
                        contains_text("\nf16:bf16 ") && contains_text("mean KL at positions"));
  CHECK_THAT(o.err, contains_text("random weights") && contains_text("measuring: ") && contains_text(" left"));
  const auto json = nlohmann::json::parse(read_file(f.at("report.json")));
  REQUIRE(json["dtypes"].size() == 3);
  CHECK(json["dtypes"][0]["kv_dtype"] == "f32");
  CHECK(json["dtypes"][0]["mean_kl"] == 0);
  CHECK(json["dtypes"][1]["kv_dtype"] == "bf16");
  CHECK(json["dtypes"][1]["mean_kl"] > 0);
  CHECK(json["dtypes"][2]["tokens"] == 250);

  std::vector<std::string> to_stdout = arguments;
  to_stdout.push_back("-");
  const outcome piped = run(f, to_stdout);
  CHECK(piped.status == 0);
  CHECK(nlohmann::json::parse(piped.out)["dtypes"] == json["dtypes"]);
  CHECK_THAT(piped.err, contains_text("250 tokens in windows of 100") && !contains_text("measuring: "));
}

TEST_CASE("A dtype with +offset is measured beside the one without, and the table says how it was calibrated") {
  const folder f;
  const outcome o = run(f, {"-m", f.at("model.gguf"), "--perplexity", f.write("text", some_text()), "--kv-dtype",
                            "fp8_e4m3,fp8_e4m3+offset", "--context", "100", "--limit", "100", "--calibrate", "77",
                            "--json", f.at("report.json")});
  INFO(o.err);
  REQUIRE(o.status == 0);
  CHECK_THAT(o.out, contains_text("\nfp8_e4m3 ") && contains_text("\nfp8_e4m3+offset ") &&
                        contains_text("the text's last 77 tokens"));
  const auto json = nlohmann::json::parse(read_file(f.at("report.json")));
  CHECK(json["calibration_tokens"] == 77);
  CHECK(json["dtypes"][2]["kv_dtype"] == "fp8_e4m3+offset");
}

TEST_CASE("What --perplexity cannot use ends the engine with 2 and a sentence") {
  const folder f;
  const std::string text = f.write("text", some_text());
  const auto with = [&](const std::string& file, std::vector<std::string> more) {
    more.insert(more.begin(), {"-m", f.at("model.gguf"), "--perplexity", file});
    return more;
  };
  refuses(f, with(f.at("nothing"), {}), "nothing: No such file");
  refuses(f, with(f.at(""), {}), "it is not a regular file");
  refuses(f, with(f.write("empty", ""), {}), "empty is empty; give a text");
  refuses(f, with(f.write("short", "a few words"), {"--context", "1000"}),
          "tokens, a window of 1000 and the token after");
  refuses(f, with(text, {"--context", "0"}), "context is 0, the model knows 1 to 2048 positions");
  refuses(f, with(text, {"--context", "4000"}), "context is 4000, the model knows 1 to 2048 positions");
  refuses(f, with(text, {"--context", "100", "--chunk", "0"}), "chunk is 0, the least is 1");
  refuses(f, with(text, {"--kv-dtype", "f16,int3"}), "KV dtype 'int3' is not compiled in");
  refuses(f, with(text, {"--kv-dtype", "f16,"}), "KV dtype '' is not compiled in");
  refuses(f, with(text, {"--kv-dtype", "f16:f16:f16"}), "KV dtype 'f16:f16:f16' is not compiled in");
  refuses(f, with(text, {"--kv-dtype", "bf16,f16,bf16"}), "KV dtype bf16 is given twice");
  refuses(f, with(text, {"--kv-dtype", "f16,f16:f16"}), "KV dtype f16 is given twice");
  refuses(f, with(text, {"--limit", "-1"}), "--limit: -1 is below 0");
  refuses(f, with(text, {"--calibrate", "-1"}), "--calibrate: -1 is below 0");
  refuses(f, with(text, {"--kv-dtype", "f16+offset", "--context", "100"}), "beside the 2048 to calibrate with");
  refuses(f, with(text, {"--context", "-1"}), "--context: -1 is below 0");
  refuses(f, with(text, {"--prompt", "hello"}), "Exactly 1 option from");
  refuses(f, with(text, {"--metrics", f.at("page")}), "--metrics excludes --perplexity");
  refuses(f, with(text, {"--blocks", "10"}), "--blocks excludes --perplexity");
  refuses(f, with(text, {"--context", "100", "--json", f.at("no/such/report.json")}), "cannot write");
}

TEST_CASE("The report is drawn over bytes per token") {
  if (std::system("command -v gnuplot >/dev/null") != 0) {
    std::puts("SKIPPED: gnuplot is not installed");
    return;
  }
  const folder f;
  const outcome o = run(f, {"-m", f.at("model.gguf"), "--perplexity", f.write("text", some_text()), "--kv-dtype",
                            "bf16,f16", "--context", "100", "--limit", "100", "--json", f.at("report.json")});
  REQUIRE(o.status == 0);
  const auto draw = [&](const std::vector<std::string>& arguments) {
    std::string command = "'" KVCACHE_PLOT_QUALITY "'";
    for (const std::string& a : arguments) command += " '" + a + "'";
    command += " >'" + f.at("stdout") + "' 2>'" + f.at("stderr") + "'";
    return WEXITSTATUS(std::system(command.c_str()));
  };
  CHECK(draw({f.at("report.json"), f.at("picture.svg")}) == 0);
  const std::string picture = read_file(f.at("picture.svg"));
  CHECK(picture.size() < 60'000);
  CHECK_THAT(picture, contains_text("<svg") && contains_text("bf16") && contains_text("bytes per token"));
  // Several reports in one picture; a dtype that is in two of them stands there once.
  const outcome more = run(f, {"-m", f.at("model.gguf"), "--perplexity", f.at("text"), "--kv-dtype", "f16,fp8_e5m2",
                               "--context", "100", "--limit", "100", "--json", f.at("more.json")});
  REQUIRE(more.status == 0);
  CHECK(draw({f.at("report.json"), f.at("more.json"), f.at("both.svg")}) == 0);
  CHECK_THAT(read_file(f.at("both.svg")),
             contains_text("bf16") && contains_text("3  f16") && contains_text("fp8_e5m2") && !contains_text("4  "));
  CHECK(draw({f.at("nothing.json"), f.at("other.svg")}) == 1);
  CHECK_THAT(read_file(f.at("stderr")), contains_text("nothing.json"));
  CHECK(draw({}) == 1);
  CHECK_THAT(read_file(f.at("stderr")), contains_text("usage: plot_quality.sh REPORT.json... PICTURE.svg"));
}
