// SPDX-License-Identifier: Apache-2.0
#include "optimal.hpp"

#include <limits>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace replay {
namespace {

constexpr std::size_t never = std::numeric_limits<std::size_t>::max();

/// The prompt, and what was generated after it.
request whole(const trace& all, std::size_t r) {
  request blocks = all.requests[r];
  if (r < all.outputs.size()) blocks.insert(blocks.end(), all.outputs[r].begin(), all.outputs[r].end());
  return blocks;
}

/// For each request and block: the next request whose prompt has the block.
std::vector<std::vector<std::size_t>> next_uses(const trace& all) {
  std::vector<std::vector<std::size_t>> next(all.requests.size());
  std::unordered_map<kvcache::content_unit, std::size_t> seen;
  for (std::size_t r = all.requests.size(); r-- > 0;) {
    for (const auto block : whole(all, r)) {
      const auto found = seen.find(block);
      next[r].push_back(found == seen.end() ? never : found->second);
    }
    for (const auto block : all.requests[r]) seen[block] = r;
  }
  return next;
}

}  // namespace

std::size_t optimal_hits(const trace& all, std::uint32_t blocks) {
  const auto next = next_uses(all);
  using place = std::tuple<std::size_t, std::size_t, kvcache::content_unit>;  // next use, depth, block
  std::set<place> resident;
  std::unordered_map<kvcache::content_unit, place> places;
  std::size_t hits = 0;
  for (std::size_t r = 0; r < all.requests.size(); ++r) {
    const request wanted = whole(all, r);
    std::size_t leading = 0;
    while (leading < all.requests[r].size() && places.contains(wanted[leading])) ++leading;
    hits += leading;
    for (std::size_t depth = 0; depth < wanted.size(); ++depth) {
      const auto block = wanted[depth];
      if (const auto old = places.find(block); old != places.end()) {
        resident.erase(old->second);
        places.erase(old);
      }
      if (next[r][depth] == never) continue;
      const place now{next[r][depth], depth, block};
      resident.insert(now);
      places[block] = now;
    }
    while (resident.size() > blocks) {
      places.erase(std::get<2>(*resident.rbegin()));
      resident.erase(std::prev(resident.end()));
    }
  }
  return hits;
}

}  // namespace replay
