// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/extra_key.hpp>
#include <kvcache/blocks/grow.hpp>
#include <kvcache/blocks/key_sets.hpp>
#include <kvcache/schedule/requests.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kvcache::detail {

/// Names a request's place in the table, without its generation.
using request_index = std::uint32_t;
inline constexpr request_index no_request = ~0u;

/// What a scheduler knows of one request. A step reads and writes only the first cache line of those that decode.
struct alignas(64) request_record {
  std::vector<content_unit> content;  // prompt and what was generated
  std::uint32_t begun = 0;            // positions that steps begun so far compute
  std::uint32_t computed = 0;         // of these, accepted
  std::uint32_t target = 0;           // content there was when it was admitted: prefill goes so far
  std::uint32_t limit = 0;            // positions that are ever computed
  std::uint32_t next_commit = 0;      // there is a whole block to commit from this position on
  sequence_id sequence;               // while it runs
  std::uint32_t generation = 0;
  std::uint32_t rows = 0;  // in flight, those of earlier admissions included
  bool open = false;
  bool running = false;
  bool with_drafts = false;
  bool verifying = false;  // a row with drafts is in flight, so its length is not known

  bool admitted = false;  // once at least
  std::uint32_t drafts = 0;
  std::uint32_t committed = 0;
  std::uint32_t prompt = 0;
  std::uint32_t reached = 0;     // positions that steps have computed up to its last preemption
  std::uint32_t reused = 0;      // at its first admission
  std::uint32_t reused_now = 0;  // at its last one
  std::uint32_t preemptions = 0;
  std::uint32_t producing = 0;  // the first block it has not produced yet, of those it has claimed
  std::int32_t priority = 0;
  std::int32_t lent = 0;  // the highest of those that wait for it; its own where none does
  std::uint64_t arrival = 0;
  key_set_id key_set = no_key_set;
  std::vector<extra_key> keys;
  std::vector<char> key_bytes;  // what the keys' values point to
  std::vector<retention_range> retention;

  [[nodiscard]] content_view tokens() const noexcept { return {content.data(), content.size()}; }
  [[nodiscard]] std::uint32_t known() const noexcept { return static_cast<std::uint32_t>(content.size()); }
  [[nodiscard]] std::int32_t effective() const noexcept { return lent > priority ? lent : priority; }
};

/// The requests of a scheduler. Places are used again with the arrays they have grown. `Owner`: see
/// block_keeper.
template <class Owner>
class request_table {
 public:
  /// O(prompt + keys).
  request_index add(const request& what) noexcept {
    if (unused_.empty()) {
      unused_.push_back(static_cast<request_index>(records_.size()));
      records_.emplace_back();
    }
    const request_index index = unused_.back();
    unused_.pop_back();
    request_record& r = records_[index];
    grow(r.content, what.prompt.size());
    r.content.resize(what.prompt.size());
    for (std::size_t i = 0; i < r.content.size(); ++i) r.content[i] = what.prompt[i];
    r.prompt = r.known();
    r.limit = r.prompt + what.max_tokens - 1;
    r.priority = r.lent = what.priority;
    r.drafts = what.drafts;
    r.with_drafts = what.drafts != 0;
    r.open = true;
    r.arrival = arrivals_++;
    copy_keys(r, what.keys);
    grow(r.retention, what.retention.size());
    r.retention.assign(what.retention.begin(), what.retention.end());
    return index;
  }
  void remove(request_index index) noexcept {
    request_record& r = records_[index];
    r.content.clear();
    r.begun = r.computed = r.target = r.limit = r.next_commit = r.committed = 0;
    r.sequence = {};
    r.running = r.verifying = r.open = r.admitted = false;
    r.rows = r.reached = r.reused = r.reused_now = r.preemptions = r.producing = 0;
    ++r.generation;
    unused_.push_back(index);
  }

  [[nodiscard]] request_record& operator[](request_index index) noexcept { return records_[index]; }
  [[nodiscard]] const request_record& operator[](request_index index) const noexcept { return records_[index]; }
  [[nodiscard]] request_id id(request_index index) const noexcept { return {index, records_[index].generation}; }
  [[nodiscard]] bool contains(request_id id) const noexcept {
    return id.index < records_.size() && records_[id.index].open && lives(id);
  }
  /// Of an id that this table gave out.
  [[nodiscard]] bool lives(request_id id) const noexcept { return records_[id.index].generation == id.generation; }
  [[nodiscard]] failure stale(request_id id) const noexcept {
    return {errc::stale_id, id.index, id.index < records_.size() ? records_[id.index].generation : 0};
  }
  [[nodiscard]] std::size_t size() const noexcept { return records_.size() - unused_.size(); }

  /// Who of two goes first: the higher priority, lent ones included, then who came first.
  [[nodiscard]] bool before(request_index a, request_index b) const noexcept {
    const request_record& x = records_[a];
    const request_record& y = records_[b];
    return x.effective() != y.effective() ? x.effective() > y.effective() : x.arrival < y.arrival;
  }

 private:
  static void copy_keys(request_record& r, std::span<const extra_key> keys) noexcept {
    r.keys.clear();
    r.key_bytes.clear();
    std::size_t bytes = 0;
    for (const extra_key& key : keys) bytes += key.value.size();
    grow(r.key_bytes, bytes);
    for (const extra_key& key : keys) r.key_bytes.insert(r.key_bytes.end(), key.value.begin(), key.value.end());
    const char* at = r.key_bytes.data();
    for (const extra_key& key : keys) {
      r.keys.push_back({key.kind, std::string_view(at, key.value.size())});
      at += key.value.size();
    }
  }

  std::vector<request_record> records_;
  std::vector<request_index> unused_;  // a stack
  std::uint64_t arrivals_ = 0;
};

}  // namespace kvcache::detail
