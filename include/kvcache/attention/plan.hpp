// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/variant.hpp>
#include <kvcache/concepts.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/detail/span_of.hpp>
#include <kvcache/error.hpp>
#include <kvcache/views.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace kvcache {

/// The heads that a plan is for. 0 stands for "known when it runs".
struct attention_shape {
  std::uint32_t query_heads = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t head_dim = 0;
  std::uint32_t head_dim_v = 0;  ///< 0: as head_dim

  friend constexpr bool operator==(const attention_shape&, const attention_shape&) = default;
};

/// What a plan depends on beside the batch.
struct plan_options {
  attention_shape shape{};
  variant_features features{.causal = true};
  /// Threads that will run the plan; long sequences are split to keep so many busy.
  unsigned threads = 1;
  /// Cut the work by each row's own lengths only.
  bool batch_invariant = false;
  /// The largest window that the plan will be run with; 0: not known, so work is planned for all tokens.
  std::uint32_t window = 0;
};

/// One sequence of the batch, as planned.
struct planned_sequence {
  std::uint32_t query_begin = 0;  ///< first query row of the step
  std::uint32_t queries = 0;
  std::uint32_t kv_length = 0;
  std::size_t first_block = 0;  ///< its table in attention_plan::blocks()

  /// Where query row `row` of the step stands in the sequence; negative when there are more queries than tokens.
  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr std::int64_t position(std::uint32_t row) const noexcept {
    return std::int64_t{kv_length} - queries + (row - query_begin);
  }
  friend constexpr bool operator==(const planned_sequence&, const planned_sequence&) = default;
};

/// Query rows of one sequence that go through its tokens together.
struct query_tile {
  std::uint32_t sequence = 0;
  std::uint32_t query_begin = 0;  ///< rows of the step
  std::uint32_t query_end = 0;
  std::uint32_t parts = 0;      ///< KV ranges; with more than one, each leaves a state and the last to end merges them
  std::uint64_t first_row = 0;  ///< of its states, counted in query rows; part p's are `query_end - query_begin` on

  friend constexpr bool operator==(const query_tile&, const query_tile&) = default;
};

/// The tokens that at least one row of the tile sees, masks apart. A window of 0 is one that is not known.
[[nodiscard]] constexpr visible_range visible_to_tile(variant_features features, std::uint32_t window,
                                                      const planned_sequence& sequence,
                                                      const query_tile& tile) noexcept {
  features.window = features.window && window != 0;
  const auto first = visible(features, window, sequence.position(tile.query_begin), sequence.kv_length);
  const auto last = visible(features, window, sequence.position(tile.query_end - 1), sequence.kv_length);
  return {first.begin, last.end};  // a first row before the sequence's first token sees nothing, from 0 on
}

/// The unit of work: the rows of one tile over the tokens [kv_begin, kv_end), for all heads.
struct work_unit {
  std::uint32_t tile = 0;
  std::uint32_t part = 0;
  std::uint32_t kv_begin = 0;
  std::uint32_t kv_end = 0;

  friend constexpr bool operator==(const work_unit&, const work_unit&) = default;
};

/// Memory that one run in flight works in: states of split rows, counters of arrivals, and each thread's own scratch.
struct attention_workspace {
  std::vector<float> states;            ///< outputs of all state rows and heads, then the lse of each
  std::vector<std::uint32_t> arrivals;  ///< per tile: parts that have ended. All 0 between runs
  std::uint32_t next = 0;               ///< unit to be taken. 0 between runs
  std::uint32_t left = 0;               ///< threads that have left the run. 0 between runs
  std::vector<float> scratch;           ///< threads * scratch_floats, and room to align
  std::size_t scratch_floats = 0;       ///< of one thread
  unsigned threads = 0;

  /// A copy of a plan works in memory of its own.
  attention_workspace() = default;
  attention_workspace(const attention_workspace& o) : attention_workspace() {
    arrivals.assign(o.arrivals.size(), 0);
    states.resize(o.states.size());
    scratch.resize(o.scratch.size());
    scratch_floats = o.scratch_floats;
    threads = o.threads;
  }
  attention_workspace(attention_workspace&&) noexcept = default;
  attention_workspace& operator=(const attention_workspace& o) {
    attention_workspace copy(o);
    return *this = std::move(copy);
  }
  attention_workspace& operator=(attention_workspace&&) noexcept = default;
};

class attention_plan;

namespace detail {

// What it does is a template only so that it is compiled where attention is planned, and not for everyone who includes
// the umbrella.
struct planner {
  /// The contract stands at plan_attention. Precondition: the batch was checked.
  template <class>
  static void lay_out(attention_plan& plan, const batch_view& batch, const plan_options& options);
};

}  // namespace detail

/// The work of one step's attention: which query rows meet which tokens, and through which blocks. A value that owns
/// its arrays, so the batch it came from may go away and several plans may live at once. One plan serves every layer
/// of its layer group, one run at a time; copy the plan to run it twice at the same time. A plan that was moved from
/// may only be destroyed or assigned to.
class attention_plan {
 public:
  // Spans into the plan; a plan that is about to go away gives none.
  [[nodiscard]] std::span<const work_unit> units() const& noexcept { return detail::span_of(units_); }
  std::span<const work_unit> units() const&& = delete;
  [[nodiscard]] std::span<const query_tile> tiles() const& noexcept { return detail::span_of(tiles_); }
  std::span<const query_tile> tiles() const&& = delete;
  [[nodiscard]] std::span<const planned_sequence> sequences() const& noexcept { return detail::span_of(sequences_); }
  std::span<const planned_sequence> sequences() const&& = delete;
  /// The block tables, one sequence after another; see planned_sequence::first_block.
  [[nodiscard]] std::span<const block_id> blocks() const& noexcept { return detail::span_of(blocks_); }
  std::span<const block_id> blocks() const&& = delete;

  [[nodiscard]] const plan_options& options() const noexcept { return options_; }
  [[nodiscard]] std::uint32_t block_size() const noexcept { return block_size_; }
  /// Query rows of the step.
  [[nodiscard]] std::uint32_t rows() const noexcept { return rows_; }
  /// The largest kv length of a sequence that has queries.
  [[nodiscard]] std::uint32_t longest() const noexcept { return longest_; }
  /// Of the batch: newest tokens that its tables hold.
  [[nodiscard]] std::uint32_t window() const noexcept { return window_; }
  /// Ids that a view needs at least: one more than the highest in any table.
  [[nodiscard]] std::uint32_t blocks_needed() const noexcept { return blocks_needed_; }
  /// The same of the tail pool; 0 where no entry has tail_bit set.
  [[nodiscard]] std::uint32_t tail_blocks_needed() const noexcept { return tail_blocks_needed_; }
  /// Query rows that leave a state, counted once for each part.
  [[nodiscard]] std::uint64_t state_rows() const noexcept { return state_rows_; }
  /// The longest tile, in query rows.
  [[nodiscard]] std::uint32_t tile_rows() const noexcept { return tile_rows_; }

  /// For whoever runs the plan.
  [[nodiscard]] attention_workspace& workspace() const noexcept { return workspace_; }

 private:
  friend struct detail::planner;

  plan_options options_;
  std::uint32_t block_size_ = 0;
  std::uint32_t rows_ = 0;
  std::uint32_t longest_ = 0;
  std::uint32_t window_ = 0;
  std::uint32_t blocks_needed_ = 0;
  std::uint32_t tail_blocks_needed_ = 0;
  std::uint64_t state_rows_ = 0;
  std::uint32_t tile_rows_ = 0;
  std::vector<planned_sequence> sequences_;
  std::vector<query_tile> tiles_;
  std::vector<work_unit> made_;  // the units in the order of their tiles, of use while they are put into another
  std::vector<work_unit> units_;
  std::vector<block_id> blocks_;
  mutable attention_workspace workspace_;
};

namespace detail {

/// Kernels work in chunks of so many tokens, counted from the sequence's first; ranges are cut between chunks.
inline constexpr std::uint32_t kv_chunk = 64;
/// Rows (query tokens times group) that a tile has at most, where one query token has fewer.
inline constexpr std::uint32_t tile_target = 96;
/// A range is not cut shorter than this.
inline constexpr std::uint32_t shortest_part = 512;
/// Under batch_invariant, ranges are cut at every multiple of this.
inline constexpr std::uint32_t invariant_part = 2048;
/// Units that each thread gets to choose from, so that a slow thread takes fewer.
inline constexpr std::uint32_t units_per_thread = 4;

// <algorithm> would take a tenth of what the umbrella takes to compile.
template <class T>
[[nodiscard]] constexpr T lower(T a, T b) noexcept {
  return b < a ? b : a;
}
template <class T>
[[nodiscard]] constexpr T higher(T a, T b) noexcept {
  return a < b ? b : a;
}

/// Classes of numbers: up to 15 each its own, then eight for each power of two.
inline constexpr std::size_t cost_classes = 60 * 8 + 16;
[[nodiscard]] constexpr std::size_t cost_class(std::uint64_t cost) noexcept {
  const unsigned shift = cost < 16 ? 0 : static_cast<unsigned>(std::bit_width(cost)) - 4;
  return static_cast<std::size_t>(8 * shift + (cost >> shift));
}
static_assert(cost_class(15) == 15 && cost_class(16) == 16 && cost_class(~std::uint64_t{0}) == cost_classes - 1);

template <class>
KVCACHE_NOINLINE void check_batch(const batch_view& batch) {
  const auto refuse = [](const std::string& text) { raise<invalid_argument>("plan: " + text); };
  const std::uint32_t rows = batch.rows();
  if (rows == 0 && batch.tokens() != 0)
    refuse("query_offsets end with " + std::to_string(batch.tokens()) +
           " rows, but there are no kv_lengths; give one for each sequence");
  if (rows == 0) return;
  if (batch.block_size == 0) refuse("block_size is 0, at least 1 needed; set batch_view::block_size");
  if (batch.query_offsets.size() != std::size_t{rows} + 1)
    refuse(std::to_string(batch.query_offsets.size()) + " query_offsets given for " + std::to_string(rows) +
           " sequences, " + std::to_string(std::size_t{rows} + 1) + " needed; add the end of the last sequence");
  if (batch.tables.rows() < rows)
    refuse(std::to_string(batch.tables.rows()) + " block tables given, " + std::to_string(rows) +
           " needed; give one for each sequence");
  if (batch.query_offsets[0] != 0)
    refuse("query_offsets begin with " + std::to_string(batch.query_offsets[0]) + ", they have to begin with 0");
  for (std::uint32_t r = 0; r < rows; ++r) {
    if (batch.query_offsets[r + 1] < batch.query_offsets[r])
      refuse("query_offsets fall from " + std::to_string(batch.query_offsets[r]) + " to " +
             std::to_string(batch.query_offsets[r + 1]) + " at sequence " + std::to_string(r) +
             "; they have to rise or stay");
    const std::uint64_t covered = std::uint64_t{batch.tables.row(r).size()} * batch.block_size;
    if (batch.kv_lengths[r] > covered)
      refuse("sequence " + std::to_string(r) + " has " + std::to_string(batch.kv_lengths[r]) +
             " tokens, its block table covers " + std::to_string(covered) + "; reserve blocks before planning");
  }
}

template <class>
KVCACHE_NOINLINE void planner::lay_out(attention_plan& plan, const batch_view& batch, const plan_options& options) {
  const attention_shape& shape = options.shape;
  if (shape.kv_heads != 0 && shape.query_heads % shape.kv_heads != 0)
    detail::raise<invalid_argument>("plan: " + std::to_string(shape.query_heads) + " query heads are no multiple of " +
                                    std::to_string(shape.kv_heads) + " kv heads; give every kv head the same group");
  const std::uint32_t group = shape.kv_heads == 0 || shape.query_heads == 0 ? 0 : shape.query_heads / shape.kv_heads;
  const std::uint32_t tile_queries = group == 0 ? 16 : (group >= detail::tile_target ? 1 : detail::tile_target / group);
  const unsigned threads = options.threads == 0 ? 1 : options.threads;

  plan.options_ = options;
  plan.block_size_ = batch.block_size;
  plan.rows_ = batch.tokens();
  plan.longest_ = 0;
  plan.window_ = batch.window;
  plan.state_rows_ = 0;
  plan.tile_rows_ = 0;
  plan.sequences_.clear();
  plan.tiles_.clear();
  plan.made_.clear();
  plan.blocks_.clear();

  // Sequences and tables.
  block_id highest = 0;
  block_id highest_tail = 0;
  bool tails = false;
  for (std::uint32_t r = 0; r < batch.rows(); ++r) {
    planned_sequence s;
    s.query_begin = batch.query_offsets[r];
    s.queries = batch.query_offsets[r + 1] - batch.query_offsets[r];
    s.kv_length = batch.kv_lengths[r];
    s.first_block = plan.blocks_.size();
    plan.sequences_.push_back(s);
    if (s.queries == 0) continue;
    plan.longest_ = higher(plan.longest_, s.kv_length);
    const std::size_t used = (std::size_t{s.kv_length} + batch.block_size - 1) / batch.block_size;
    const auto table = batch.tables.row(r).first(used);
    plan.blocks_.insert(plan.blocks_.end(), table.begin(), table.end());
    for (const block_id entry : table) {
      const block_id block = entry & ~tail_bit;
      block_id& highest_so_far = entry != block ? highest_tail : highest;
      if (block > highest_so_far) highest_so_far = block;
      tails = tails || entry != block;
    }
  }
  plan.blocks_needed_ = plan.blocks_.empty() ? 0 : highest + 1;
  plan.tail_blocks_needed_ = tails ? highest_tail + 1 : 0;

  // Tiles, and what each costs: going through a token costs something for its bytes and something for every row.
  const auto range_of = [&](const query_tile& t) {
    return visible_to_tile(options.features, options.window, plan.sequences_[t.sequence], t);
  };
  const auto cost = [&](const query_tile& t, std::uint64_t tokens) {
    return tokens * (8 + std::uint64_t{t.query_end - t.query_begin} * (group == 0 ? 1 : group));
  };
  std::uint64_t total = 0;
  for (std::uint32_t r = 0; r < plan.sequences_.size(); ++r) {
    const planned_sequence& s = plan.sequences_[r];
    for (std::uint64_t q = 0; q < s.queries; q += tile_queries) {
      query_tile t;
      t.sequence = r;
      t.query_begin = s.query_begin + static_cast<std::uint32_t>(q);
      t.query_end = s.query_begin + static_cast<std::uint32_t>(lower<std::uint64_t>(s.queries, q + tile_queries));
      plan.tile_rows_ = higher(plan.tile_rows_, t.query_end - t.query_begin);
      plan.tiles_.push_back(t);
      const visible_range range = range_of(t);
      total += cost(t, range.end - range.begin);
    }
  }

  // Units.
  const std::uint64_t share = total / (std::uint64_t{threads} * detail::units_per_thread) + 1;
  for (std::uint32_t i = 0; i < plan.tiles_.size(); ++i) {
    query_tile& t = plan.tiles_[i];
    const visible_range range = range_of(t);
    const std::uint64_t tokens = range.end - range.begin;
    std::uint64_t step = detail::invariant_part;
    if (!options.batch_invariant) {
      const std::uint64_t wanted = threads == 1 ? 1 : (cost(t, tokens) + share - 1) / share;
      const std::uint64_t most = higher<std::uint64_t>(1, tokens / detail::shortest_part);
      const std::uint64_t parts = higher<std::uint64_t>(1, lower(wanted, most));
      const std::uint64_t even = (tokens + parts - 1) / parts;
      step = higher<std::uint64_t>(1, (even + detail::kv_chunk - 1) / detail::kv_chunk) * detail::kv_chunk;
    }
    // Cut between chunks, counted from the sequence's first token; an empty range is one unit that writes empty states.
    std::uint64_t begin = range.begin;
    do {
      const std::uint64_t from =
          options.batch_invariant ? begin / step * step : begin / detail::kv_chunk * detail::kv_chunk;
      const std::uint64_t end = lower<std::uint64_t>(range.end, from + step);
      plan.made_.push_back({i, t.parts, static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end)});
      ++t.parts;
      begin = end;
    } while (begin < range.end);
    if (t.parts > 1) {
      t.first_row = plan.state_rows_;
      plan.state_rows_ += std::uint64_t{t.parts} * (t.query_end - t.query_begin);
    }
  }

  // Expensive units first, so that the threads end together: by classes of cost, an eighth apart. The order changes no
  // result.
  const auto class_of = [&](const work_unit& u) {
    return cost_class(cost(plan.tiles_[u.tile], u.kv_end - u.kv_begin));
  };
  std::array<std::uint32_t, cost_classes> next{};
  for (const work_unit& u : plan.made_) ++next[class_of(u)];
  std::uint32_t before = 0;
  for (std::size_t c = cost_classes; c-- > 0;) before += std::exchange(next[c], before);
  plan.units_.resize(plan.made_.size());
  for (const work_unit& u : plan.made_) plan.units_[next[class_of(u)]++] = u;
  plan.workspace_.arrivals.assign(plan.tiles_.size(), 0);
  plan.workspace_.next = 0;
  plan.workspace_.left = 0;
  plan.workspace_.threads = 0;
}

}  // namespace detail

/// Plans the step's attention: a pure function of its arguments, so equal arguments give equal plans. `reuse` is a plan
/// that has been run to its end; its memory is used again and its content is not. Raises invalid_argument, naming value
/// and limit, where a table does not cover its sequence or the batch contradicts itself. More queries than tokens are
/// legal: with a causal variant the first rows see nothing. O(blocks + rows + units). Any number of threads
/// may plan at once.
template <class Once = void>
attention_plan plan_attention(const batch_view& batch, const plan_options& options, attention_plan reuse = {}) {
  detail::check_batch<Once>(batch);
  detail::planner::lay_out<Once>(reuse, batch, options);
  return reuse;
}

}  // namespace kvcache
