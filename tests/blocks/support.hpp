// SPDX-License-Identifier: Apache-2.0
// What the tests of the bookkeeping share: content, whole requests, and the order in which blocks are handed out.
#pragma once

#include <kvcache/blocks/block_manager.hpp>

#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "catch.hpp"

namespace kvcache_test {

using manager = kvcache::block_manager<kvcache::lru>;
using text = std::vector<std::int32_t>;
using ids = std::vector<kvcache::block_id>;

/// `count` tokens that occur in no text with another `topic`.
inline text words(int topic, std::size_t count, std::size_t first = 0) {
  text t;
  for (std::size_t i = 0; i < count; ++i) t.push_back(topic * 10'000'000 + static_cast<std::int32_t>(first + i));
  return t;
}

inline text operator+(text a, const text& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline text head(const text& t, std::size_t count) {
  return {t.begin(), t.begin() + static_cast<std::ptrdiff_t>(count)};
}

template <class Manager>
ids table(const Manager& m, kvcache::sequence_id s, std::uint32_t group = 0) {
  const auto t = m.table(s, group);
  REQUIRE(t.has_value());
  return {t->begin(), t->end()};
}

inline ids row(const kvcache::block_tables& tables, std::uint32_t r) {
  const auto t = tables.row(r);
  return {t.begin(), t.end()};
}

/// R9, R3.
template <class Manager>
void check_counts(const Manager& m) {
  const kvcache::block_counts c = m.counts();
  REQUIRE(c.capacity() == m.capacity());
  kvcache::block_counts seen;
  for (kvcache::block_id b = 1; b <= m.capacity(); ++b) switch (m.state(b)) {
      case kvcache::block_state::free: ++seen.free; break;
      case kvcache::block_state::evictable: ++seen.evictable; break;
      case kvcache::block_state::referenced: ++seen.referenced; break;
      case kvcache::block_state::held: ++seen.held; break;
    }
  REQUIRE(seen == c);
}

/// One step for one sequence, accepted in full and retired. Leaves the content open.
template <class Manager>
void compute(Manager& m, kvcache::sequence_id s, std::uint32_t tokens) {
  const kvcache::want w{s, tokens};
  auto step = m.begin({&w, 1});
  REQUIRE(step.has_value());
  REQUIRE(step->accept().has_value());
  REQUIRE(m.retire(*step).has_value());
}

/// Computes and commits `more`.
template <class Manager>
void extend(Manager& m, kvcache::sequence_id s, const text& more) {
  compute(m, s, static_cast<std::uint32_t>(more.size()));
  REQUIRE(m.commit(s, more).has_value());
}

/// Opens a request with room for all of its prompt, computes what is not cached and commits it.
template <class Manager>
kvcache::opened prompt(Manager& m, const text& content, std::span<const kvcache::extra_key> keys = {}) {
  const auto opened = m.open({.content = content, .keys = keys, .reserve = content.size()});
  REQUIRE(opened.has_value());
  const text rest(content.begin() + opened->reused_tokens, content.end());
  extend(m, opened->sequence, rest);
  REQUIRE(*m.length(opened->sequence) == content.size());
  check_counts(m);
  return *opened;
}

template <class Manager>
void close(Manager& m, kvcache::sequence_id s) {
  REQUIRE(m.close(s).has_value());
  check_counts(m);
}

/// The order in which the pool hands out what is available, by taking all of it. Cached blocks lose their keys.
template <class Manager>
ids drain(Manager& m) {
  const text content = words(99, 1);
  const auto all = m.open({.content = content});
  REQUIRE(all.has_value());
  const kvcache::want w{all->sequence, m.counts().available() * m.block_size()};
  auto step = m.begin({&w, 1});
  REQUIRE(step.has_value());
  REQUIRE(m.counts().available() == 0);
  return row(step->batch().tables, 0);
}

}  // namespace kvcache_test
