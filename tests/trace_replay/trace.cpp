// SPDX-License-Identifier: Apache-2.0
#include "trace.hpp"

#include "bad_input.hpp"
#include "catch.hpp"
#include "replay.hpp"

#include <sstream>
#include <string>
#include <vector>

using kvcache_test::contains_text;
using replay::bad_input;

namespace {

replay::trace read(const std::string& text) {
  std::istringstream in(text);
  return replay::read_trace(in, "lines");
}

}  // namespace

TEST_CASE("A trace is read line by line; other keys and empty lines are read over") {
  const auto t =
      read("{\"hash_ids\": [1, 2]}\n\n{\"timestamp\": 5, \"hash_ids\": [], \"x\": [[]]}\n{\"hash_ids\":[7]}");
  REQUIRE(t.requests.size() == 3);
  CHECK(t.requests[0] == replay::request{1, 2});
  CHECK(t.requests[1].empty());
  CHECK(t.requests[2] == replay::request{7});
  CHECK(t.references == 3);
  CHECK(read("{\"hash_ids\": [18446744073709551615]}").requests[0] == replay::request{~kvcache::content_unit{0}});
}

TEST_CASE("What a request generates is read beside its prompt, and is no reference") {
  const auto t = read("{\"hash_ids\": [1, 2], \"output_hash_ids\": [3, 4]}\n{\"hash_ids\": [1]}");
  CHECK(t.outputs == std::vector<replay::request>{{3, 4}, {}});
  CHECK(t.references == 3);
}

TEST_CASE("A torn or foreign line is refused with its number") {
  const auto refuses = [](const std::string& line, const std::string& why) {
    CAPTURE(line);
    CHECK_THROWS_WITH(read("{\"hash_ids\": [1]}\n\n" + line + "\n"),
                      contains_text("lines line 3: ") && contains_text(why));
  };
  refuses("{\"hash_ids\": [1, 2", "it is no JSON");
  refuses("[1]", "it is no JSON object");
  refuses(std::string("{\"hash_ids\": [1]}\0rest", 22), "it has a zero byte at column 18");
  refuses("{\"ids\": [1]}", "lacks the key 'hash_ids'");
  refuses("{\"hash_ids\": 5}", "'hash_ids' is 5, it must be an array");
  refuses("{\"hash_ids\": [1, -2]}", "'hash_ids' holds -2");
  refuses("{\"hash_ids\": [1, 2.5]}", "'hash_ids' holds 2.5");
  refuses("{\"hash_ids\": [\"a\"]}", "'hash_ids' holds \"a\"");
  refuses("{\"hash_ids\": [1, 18446744073709551616]}",
          "'hash_ids' holds 18446744073709551616, its elements must be integers from 0 to 18446744073709551615");
  refuses("{\"hash_ids\": [1, -9223372036854775809]}", "'hash_ids' holds -9223372036854775809, its elements must be");
  refuses("{\"hash_ids\": 99999999999999999999}", "'hash_ids' is 99999999999999999999, it must be an array");
  refuses("{\"hash_ids\": {\"a\": 1}}", "'hash_ids' is an object, it must be an array");
  refuses("{\"hash_ids\": [1], \"x\": {\"hash_ids\": 5}, \"hash_ids\": [2]}", "it has the key 'hash_ids' twice");
  refuses("{\"hash_ids\": [1], \"output_hash_ids\": [2.5]}", "'output_hash_ids' holds 2.5");
  refuses("{\"hash_ids\": [" + std::string(100'000, '[') + std::string(100'000, ']') + "]}",
          "'hash_ids' holds an array");
  CHECK_THROWS_WITH(read("\n"), contains_text("holds 0 blocks"));
  CHECK_THROWS_WITH(replay::read_trace_file("no/such/file"), contains_text("cannot open no/such/file"));
}

TEST_CASE("An unknown policy is refused and the known ones are named") {
  CHECK_THROWS_WITH(replay::hits("clock", read("{\"hash_ids\": [1]}"), {1}),
                    contains_text("'clock'") && contains_text("gittins") && contains_text("optimal"));
}
