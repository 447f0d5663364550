// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/ghost_list.hpp>
#include <kvcache/error.hpp>
#include <kvcache/observe/histogram.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace kvcache {

/// How many other contents are used between two uses of one, and from it the hit ratio that lru would have in a pool of
/// any size (Mattson, Gecsei, Slutz and Traiger, Evaluation Techniques for Storage Hierarchies, 1970). Follows a sample
/// of bounded size, chosen by hash so that all uses of a content are in it or none (SHARDS; Waldspurger, Park,
/// Garthwaite and Ahmad, Efficient MRC Construction with SHARDS, FAST 2015): when it is full, about half of it is
/// dropped, and each of the others stands for twice as many as before. Which of the few hottest contents are in a
/// sample is chance, and they make most of the uses that it has too many or too few; those are taken to be near ones.
///
/// O(log samples) for a content in the sample, O(1) for others, amortised; some 60 bytes a sample, nothing allocated
/// after the constructor. One thread at a time; calls of const members may overlap each other.
class reuse_distances {
 public:
  /// Follows at most `samples` contents. Raises invalid_argument where that is not from 64 to 2^24. O(samples).
  explicit reuse_distances(std::uint32_t samples)
      : known_(checked(samples)),
        fingerprints_(std::size_t{samples} + 1),
        places_(std::size_t{samples} + 1),
        order_(std::size_t{samples} * 2 + 1),
        sums_(order_.size()) {}

  /// A content is used; it is the newest from now on.
  void reference(std::uint64_t fingerprint) noexcept {
    ++references_;
    if (!sampled(fingerprint)) return;
    sampled_references_ += stands_for();
    detail::ghost_id content = known_.find(fingerprint);
    if (content != 0) {
      distances_.add(newer(content) * stands_for(), stands_for());
    } else {
      while (known_.size(0) == known_.capacity()) halve();
      if (!sampled(fingerprint)) return;
      content = known_.push(0, fingerprint);
      fingerprints_[content] = fingerprint;
    }
    make_newest(content);
  }
  /// A content that was in use is in use no more: the newest from now on, but not used again.
  void release(std::uint64_t fingerprint) noexcept {
    if (!sampled(fingerprint)) return;
    if (const detail::ghost_id content = known_.find(fingerprint); content != 0) make_newest(content);
  }
  /// Counts from zero, say for the curve of another hour, but remembers what was used.
  void restart() noexcept {
    distances_ = {};
    references_ = sampled_references_ = 0;
  }

  /// All uses. O(1).
  [[nodiscard]] std::uint64_t references() const noexcept { return references_; }
  /// Contents that one in the sample stands for. O(1).
  [[nodiscard]] std::uint64_t stands_for() const noexcept { return std::uint64_t{1} << halvings_; }
  /// How many other contents were used in between, for all uses but the first of each content; an estimate where one
  /// content stands for several. O(1).
  [[nodiscard]] const histogram& distances() const noexcept { return distances_; }
  /// The share of all uses that lru finds in a pool of `blocks` blocks. O(histogram::buckets).
  [[nodiscard]] double hit_ratio(std::uint64_t blocks) const noexcept {
    if (references_ == 0 || blocks == 0) return 0;
    const auto all = static_cast<double>(references_);
    const double hits = distances_.count_below(blocks) + (all - static_cast<double>(sampled_references_));
    return hits < 0 ? 0 : hits > all ? 1 : hits / all;
  }

 private:
  static std::uint32_t checked(std::uint32_t samples) {
    constexpr std::uint32_t least = 64;
    constexpr std::uint32_t most = 1u << 24;
    if (samples < least || samples > most)
      detail::raise<invalid_argument>("reuse distances: " + std::to_string(samples) + " samples, from " +
                                      std::to_string(least) + " to " + std::to_string(most) +
                                      " possible; 16384 give a curve to about a hundredth");
    return samples;
  }

  /// Fingerprints are hashes already, but others choose by their bits too, and not by these: what is in the sample
  /// would crowd in one part of known_.
  [[nodiscard]] bool sampled(std::uint64_t fingerprint) const noexcept {
    return halvings_ == 0 || fingerprint * 0xd6e8feb86659fd93u >> (64 - halvings_) == 0;
  }
  void halve() noexcept {
    ++halvings_;
    for (std::uint32_t place = 1; place < next_; ++place) {
      const detail::ghost_id content = order_[place];
      if (content == 0 || sampled(fingerprints_[content])) continue;
      take_out(content);
      known_.erase(content);
    }
  }

  // Contents of the sample by age: each has a place, the newest the highest; the places taken are counted by a tree of
  // partial sums (Fenwick, 1994).
  [[nodiscard]] std::uint64_t newer(detail::ghost_id content) const noexcept {
    std::uint64_t not_newer = 0;
    for (std::uint32_t p = places_[content]; p != 0; p &= p - 1) not_newer += sums_[p];
    return taken_ - not_newer;
  }
  void make_newest(detail::ghost_id content) noexcept {
    if (places_[content] != 0) take_out(content);
    if (next_ == order_.size()) close_up();
    put(next_++, content);
  }
  void put(std::uint32_t place, detail::ghost_id content) noexcept {
    order_[place] = content;
    places_[content] = place;
    ++taken_;
    for (std::size_t p = place; p < sums_.size(); p += p & (~p + 1)) ++sums_[p];
  }
  void take_out(detail::ghost_id content) noexcept {
    const std::uint32_t place = places_[content];
    order_[place] = 0;
    places_[content] = 0;
    --taken_;
    for (std::size_t p = place; p < sums_.size(); p += p & (~p + 1)) --sums_[p];
  }
  /// Takes out the gaps between places. At least half of all are free then, so it is due again only after as many uses.
  void close_up() noexcept {
    for (std::uint32_t& sum : sums_) sum = 0;
    const std::uint32_t end = next_;
    next_ = 1;
    taken_ = 0;
    for (std::uint32_t place = 1; place < end; ++place) {
      const detail::ghost_id content = order_[place];
      order_[place] = 0;
      if (content != 0) put(next_++, content);
    }
  }

  detail::ghost_list<> known_;
  std::vector<std::uint64_t> fingerprints_;  // by content
  std::vector<std::uint32_t> places_;        // by content, from 1
  std::vector<detail::ghost_id> order_;      // by place
  std::vector<std::uint32_t> sums_;
  std::uint32_t next_ = 1;  // place
  std::uint32_t taken_ = 0;
  unsigned halvings_ = 0;
  std::uint64_t references_ = 0;
  std::uint64_t sampled_references_ = 0;  // times what each stood for
  histogram distances_;
};

}  // namespace kvcache
