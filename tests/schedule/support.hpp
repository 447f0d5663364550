// SPDX-License-Identifier: Apache-2.0
// What the tests of the scheduler share: an engine whose model is a hash. A slot holds the hash of all tokens up to its
// own, so a block that is reused before it is there, or for other content, gives other tokens than a request alone.
#pragma once

#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/schedule/scheduler.hpp>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "catch.hpp"

namespace kvcache_test {

using manager = kvcache::block_manager<kvcache::lru>;
using scheduler = kvcache::scheduler<manager>;
using text = std::vector<kvcache::content_unit>;

/// `count` tokens that occur in no text with another `topic`.
inline text words(std::uint64_t topic, std::size_t count) {
  text t;
  for (std::size_t i = 0; i < count; ++i) t.push_back(topic * 10'000'000 + i);
  return t;
}

inline text head_of(const text& t, std::size_t count) {
  return {t.begin(), t.begin() + static_cast<std::ptrdiff_t>(count)};
}

inline text operator+(text a, const text& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

constexpr std::uint64_t no_value = 0x123456789abcdefu;

constexpr std::uint64_t value_after(std::uint64_t before, kvcache::content_unit token) {
  std::uint64_t x = (before ^ token) * 0x9e3779b97f4a7c15u;
  x ^= x >> 29;
  return x * 0xbf58476d1ce4e5b9u + 1;
}
constexpr kvcache::content_unit chosen_after(std::uint64_t value, std::uint64_t alphabet) {
  return (value >> 33) % alphabet;
}

/// What a request alone generates. `seed` stands for the weights under its keys.
inline text alone(const text& prompt, std::size_t count, std::uint64_t alphabet, std::uint64_t seed = no_value) {
  std::uint64_t value = seed;
  for (const auto t : prompt) value = value_after(value, t);
  text out;
  for (std::size_t i = 0; i < count; ++i) {
    out.push_back(chosen_after(value, alphabet));
    value = value_after(value, out.back());
  }
  return out;
}

/// Nothing is left anywhere.
inline void check_empty(const manager& m, const scheduler& s) {
  CHECK(s.idle());
  CHECK(s.running() == 0);
  CHECK(s.steps_in_flight() == 0);
  CHECK(m.counts().available() == m.capacity());
  const kvcache::scheduler_statistics& t = s.statistics();
  CHECK(t.submitted == t.stopped + t.length + t.failed + t.aborted);
}

/// Computes plans over slots.
class hash_engine {
 public:
  struct job {
    text content;  ///< prompt and what was generated, as far as steps have finished
    std::size_t prompt = 0;
    std::uint64_t seed = no_value;
    std::size_t stop_after = ~std::size_t{0};  ///< generated tokens after which the engine ends it
    std::size_t max_tokens = 0;
    bool ended = false;
    bool aborted = false;
    kvcache::end_reason reason{};
    kvcache::failure why{};
    std::uint32_t prefilled = 0;   ///< over all its rows
    std::uint32_t first_at = ~0u;  ///< where its first row began

    [[nodiscard]] text generated() const {
      return {content.begin() + static_cast<std::ptrdiff_t>(prompt), content.end()};
    }
  };

  explicit hash_engine(manager& blocks, std::uint64_t alphabet = 1000, std::vector<std::uint32_t> windows = {})
      : blocks_(blocks), alphabet_(alphabet), windows_(std::move(windows)), cells_(std::size_t{blocks.capacity()} + 1) {
    windows_.resize(blocks.layer_group_count(), kvcache::layer_group::full);
    std::uint32_t largest = 0;
    for (std::uint32_t g = 0; g < blocks.layer_group_count(); ++g) largest = std::max(largest, blocks.block_size(g));
    for (auto& c : cells_) c.resize(largest);
    for (std::uint32_t g = 0; g < blocks.layer_group_count(); ++g)
      tails_.emplace_back(blocks.tail_blocks(g), std::vector<std::uint64_t>(largest));
  }

  std::size_t submit(scheduler& s, const text& prompt, std::uint32_t max_tokens, std::int32_t priority = 0,
                     std::uint32_t drafts = 0, std::span<const kvcache::extra_key> keys = {},
                     std::uint64_t seed = no_value, std::size_t stop_after = ~std::size_t{0}) {
    const auto id =
        s.submit({.prompt = prompt, .keys = keys, .max_tokens = max_tokens, .priority = priority, .drafts = drafts});
    REQUIRE(id.has_value());
    jobs.push_back(
        {.content = prompt, .prompt = prompt.size(), .seed = seed, .stop_after = stop_after, .max_tokens = max_tokens});
    ids.push_back(*id);
    by_id_[{id->index, id->generation}] = jobs.size() - 1;
    return jobs.size() - 1;
  }

  void abort(scheduler& s, std::size_t job_number) {
    REQUIRE(s.abort(ids[job_number]).has_value());
    jobs[job_number].ended = jobs[job_number].aborted = true;
  }

  [[nodiscard]] std::size_t job_of(kvcache::request_id id) const { return by_id_.at({id.index, id.generation}); }

  /// Plans a step and keeps it in flight. False: the plan was empty.
  bool plan(scheduler& s) {
    const kvcache::step_plan p = s.next();
    note_ends(s);
    if (p.empty()) return false;
    REQUIRE(p.blocks->batch().rows() == p.rows.size());
    bool prefills = false;
    for (std::size_t i = 0; i < p.rows.size(); ++i) {
      const kvcache::plan_row& row = p.rows[i];
      job& j = jobs[job_of(row.request)];
      REQUIRE(!j.ended);
      REQUIRE(row.tokens > row.drafts);
      REQUIRE((!row.decodes || !prefills));
      prefills = !row.decodes;
      if (prefills) j.prefilled += row.tokens;
      if (j.first_at == ~0u) j.first_at = row.first;
      REQUIRE(p.blocks->batch().kv_lengths[i] == row.first + row.tokens);
    }
    flights.push_back(p);
    return true;
  }

  /// Computes the oldest plan and tells the scheduler.
  void finish(scheduler& s) {
    const kvcache::step_plan p = flights.front();
    std::vector<text> chosen(p.rows.size());
    std::vector<kvcache::row_result> results(p.rows.size());
    seal();
    for (const kvcache::block_copy& c : p.blocks->copies()) {
      ++copies;
      std::copy_n(cells(c.source, c.layer_group).begin(), c.tokens, cells(c.destination, c.layer_group).begin());
    }
    for (std::size_t i = 0; i < p.rows.size(); ++i) {
      const kvcache::plan_row& row = p.rows[i];
      job& j = jobs[job_of(row.request)];
      if (j.ended) {
        results[i] = {.tokens = {}, .ends = true};
        continue;
      }
      // A part of the row that this row's sequence was preempted for is computed all the same.
      REQUIRE(j.content.size() >= row.first + row.tokens - row.drafts);
      text tokens = j.content;
      tokens.resize(row.first + row.tokens - row.drafts);
      for (std::uint32_t d = 0; d < row.drafts; ++d) tokens.push_back(draft(j, tokens));
      std::vector<std::uint64_t> values;
      for (std::uint32_t g = 0; g < blocks_.layer_group_count(); ++g) {
        const kvcache::batch_view batch = p.blocks->batch(g);
        const std::uint32_t size = batch.block_size;
        const auto table = batch.tables.row(static_cast<std::uint32_t>(i));
        const auto cell = [&](std::size_t at) -> std::uint64_t& {
          REQUIRE(table[at / size] != kvcache::null_block);
          return cells(table[at / size], g)[at % size];
        };
        // A group with a window has forgotten what the first value follows; the one that sees all has it.
        if (g == 0)
          for (std::size_t at = row.first; at < tokens.size(); ++at)
            values.push_back(value_after(at == 0           ? j.seed
                                         : at == row.first ? cell(at - 1)
                                                           : values.back(),
                                         tokens[at]));
        for (std::size_t at = row.first; at < tokens.size(); ++at) {
          REQUIRE(batch.slots[batch.query_offsets[i] + (at - row.first)] ==
                  kvcache::make_slot(table[at / size], static_cast<std::uint32_t>(at % size), size));
          cell(at) = values[at - row.first];
        }
        const std::size_t seen = row.first + 1 > windows_[g] ? row.first + 1 - windows_[g] : 0;
        check_reused(j, tokens, row, seen, cell);
      }
      if (!row.samples) continue;
      bool ends = false;
      for (std::size_t at = tokens.size() - row.drafts - 1; !ends; ++at) {
        const auto next = chosen_after(values[at - row.first], alphabet_);
        chosen[i].push_back(next);
        j.content.push_back(next);
        ends = j.content.size() - j.prompt >= j.stop_after;
        if (at + 1 >= tokens.size() || tokens[at + 1] != next) break;
      }
      results[i] = {.tokens = chosen[i], .ends = ends};
    }
    REQUIRE(s.finish(p, results).has_value());
    flights.pop_front();
    note_ends(s);
  }

  /// Quantises what is to be quantised.
  void seal() {
    for (const kvcache::block_seal& c : blocks_.seals()) {
      cells_[c.block] = tails_[c.layer_group][c.tail];
      ++seals;
    }
    blocks_.sealed();
  }

  /// Plans a step, which is not empty, and computes it. Its rows.
  std::vector<std::size_t> step(scheduler& s) {
    REQUIRE(plan(s));
    std::vector<std::size_t> computed = oldest();
    finish(s);
    return computed;
  }
  /// Jobs of the oldest plan in flight, by row.
  [[nodiscard]] std::vector<std::size_t> oldest() const {
    std::vector<std::size_t> by_row;
    for (const kvcache::plan_row& row : flights.front().rows) by_row.push_back(job_of(row.request));
    return by_row;
  }

  /// Runs until nothing is left. Each step finishes before the next, or `depth` are in flight.
  void run(scheduler& s, std::size_t depth = 1) {
    for (;;) {
      while (flights.size() < depth && plan(s)) {
      }
      if (flights.empty()) break;
      finish(s);
    }
    REQUIRE(s.idle());
  }

  /// Every request that ended by itself has the tokens that it would have alone; so many failed.
  void check_tokens(std::size_t failures = 0) const {
    std::size_t failed = 0;
    for (const job& j : jobs) failed += j.ended && !j.aborted && j.reason == kvcache::end_reason::failed ? 1 : 0;
    CHECK(failed == failures);
    for (std::size_t i = 0; i < jobs.size(); ++i) {
      const job& j = jobs[i];
      INFO("request " << i);
      REQUIRE(j.ended);
      if (j.aborted || j.reason == kvcache::end_reason::failed) continue;
      const text prompt(j.content.begin(), j.content.begin() + static_cast<std::ptrdiff_t>(j.prompt));
      REQUIRE(j.generated() ==
              alone(prompt, j.max_tokens < j.stop_after ? j.max_tokens : j.stop_after, alphabet_, j.seed));
    }
  }

  /// Runs to the end, which is as it has to be.
  void run_to_end(scheduler& s, std::size_t depth = 1) {
    run(s, depth);
    check_tokens();
    check_empty(blocks_, s);
  }

  std::vector<job> jobs;
  std::vector<kvcache::request_id> ids;
  std::deque<kvcache::step_plan> flights;
  std::uint32_t good_drafts = 2;  ///< of three
  std::uint64_t copies = 0;
  std::uint64_t seals = 0;

 private:
  /// What an entry of a table holds.
  [[nodiscard]] std::vector<std::uint64_t>& cells(kvcache::block_id entry, std::uint32_t group) {
    return (entry & kvcache::tail_bit) != 0 ? tails_[group].at(entry & ~kvcache::tail_bit) : cells_.at(entry);
  }

  /// Right most of the time.
  kvcache::content_unit draft(const job& j, const text& tokens) {
    std::uint64_t value = j.seed;
    for (const auto t : tokens) value = value_after(value, t);
    return chosen_after(value, alphabet_) + (++drafted_ % 3 < good_drafts ? 0 : alphabet_);
  }

  /// What the row found in the cache is what it would have computed.
  template <class Cell>
  void check_reused(const job& j, const text& tokens, const kvcache::plan_row& row, std::size_t seen,
                    Cell&& cell) const {
    if (row.decodes) return;
    std::uint64_t value = j.seed;
    bool good = true;
    for (std::size_t at = 0; at < tokens.size(); ++at) {
      value = value_after(value, tokens[at]);
      good = good && (at < seen || cell(at) == value);
    }
    REQUIRE(good);
  }

  void note_ends(const scheduler& s) {
    for (const kvcache::ended_request& e : s.ended()) {
      job& j = jobs[job_of(e.request)];
      REQUIRE(!j.ended);
      REQUIRE(!s.contains(e.request));
      j.ended = true;
      j.reason = e.reason;
      j.why = e.why;
    }
  }

  manager& blocks_;
  std::uint64_t alphabet_;
  std::vector<std::uint32_t> windows_;                          // by layer group
  std::vector<std::vector<std::uint64_t>> cells_;               // by block
  std::vector<std::vector<std::vector<std::uint64_t>>> tails_;  // by layer group and block of its tail pool
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::size_t> by_id_;
  std::uint64_t drafted_ = 0;
};

}  // namespace kvcache_test
