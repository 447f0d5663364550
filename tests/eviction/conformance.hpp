// SPDX-License-Identifier: Apache-2.0
// What every eviction policy has to keep, whatever its order. Needs no test framework: run it on a policy of your own.
//
//   const std::string fault = kvcache_test::conformance<my_policy>({.seed = 1});   // empty: none found
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/types.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvcache_test {

struct conformance_options {
  std::uint64_t seed = 1;
  kvcache::block_id blocks = 64;
  std::uint32_t calls = 100'000;             ///< of the policy, at least
  std::uint64_t (*allocations)() = nullptr;  ///< heap allocations so far; without it they are not checked
  std::uint64_t* descents = nullptr;         ///< how often a victim had cached children, if that is of interest
};

/// Plays the block manager: requests that share prefixes open, commit and close in any order, blocks are evicted leaf
/// by leaf, forgotten, held without a request, and their ids used again for other content. Two instances of the policy,
/// one of which is moved from time to time, get the same calls; a plain set says what a victim may be.
template <kvcache::eviction_policy P>
class conformance_driver {
 public:
  explicit conformance_driver(const conformance_options& options)
      : options_(options),
        random_(options.seed),
        first_(std::make_unique<P>(options.blocks)),
        second_(std::make_unique<P>(options.blocks)),
        slots_(options.blocks + 1) {
    for (kvcache::block_id b = options.blocks; b > 0; --b) free_.push_back(b);
    // A forest: long chains and branches, half as much again as the pool holds and more.
    const std::uint32_t count = 3 * options.blocks + 20;
    for (std::uint32_t c = 0; c < count; ++c) {
      content made;
      made.fingerprint = mixed(c + 1 + (options.seed << 32));
      if (c != 0 && below(8) != 0) made.parent = static_cast<int>(below(2) == 0 ? c - 1 : below(c));
      contents_.push_back(made);
    }
  }

  /// What is wrong, or nothing.
  std::string run() {
    if (P::name == nullptr || std::string(P::name).empty()) fail("name is empty");
    check();
    while (calls_ < options_.calls && fault_.empty()) {
      switch (below(16)) {
        case 0: forget(); break;
        case 1: hold(); break;
        case 2: retain(); break;
        case 3:
          if (below(64) == 0) drain();
          break;
        case 4:
          if (below(16) == 0) {
            second_ = std::make_unique<P>(std::move(*second_));
            check();
          }
          break;
        case 5:
        case 6:
        case 7: open(); break;
        case 8:
        case 9: close(); break;
        default: commit();
      }
    }
    while (!requests_.empty() && fault_.empty()) close();
    drain();
    return fault_;
  }
  [[nodiscard]] std::uint64_t descents() const { return descents_; }
  [[nodiscard]] std::uint64_t evicted() const { return evicted_; }

 private:
  using block_id = kvcache::block_id;
  struct content {
    std::uint64_t fingerprint = 0;
    int parent = -1;
    block_id block = kvcache::null_block;  // where it is cached
    std::uint32_t children = 0;            // cached ones
  };
  struct slot {
    int content = -1;
    std::uint32_t holders = 0;
    bool evictable = false;
  };
  struct request {
    std::vector<int> chain;  // contents, head first
    std::size_t held = 0;    // the first so many have a block that the request holds
  };

  static std::uint64_t mixed(std::uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  std::uint32_t below(std::uint64_t limit) { return static_cast<std::uint32_t>(mixed(random_++) % limit); }

  void fail(const std::string& what) {
    if (fault_.empty())
      fault_ = std::string(P::name == nullptr ? "policy" : P::name) + ", " + std::to_string(options_.blocks) +
               " blocks, seed " + std::to_string(options_.seed) + ", call " + std::to_string(calls_) +
               (last_.empty() ? "" : " (" + last_ + ")") + ": " + what;
  }

  /// One call of both instances, and what has to hold after it.
  template <class Call>
  void call(const char* what, block_id block, Call&& f) {
    if (!fault_.empty()) return;
    ++calls_;
    last_ = std::string(what) + (block == kvcache::null_block ? "" : " " + std::to_string(block));
    const std::uint64_t before = options_.allocations == nullptr ? 0 : options_.allocations();
    f(*first_);
    const std::uint64_t after = options_.allocations == nullptr ? 0 : options_.allocations();
    if (after != before) fail("the call allocates from the heap");
    f(*second_);
    check();
  }
  void check() {
    if (!fault_.empty()) return;
    const std::uint64_t before = options_.allocations == nullptr ? 0 : options_.allocations();
    const block_id victim = std::as_const(*first_).victim();
    const std::uint64_t after = options_.allocations == nullptr ? 0 : options_.allocations();
    if (after != before) return fail("victim() allocates from the heap");
    if (victim == kvcache::null_block && evictable_ != 0)
      return fail("victim() is null where " + std::to_string(evictable_) + " blocks are evictable");
    if (victim != kvcache::null_block && (victim > options_.blocks || !slots_[victim].evictable))
      return fail("victim() names block " + std::to_string(victim) + ", which is not evictable");
    if (const block_id again = std::as_const(*first_).victim(); again != victim)
      return fail("victim() names block " + std::to_string(victim) + ", and asked again " + std::to_string(again));
    if (const block_id other = std::as_const(*second_).victim(); other != victim)
      fail("victim() names block " + std::to_string(victim) + ", a second instance after the same calls " +
           std::to_string(other));
  }

  void insert(block_id block) {
    slots_[block].evictable = true;
    ++evictable_;
    call("insert", block, [&](P& p) { p.insert(block); });
  }
  void leave(block_id block) {
    slots_[block].evictable = false;
    --evictable_;
  }
  void erase(block_id block) {
    leave(block);
    call("erase", block, [&](P& p) { p.erase(block); });
  }
  void reference(block_id block) {
    if constexpr (requires(P & p) { p.reference(block_id{}, std::uint64_t{}, block_id{}); }) {
      const content& c = contents_[static_cast<std::size_t>(slots_[block].content)];
      const block_id parent = c.parent < 0 ? kvcache::null_block : at(c.parent).block;
      call("reference", block, [&](P& p) { p.reference(block, c.fingerprint, parent); });
    }
  }
  void evict(block_id block) {
    ++evicted_;
    if constexpr (requires(P & p) { p.evict(block_id{}); }) {
      leave(block);
      call("evict", block, [&](P& p) { p.evict(block); });
    } else {
      erase(block);
    }
    uncache(block);
  }

  content& at(int c) { return contents_[static_cast<std::size_t>(c)]; }
  /// The block has no content from now on, and is free.
  void uncache(block_id block) {
    content& gone = at(slots_[block].content);
    gone.block = kvcache::null_block;
    if (gone.parent >= 0) --at(gone.parent).children;
    slots_[block].content = -1;
    free_.push_back(block);
  }
  /// A cached block that no cached block follows, below `block` or `block` itself.
  block_id leaf_below(block_id block) {
    for (bool found = true; found;) {
      found = false;
      if (at(slots_[block].content).children == 0) return block;
      for (const content& c : contents_)
        if (c.block != kvcache::null_block && c.parent == slots_[block].content) {
          block = c.block;
          found = true;
          break;
        }
    }
    return block;
  }
  bool evict_one() {
    const block_id victim = first_->victim();
    if (victim == kvcache::null_block || !fault_.empty()) return false;
    const block_id leaf = leaf_below(victim);
    if (leaf != victim) ++descents_;
    evict(leaf);
    return fault_.empty();
  }

  void acquire(block_id block) {
    if (slots_[block].evictable) erase(block);
    ++slots_[block].holders;
  }
  void release(block_id block) {
    if (--slots_[block].holders == 0) insert(block);
  }
  std::vector<int> chain_to(int c) {
    std::vector<int> chain;
    for (; c >= 0; c = at(c).parent) chain.push_back(c);
    std::reverse(chain.begin(), chain.end());
    return chain;
  }

  void open() {
    if (requests_.size() >= 8) return close();
    request r;
    // Some content is asked for more often than other.
    r.chain = chain_to(static_cast<int>(below(1 + below(contents_.size()))));
    while (r.held < r.chain.size() && at(r.chain[r.held]).block != kvcache::null_block) ++r.held;
    for (std::size_t i = 0; i < r.held; ++i) acquire(at(r.chain[i]).block);
    if constexpr (requires(P & p, std::span<const std::uint64_t> f) { p.open(f, 0u, 0u); }) {
      // What is committed beyond this is output.
      std::vector<std::uint64_t> fingerprints;
      for (std::size_t i = 0; i < r.chain.size() && (i < r.held || below(8) != 0); ++i)
        fingerprints.push_back(at(r.chain[i]).fingerprint);
      call("open", kvcache::null_block, [&](P& p) { p.open(fingerprints, static_cast<std::uint32_t>(r.held), 16u); });
    }
    for (std::size_t i = 0; i < r.held; ++i) reference(at(r.chain[i]).block);
    requests_.push_back(std::move(r));
  }
  /// The next block of some request, or some more.
  void commit() {
    if (requests_.empty()) return;
    request& r = requests_[below(requests_.size())];
    for (std::uint32_t more = below(6) + 1; more > 0 && r.held < r.chain.size() && fault_.empty(); --more) {
      content& next = at(r.chain[r.held]);
      if (next.block != kvcache::null_block) {
        // Another request has cached it meanwhile; one's own copy gives way.
        acquire(next.block);
        ++r.held;
        continue;
      }
      if (free_.empty() && !evict_one()) return;
      const block_id block = free_.back();
      free_.pop_back();
      slots_[block] = {r.chain[r.held], 1, false};
      next.block = block;
      if (next.parent >= 0) ++at(next.parent).children;
      reference(block);
      ++r.held;
    }
  }
  void close() {
    if (requests_.empty()) return;
    const std::size_t which = below(requests_.size());
    request r = std::move(requests_[which]);
    requests_.erase(requests_.begin() + static_cast<std::ptrdiff_t>(which));
    for (std::size_t i = r.held; i-- > 0;) release(at(r.chain[i]).block);
  }
  /// A chain is in use for a while without a request that references it.
  void hold() {
    const auto chain = chain_to(static_cast<int>(below(contents_.size())));
    std::size_t cached = 0;
    while (cached < chain.size() && at(chain[cached]).block != kvcache::null_block) ++cached;
    for (std::size_t i = 0; i < cached; ++i) acquire(at(chain[i]).block);
    for (std::size_t i = cached; i-- > 0;) release(at(chain[i]).block);
  }
  /// The content of an evictable block and of all that follow it is forgotten.
  void forget() {
    if (evictable_ == 0 || below(4) != 0) return;
    const int top = static_cast<int>(below(contents_.size()));
    if (at(top).block == kvcache::null_block || !slots_[at(top).block].evictable) return;
    while (fault_.empty()) {
      const block_id leaf = leaf_below(at(top).block);
      const bool last = slots_[leaf].content == top;
      erase(leaf);
      uncache(leaf);
      if (last) return;
    }
  }
  /// Retention, where the policy has it.
  void retain() {
    if constexpr (requires(P & p) {
                    p.set_priority(block_id{}, 0u, std::uint64_t{});
                    p.advance(std::uint64_t{});
                  }) {
      const block_id block = below(options_.blocks) + 1;
      const unsigned level = below(110);
      const std::uint64_t expires = below(2) == 0 ? ~std::uint64_t{0} : now_ + below(50);
      if (slots_[block].content >= 0) call("set_priority", block, [&](P& p) { p.set_priority(block, level, expires); });
      now_ += below(10);
      call("advance", kvcache::null_block, [&](P& p) { p.advance(now_); });
    }
  }
  /// Everything evictable is handed out, each block once.
  void drain() {
    for (std::size_t left = evictable_; left > 0; --left)
      if (!evict_one()) return;
  }

  conformance_options options_;
  std::uint64_t random_;
  std::unique_ptr<P> first_;
  std::unique_ptr<P> second_;
  std::vector<slot> slots_;  // by block
  std::vector<content> contents_;
  std::vector<block_id> free_;
  std::vector<request> requests_;
  std::size_t evictable_ = 0;
  std::uint64_t now_ = 0;
  std::uint64_t calls_ = 0;
  std::uint64_t evicted_ = 0;
  std::uint64_t descents_ = 0;
  std::string last_;
  std::string fault_;
};

/// The first fault found in the policy, with the seed and the call, or an empty string.
template <kvcache::eviction_policy P>
std::string conformance(const conformance_options& options = {}) {
  conformance_driver<P> driver(options);
  std::string fault = driver.run();
  if (options.descents != nullptr) *options.descents = driver.descents();
  return fault;
}

}  // namespace kvcache_test
