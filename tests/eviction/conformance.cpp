// SPDX-License-Identifier: Apache-2.0
// Every policy of the library through the conformance suite, and that the suite finds what is wrong. Replaces operator
// new, so it is a program of its own.
#include "conformance.hpp"

#include <kvcache/eviction/arc.hpp>
#include <kvcache/eviction/gittins.hpp>
#include <kvcache/eviction/lfu.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/eviction/lru_k.hpp>
#include <kvcache/eviction/priority.hpp>
#include <kvcache/eviction/s3fifo.hpp>
#include <kvcache/eviction/tiny_lfu.hpp>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <set>
#include <string>

#include "catch.hpp"
#include "counting_new.hpp"

namespace {

std::uint64_t allocations_so_far() { return allocations; }

}  // namespace

using kvcache::block_id;
using kvcache_test::conformance;

TEMPLATE_TEST_CASE("R12 a policy names a member, hands out every block, repeats itself and never allocates", "",
                   kvcache::gittins, kvcache::lru, kvcache::lfu, kvcache::lru_k, kvcache::arc, kvcache::s3fifo,
                   kvcache::tiny_lfu, kvcache::priority) {
  const block_id blocks = GENERATE(1u, 2u, 3u, 7u, 24u, 150u);
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  CAPTURE(TestType::name, blocks, seed);
  const std::string fault = conformance<TestType>(
      {.seed = seed, .blocks = blocks, .calls = blocks == 24 ? 100'000u : 20'000u, .allocations = allocations_so_far});
  CHECK(fault == "");
}

TEMPLATE_TEST_CASE("R7 a policy whose parents are never colder than their children names leaves only", "", kvcache::lru,
                   kvcache::lfu, kvcache::lru_k, kvcache::arc, kvcache::s3fifo, kvcache::priority) {
  const block_id blocks = GENERATE(3u, 24u, 150u);
  const std::uint64_t seed = GENERATE(4u, 5u, 6u);
  CAPTURE(TestType::name, blocks, seed);
  std::uint64_t descents = 0;
  CHECK(conformance<TestType>({.seed = seed, .blocks = blocks, .calls = 30'000, .descents = &descents}) == "");
  CHECK(descents == 0);
}

namespace {

/// Right but for what a derived class does wrong.
class lowest {
 public:
  static constexpr const char* name = "lowest";
  explicit lowest(block_id highest) : members(highest + 1) {}
  void insert(block_id block) noexcept { members[block] = 1; }
  void erase(block_id block) noexcept { members[block] = 0; }
  [[nodiscard]] block_id victim() const noexcept {
    for (block_id b = 1; b < members.size(); ++b)
      if (members[b] != 0) return b;
    return kvcache::null_block;
  }
  std::vector<char> members;
};

struct names_what_it_lost : lowest {
  using lowest::lowest;
  void erase(block_id block) noexcept {
    if (block != 5) lowest::erase(block);
  }
};
struct loses_a_block : lowest {
  using lowest::lowest;
  void insert(block_id block) noexcept {
    if (block != 5) lowest::insert(block);
  }
};
struct allocates : lowest {
  using lowest::lowest;
  void insert(block_id block) noexcept {
    lowest::insert(block);
    waste.push_back(block);
  }
  std::vector<block_id> waste;
};
struct allocates_on_reference : lowest {
  using lowest::lowest;
  void reference(block_id, std::uint64_t fingerprint, block_id) noexcept { seen.insert(fingerprint); }
  std::set<std::uint64_t> seen;
};
struct asks_its_address : lowest {
  using lowest::lowest;
  [[nodiscard]] block_id victim() const noexcept {
    const block_id low = lowest::victim();
    if (reinterpret_cast<std::uintptr_t>(this) / 16 % 2 == 0) return low;
    for (block_id b = static_cast<block_id>(members.size()); b-- > 1;)
      if (members[b] != 0) return b;
    return low;
  }
};
struct changes_its_mind : lowest {
  using lowest::lowest;
  [[nodiscard]] block_id victim() const noexcept {
    const block_id low = lowest::victim();
    if (low == kvcache::null_block || ++asked % 2 == 0) return low;
    for (block_id b = static_cast<block_id>(members.size()); b-- > 1;)
      if (members[b] != 0) return b;
    return low;
  }
  mutable unsigned asked = 0;
};
struct forgets_to_erase_on_eviction : lowest {
  using lowest::lowest;
  void evict(block_id) noexcept {}
};
struct stays_behind_when_moved : lowest {
  explicit stays_behind_when_moved(block_id highest) : lowest(highest) {}
  stays_behind_when_moved(stays_behind_when_moved&& from) noexcept
      : lowest(static_cast<block_id>(from.members.size() - 1)) {}
};

}  // namespace

TEST_CASE("The conformance suite says what is wrong with a policy, with seed and call") {
  const auto fault = [](auto* policy) {
    return conformance<std::remove_pointer_t<decltype(policy)>>(
        {.seed = 7, .blocks = 24, .allocations = allocations_so_far});
  };
  using kvcache_test::contains_text;
  CHECK(fault(static_cast<lowest*>(nullptr)) == "");
  CHECK_THAT(fault(static_cast<names_what_it_lost*>(nullptr)), contains_text("names block 5, which is not evictable"));
  CHECK_THAT(fault(static_cast<loses_a_block*>(nullptr)), contains_text("victim() is null where 1 blocks"));
  CHECK_THAT(fault(static_cast<allocates*>(nullptr)), contains_text("the call allocates from the heap"));
  CHECK_THAT(fault(static_cast<allocates_on_reference*>(nullptr)), contains_text("(reference "));
  CHECK_THAT(fault(static_cast<changes_its_mind*>(nullptr)), contains_text("and asked again"));
  CHECK_THAT(fault(static_cast<forgets_to_erase_on_eviction*>(nullptr)), contains_text("(evict "));
  CHECK_THAT(fault(static_cast<stays_behind_when_moved*>(nullptr)), contains_text("a second instance"));
  CHECK_THAT(fault(static_cast<loses_a_block*>(nullptr)), contains_text("24 blocks, seed 7, call "));
  // Where the heap puts things is not ours to say: no fault, or this one.
  const std::string by_address = fault(static_cast<asks_its_address*>(nullptr));
  CHECK((by_address.empty() || by_address.find("a second instance") != std::string::npos));
}
