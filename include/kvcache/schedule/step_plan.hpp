// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/step.hpp>
#include <kvcache/schedule/requests.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstdint>
#include <span>
#include <type_traits>

namespace kvcache {

/// What one request computes in a step.
struct plan_row {
  request_id request;
  sequence_id sequence;
  std::uint32_t first = 0;   ///< position of its first token
  std::uint32_t tokens = 0;  ///< how many
  /// How many of these the scheduler knows (`tokens` of the scheduler has them). The one after comes from a step that
  /// has not finished yet, drafts from the engine.
  std::uint32_t known = 0;
  std::uint32_t drafts = 0;  ///< how many of the last tokens are drafts
  bool decodes = false;      ///< else it computes a part of its prompt, or again what a preemption has cost
  bool samples = false;      ///< a token is wanted after its last one (after each of the last, with drafts)
};

/// What the engine computes next. A view: valid until the step has finished.
struct step_plan {
  std::uint64_t number = 0;             ///< steps finish in this order
  std::span<const plan_row> rows = {};  ///< first those that decode; none: see scheduler::next
  const step* blocks = nullptr;         ///< tables, lengths, slots and copies, a row for each of `rows`

  [[nodiscard]] constexpr bool empty() const noexcept { return rows.empty(); }
};

/// What came of a row.
struct row_result {
  /// What follows the row's last accepted token: nothing where it does not sample, else one token, after as many
  /// drafts as were confirmed.
  content_view tokens = {};
  bool ends = false;  ///< the request is done; only then a row that samples may bring no token
};

static_assert(std::is_trivially_copyable_v<plan_row> && std::is_trivially_copyable_v<step_plan> &&
              std::is_trivially_copyable_v<row_result>);

}  // namespace kvcache
