// SPDX-License-Identifier: Apache-2.0
#include <kvcache/dispatch.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/quantization.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "catch.hpp"

using namespace kvcache;
using kvcache_test::contains_text;

TEST_CASE("dispatch turns a value into a template argument") {
  const auto doubled = [](auto block_size) { return std::integral_constant<unsigned, block_size.value * 2>::value; };
  for (const unsigned value : {1u, 16u, 64u}) CHECK(dispatch(doubled, one_of<1u, 16u, 64u>{value}) == value * 2);
}

TEST_CASE("dispatch turns a dtype's name into its type") {
  const auto size = [](auto type) { return sizeof(typename decltype(type)::type); };
  const dtype_of<f32, f16, bf16> all{dtype_id::float32};
  CHECK(dispatch(size, all) == 4);
  const auto which = [](auto type) { return std::string(dtype_traits<typename decltype(type)::type>::name); };
  CHECK(dispatch(which, dtype_of<f32, f16, bf16>{dtype_id::float16}) == "f16");
  CHECK(dispatch(which, dtype_of<f32, f16, bf16>{dtype_id::bfloat16}) == "bf16");
}

TEST_CASE("dispatch turns the name of a format into its type, rotated or not") {
  const auto which = [](auto type) { return std::string(dtype_traits<typename decltype(type)::type>::name); };
  const auto named = [&](dtype_id id) {
    return dispatch(which, dtype_of<bf16, fp8_e4m3, int8_per_token, int4_grouped<64>, int4_per_channel,
                                    rotated<int4_grouped<32>>, rotated<bf16>>{id});
  };
  for (const dtype_id id :
       {dtype_id::bfloat16, dtype_id::float8_e4m3, dtype_id::int8_per_token, dtype_id::int4_grouped_64,
        dtype_id::int4_per_channel, dtype_traits<rotated<int4_grouped<>>>::id, dtype_traits<rotated<bf16>>::id})
    CHECK(named(id) == name(id));
  CHECK_THROWS_WITH(named(dtype_id::int4_grouped_32),
                    contains_text("dtype int4_grouped_32 is not compiled in") && contains_text("rotated_bf16"));
}

TEST_CASE("dispatch visits every combination, first choice first") {
  std::vector<std::string> seen;
  for (const unsigned block_size : {16u, 64u})
    for (const dtype_id id : {dtype_id::float16, dtype_id::bfloat16})
      for (const int heads : {1, -8})
        seen.push_back(dispatch(
            [](auto b, auto type, auto h) {
              return std::to_string(b.value) + dtype_traits<typename decltype(type)::type>::name +
                     std::to_string(h.value);
            },
            one_of<16u, 64u>{block_size}, dtype_of<f16, bf16>{id}, one_of<1, -8>{heads}));
  CHECK(seen == std::vector<std::string>{"16f161", "16f16-8", "16bf161", "16bf16-8", "64f161", "64f16-8", "64bf161",
                                         "64bf16-8"});
}

TEST_CASE("dispatch calls once, passes references and what only moves") {
  int calls = 0;
  int target = 0;
  int& got = dispatch(
      [&](auto) -> int& {
        ++calls;
        return target;
      },
      one_of<1, 2, 3>{2});
  CHECK(&got == &target);
  CHECK(calls == 1);
  const std::unique_ptr<int> made = dispatch([](auto v) { return std::make_unique<int>(v.value); }, one_of<4, 5>{5});
  CHECK(*made == 5);
  dispatch([&](auto, auto) { ++calls; }, one_of<1>{1}, dtype_of<f32>{dtype_id::float32});
  CHECK(calls == 2);
}

TEST_CASE("dispatch refuses a value that is not compiled in and says what is") {
  const auto f = [](auto) { return 0; };
  CHECK_THROWS_AS(dispatch(f, one_of<16, 64>{32}), invalid_argument);
  CHECK_THROWS_WITH(dispatch(f, one_of<16, 64>{32}), contains_text("32 is not compiled in") && contains_text("16, 64"));
  CHECK_THROWS_WITH(dispatch(f, dtype_of<f16, bf16>{dtype_id::float32}),
                    contains_text("dtype f32 is not compiled in") && contains_text("f16, bf16"));
  int calls = 0;
  CHECK_THROWS_AS(dispatch([&](auto, auto) { ++calls; }, one_of<1>{1}, one_of<2>{3}), invalid_argument);
  CHECK(calls == 0);
}
