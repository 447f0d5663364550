// SPDX-License-Identifier: Apache-2.0
// The engine as a user runs it: what it prints, and what it says and exits with on bad input. The model is the random
// one. Under AddressSanitizer a leak would change the exit status.
#include "../observe/prometheus_parser.hpp"
#include "catch.hpp"
#include "run_command.hpp"
#include "sanitized.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

using kvcache_test::contains_text;
using namespace engine_test;

namespace {

std::string patched_model(const folder& in, const std::string& key, std::uint32_t value) {
  std::string bytes = read_file(in.at("model.gguf"));
  bytes.replace(bytes.find(key) + key.size() + 4, 4, reinterpret_cast<const char*>(&value), 4);
  return in.write("patched.gguf", bytes);
}

}  // namespace

TEST_CASE("One prompt is served, with a table at the end") {
  const folder f;
  const outcome o = run(f, {"-m", f.at("model.gguf"), "-p", "hello", "-n", "5", "--ignore-end"});
  INFO(o.err);
  CHECK(o.status == 0);
  for (const char* part : {"requests ", "1 served, 0 failed", "tokens/s", "time to first token p50 / p95",
                           "blocks in use at peak", "slots wasted", "contiguous, prompt + max_tokens"})
    CHECK_THAT(o.out, contains_text(part));
  CHECK_THAT(o.err, contains_text("random weights"));
  CHECK_THAT(o.err, !contains_text("reading the prompt"));
}

TEST_CASE("Requests of a file are served together; JSON holds the table and the answers") {
  const folder f;
  const std::string requests = f.write("requests.jsonl",
                                       "{\"id\": \"one\", \"prompt\": \"a\", \"max_tokens\": 4}\n"
                                       "{\"id\": \"two\", \"prompt\": \"b\", \"max_tokens\": 6}\n");
  for (const char* block_size : {"8", "16", "64"}) {
    const outcome o = run(f, {"-m", f.at("model.gguf"), "-r", requests, "--ignore-end", "--json", "-", "--block-size",
                              block_size, "--kv-dtype", "bf16"});
    INFO(o.err);
    REQUIRE(o.status == 0);
    const auto json = nlohmann::json::parse(o.out);
    CHECK(json["requests"] == 2);
    CHECK(json["kv_dtype"] == "bf16");
    CHECK(json["block_size"] == std::stoi(block_size));
    CHECK(json["peak_sequences"] == 2);
    CHECK(json["generated_tokens"] == 10);
    CHECK(json["answers"][0]["tokens"].size() == 4);
    CHECK(json["answers"][1]["tokens"].size() == 6);
    CHECK_THAT(o.err, contains_text("--- one\n") && contains_text("--- two\n") && contains_text("2 served"));
  }
  const outcome o = run(f, {"-m", f.at("model.gguf"), "-r", requests, "--ignore-end", "--json", f.at("report.json"),
                            "--progress", "--chunk", "10"});
  CHECK(o.status == 0);
  CHECK_THAT(o.out, contains_text("--- one\n") && contains_text("2 served"));
  CHECK(nlohmann::json::parse(read_file(f.at("report.json")))["requests"] == 2);
  CHECK_THAT(o.err, contains_text("reading the prompt of one: 10 of "));
}

TEST_CASE("A chat keeps what was said; later turns find it in the cache") {
  const folder f;
  const outcome o =
      run(f, {"-m", f.at("model.gguf"), "--chat", "-n", "6", "--json", f.at("report.json")}, "hello\n\nand again\n");
  INFO(o.err);
  CHECK(o.status == 0);
  const auto json = nlohmann::json::parse(read_file(f.at("report.json")));
  REQUIRE(json["answers"].size() == 2);
  CHECK(json["answers"][0]["reused_tokens"] == 0);
  CHECK(json["answers"][1]["prompt_tokens"] > json["answers"][0]["prompt_tokens"]);
  // All whole blocks of the first prompt; what was answered may be tokenised anew.
  CHECK(json["answers"][1]["reused_tokens"].get<int>() >= json["answers"][0]["prompt_tokens"].get<int>() / 16 * 16);
}

TEST_CASE("R13 the report and the page for Prometheus have the hit ratio of the newest requests") {
  const folder f;
  std::string lines;
  for (const char* id : {"a", "b", "c"})
    lines +=
        std::string(R"({"id": ")") + id + R"(", "prompt": ")" + std::string(40, 'p') + R"(", "max_tokens": 2})" + "\n";
  const outcome o =
      run(f, {"-m", f.at("model.gguf"), "-r", f.write("requests.jsonl", lines), "--ignore-end", "--max-sequences", "1",
              "--window", "2", "--json", f.at("report.json"), "--metrics", f.at("page.txt")});
  INFO(o.err);
  REQUIRE(o.status == 0);
  const auto json = nlohmann::json::parse(read_file(f.at("report.json")));
  const double tokens = json["prompt_tokens"].get<double>() / 3;
  const double reused = json["answers"][2]["reused_tokens"].get<double>();
  CHECK(reused > 0.7 * tokens);
  CHECK(json["window_requests"] == 2);
  CHECK(json["window_hit_ratio"] == Approx(reused / tokens));
  CHECK(json["hit_ratio"] == Approx(2 * reused / (3 * tokens)));
  CHECK(json["readmitted_requests"] == 0);
  CHECK_THAT(o.out, contains_text("found, newest requests") && contains_text("2: "));

  const kvcache_test::prometheus_page page(read_file(f.at("page.txt")));
  const kvcache_test::prometheus_page::labels model{{"model", json["model"].get<std::string>()}};
  CHECK(page.value("kvcache_window_requests", model) == 2);
  CHECK(page.value("kvcache_window_queried_tokens", model) == 2 * tokens);
  CHECK(page.value("kvcache_window_hit_ratio", model) == Approx(reused / tokens).margin(1e-6));
  CHECK(page.value("kvcache_hit_tokens_total", model) == 2 * reused);
  CHECK(page.value("kvcache_readmitted_requests_total", model) == 0);
}

TEST_CASE("Chats that share a system prompt are served side by side; without reuse the answers are the same") {
  const folder f;
  const std::string system(400, 's');
  std::string lines;
  for (const char* id : {"a", "b", "c", "d", "e"})
    lines += std::string(R"({"id": ")") + id + R"(", "system": ")" + system + R"(", "turns": ["hello )" + id +
             R"(", "and again"], "max_tokens": 5})" + "\n";
  const std::string chats = f.write("chats.jsonl", lines);
  const auto serve = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"-m", f.at("model.gguf"), "--chats", chats, "--ignore-end", "--kv-dtype", "f32",
                               "--json", f.at("report.json")});
    const outcome o = run(f, more);
    INFO(o.err);
    REQUIRE(o.status == 0);
    CHECK_THAT(o.out, contains_text("--- a turn 1\n") && contains_text("--- e turn 2\n"));
    return nlohmann::json::parse(read_file(f.at("report.json")));
  };
  const auto with = serve({});
  const auto without = serve({"--no-reuse"});
  REQUIRE(with["answers"].size() == 10);
  for (std::size_t i = 0; i < 10; ++i) {
    const auto& id = with["answers"][i]["id"];
    const auto other = std::find_if(without["answers"].begin(), without["answers"].end(),
                                    [&](const auto& a) { return a["id"] == id; });
    REQUIRE(other != without["answers"].end());
    CHECK(with["answers"][i]["tokens"] == (*other)["tokens"]);
    CHECK(with["answers"][i]["prompt_tokens"] == (*other)["prompt_tokens"]);
  }
  // Only the first turn of the first chat computes the system prompt.
  CHECK(with["answers"][0]["reused_tokens"] == 0);
  for (std::size_t i = 1; i < 10; ++i) CHECK(with["answers"][i]["reused_tokens"] >= 400);
  CHECK(with["hit_ratio"] > 0.75);
  CHECK(with["prefilled_tokens"].get<int>() + with["reused_tokens"].get<int>() == with["prompt_tokens"].get<int>());
  CHECK(without["reused_tokens"] == 0);
  CHECK(without["hit_ratio"] == 0.0);
  CHECK(without["prefilled_tokens"] == without["prompt_tokens"]);
}

TEST_CASE("A model file that cannot be used ends the engine with 2 and a sentence") {
  const folder f;
  const std::string whole = read_file(f.at("model.gguf"));
  const std::vector<std::string> ask{"-p", "hello"};
  const auto with = [&](const std::string& model) { return std::vector<std::string>{"-m", model, "-p", "hello"}; };
  refuses(f, with(f.at("nothing.gguf")), "nothing.gguf: No such file");
  refuses(f, with(f.at("")), "it is not a regular file");
  REQUIRE(::mkfifo(f.at("pipe.gguf").c_str(), 0600) == 0);  // reading it would wait for ever
  refuses(f, with(f.at("pipe.gguf")), "it is not a regular file");
  refuses(f, with(f.write("empty.gguf", "")), "the file has 0 left");
  refuses(f, with(f.write("foreign.gguf", "\x89PNG and so on")), "foreign.gguf: not a usable GGUF file");
  refuses(f, with(f.at("foreign.gguf")), "a GGUF file begins with 'GGUF'");
  refuses(f, with(f.write("head.gguf", whole.substr(0, 1000))), "(is it truncated?)");
  refuses(f, with(f.write("cut.gguf", whole.substr(0, whole.size() / 2))), "(is it truncated?)");
  refuses(f, with(f.write("short.gguf", whole.substr(0, whole.size() - 1))), "(is it truncated?)");
  refuses(f, with(patched_model(f, "llama.attention.head_count", 0)), "llama.attention.head_count is 0, 1 to");
  refuses(f, with(patched_model(f, "llama.attention.head_count_kv", 0)), "llama.attention.head_count_kv is 0, 1 to");
}

TEST_CASE("Options that can never work end the engine with 2 and a sentence") {
  const folder f;
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"-m", f.at("model.gguf"), "-p", "hello"});
    return more;
  };
  refuses(f, with({"--block-size", "0"}), "block size is 0, choose one of 8, 16, 64");
  refuses(f, with({"--block-size", "12"}), "block size is 12, choose one of 8, 16, 64");
  refuses(f, with({"--max-tokens", "0"}), "max tokens is 0, the least is 1");
  refuses(f, with({"--max-sequences", "0"}), "at once is 0, the least is 1");
  refuses(f, with({"--window", "0"}), "hit window: 0 requests, from 1 to 16777216 possible");
  refuses(f, with({"--chunk", "0"}), "in a step is 0, the least is 1");
  refuses(f, with({"--threads", "100000"}), "threads is 100000, at most 1024 are possible");
  refuses(f, with({"--temperature", "-1"}), "temperature is -1");
  refuses(f, with({"--top-p", "0"}), "top_p is 0");
  refuses(f, with({"--kv-dtype", "int3"}), "KV dtype 'int3' is not compiled in");
  refuses(f, with({"--kv-dtype", "f16,bf16"}), "2 KV dtypes are given, one is served with");
  refuses(f, with({"--context", "10"}), "--context requires --perplexity");
  refuses(f, with({"--limit", "10"}), "--limit requires --perplexity");
  refuses(f, with({"--unknown"}), "--unknown");
  refuses(f, {"-m", f.at("model.gguf")},
          "Exactly 1 option from [-p,--prompt,-r,--requests,--chats,-c,--chat,--perplexity]");
  refuses(f, {"-p", "hello"}, "--model");
}

TEST_CASE("More threads than the system gives end the engine with 2 and a sentence") {
  if (engine_test::sanitized) {
    std::puts("SKIPPED: a sanitizer needs more address space than this test leaves");
    return;
  }
  const folder f;
  const outcome o = run(f, {"-m", f.at("model.gguf"), "-p", "hello", "--threads", "1000"}, {}, "ulimit -v 2000000;");
  INFO(o.err);
  CHECK(o.status == 2);
  CHECK_THAT(o.err,
             contains_text("thread_pool: 1000 threads asked for, the system gave ") && contains_text("ask for fewer"));
}

TEST_CASE("A malformed request ends the engine before it serves anything, and its line is named") {
  const folder f;
  const auto with = [&](const std::string& lines) {
    return std::vector<std::string>{"-m", f.at("model.gguf"), "-r", f.write("requests.jsonl", lines)};
  };
  refuses(f, with("{\"prompt\": \"a\"}\n{\"prompt\": \n"), "requests.jsonl line 2: it is no JSON");
  refuses(f, with("{\"prompt\": \"a\", \"max_tokens\": \"b\"}\n"), "line 1: 'max_tokens' is \"b\"");
  refuses(f, with(""), "holds 0 requests");
  refuses(f, {"-m", f.at("model.gguf"), "--chats", f.write("chats.jsonl", "{\"turns\": []}\n")},
          "chats.jsonl line 1: it has 0 turns, the least is 1");
  refuses(f, {"-m", f.at("model.gguf"), "-r", f.at("nothing.jsonl")}, "nothing.jsonl: No such file");
  refuses(f, {"-m", f.at("model.gguf"), "-r", f.at("")}, "it is a directory");
}

TEST_CASE("A prompt longer than the pool fails alone; the other requests are served") {
  const folder f;
  const std::string requests = f.write("requests.jsonl",
                                       "{\"id\": \"one\", \"prompt\": \"a\", \"max_tokens\": 4}\n"
                                       "{\"id\": \"long\", \"prompt\": \"" +
                                           std::string(300, 'x') +
                                           "\", \"max_tokens\": 4}\n"
                                           "{\"id\": \"two\", \"prompt\": \"b\", \"max_tokens\": 6}\n");
  const outcome o = run(
      f, {"-m", f.at("model.gguf"), "-r", requests, "--ignore-end", "--json", f.at("report.json"), "--blocks", "20"});
  INFO(o.err);
  CHECK(o.status == 1);
  CHECK_THAT(o.err, contains_text("request 'long' has ") && contains_text("the pool has 20; shorten the prompt"));
  const auto json = nlohmann::json::parse(read_file(f.at("report.json")));
  CHECK(json["requests"] == 2);
  CHECK(json["failed"] == 1);
  CHECK(json["answers"][0]["tokens"].size() == 4);
  CHECK(json["answers"][1]["finish"] == "failed");
  CHECK(json["answers"][2]["tokens"].size() == 6);

  const outcome alone = run(f, {"-m", f.at("model.gguf"), "-p", std::string(300, 'x'), "--blocks", "20"});
  CHECK(alone.status == 2);
  CHECK_THAT(alone.err, contains_text("the pool has 20"));
}

TEST_CASE("A value that is nested deeply is refused like any other") {
  const folder f;
  const std::string deep = std::string(200'000, '[') + std::string(200'000, ']');
  refuses(f, {"-m", f.at("model.gguf"), "-r", f.write("deep.jsonl", "{\"prompt\": " + deep + "}\n")},
          "line 1: 'prompt' is an array");
}

TEST_CASE("Output that cannot be written is a fault") {
  const folder f;
  for (const char* json : {"", "--json"}) {
    std::vector<std::string> arguments{"-m", f.at("model.gguf"), "-p", "hello", "-n", "1"};
    if (*json != '\0') arguments.insert(arguments.end(), {json, "-"});
    std::string command = "env -u KVCACHE_MODEL '" KVCACHE_ENGINE_EXECUTABLE "'";
    for (const std::string& a : arguments) command += " '" + a + "'";
    const int status = std::system((command + " >/dev/full 2>'" + f.at("stderr") + "'").c_str());
    CHECK(WEXITSTATUS(status) == 2);
    CHECK_THAT(read_file(f.at("stderr")), contains_text("cannot write to the standard output"));
  }
}

TEST_CASE("A report that cannot be written is a fault, told before anything is served") {
  const folder f;
  const outcome o = run(f, {"-m", f.at("model.gguf"), "-p", "hello", "-n", "1", "--json", f.at("no/such/folder.json")});
  CHECK(o.status == 2);
  CHECK(o.out.empty());
  CHECK_THAT(o.err, contains_text("cannot write"));
  refuses(f, {"-m", f.at("model.gguf"), "-p", "hello", "--metrics", f.at("no/such/page.txt")},
          "cannot write " + f.at("no/such/page.txt"));
  const outcome full = run(f, {"-m", f.at("model.gguf"), "-p", "hello", "-n", "1", "--metrics", "/dev/full"});
  CHECK(full.status == 2);
  CHECK_THAT(full.err, contains_text("cannot write /dev/full"));
}
