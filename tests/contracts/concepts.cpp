// SPDX-License-Identifier: Apache-2.0
// What the contracts accept and refuse.
#include <kvcache/attention/variant.hpp>
#include <kvcache/concepts.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/layout/hnd.hpp>
#include <kvcache/layout/nhd.hpp>
#include <kvcache/memory/aligned_allocator.hpp>
#include <kvcache/memory/huge_page_allocator.hpp>
#include <kvcache/memory/mapped_file_allocator.hpp>
#include <kvcache/quantization.hpp>

#include <cstddef>
#include <cstdint>

#include "catch.hpp"

using namespace kvcache;

namespace {

struct newest_first {
  static constexpr const char* name = "newest_first";
  explicit newest_first(block_id) {}
  void insert(block_id block) noexcept { last = block; }
  void erase(block_id) noexcept { last = null_block; }
  [[nodiscard]] block_id victim() const noexcept { return last; }
  block_id last = null_block;
};
struct throwing_insert : newest_first {
  using newest_first::newest_first;
  void insert(block_id) {}
};
struct changing_victim : newest_first {
  using newest_first::newest_first;
  block_id victim() noexcept { return last; }
};
struct no_pool_size : newest_first {
  no_pool_size() : newest_first(null_block) {}
};

struct device_allocator {
  static constexpr const char* name = "device";
  static constexpr memory_space space = memory_space::device;
  void* allocate(std::size_t, std::size_t) { return this; }
  void deallocate(void*, std::size_t, std::size_t) noexcept {}
};
struct without_space {
  static constexpr const char* name = "without_space";
  void* allocate(std::size_t, std::size_t) { return this; }
  void deallocate(void*, std::size_t, std::size_t) noexcept {}
};
struct pinned_to_its_place : device_allocator {
  pinned_to_its_place() = default;
  pinned_to_its_place(const pinned_to_its_place&) = delete;
  pinned_to_its_place& operator=(const pinned_to_its_place&) = delete;
};

struct narrow_layout {
  static constexpr const char* name = "narrow";
  static constexpr std::int32_t strides(std::uint32_t, std::uint32_t, std::uint64_t) noexcept { return 0; }
};

struct executor_of_two {
  [[nodiscard]] unsigned threads() const { return 2; }
  template <class F>
  void run(F&& f) {
    f(0u, 2u);
    f(1u, 2u);
  }
};
struct no_executor {
  [[nodiscard]] unsigned threads() const { return 1; }
};

}  // namespace

TEST_CASE("an eviction policy is an order that neither throws nor changes when asked") {
  static_assert(eviction_policy<lru> && eviction_policy<newest_first>);
  static_assert(!eviction_policy<throwing_insert> && !eviction_policy<changing_victim> &&
                !eviction_policy<no_pool_size> && !eviction_policy<int>);
  SUCCEED();
}

TEST_CASE("an allocator names its space and moves") {
  static_assert(memory_allocator<aligned_allocator> && memory_allocator<huge_page_allocator> &&
                memory_allocator<mapped_file_allocator> && memory_allocator<device_allocator>);
  static_assert(!memory_allocator<without_space> && !memory_allocator<pinned_to_its_place> && !memory_allocator<int>);
  SUCCEED();
}

TEST_CASE("a layout gives 64-bit strides") {
  static_assert(kv_layout<nhd> && kv_layout<hnd>);
  static_assert(!kv_layout<narrow_layout> && !kv_layout<int>);
  SUCCEED();
}

TEST_CASE("a dtype policy names two element types or formats") {
  static_assert(kv_dtype_policy<kv_dtype<int8_per_token, rotated<int4_grouped<64>>>> &&
                kv_dtype_policy<kv_dtype<fp8_e4m3>>);
  static_assert(element<fp8_e5m2> && !element<int8_per_token> && stored_type<int2_per_channel> && !stored_type<int>);
  static_assert(kv_dtype_policy<kv_dtype<f16>> && kv_dtype_policy<kv_dtype<bf16, f32>>);
  static_assert(!kv_dtype_policy<kv_dtype<double>> && !kv_dtype_policy<kv_dtype<f16, int>> && !kv_dtype_policy<f16>);
  SUCCEED();
}

TEST_CASE("a variant states its features") {
  static_assert(attention_variant<causal> && attention_variant<full>);
  static_assert(!attention_variant<nhd>);
  SUCCEED();
}

TEST_CASE("an executor lends threads") {
  static_assert(executor<executor_of_two>);
  static_assert(!executor<no_executor> && !executor<int>);
  SUCCEED();
}
