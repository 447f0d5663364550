// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/observe/histogram.hpp>
#include <kvcache/observe/reuse_distances.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace kvcache {

/// An eviction policy that does what another does, and keeps figures of what passes through: how old blocks get, how
/// long nobody wants them before they go, how soon they are wanted again, and what a pool of another size would find.
/// Times are the caller's (`advance`, from before the first request on); where it gives none, a time is the number of
/// requests so far that used a cached block, counted in each layer group. Where its first time comes after requests,
/// the figures start anew, and what is cached by then was stored and used at 0.
///
/// Every call is as fast as the other policy's to within a constant, but for the log of Samples that a content in the
/// sample costs: 6 ns a block beside lru's 6 in a pool of 4,096, 43 beside 27 in one of a million, where memory is what
/// it waits for. 40 bytes a block, 60 a sample and 16 KiB. What the other policy need not be told, it is not told. One
/// thread at a time; calls of const members may overlap each other.
template <class Eviction, std::uint32_t Samples = 16384>
class observed {
 public:
  using policy_type = std::conditional_t<eviction_policy<Eviction>, Eviction, lru>;

  /// That of the other, since the order is.
  static constexpr const char* name = policy_type::name;

  /// An empty order over the blocks 1 to `highest`.
  explicit observed(block_id highest) : policy_(highest), uses_(std::size_t{highest} + 1), reuse_(Samples) {}

  /// The time is `now`. An earlier one than before changes nothing. O(1), the first one O(blocks).
  void advance(std::uint64_t now) noexcept {
    if (!timed_) start_time();
    if (now > now_) now_ = now;
    if constexpr (told_of_time<policy_type>) policy_.advance(now);
  }
  void set_priority(block_id block, unsigned priority,
                    std::uint64_t expires) noexcept requires told_of_priorities<policy_type> {
    policy_.set_priority(block, priority, expires);
  }

  // What a block manager calls; see eviction_policy.
  void open(std::span<const std::uint64_t> fingerprints, std::uint32_t hits,
            std::uint32_t block_tokens) noexcept requires told_of_requests<policy_type> {
    policy_.open(fingerprints, hits, block_tokens);
  }
  void reference(block_id block, std::uint64_t fingerprint, block_id parent) noexcept {
    if (parent == null_block) ++requests_;
    use& u = uses_[block];
    if (u.known && u.fingerprint == fingerprint)
      gap_.add(time() - u.referenced);
    else
      u = {.fingerprint = fingerprint, .stored = time(), .known = true};
    u.referenced = time();
    reuse_.reference(fingerprint);
    if constexpr (told_of_references<policy_type>) policy_.reference(block, fingerprint, parent);
  }
  void insert(block_id block) noexcept {
    use& u = uses_[block];
    u.released = time();
    if (u.known) reuse_.release(u.fingerprint);
    policy_.insert(block);
  }
  void erase(block_id block) noexcept { policy_.erase(block); }
  void evict(block_id block) noexcept {
    use& u = uses_[block];
    if (u.known) {
      age_.add(time() - u.stored);
      idle_.add(time() - u.released);
      u.known = false;
    }
    if constexpr (told_of_evictions<policy_type>)
      policy_.evict(block);
    else
      policy_.erase(block);
  }
  [[nodiscard]] block_id victim() const noexcept { return policy_.victim(); }

  /// Of blocks that were evicted, or forgotten by a reset or a time to live: from stored to then. O(1), as all below.
  [[nodiscard]] const histogram& age() const noexcept { return age_; }
  /// Of the same: from the end of their last use to then.
  [[nodiscard]] const histogram& idle() const noexcept { return idle_; }
  /// Of cached blocks: from one request that uses them to the next.
  [[nodiscard]] const histogram& gap() const noexcept { return gap_; }
  /// What is used between two uses of a block, cached or not, and the hit ratio of lru in pools of any size.
  [[nodiscard]] const reuse_distances& reuse() const noexcept { return reuse_; }
  [[nodiscard]] reuse_distances& reuse() noexcept { return reuse_; }
  /// The policy that decides.
  [[nodiscard]] const policy_type& policy() const noexcept { return policy_; }
  [[nodiscard]] policy_type& policy() noexcept { return policy_; }

 private:
  struct use {
    std::uint64_t fingerprint = 0;
    std::uint64_t stored = 0;
    std::uint64_t referenced = 0;
    std::uint64_t released = 0;
    bool known = false;
  };

  /// Counts of requests are no times of the caller's.
  void start_time() noexcept {
    timed_ = true;
    for (use& u : uses_) u.stored = u.referenced = u.released = 0;
    age_ = idle_ = gap_ = {};
  }
  [[nodiscard]] std::uint64_t time() const noexcept { return timed_ ? now_ : requests_; }

  policy_type policy_;
  std::vector<use> uses_;  // by block
  reuse_distances reuse_;
  histogram age_;
  histogram idle_;
  histogram gap_;
  std::uint64_t now_ = 0;
  std::uint64_t requests_ = 0;
  bool timed_ = false;

  // Last in the class, since some compilers leave out what follows a mandate that fails.
  static_assert(
      eviction_policy<Eviction>,
      "kvcache::observed<Eviction> needs an eviction policy: constructible from block_id, nothrow move "
      "constructible, static const char* name, void insert(block_id) noexcept, void erase(block_id) noexcept, "
      "block_id victim() const noexcept");
};

}  // namespace kvcache
