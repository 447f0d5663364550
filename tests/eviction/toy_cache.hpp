// SPDX-License-Identifier: Apache-2.0
// A cache of unrelated contents, one letter and one block each: what a policy keeps, in examples to compute by hand.
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/types.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace kvcache_test {

template <kvcache::eviction_policy P>
class toy_cache {
 public:
  explicit toy_cache(kvcache::block_id blocks) : policy(blocks), fingerprints_(blocks + 1) {
    for (kvcache::block_id b = blocks; b > 0; --b) free_.push_back(b);
  }

  /// Requests for one block each, opened and closed one after the other. How many were hits.
  unsigned get(std::uint64_t content) {
    const auto found = where_.find(content);
    const bool hit = found != where_.end();
    kvcache::block_id block = hit ? found->second : kvcache::null_block;
    if (hit) {
      policy.erase(block);
    } else {
      if (free_.empty()) evict();
      block = free_.back();
      free_.pop_back();
      where_[content] = block;
      fingerprints_[block] = content;
    }
    if constexpr (requires { policy.reference(block, content, block); })
      policy.reference(block, content * 0x9e3779b97f4a7c15u, kvcache::null_block);
    policy.insert(block);
    return hit ? 1 : 0;
  }
  unsigned get(const std::string& contents) {
    unsigned hits = 0;
    for (const char c : contents) hits += get(static_cast<std::uint64_t>(c));
    return hits;
  }

  [[nodiscard]] bool has(std::uint64_t content) const { return where_.count(content) != 0; }
  /// Letters that are cached, in alphabetical order.
  [[nodiscard]] std::string letters() const {
    std::string all;
    for (const auto& [content, block] : where_) all += static_cast<char>(content);
    return all;
  }
  [[nodiscard]] char next() const { return static_cast<char>(fingerprints_[policy.victim()]); }

  void evict() {
    const kvcache::block_id gone = policy.victim();
    if constexpr (requires { policy.evict(gone); }) {
      policy.evict(gone);
    } else {
      policy.erase(gone);
    }
    where_.erase(fingerprints_[gone]);
    free_.push_back(gone);
  }

  P policy;

 private:
  std::map<std::uint64_t, kvcache::block_id> where_;
  std::vector<std::uint64_t> fingerprints_;  // contents by block
  std::vector<kvcache::block_id> free_;
};

}  // namespace kvcache_test
