// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/plan.hpp>
#include <kvcache/cuda/attention_params.hpp>
#include <kvcache/error.hpp>
#include <kvcache/types.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace kvcache::device {

/// The largest plans that there is room for.
struct plan_capacity {
  std::uint32_t sequences = 0;
  std::uint32_t tiles = 0;
  std::uint32_t units = 0;
  std::uint64_t blocks = 0;  ///< entries of all block tables together

  friend constexpr bool operator==(const plan_capacity&, const plan_capacity&) = default;
};

/// Where the arrays of a plan lie in one piece of memory, which is copied to the device at once. Places depend on the
/// capacity alone, so that the addresses in a captured graph hold for every plan. Units whose tile has at most
/// `few_rows` rows of a kv head and those that have more are apart, since other kernels take them.
class packed_plan {
 public:
  static constexpr std::uint32_t few_rows = 16;

  /// O(1). Raises invalid_argument where the capacity is more than 63 bits of bytes.
  explicit packed_plan(const plan_capacity& most) : most_(most) {
    std::uint64_t at = sizeof(counts);
    const auto take = [&](std::uint64_t count, std::uint64_t each) {
      const std::uint64_t first = at;
      if (count > std::uint64_t{INT64_MAX} / 2 / each - at / each)
        detail::raise<invalid_argument>("packed_plan: room for " + std::to_string(count) + " entries of " +
                                        std::to_string(each) + " bytes passes 2^62; lower the capacity");
      at = (at + count * each + 15) / 16 * 16;
      return first;
    };
    few_ = take(most.units, sizeof(work_unit));
    many_ = take(most.units, sizeof(work_unit));
    tiles_ = take(most.tiles, sizeof(query_tile));
    sequences_ = take(most.sequences, sizeof(planned_sequence));
    blocks_ = take(most.blocks, sizeof(block_id));
    bytes_ = at;
  }

  [[nodiscard]] const plan_capacity& capacity() const noexcept { return most_; }
  /// Of the whole piece of memory; it has to begin at a multiple of 16.
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  /// Writes the arrays of `plan` to `to`; what is not needed of the memory stays as it is. `group` is that of the heads
  /// the plan will run with. Raises invalid_argument, naming value, limit and remedy, and writes nothing where the plan
  /// is larger than the capacity. O(units + tiles + sequences + blocks).
  void pack(const attention_plan& plan, std::uint32_t group, std::byte* to) const {
    const auto fits = [](const char* what, std::uint64_t value, std::uint64_t limit) {
      if (value > limit)
        detail::raise<invalid_argument>("packed_plan: the plan has " + std::to_string(value) + ' ' + what +
                                        ", there is room for " + std::to_string(limit) +
                                        "; make plan_capacity larger, or the step smaller");
    };
    fits("units", plan.units().size(), most_.units);
    fits("tiles", plan.tiles().size(), most_.tiles);
    fits("sequences", plan.sequences().size(), most_.sequences);
    fits("blocks in tables", plan.blocks().size(), most_.blocks);

    counts c;
    for (const work_unit& u : plan.units()) {
      const query_tile& tile = plan.tiles()[u.tile];
      const bool few = std::uint64_t{tile.query_end - tile.query_begin} * group <= few_rows;
      std::uint32_t& count = few ? c.few : c.many;
      std::memcpy(to + (few ? few_ : many_) + std::size_t{count} * sizeof u, &u, sizeof u);
      ++count;
    }
    c.tiles = static_cast<std::uint32_t>(plan.tiles().size());
    std::memcpy(to, &c, sizeof c);
    const auto copy = [&](std::uint64_t at, const auto& from) {
      if (!from.empty()) std::memcpy(to + at, from.data(), from.size_bytes());
    };
    copy(tiles_, plan.tiles());
    copy(sequences_, plan.sequences());
    copy(blocks_, plan.blocks());
  }

  /// What kernels are told: the units of one of the two kinds in a copy of the memory at `base`. O(1).
  [[nodiscard]] attention_work work(const std::byte* base, bool many) const noexcept {
    attention_work w;
    const auto* const c = reinterpret_cast<const std::uint32_t*>(base);
    w.unit_count = c + (many ? 1 : 0);
    w.units = reinterpret_cast<const work_unit*>(base + (many ? many_ : few_));
    w.tile_count = c + 2;
    w.tiles = reinterpret_cast<const query_tile*>(base + tiles_);
    w.sequences = reinterpret_cast<const planned_sequence*>(base + sequences_);
    w.blocks = reinterpret_cast<const block_id*>(base + blocks_);
    return w;
  }

 private:
  struct counts {
    std::uint32_t few = 0;
    std::uint32_t many = 0;
    std::uint32_t tiles = 0;
    std::uint32_t unused = 0;
  };

  plan_capacity most_;
  std::uint64_t few_ = 0;
  std::uint64_t many_ = 0;
  std::uint64_t tiles_ = 0;
  std::uint64_t sequences_ = 0;
  std::uint64_t blocks_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace kvcache::device
