// SPDX-License-Identifier: Apache-2.0
#include <kvcache/attention/attention.hpp>
#include <kvcache/attention/variant.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/layout/hnd.hpp>
#include <kvcache/layout/nhd.hpp>
#include <kvcache/memory/aligned_allocator.hpp>
#include <kvcache/memory/huge_page_allocator.hpp>
#include <kvcache/policies.hpp>
#include <kvcache/quantization.hpp>

#include <algorithm>
#include <string>

#include "catch.hpp"

using namespace kvcache;

namespace {

struct mine : policies {
  static constexpr unsigned block_size = 32;
  using dtype = kv_dtype<f16, f32>;
  using layout = hnd;
  using allocator = huge_page_allocator;
  using variant = full;
  static constexpr bool batch_invariant = true;
};

struct run_time : policies {
  static constexpr unsigned block_size = dynamic;
};

struct quantised : policies {
  using dtype = kv_dtype<rotated<int4_grouped<64>>, int4_per_channel>;
  using tail_dtype = f16;
};

struct misspelt : policies {
  static constexpr unsigned blocksize = 64;
  using d_type = kv_dtype<f16>;
};

}  // namespace

TEST_CASE("describe prints every choice of a bundle, one a line") {
  CHECK(describe<mine>() ==
        "block_size      32\n"
        "dtype.k         f16\n"
        "dtype.v         f32\n"
        "tail_dtype      bf16\n"
        "layout          hnd\n"
        "allocator       huge_page\n"
        "eviction        lru\n"
        "variant         full\n"
        "backend         cpu\n"
        "batch_invariant true\n");
}

TEST_CASE("describe prints the defaults") {
  CHECK(describe<policies>() ==
        "block_size      16\n"
        "dtype.k         bf16\n"
        "dtype.v         bf16\n"
        "tail_dtype      bf16\n"
        "layout          nhd\n"
        "allocator       aligned\n"
        "eviction        lru\n"
        "variant         causal\n"
        "backend         cpu\n"
        "batch_invariant false\n");
}

TEST_CASE("describe says when the block size comes at run time") {
  CHECK_THAT(describe<run_time>(), kvcache_test::contains_text("block_size      dynamic\n"));
}

TEST_CASE("describe prints formats, with their groups and rotation, and what tails are") {
  const std::string text = describe<quantised>();
  CHECK_THAT(text, kvcache_test::contains_text("dtype.k         rotated_int4_grouped_64\n"));
  CHECK_THAT(text, kvcache_test::contains_text("dtype.v         int4_per_channel\n"));
  CHECK_THAT(text, kvcache_test::contains_text("tail_dtype      f16\n"));
}

TEST_CASE("a misspelt override shows as the default") {
  static_assert(misspelt::blocksize == 64);
  CHECK(describe<misspelt>() == describe<policies>());
}
