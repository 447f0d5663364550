// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/grow.hpp>
#include <kvcache/detail/span_of.hpp>
#include <kvcache/error.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace kvcache {

namespace detail {

/// What the pool keeps of one step. Records are used again, so that a step allocates nothing once arrays have grown.
struct step_record {
  struct row {
    sequence_id sequence;
    std::uint32_t tokens = 0;
    std::uint32_t start = 0;          // length before the step
    std::uint64_t previous_step = 0;  // the sequence's newest step before this one
    bool grew = false;                // its tables changed
    bool owned_tail = false;          // as sequence_state::owns_tail, before this one
  };
  // A tail block that was copied because someone else holds it, for rolling back.
  struct replacement {
    std::uint32_t row = 0;
    std::uint32_t group = 0;
    block_id source = null_block;
    std::uint64_t copied_before = 0;
    bool borrowed = false;  // the sequence's tail was another's
    bool spare = false;     // the copy lies in a block that the sequence held for it
  };
  // A block that was given a place in the tail pool, for rolling back.
  struct tail_gift {
    std::uint32_t row = 0;
    std::uint32_t group = 0;
    block_id block = null_block;
  };
  // A copy of one sequence's table, which is brought up to date when the record is used again.
  struct table_copy {
    std::uint32_t changes = 0;  // of the sequence, when the copy was up to date
    std::uint32_t version = 0;
    std::uint32_t begin = 0;
    std::uint32_t room = 0;
    std::uint32_t count = 0;
    std::uint32_t first = 0;
    std::uint32_t settled = 0;  // entries before this one stay as they are when blocks are sealed
    std::uint32_t tail = ~0u;   // an entry, and the slot that token 0 would have if all before lay in front of it
    slot_id tail_slot = 0;
  };
  struct group_arrays {
    std::vector<block_id> blocks;
    std::vector<table_copy> copies;  // by index of the sequence
    std::vector<std::uint32_t> begins;
    std::vector<std::uint32_t> counts;
    std::vector<block_id> padded;
    std::vector<slot_id> slots;
    std::vector<std::uint32_t> blocks_before;  // per row: length of the sequence's table before the step
    std::uint32_t block_size = 0;
    std::uint32_t window = 0;
  };

  std::uint64_t number = 0;  // steps end in the order of their numbers; a dropped step's number is used again
  std::uint64_t stamp = 0;   // tells this use of the record from every other; 0: not in use
  bool accepted = false;
  std::vector<row> rows;
  std::vector<std::uint32_t> query_offsets;
  std::vector<std::uint32_t> kv_lengths;
  std::vector<group_arrays> groups;
  std::vector<block_copy> copies;
  std::vector<replacement> replacements;
  std::vector<tail_gift> tail_gifts;
  std::vector<block_seal> sealed;  // their places in the tail pool are in use until the step is over
  std::vector<block_id> held;      // released while the step may still touch them; see held_list in block_use.hpp
  std::uint64_t held_batch = 0;    // the call whose blocks were held last
};

class step_owner {
 public:
  virtual result<void> accept_step(step_record& record, const std::uint32_t* counts, std::size_t size) noexcept = 0;
  virtual void drop_step(step_record& record) noexcept = 0;

 protected:
  ~step_owner() = default;
};

}  // namespace detail

/// One step of a batch: blocks are reserved, lengths have not advanced yet. A handle: it moves, owns no memory, and
/// must not outlive the block manager that began it.
///
/// The arrays behind `batch`, `padded` and `copies` are a snapshot: later calls do not change them, and they stay
/// valid until the step is retired or dropped. Not thread safe towards the manager's calls; the arrays themselves can
/// be read from any thread.
class [[nodiscard]] step {
 public:
  step() noexcept = default;
  step(step&& other) noexcept
      : owner_(std::exchange(other.owner_, nullptr)),
        record_(std::exchange(other.record_, nullptr)),
        stamp_(std::exchange(other.stamp_, 0)) {}
  step& operator=(step&& other) noexcept {
    if (this != &other) {
      drop();
      owner_ = std::exchange(other.owner_, nullptr);
      record_ = std::exchange(other.record_, nullptr);
      stamp_ = std::exchange(other.stamp_, 0);
    }
    return *this;
  }
  step(const step&) = delete;
  step& operator=(const step&) = delete;
  /// Rolls back where the step was not accepted, as `drop`. An accepted step stays in flight until it or a later one
  /// is retired.
  ~step() { drop(); }

  /// Whether the step is open: begun, neither dropped nor retired.
  [[nodiscard]] bool open() const noexcept { return record_ != nullptr && record_->stamp == stamp_; }
  [[nodiscard]] bool accepted() const noexcept { return open() && record_->accepted; }
  /// Steps end in the order of their numbers. Precondition, as for all views below: open.
  [[nodiscard]] std::uint64_t number() const noexcept { return checked().number; }

  /// Tables (ragged), lengths and slots of one layer group, a row for each want in their order. O(1).
  [[nodiscard]] batch_view batch(std::uint32_t layer_group = 0) const noexcept {
    const detail::step_record& r = checked();
    const auto& g = group(layer_group);
    return {detail::span_of(r.query_offsets),
            detail::span_of(r.kv_lengths),
            block_tables::ragged(g.blocks.data(), detail::span_of(g.begins), detail::span_of(g.counts)),
            detail::span_of(g.slots),
            g.block_size,
            g.window};
  }

  /// The same tables padded with null blocks to the longest row. O(rows * columns) the first time, then O(1). The
  /// first call fills the array, so it must not run beside another on the same step.
  [[nodiscard]] block_tables padded(std::uint32_t layer_group = 0) const noexcept {
    auto& g = group(layer_group);
    const std::size_t rows = g.counts.size();
    std::size_t columns = 0;
    for (const std::uint32_t count : g.counts)
      if (count > columns) columns = count;
    if (g.padded.empty() && rows * columns != 0) {
      detail::grow(g.padded, rows * columns);
      g.padded.assign(rows * columns, null_block);
      for (std::size_t r = 0; r < rows; ++r)
        for (std::uint32_t i = 0; i < g.counts[r]; ++i) g.padded[r * columns + i] = g.blocks[g.begins[r] + i];
    }
    return block_tables::padded(g.padded.data(), static_cast<std::uint32_t>(rows), static_cast<std::uint32_t>(columns));
  }

  /// Copies that have to be carried out before the step writes anything.
  [[nodiscard]] std::span<const block_copy> copies() const noexcept { return detail::span_of(checked().copies); }

  /// The tokens of every want count: lengths advance by what was begun.
  /// step_order: an earlier step is not accepted yet. stale_id: the step was dropped or retired, or accepted already.
  result<void> accept() noexcept { return accept_counts(nullptr, 0); }

  /// Of want i only the first counts[i] tokens count (drafts that were not confirmed fall away). Blocks that are not
  /// needed any more are given back, and are `held` until the step is retired. Rows of closed sequences are skipped.
  /// O(rows + blocks given back).
  /// beyond_length: a count larger than begun, or not as many counts as wants. step_order: as above, or fewer tokens
  /// than begun while a later open step contains the sequence, which relied on all of them: drop that one first.
  /// stale_id: as above.
  result<void> accept(std::span<const std::uint32_t> counts) noexcept {
    // A span of no counts may have no address, which would read as "all".
    static constexpr std::uint32_t none = 0;
    return accept_counts(counts.empty() ? &none : counts.data(), counts.size());
  }

  /// Leaves an unaccepted step as if it had not begun, every later step first: lengths, tables, counts and the order
  /// of free blocks are restored. Keys that it evicted or overwrote stay gone. Nothing of it may be running any more.
  /// Does nothing to an accepted step but let go of the handle. O(rows + blocks of the steps dropped).
  void drop() noexcept {
    if (open() && !record_->accepted) owner_->drop_step(*record_);
    record_ = nullptr;
  }

 private:
  template <class Eviction>
  friend class block_manager;

  step(detail::step_owner& owner, detail::step_record& record) noexcept
      : owner_(&owner), record_(&record), stamp_(record.stamp) {}

  detail::step_record& checked() const noexcept {
    KVCACHE_ASSERT(open(), "a view of a step that was dropped or retired");
    return *record_;
  }
  detail::step_record::group_arrays& group(std::uint32_t layer_group) const noexcept {
    KVCACHE_ASSERT(layer_group < checked().groups.size(), "no such layer group");
    return checked().groups[layer_group];
  }
  result<void> accept_counts(const std::uint32_t* counts, std::size_t size) noexcept {
    if (!open() || record_->accepted) return failure{errc::stale_id, stamp_, record_ != nullptr ? record_->stamp : 0};
    return owner_->accept_step(*record_, counts, size);
  }

  detail::step_owner* owner_ = nullptr;
  detail::step_record* record_ = nullptr;
  std::uint64_t stamp_ = 0;
};

}  // namespace kvcache
