// SPDX-License-Identifier: Apache-2.0
#include <kvcache/error.hpp>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "catch.hpp"

using kvcache::errc;
using kvcache::failure;
using kvcache::result;

namespace {

constexpr failure out_of_blocks{errc::out_of_blocks, 3, 2};

/// Counts the values alive, and moves only.
struct counted {
  explicit counted(int& alive) noexcept : alive_(&alive) { ++*alive_; }
  counted(counted&& other) noexcept : alive_(other.alive_) { ++*alive_; }
  ~counted() { --*alive_; }

 private:
  int* alive_;
};

}  // namespace

TEST_CASE("a result holds a value") {
  result<int> r = 7;
  REQUIRE(r);
  CHECK(r.has_value());
  CHECK(*r == 7);
  CHECK(r.value() == 7);
  *r = 8;
  const result<int>& constant = r;
  CHECK(*constant == 8);
  CHECK(constant.value() == 8);
}

TEST_CASE("a result holds a failure with value and limit") {
  const result<int> r = out_of_blocks;
  REQUIRE_FALSE(r);
  CHECK(r.error() == out_of_blocks);
}

TEST_CASE("a result carries a value that only moves") {
  result<std::unique_ptr<std::string>> r = std::make_unique<std::string>("block");
  CHECK(r->get()->size() == 5);
  result<std::unique_ptr<std::string>> moved = std::move(r);
  REQUIRE(moved);
  const std::unique_ptr<std::string> taken = *std::move(moved);
  CHECK(*taken == "block");
  CHECK(*result<std::unique_ptr<std::string>>(std::make_unique<std::string>("x")).value() == "x");
  static_assert(!std::is_copy_constructible_v<result<std::unique_ptr<int>>>);
  static_assert(std::is_nothrow_move_constructible_v<result<std::unique_ptr<int>>>);
}

TEST_CASE("a result destroys its value once, whatever it is assigned") {
  int alive = 0;
  {
    result<counted> r = counted(alive);
    CHECK(alive == 1);
    r = result<counted>(out_of_blocks);
    CHECK(alive == 0);
    CHECK(r.error() == out_of_blocks);
    r = result<counted>(counted(alive));
    CHECK(alive == 1);
    result<counted>& itself = r;
    r = std::move(itself);
    CHECK(alive == 1);
    result<counted> other = std::move(r);
    CHECK(alive == 2);  // the moved-from value lives on until its result goes
  }
  CHECK(alive == 0);
}

TEST_CASE("value() of a failure throws its sentence") {
  result<int> r = out_of_blocks;
  CHECK_THROWS_WITH(r.value(), kvcache::message(out_of_blocks));
  CHECK_THROWS_AS(std::as_const(r).value(), kvcache::invalid_argument);
  CHECK_THROWS_AS(result<int>(out_of_blocks).value(), kvcache::invalid_argument);
}

TEST_CASE("a result without a value is success or failure") {
  result<void> good;
  REQUIRE(good);
  CHECK_NOTHROW(good.value());
  const result<void> bad = failure{errc::step_order, 4, 3};
  REQUIRE_FALSE(bad);
  CHECK(bad.error().value == 4);
  CHECK_THROWS_WITH(bad.value(), kvcache::message(bad.error()));
  static_assert(std::is_trivially_copyable_v<result<void>>);
}
