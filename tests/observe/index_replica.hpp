// SPDX-License-Identifier: Apache-2.0
// An index kept by somebody else, from a snapshot and events alone: what a router does. Naive, and strict about what it
// is told. Works for any source that has
//   const kvcache::event_log& events() const
//   std::uint64_t visit_cached(visit) const     calls visit(const kvcache::cache_event&) for every cached block as if
//   it
//                                               were stored now, parents before children; the number of the last event
//                                               that this includes
#pragma once

#include <kvcache/blocks/event_log.hpp>
#include <kvcache/events.hpp>

#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

namespace kvcache_test {

class index_replica {
 public:
  /// Blocks of these layer groups may go before those that follow them.
  explicit index_replica(std::set<std::uint32_t> window_groups = {}) : window_groups_(std::move(window_groups)) {}

  /// Reads events until there is none left, `room` at a time; takes a snapshot where some were lost.
  template <class Source>
  void catch_up(const Source& source, std::size_t room = 16) {
    std::vector<kvcache::cache_event> events(room);
    for (;;) {
      const kvcache::event_reading reading = source.events().read(number_, events);
      if (reading.lost != 0) {
        if (reading.events != 0) fail("events come with a gap");
        start(source);
        continue;
      }
      if (reading.events == 0) return;
      for (const kvcache::cache_event& e : std::span(events).first(reading.events)) apply(e);
    }
  }
  /// Forgets all and takes a snapshot.
  template <class Source>
  void start(const Source& source) {
    ++snapshots_;
    forget_all();
    number_ = source.visit_cached([&](const kvcache::cache_event& e) { store(e); });
  }
  void apply(const kvcache::cache_event& e) {
    if (e.number != number_ + 1) fail("after event " + std::to_string(number_) + " comes " + std::to_string(e.number));
    number_ = e.number;
    switch (e.kind) {
      case kvcache::cache_event_kind::stored: store(e); break;
      case kvcache::cache_event_kind::removed: remove(e); break;
      case kvcache::cache_event_kind::cleared: forget_all(); break;
    }
  }

  /// What is cached, by serial. Numbers and kinds are those of a snapshot that nobody numbered.
  [[nodiscard]] const std::map<kvcache::serial, kvcache::cache_event>& cached() const { return cached_; }
  [[nodiscard]] std::uint64_t number() const { return number_; }
  [[nodiscard]] unsigned snapshots() const { return snapshots_; }
  /// What the source did wrong, or nothing.
  [[nodiscard]] const std::string& fault() const { return fault_; }

 private:
  void fail(const std::string& what) {
    if (fault_.empty()) fault_ = "event " + std::to_string(number_) + ": " + what;
  }
  [[nodiscard]] bool window(std::uint32_t group) const { return window_groups_.count(group) != 0; }

  void store(kvcache::cache_event e) {
    const std::string block = "block " + std::to_string(e.block);
    if (e.kind != kvcache::cache_event_kind::stored) fail(block + " is visited as " + name(e.kind));
    e.number = 0;
    if (e.parent == 0 || e.parent >= e.content) fail(block + " is older than what it follows");
    if (e.block == kvcache::null_block || e.tokens == 0) fail("an empty block is stored");
    if (!blocks_.insert(e.block).second) fail(block + " holds two contents");
    if (!cached_.emplace(e.content, e).second) fail(block + " is stored twice");
    if (roots_.count(e.content) != 0) fail(block + " has the serial of a root");
    // A parent that was cached, and is so no more, is a loss only where there are windows.
    const auto parent = cached_.find(e.parent);
    if (parent == cached_.end()) {
      if (!window(e.layer_group)) roots_.insert(e.parent);
    } else if (parent->second.layer_group != e.layer_group) {
      fail(block + " follows one of another layer group");
    }
    if (seen_.count(e.parent) != 0 && parent == cached_.end() && !window(e.layer_group))
      fail(block + " follows one that is gone");
    seen_.insert(e.content);
  }
  void remove(kvcache::cache_event e) {
    const auto found = cached_.find(e.content);
    if (found == cached_.end()) return fail("block " + std::to_string(e.block) + " is removed but not cached");
    e.number = 0;
    e.kind = kvcache::cache_event_kind::stored;
    if (!(found->second == e)) fail("block " + std::to_string(e.block) + " is removed as another than was stored");
    cached_.erase(found);
    blocks_.erase(e.block);
    if (window(e.layer_group)) return;
    for (const auto& [content, other] : cached_)
      if (other.parent == e.content) fail("block " + std::to_string(e.block) + " goes before one that follows it");
  }
  void forget_all() {
    cached_.clear();
    blocks_.clear();
    roots_.clear();
    seen_.clear();
  }

  std::set<std::uint32_t> window_groups_;
  std::map<kvcache::serial, kvcache::cache_event> cached_;
  std::set<kvcache::block_id> blocks_;
  std::set<kvcache::serial> roots_;
  std::set<kvcache::serial> seen_;
  std::uint64_t number_ = 0;
  unsigned snapshots_ = 0;
  std::string fault_;
};

}  // namespace kvcache_test
