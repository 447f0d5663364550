// SPDX-License-Identifier: Apache-2.0
#include <kvcache/error.hpp>
#include <kvcache/geometry.hpp>

#include <stdexcept>
#include <string>
#include <vector>

#include "catch.hpp"

using kvcache::errc;
using kvcache::failure;
using kvcache_test::contains_text;

TEST_CASE("every outcome has a name and a sentence with value and limit") {
  const std::vector<errc> all{errc::out_of_blocks, errc::exceeds_pool, errc::stale_id,      errc::beyond_length,
                              errc::step_order,    errc::duplicate_id, errc::empty_content, errc::in_use};
  std::vector<std::string> seen;
  for (const errc code : all) {
    const std::string text = kvcache::message({code, 4711, 815});
    CAPTURE(text);
    CHECK_THAT(text, contains_text("4711"));
    CHECK_THAT(text, contains_text("815"));
    CHECK(std::string(name(code)) != "unknown");
    for (const std::string& other : seen) CHECK(other != text);
    seen.push_back(text);
  }
  CHECK(std::string(name(static_cast<errc>(200))) == "unknown");
  CHECK(kvcache::message({static_cast<errc>(200), 1, 2}) == "unknown failure");
}

TEST_CASE("outcomes that waiting can cure say what to do") {
  CHECK_THAT(kvcache::message({errc::out_of_blocks, 3, 2}), contains_text("preempt"));
  CHECK_THAT(kvcache::message({errc::exceeds_pool, 3, 2}), contains_text("make the pool larger"));
}

TEST_CASE("exceptions are the library's and the standard's") {
  const auto thrown = [] { kvcache::validate({.layers = 0, .kv_heads = 8, .head_dim = 128}); };
  CHECK_THROWS_AS(thrown(), kvcache::invalid_argument);
  CHECK_THROWS_AS(thrown(), std::invalid_argument);
  CHECK_THROWS_AS(thrown(), kvcache::error);
  try {
    thrown();
  } catch (const kvcache::error& e) {
    CHECK_THAT(e.message(), contains_text("layers is 0, at least 1 needed"));
  }
  CHECK_THROWS_AS(throw kvcache::system_failure("no memory"), std::runtime_error);
  CHECK_THROWS_AS(throw kvcache::system_failure("no memory"), kvcache::error);
}

TEST_CASE("a shape that can hold nothing is refused by name") {
  CHECK_THROWS_WITH(kvcache::validate({.layers = 1, .kv_heads = 0, .head_dim = 128}),
                    contains_text("kv_heads is 0, at least 1 needed"));
  CHECK_THROWS_WITH(kvcache::validate({.layers = 1, .kv_heads = 1, .head_dim = 0}),
                    contains_text("head_dim is 0, at least 1 needed"));
  CHECK_NOTHROW(kvcache::validate({.layers = 1, .kv_heads = 1, .head_dim = 1}));
}
