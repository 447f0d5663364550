// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/extra_key.hpp>
#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/blocks/retention.hpp>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

namespace kvcache {

/// How much a scheduler puts into a step, and how many requests it serves at once.
struct scheduler_options {
  /// As watermark: a hundredth of the pool.
  static constexpr std::uint32_t automatic = ~0u;

  std::uint32_t running = 256;       ///< requests admitted at once, at most
  std::uint32_t step_tokens = 2048;  ///< computed in one step, at most; one for each running request has to fit
  std::uint32_t prefill_tokens = 0;  ///< of these, tokens of prompts; 0: no limit of their own
  /// Blocks that an admission leaves available for those that run, unless none runs.
  std::uint32_t watermark = automatic;
  unsigned hash_bits = 64;  ///< bits of the content hash in use. Fewer force collisions: slower, never wrong
};

namespace detail {

/// The same options. Raises invalid_argument where they can never work.
inline const scheduler_options& checked(const scheduler_options& o) {
  if (o.running == 0) raise<invalid_argument>("scheduler: 0 requests running at once, at least 1 needed; give a limit");
  if (o.step_tokens < o.running)
    raise<invalid_argument>("scheduler: " + std::to_string(o.step_tokens) + " tokens in a step, at least " +
                            std::to_string(o.running) +
                            " needed, one for each running request; raise step_tokens or lower running");
  if (o.hash_bits > 64)
    raise<invalid_argument>("scheduler: " + std::to_string(o.hash_bits) +
                            " hash bits, at most 64 possible; leave the default unless collisions are wanted");
  return o;
}

/// Raises invalid_argument where a step might not find the places in a tail pool that it needs.
template <class Manager>
void check_tail_pools(const Manager& manager, const scheduler_options& o) {
  for (std::uint32_t g = 0; g < manager.layer_group_count(); ++g) {
    if (manager.tail_blocks(g) == 0) continue;
    const std::uint64_t needed =
        tail_blocks_for(o.running, o.step_tokens, manager.block_size(g), 1,
                        static_cast<std::uint32_t>(manager.wide_blocks(g) * manager.block_size(g)));
    if (manager.tail_blocks(g) < needed)
      raise<invalid_argument>(
          "scheduler: layer group " + std::to_string(g) + " has " + std::to_string(manager.tail_blocks(g)) +
          " tail blocks, at least " + std::to_string(needed) + " needed for " + std::to_string(o.running) +
          " running requests and steps of " + std::to_string(o.step_tokens) + " tokens; see tail_blocks_for");
  }
}

}  // namespace detail

/// Names a request. The generation tells one that ended from a later one that took its place.
struct request_id {
  std::uint32_t index = ~0u;
  std::uint32_t generation = 0;

  friend constexpr bool operator==(request_id, request_id) = default;
};

/// What is asked of a scheduler. The scheduler copies what it needs.
struct request {
  content_view prompt = {};                         ///< at least one unit
  std::span<const extra_key> keys = {};             ///< a set, as in open_request
  std::uint32_t max_tokens = 1;                     ///< tokens to generate, at most; at least one
  std::int32_t priority = 0;                        ///< higher goes first; equal ones in order of arrival
  std::uint32_t drafts = 0;                         ///< draft tokens that a decode may bring along for verification
  std::span<const retention_range> retention = {};  ///< what its cached content is worth, as in open_request
};

/// Where a request stands.
struct request_progress {
  std::uint32_t prompt = 0;       ///< tokens of the prompt
  std::uint32_t generated = 0;    ///< tokens generated, as far as steps have finished
  std::uint32_t computed = 0;     ///< tokens whose K and V are there; 0 unless it runs
  std::uint32_t reused = 0;       ///< tokens found in the cache when it was admitted first
  std::uint32_t preemptions = 0;  ///< times it had to give its blocks back
  std::int32_t priority = 0;      ///< its own, or what those lend that wait for it, whichever is higher
  bool running = false;           ///< admitted; else it waits, for room or for another one's prefix
  sequence_id sequence = {};      ///< while it runs
};

enum class end_reason : std::uint8_t {
  stopped,  ///< its row_result said so
  length,   ///< max_tokens are generated
  failed,   ///< nothing runs and there is still no room for it; see ended_request::why
};

/// A request that ended; its id is stale.
struct ended_request {
  request_id request;
  end_reason reason = end_reason::stopped;
  failure why = {};  ///< where failed
};

/// Running sums since the scheduler was built.
struct scheduler_statistics {
  std::uint64_t submitted = 0;  ///< requests taken; each of them ends in one of the next four ways or lives
  std::uint64_t stopped = 0;    ///< see end_reason
  std::uint64_t length = 0;
  std::uint64_t failed = 0;
  std::uint64_t aborted = 0;
  std::uint64_t admitted = 0;           ///< requests admitted, each counted once
  std::uint64_t queried_tokens = 0;     ///< their prompts
  std::uint64_t hit_tokens = 0;         ///< of these, found in the cache at the first admission
  std::uint64_t prefilled_tokens = 0;   ///< put into steps as part of a prompt, each position once a request
  std::uint64_t recomputed_tokens = 0;  ///< the same again after a preemption
  std::uint64_t decoded_tokens = 0;     ///< put into steps one by one, drafts included
  std::uint64_t generated_tokens = 0;
  std::uint64_t preemptions = 0;
  std::uint64_t examined = 0;  ///< looks at a waiting request: the work that admission costs

  friend constexpr bool operator==(const scheduler_statistics&, const scheduler_statistics&) = default;
};

static_assert(std::is_trivially_copyable_v<request> && std::is_trivially_copyable_v<request_progress> &&
              std::is_trivially_copyable_v<ended_request> && std::is_trivially_copyable_v<scheduler_statistics>);

}  // namespace kvcache
