// SPDX-License-Identifier: Apache-2.0
#include "trace.hpp"

#include "bad_input.hpp"
#include "catch.hpp"
#include "replay.hpp"

#include <sstream>
#include <string>

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
}

TEST_CASE("A torn or foreign line is refused with its number") {
  const auto refuses = [](const std::string& line, const std::string& why) {
    CAPTURE(line);
    CHECK_THROWS_WITH(read("{\"hash_ids\": [1]}\n\n" + line + "\n"),
                      contains_text("lines line 3: ") && contains_text(why));
  };
  refuses("{\"hash_ids\": [1, 2", "it is no JSON");
  refuses("[1]", "it is no JSON object");
  refuses("{\"ids\": [1]}", "lacks the key 'hash_ids'");
  refuses("{\"hash_ids\": 5}", "'hash_ids' is 5, it must be an array");
  refuses("{\"hash_ids\": [1, -2]}", "'hash_ids' holds -2");
  refuses("{\"hash_ids\": [1, 2.5]}", "'hash_ids' holds 2.5");
  refuses("{\"hash_ids\": [\"a\"]}", "'hash_ids' holds \"a\"");
  refuses("{\"hash_ids\": [" + std::string(100'000, '[') + std::string(100'000, ']') + "]}",
          "'hash_ids' holds an array");
  CHECK_THROWS_WITH(read("\n"), contains_text("holds 0 blocks"));
  CHECK_THROWS_WITH(replay::read_trace_file("no/such/file"), contains_text("cannot open no/such/file"));
}

TEST_CASE("An unknown policy is refused and the known ones are named") {
  CHECK_THROWS_WITH(replay::hits("clock", read("{\"hash_ids\": [1]}"), 1),
                    contains_text("'clock'") && contains_text("gittins") && contains_text("optimal"));
}
