// SPDX-License-Identifier: Apache-2.0
#include "request_file.hpp"

#include "bad_input.hpp"
#include "catch.hpp"
#include "chat.hpp"
#include "support.hpp"

#include <sstream>
#include <string>
#include <vector>

using namespace engine;
using kvcache_test::contains_text;

namespace {

std::vector<request> read(const std::string& text) {
  static const engine_test::small_model small;
  std::istringstream in(text);
  request defaults;
  defaults.max_tokens = 9;
  return read_requests(in, "lines", small.words, defaults);
}

}  // namespace

TEST_CASE("A line of a request file says what differs from the command line") {
  const auto requests = read(R"({"prompt": "the"}

{"id": "b", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.25, "seed": 18446744073709551615, "ignore_end": true}
)");
  const engine_test::small_model small;
  REQUIRE(requests.size() == 2);
  CHECK(requests[0].id == "1");
  CHECK(requests[0].max_tokens == 9);
  CHECK_FALSE(requests[0].ignore_end);
  CHECK(requests[0].prompt == encode_chat(small.words, {{"user", "the"}}));
  CHECK(requests[1].id == "b");
  CHECK(requests[1].prompt == encode_chat(small.words, {{"system", "s"}, {"user", "u"}}));
  CHECK(requests[1].max_tokens == 3);
  CHECK(requests[1].how.temperature == 0.5f);
  CHECK(requests[1].how.top_k == 4);
  CHECK(requests[1].how.top_p == 0.25f);
  CHECK(requests[1].how.seed == ~std::uint64_t{0});
  CHECK(requests[1].ignore_end);
  // Each object has keys of its own.
  CHECK_NOTHROW(
      read(R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "id": "role"})"));
}

TEST_CASE("A malformed request is refused with the number of its line") {
  const std::string good = "{\"prompt\": \"a\"}\n";
  const auto refuses = [&](const std::string& line, const std::string& why) {
    INFO(line);
    CHECK_THROWS_AS(read(good + "\n" + line + "\n" + good), bad_input);
    CHECK_THROWS_WITH(read(good + "\n" + line + "\n" + good), contains_text("lines line 3: ") && contains_text(why));
  };
  refuses("{\"prompt\": \"a\"", "it is no JSON");
  refuses("prompt", "it is no JSON");
  refuses(std::string("{\"prompt\": \"a\"}\0rest", 20), "it has a zero byte at column 16");
  refuses("[1]", "it is no JSON object");
  refuses("{}", "it has none of the keys 'prompt' and 'messages'");
  refuses(R"({"prompt": "a", "messages": []})", "it has both of the keys 'prompt' and 'messages'");
  refuses(R"({"id": "1", "prompt": "b"})", "the id '1' is that of an earlier line");
  refuses(R"({"prompt": 5})", "'prompt' is 5, it must be a string");
  refuses(R"({"messages": []})", "at least 1");
  refuses(R"({"messages": ["a"]})", "a message is \"a\"");
  refuses(R"({"messages": [{"role": "user"}]})", "it must have the keys role and content");
  refuses(R"({"messages": [{"role": "king", "content": ""}]})",
          "'role' is 'king', it must be system, user or assistant");
  refuses(R"({"prompt": "a", "max_tokens": -1})", "'max_tokens' is -1, it must be an integer from 0 to 4294967295");
  refuses(R"({"prompt": "a", "max_tokens": 0})", "'max_tokens' is 0, the least is 1");
  refuses(R"({"prompt": "a", "max_tokens": 1.5})", "'max_tokens' is 1.5");
  refuses(R"({"prompt": "a", "top_k": 4294967296})", "'top_k' is 4294967296");
  refuses(R"({"prompt": "a", "temperature": -2})", "temperature is -2");
  refuses(R"({"prompt": "a", "temperature": "hot"})", "'temperature' is \"hot\", it must be a number");
  refuses(R"({"prompt": "a", "top_p": 0})", "top_p is 0");
  refuses(R"({"prompt": "a", "ignore_end": 1})", "'ignore_end' is 1, it must be true or false");
  refuses(R"({"prompt": "a", "max_token": 4})", "an unknown key 'max_token'");
  refuses("{\"prompt\": \"\xff\"}", "it is no JSON");
  refuses(R"({"prompt": "a", "max_tokens": 3, "prompt": "b"})", "it has the key 'prompt' twice in one object");
  refuses(R"({"messages": [{"role": "user", "content": "a", "role": "user"}]})",
          "it has the key 'role' twice in one object");
}

TEST_CASE("A request file without a request is refused") {
  CHECK_THROWS_WITH(read(""), contains_text("lines holds 0 requests, the least is 1"));
  CHECK_THROWS_WITH(read(" \n\t\n"), contains_text("lines holds 0 requests"));
}
