// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/schedule/request_table.hpp>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace kvcache::detail {

/// Queues of requests, first who goes first. A request is in one queue at most. Leftist heaps (Crane 1972; Knuth, The
/// Art of Computer Programming 3, 5.2.3), because a whole queue moves into another in O(log n): when a prefix is there,
/// those who waited for it go on, however many they are. O(log n) each call, but top.
template <class Requests>
class waiting_queues {
 public:
  using queue = std::uint32_t;

  explicit waiting_queues(const Requests& requests) : requests_(requests) {}

  /// The first of a queue, or no_request. O(1).
  [[nodiscard]] request_index top(queue q) const noexcept { return q < tops_.size() ? tops_[q] : no_request; }

  /// Precondition: in no queue.
  void push(queue q, request_index r) noexcept {
    if (r >= nodes_.size()) nodes_.resize(std::size_t{r} + 1);
    nodes_[r] = {};
    if (q >= tops_.size()) tops_.resize(std::size_t{q} + 1, no_request);
    set_top(q, merge(tops_[q], r));
  }

  /// Takes a request out of its queue. Where it was the first one, true, and `from` says of which queue.
  /// Precondition: in a queue.
  bool erase(request_index r, queue& from) noexcept {
    const node n = nodes_[r];
    const request_index rest = merge(n.left, n.right);
    if (n.parent == no_request) {
      from = n.owner;
      set_top(from, rest);
      return true;
    }
    if (rest != no_request) nodes_[rest].parent = n.parent;
    node& p = nodes_[n.parent];
    (p.left == r ? p.left : p.right) = rest;
    for (request_index i = n.parent; i != no_request && settle(i); i = nodes_[i].parent) {
    }
    return false;
  }

  /// Moves all of one queue into another.
  void move_all(queue from, queue to) noexcept {
    const request_index all = top(from);
    if (all == no_request) return;
    tops_[from] = no_request;
    if (to >= tops_.size()) tops_.resize(std::size_t{to} + 1, no_request);
    set_top(to, merge(tops_[to], all));
  }

 private:
  struct node {
    request_index left = no_request;
    request_index right = no_request;
    request_index parent = no_request;
    std::uint32_t rank = 1;  // nodes on the way right
    queue owner = 0;         // of a first one: its queue
  };

  void set_top(queue q, request_index r) noexcept {
    tops_[q] = r;
    if (r == no_request) return;
    nodes_[r].parent = no_request;
    nodes_[r].owner = q;
  }
  [[nodiscard]] std::uint32_t rank(request_index r) const noexcept { return r == no_request ? 0 : nodes_[r].rank; }

  /// Puts the longer way left. Whether the rank changed.
  bool settle(request_index r) noexcept {
    node& n = nodes_[r];
    if (rank(n.left) < rank(n.right)) std::swap(n.left, n.right);
    const std::uint32_t now = rank(n.right) + 1;
    return std::exchange(n.rank, now) != now;
  }
  /// As deep as both ways right are long.
  request_index merge(request_index a, request_index b) noexcept {
    if (a == no_request) return b;
    if (b == no_request) return a;
    if (requests_.before(b, a)) std::swap(a, b);
    const request_index right = merge(nodes_[a].right, b);
    nodes_[a].right = right;
    nodes_[right].parent = a;
    settle(a);
    return a;
  }

  const Requests& requests_;
  std::vector<node> nodes_;          // by request
  std::vector<request_index> tops_;  // by queue
};

}  // namespace kvcache::detail
