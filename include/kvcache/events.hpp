// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvcache {

enum class cache_event_kind : std::uint8_t {
  stored,   ///< a block can be found by its content from now on
  removed,  ///< a block was evicted, or its content forgotten
  cleared,  ///< all cached blocks of all layer groups were forgotten at once
};

/// Short name of a kind, for logs and wires.
[[nodiscard]] constexpr const char* name(cache_event_kind kind) noexcept {
  switch (kind) {
    case cache_event_kind::stored: return "stored";
    case cache_event_kind::removed: return "removed";
    case cache_event_kind::cleared: return "cleared";
  }
  return "unknown";
}

/// A change of what is cached. Numbers rise by one from 1, so a gap is a loss on the way. Of `cleared`, only number and
/// kind say something.
///
/// `content` and `parent` are serials, and a serial is never used again: a consumer builds the tree from them and needs
/// no block id. The parent of a chain's first block is the serial of its extra keys and layer group, which is never
/// `content` of any event; chains under equal keys that are cached at one time have one such root. The fingerprint is
/// that of the block's content, all before it and the extra keys: equal in every process, so that it can be looked up
/// without the source.
struct cache_event {
  std::uint64_t number = 0;
  serial content = 0;
  serial parent = 0;
  std::uint64_t fingerprint = 0;
  std::uint32_t layer_group = 0;
  block_id block = null_block;
  std::uint32_t tokens = 0;  ///< in the block
  cache_event_kind kind = cache_event_kind::stored;

  friend constexpr bool operator==(const cache_event&, const cache_event&) = default;
};

/// What a consumer gets when it asks for the events after a number.
struct event_reading {
  std::size_t events = 0;  ///< written, in order and without a gap; 0 and nothing lost: there is nothing new
  std::uint64_t lost = 0;  ///< events in between that are gone; then nothing is written, and a snapshot has to be taken

  friend constexpr bool operator==(const event_reading&, const event_reading&) = default;
};

/// As event_reading::lost: the number was never given, so the source has begun anew since.
inline constexpr std::uint64_t all_events_lost = ~std::uint64_t{0};

static_assert(std::is_trivially_copyable_v<cache_event> && std::is_trivially_copyable_v<event_reading>);
static_assert(cache_event{} == cache_event{} && event_reading{} == event_reading{});

}  // namespace kvcache
