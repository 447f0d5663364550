// SPDX-License-Identifier: Apache-2.0
// Which classes gittins tells apart, and that it survives whatever a caller may say. What it is for is in
// tests/trace_replay.
#include <kvcache/eviction/gittins.hpp>

#include <algorithm>
#include <cstdint>
#include <random>
#include <unordered_map>
#include <vector>

#include "catch.hpp"

using kvcache::block_id;
using kvcache::null_block;

namespace {

using contents = std::vector<std::uint64_t>;

/// Requests one after the other, in a pool that holds all of them.
class requests {
 public:
  static constexpr std::uint32_t block_tokens = 16;

  /// `generated` follows the prompt, and no request has announced it.
  void serve(const contents& prompt, const contents& generated = {}) {
    policy_.open(prompt, 0, block_tokens);
    std::vector<block_id> chain;
    contents all = prompt;
    all.insert(all.end(), generated.begin(), generated.end());
    for (const std::uint64_t content : all) {
      block_id& block = blocks_[content];
      if (block != null_block) {
        policy_.erase(block);
      } else {
        block = ++used_;
        contents_.push_back(content);
      }
      policy_.reference(block, content, chain.empty() ? null_block : chain.back());
      chain.push_back(block);
    }
    while (!chain.empty()) {
      policy_.insert(chain.back());
      chain.pop_back();
    }
  }
  /// Evicts until all `count` contents of a kind are gone; these, and what went before the last of them.
  contents evict_all(std::uint64_t kind, std::size_t count) {
    contents gone;
    while (count > 0) {
      const block_id block = policy_.victim();
      REQUIRE(block != null_block);
      gone.push_back(contents_[block]);
      if (gone.back() >> 32 == kind) --count;
      policy_.evict(block);
    }
    return gone;
  }

 private:
  kvcache::gittins policy_{4'096};
  std::unordered_map<std::uint64_t, block_id> blocks_;
  contents contents_{0};  // by block
  block_id used_ = 0;
};

/// Content of round `i`.
constexpr std::uint64_t of(std::uint64_t kind, std::uint64_t i) { return (kind << 32) + i; }

}  // namespace

TEST_CASE("gittins: the end of a chain that went on differently goes first, however new it is") {
  enum : std::uint64_t { root = 1, tail, head, end, other_end };
  requests all;
  constexpr std::size_t rounds = 200;
  constexpr std::size_t pause = 5;
  for (std::uint64_t i = 0; i < rounds; ++i) {
    // Of one kind until the second goes on with another end. The first comes back.
    all.serve({of(root, i), of(tail, i)});
    all.serve({of(head, i), of(end, i)});
    all.serve({of(head, i), of(other_end, i)});
    if (i >= pause) all.serve({of(root, i - pause), of(tail, i - pause)});
  }
  const contents gone = all.evict_all(end, rounds);
  for (std::uint64_t i = rounds - pause; i < rounds; ++i)
    CHECK(std::find(gone.begin(), gone.end(), of(tail, i)) == gone.end());
}

TEST_CASE("gittins: generated text is a class of its own, and goes by whether it is sent back") {
  enum : std::uint64_t { question = 1, answer, document, page, further };
  const bool sent_back = GENERATE(true, false);
  CAPTURE(sent_back);
  requests all;
  constexpr std::size_t rounds = 200;
  constexpr std::size_t pause = 5;
  for (std::uint64_t i = 0; i < rounds; ++i) {
    // Both are of one length and new, so nothing but the class tells an answer from a page.
    all.serve({of(question, i)}, {of(answer, i)});
    all.serve({of(document, i), of(page, i)});
    if (i < pause) continue;
    const std::uint64_t then = i - pause;
    if (sent_back)
      all.serve({of(question, then), of(answer, then), of(further, then)});
    else
      all.serve({of(document, then), of(page, then), of(further, then)});
  }
  const contents gone = all.evict_all(sent_back ? page : answer, rounds);
  for (std::uint64_t i = rounds - pause; i < rounds; ++i)
    CHECK(std::find(gone.begin(), gone.end(), of(sent_back ? answer : page, i)) == gone.end());
}

TEST_CASE("gittins: whatever is announced, referenced and evicted, the victim is a leaf that can go") {
  // A pool so small that its memory of evicted content is short; contents that no request announces; lists of blocks
  // that contradict each other, and fingerprints that several blocks have, as if hashes collided. With checks on, the
  // memory says if it forgets the parent of what it remembers.
  struct slot {
    std::uint64_t content = 0;
    block_id parent = null_block;
    std::uint32_t children = 0;  // cached
    std::uint32_t active = 0;    // of these, in use
    bool cached = false;
    bool evictable = false;
  };
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::uint32_t n) { return static_cast<std::uint32_t>(random() % n); };
    const block_id highest = 1 + below(6);
    const std::uint32_t universe = (10 + below(40)) * highest;
    kvcache::gittins policy(highest);
    std::vector<slot> slots(highest + 1);
    bool good = true;
    for (int call = 0; call < 300 && good; ++call) {
      const block_id block = 1 + below(highest);
      slot& s = slots[block];
      switch (below(4)) {
        case 0: {
          contents list;
          for (std::uint32_t i = below(2 * highest + 2); i > 0; --i) list.push_back(1 + below(universe));
          policy.open(list, 0, 1u << below(10));
          break;
        }
        case 1: {  // in use: new content, a hit, or another reference
          const block_id parent = s.cached ? s.parent : below(highest + 1);
          if (parent == block || (parent != null_block && (!slots[parent].cached || slots[parent].evictable))) break;
          const std::uint64_t own = 1 + below(universe);
          const std::uint64_t same = slots[1 + below(highest)].content;
          const std::uint64_t other = same == 0 || below(3) != 0 ? own : same;
          if (s.evictable) policy.erase(block);
          if (!s.cached) {
            s = {.content = other, .parent = parent, .cached = true};
            ++slots[parent].children;
          } else if (!s.evictable) {
            --slots[parent].active;
          }
          ++slots[parent].active;
          s.evictable = false;
          policy.reference(block, s.content, parent);
          break;
        }
        case 2:  // let go
          if (!s.cached || s.evictable || s.active != 0) break;
          --slots[s.parent].active;
          s.evictable = true;
          policy.insert(block);
          break;
        default: {
          const block_id gone = policy.victim();
          const bool any = std::any_of(slots.begin(), slots.end(), [](const slot& t) { return t.evictable; });
          good = any == (gone != null_block);
          if (gone == null_block) break;
          good = good && slots[gone].evictable && slots[gone].children == 0;
          policy.evict(gone);
          --slots[slots[gone].parent].children;
          slots[gone] = {};
        }
      }
    }
    INFO("seed " << seed);
    REQUIRE(good);
  }
}

TEST_CASE("gittins: what is remembered does not push out its own parent") {
  for (std::uint32_t others = 0; others < 40; ++others) {
    kvcache::gittins policy(2);
    // Two blocks of one fingerprint: when the newer is evicted, the content of the other one counts as evicted.
    policy.reference(1, 7, null_block);
    policy.reference(2, 7, null_block);
    policy.insert(2);
    policy.evict(2);
    for (std::uint64_t i = 0; i < others; ++i) policy.open(contents{100 + i}, 0, 16);  // until it is the oldest
    policy.reference(2, 8, 1);  // with checks on, the memory says if it forgets the parent for it
    policy.insert(2);
    CHECK(policy.victim() == 2);
  }
}
