// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/content_hash.hpp>
#include <kvcache/blocks/hash_table.hpp>
#include <kvcache/blocks/key_sets.hpp>
#include <kvcache/schedule/request_table.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// Which running request is about to produce which content: a claim for each whole block of its prompt that it has not
/// committed yet. A block is `stride` tokens here, what is cached in every layer group at once. No content is claimed
/// twice; a hash narrows, content and keys are compared.
template <class Requests>
class producers {
 public:
  /// Names a claim, from 1; 0: none.
  using claim = std::uint32_t;

  /// `heads`: whether a block may be reused in part. `holes`: whether less may be reused than others have produced, as
  /// where a window has lost its blocks.
  producers(const Requests& requests, std::uint64_t stride, bool heads, bool holes, unsigned hash_bits)
      : requests_(requests),
        stride_(stride),
        heads_(heads),
        holes_(holes),
        hash_mask_(hash_bits >= 32 ? ~0u : (1u << hash_bits) - 1u),
        claims_(1) {}

  /// Who produces what follows the first `cached` tokens of a waiting request: the claim on the last block that both
  /// have in common, or 0. Blocks that would not spare the request anything (R1: its last token is always computed)
  /// are not waited for. O(content); O(1) where nothing is claimed.
  [[nodiscard]] claim find(request_index waiting, std::uint32_t cached, std::uint64_t seed) const noexcept {
    if (claimed_ == 0) return 0;
    const content_view content = requests_[waiting].tokens();
    const std::uint64_t useful = (heads_ ? content.size() : content.size() - 1) / stride_;
    const std::uint64_t first = cached / stride_;
    if (first >= useful) return 0;
    for (std::uint64_t b = 0; b <= first; ++b) seed = chain_fingerprint(seed, block(content, b));
    claim found = find(waiting, static_cast<std::uint32_t>(first), narrowed(seed));
    for (std::uint64_t b = first + 1; holes_ && found == 0 && b < useful; ++b) {
      seed = chain_fingerprint(seed, block(content, b));
      found = find(waiting, static_cast<std::uint32_t>(b), narrowed(seed));
    }
    if (found == 0) return 0;
    const content_view other = requests_[claims_[found].request].tokens();
    for (;;) {
      const claim next = claims_[found].next;
      if (next == 0 || claims_[next].block >= useful || claims_[next].block != claims_[found].block + 1) return found;
      const std::uint64_t b = claims_[next].block;
      if (!equal(block(other, b), block(content, b))) return found;
      found = next;
    }
  }

  /// Claims what a request that was just admitted will compute, its first `cached` tokens apart. O(content).
  void claim_all(request_index producer, std::uint32_t cached, std::uint64_t seed, claim& first) noexcept {
    const content_view content = requests_[producer].tokens();
    const std::uint64_t blocks = content.size() / stride_;
    claim last = 0;
    first = 0;
    for (std::uint64_t b = 0; b < blocks; ++b) {
      seed = chain_fingerprint(seed, block(content, b));
      if (b < cached / stride_ || find(producer, static_cast<std::uint32_t>(b), narrowed(seed)) != 0) continue;
      const claim made = add({producer, static_cast<std::uint32_t>(b), narrowed(seed), 0});
      (last == 0 ? first : claims_[last].next) = made;
      last = made;
    }
  }

  /// Gives up a claim. The request's next one.
  claim remove(claim c) noexcept {
    table_.erase(claims_[c].hash, c);
    unused_.push_back(c);
    --claimed_;
    return claims_[c].next;
  }

  [[nodiscard]] request_index producer(claim c) const noexcept { return claims_[c].request; }
  [[nodiscard]] claim next(claim c) const noexcept { return claims_[c].next; }
  /// First position after the claimed block.
  [[nodiscard]] std::uint64_t end(claim c) const noexcept { return (std::uint64_t{claims_[c].block} + 1) * stride_; }

 private:
  struct entry {
    request_index request = no_request;
    std::uint32_t block = 0;
    std::uint32_t hash = 0;
    claim next = 0;  // of the same request, in the order of its blocks
  };

  [[nodiscard]] content_view block(const content_view& content, std::uint64_t b) const noexcept {
    return content.sub(static_cast<std::size_t>(b * stride_), static_cast<std::size_t>(stride_));
  }
  [[nodiscard]] static bool equal(content_view a, content_view b) noexcept {
    for (std::size_t i = 0; i < a.size(); ++i)
      if (a[i] != b[i]) return false;
    return true;
  }
  [[nodiscard]] std::uint32_t narrowed(std::uint64_t fingerprint) const noexcept {
    return static_cast<std::uint32_t>(fingerprint) & hash_mask_;
  }

  /// The claim on one block of a request's content, with all that stands before it.
  [[nodiscard]] claim find(request_index request, std::uint32_t b, std::uint32_t hash) const noexcept {
    const request_record& r = requests_[request];
    const auto size = static_cast<std::size_t>((std::uint64_t{b} + 1) * stride_);
    return table_.find(hash, [&](claim c) {
      const request_record& o = requests_[claims_[c].request];
      return claims_[c].block == b && o.key_set == r.key_set && equal(o.tokens().sub(0, size), r.tokens().sub(0, size));
    });
  }
  claim add(const entry& e) noexcept {
    claim c = 0;
    if (unused_.empty()) {
      c = static_cast<claim>(claims_.size());
      claims_.push_back(e);
    } else {
      c = unused_.back();
      unused_.pop_back();
      claims_[c] = e;
    }
    table_.insert(e.hash, c);
    ++claimed_;
    return c;
  }

  const Requests& requests_;
  std::uint64_t stride_;
  bool heads_;
  bool holes_;
  std::uint32_t hash_mask_;
  std::vector<entry> claims_;
  std::vector<claim> unused_;  // a stack
  std::size_t claimed_ = 0;
  hash_table<Requests> table_;
};

}  // namespace kvcache::detail
