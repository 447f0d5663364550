// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/observe/hit_window.hpp>

#include <cstdint>

namespace engine {

/// What serving took, gathered step by step.
struct serve_statistics {
  std::uint64_t steps = 0;
  std::uint64_t prefilled_tokens = 0;   ///< prompt tokens that were computed
  std::uint64_t recomputed_tokens = 0;  ///< computed again, because their request was preempted
  std::uint64_t preemptions = 0;
  std::uint64_t generated_tokens = 0;
  double busy_s = 0;  ///< seconds spent in steps

  kvcache::hit_sums window;  ///< of the last requests that were admitted, each once
  kvcache::hit_sums again;   ///< of those that came back after a preemption

  std::uint32_t peak_sequences = 0;  ///< in one step
  std::uint32_t peak_blocks = 0;     ///< referenced at once
  /// What the requests running at once would have had to reserve, each in one piece, for its prompt and the most it
  /// may generate; and for the model's whole context.
  std::uint64_t peak_contiguous_tokens = 0;
  std::uint64_t peak_context_tokens = 0;

  /// Sums over all steps, in slots of referenced blocks.
  std::uint64_t allocated_slots = 0;
  std::uint64_t unused_slots = 0;

  [[nodiscard]] constexpr double wasted_percent() const noexcept {
    return allocated_slots == 0 ? 0 : 100.0 * static_cast<double>(unused_slots) / static_cast<double>(allocated_slots);
  }
};

}  // namespace engine
