// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/block_keeper.hpp>
#include <kvcache/blocks/block_table.hpp>
#include <kvcache/blocks/event_log.hpp>
#include <kvcache/blocks/requests.hpp>
#include <kvcache/blocks/sequence_keeper.hpp>
#include <kvcache/blocks/step.hpp>
#include <kvcache/blocks/step_keeper.hpp>
#include <kvcache/concepts.hpp>
#include <kvcache/detail/span_of.hpp>
#include <kvcache/error.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/fwd.hpp>
#include <kvcache/transfer.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

namespace kvcache {

/// Says who holds which block of a pool: sequences and their block tables, copy-on-write, an index of cached
/// prefixes, steps. It moves no bytes and knows neither dtype nor head count; what has to be copied it hands out as
/// `block_copy`.
///
/// A sequence is opened, computes tokens in steps (begin, accept, retire), has its tokens committed once their ids
/// are known, and is closed. Its full committed blocks stay cached when it closes, until their room is needed.
///
/// Every call that returns `result` either does all of what it says or changes nothing: no count, order or
/// statistic. Equal calls on two instances give equal ids and order. Nothing is allocated per call once the arrays
/// have grown to what the load needs; if bookkeeping memory itself runs out, the program terminates.
///
/// Thread safety: none, calls of const members included. Use one thread at a time.
template <class Eviction>
class block_manager {
 public:
  using eviction_type = std::conditional_t<eviction_policy<Eviction>, Eviction, lru>;

  /// As `tokens` of fork: all of them.
  static constexpr std::uint32_t all_tokens = (std::numeric_limits<std::uint32_t>::max)();

  /// Raises invalid_argument where blocks is 0 or more than max_blocks, a block size is 0, or hash_bits more than 64.
  /// O(blocks).
  explicit block_manager(const block_manager_options& options)
      : blocks_(options), sequences_(blocks_), steps_(blocks_, sequences_) {}
  block_manager(const block_manager&) = delete;
  block_manager& operator=(const block_manager&) = delete;
  ~block_manager() = default;

  // Sequences ---------------------------------------------------------------------------------------------------

  /// Opens a sequence. Finds the longest prefix of its content that is cached in every layer group under equal keys
  /// (at most content.size() - 1 tokens, so that there is a token to compute), references it whole, and then
  /// allocates what is missing to hold `reserve` tokens. The sequence starts with reused_tokens as its length, these
  /// committed.
  /// empty_content: no content. exceeds_pool: content or reserve never fits. out_of_blocks: not now. bad_range,
  /// unsupported: as retain.
  /// O(content + blocks + keys^2).
  result<opened> open(const open_request& request) noexcept { return sequences_.open(request, statistics_); }

  /// What `open` would do now; open succeeds exactly where fits() says so, the
  /// content is not empty and the ranges are good. Changes and
  /// touches nothing. O(content + blocks + keys^2).
  [[nodiscard]] admission predict(const open_request& request) const noexcept { return sequences_.predict(request); }

  /// Tokens of the longest cached prefix of `content`, its last token not excepted. Changes and touches nothing.
  /// O(content + keys^2).
  [[nodiscard]] prefix_match probe(content_view content, std::span<const extra_key> keys = {}) const noexcept {
    return sequences_.probe(content, keys);
  }

  /// A new sequence that shares the first `tokens` tokens of `sequence`. A block that both hold is copied when one
  /// of them writes into it.
  /// stale_id. beyond_length. step_order: the sequence is in a step that is not accepted yet. behind_window: a window
  /// has given up blocks that the next query would see, and they are not cached any more. O(blocks shared); where those
  /// are not cached any more, O(blocks of the sequence).
  result<sequence_id> fork(sequence_id sequence, std::uint32_t tokens = all_tokens) noexcept {
    const auto all = length(sequence);
    if (!all) return all.error();
    return sequences_.fork(sequence, tokens == all_tokens ? *all : tokens);
  }

  /// Cuts a sequence to its first `tokens` tokens and gives back all blocks beyond them, reserved ones included.
  /// stale_id. beyond_length. step_order: the sequence is in a step that is not accepted yet. behind_window: as fork.
  /// O(blocks given back, and taken back).
  result<void> truncate(sequence_id sequence, std::uint32_t tokens) noexcept {
    return sequences_.truncate(sequence, tokens);
  }

  /// Ends a sequence at any time. Its blocks go back, its tail first: to the free list, or, where they are cached,
  /// to the eviction order. Those that a step in flight may touch are held until that step retires.
  /// stale_id. O(blocks).
  result<void> close(sequence_id sequence) noexcept { return sequences_.close(sequence); }

  /// Says what the next accepted tokens of a sequence are, continuing where the last commit ended. Each block that
  /// becomes full can from now on be found by its content. Where an equal block is cached already, the sequence
  /// takes that one and gives its own back.
  /// stale_id. beyond_length: more tokens than accepted. Precondition: sequences that share a block commit the same
  /// content for it. O(tokens).
  result<void> commit(sequence_id sequence, content_view tokens) noexcept {
    return sequences_.commit(sequence, tokens);
  }

  // Retention ---------------------------------------------------------------------------------------------------

  /// The caller's time; its unit is the caller's, and an earlier time than before changes nothing. Priorities, pins and
  /// times to live that end by then do: what has not been used for its time to live is free. O(1), O(log n) for each
  /// that ends, and O(blocks) of the pins.
  void advance(std::uint64_t now) noexcept {
    if (!blocks_.set_time(now)) return;
    sequences_.close_expired_pins(now);
    blocks_.forget_expired();
  }

  /// Says anew what the content of a sequence is worth: what it holds and what is to come. Ranges given before no
  /// longer count for it, but a block keeps the longest time to live that it was given. stale_id. bad_range: ranges out
  /// of order, overlapping, reversed or empty, or a priority over 100. unsupported: a priority where the eviction
  /// policy keeps none. O(blocks * ranges).
  result<void> retain(sequence_id sequence, std::span<const retention_range> ranges) noexcept {
    return sequences_.retain(sequence, ranges);
  }

  /// Whether `open` and `retain` would take these ranges. bad_range, unsupported. O(ranges).
  [[nodiscard]] static result<void> check_retention(std::span<const retention_range> ranges) noexcept {
    return detail::check_retention(ranges, told_of_priorities<eviction_type>);
  }

  /// Holds the longest cached prefix of `content` in whole blocks, whatever is evicted, until `advance` comes to
  /// `expires` or the sequence is closed. It counts as a sequence, of which others can be forked, and no request.
  /// O(content + keys^2).
  pinned pin(content_view content, std::span<const extra_key> keys = {}, std::uint64_t expires = never) noexcept {
    return sequences_.pin(content, keys, expires);
  }

  /// Forgets all that is cached, say when the weights have changed: every block is free afterwards. Where old and new
  /// weights serve side by side, key_kind::generation keeps their blocks apart instead.
  /// in_use: a sequence holds a block, or a step in flight may touch one. O(cached blocks).
  result<void> reset() noexcept {
    const block_counts c = counts();
    if (c.referenced + c.held != 0) return failure{errc::in_use, std::uint64_t{c.referenced} + c.held, 0};
    blocks_.forget_all();
    return {};
  }

  // Steps -------------------------------------------------------------------------------------------------------

  /// Makes room for the next `tokens` tokens of every want, in their order, assuming that earlier steps are accepted
  /// in full; a tail block that others hold, or that a step in flight of others may touch, is replaced by a copy.
  /// stale_id. duplicate_id: a sequence named twice. beyond_length: a length that 32 bits do not hold. exceeds_pool:
  /// a sequence that the pool can never hold. out_of_blocks, out_of_tail_blocks: not now.
  /// O(wants + blocks in their tables + tokens).
  result<step> begin(std::span<const want> wants) noexcept {
    const auto begun = steps_.begin(wants);
    if (!begun) return begun.error();
    return step(steps_, **begun);
  }

  /// Blocks that leave `available` when `begin` is called now; begin succeeds exactly where they are available.
  /// Fails as begin does, but for out_of_blocks. O(wants * groups).
  [[nodiscard]] result<std::uint64_t> blocks_needed(std::span<const want> wants) const noexcept {
    return steps_.blocks_needed(wants);
  }

  /// Blocks of the tail pool that accepted steps have filled, in the order in which they are to be quantised: before
  /// the next step's work begins and before anything else reads them. Valid until a step is accepted. O(1).
  [[nodiscard]] std::span<const block_seal> seals() const noexcept { return blocks_.tails.pending(); }
  /// All of them are carried out. Their places in the tail pool are free when the steps are over that may use them.
  /// O(seals).
  void sealed() noexcept { blocks_.tails.sealed(); }

  /// Ends a step whose work is done, and all earlier ones: blocks released meanwhile become free or evictable. The
  /// handle is empty afterwards.
  /// stale_id. step_order: this step or an earlier one is not accepted yet. O(blocks held).
  result<void> retire(step& done) noexcept {
    if (done.owner_ != &steps_ || !done.open()) return failure{errc::stale_id, done.stamp_, blocks_.steps.stamps()};
    auto ended = steps_.retire(*done.record_);
    if (ended) done.record_ = nullptr;
    return ended;
  }

  /// Ends all accepted steps up to the first one that is not; for engines that wait for all work at once.
  /// O(blocks held).
  void retire_accepted() noexcept { steps_.retire_accepted(); }

  // What is there -----------------------------------------------------------------------------------------------

  /// Whether the id names a sequence that is open.
  [[nodiscard]] bool contains(sequence_id sequence) const noexcept { return sequences_.find(sequence) != nullptr; }
  /// Accepted tokens. stale_id. O(1).
  [[nodiscard]] result<std::uint32_t> length(sequence_id sequence) const noexcept {
    const auto* s = sequences_.find(sequence);
    if (s == nullptr) return sequences_.stale(sequence);
    return s->length;
  }
  /// Tokens whose content was committed. stale_id. O(1).
  [[nodiscard]] result<std::uint32_t> committed(sequence_id sequence) const noexcept {
    const auto* s = sequences_.find(sequence);
    if (s == nullptr) return sequences_.stale(sequence);
    return s->committed;
  }
  /// All blocks that a sequence holds, reserved ones included, in the order of its tokens; the null block for those
  /// that a window has left behind. Valid until the next call that changes the sequence or opens one. stale_id. O(1).
  [[nodiscard]] result<std::span<const block_id>> table(sequence_id sequence,
                                                        std::uint32_t layer_group = 0) const noexcept {
    KVCACHE_ASSERT(layer_group < layer_group_count(), "no such layer group");
    const auto* s = sequences_.find(sequence);
    if (s == nullptr) return sequences_.stale(sequence);
    return detail::span_of(s->held[layer_group].table);
  }
  /// Writes the slots of tokens [first, first + out.size()), no_slot for those that a window has left behind.
  /// stale_id. beyond_length: no block is there for them.
  /// O(out.size()).
  result<void> slots(sequence_id sequence, std::uint32_t first, std::span<slot_id> out,
                     std::uint32_t layer_group = 0) const noexcept {
    const auto blocks = table(sequence, layer_group);
    if (!blocks) return blocks.error();
    const std::uint64_t end = std::uint64_t{first} + out.size();
    const std::uint64_t there = std::uint64_t{blocks->size()} * block_size(layer_group);
    if (end > there) return failure{errc::beyond_length, end, there};
    const std::uint32_t size = block_size(layer_group);
    for (std::size_t done = 0; done < out.size();) {
      const std::uint32_t token = first + static_cast<std::uint32_t>(done);
      const std::size_t rest = size - token % size;
      const std::size_t count = out.size() - done < rest ? out.size() - done : rest;
      const block_id entry = table_entry((*blocks)[token / size]);
      map_slots({&entry, 1}, size, token % size, out.subspan(done, count));
      done += count;
    }
    return {};
  }
  /// What stands for a block in the tables of a step that begins now: the block, or its place in the tail pool with
  /// tail_bit set. Precondition: block <= capacity(). O(1).
  [[nodiscard]] block_id table_entry(block_id block) const noexcept { return blocks_.tails.entry(block); }

  /// What changed of what is cached: stored, removed, cleared. See block_manager_options::events.
  [[nodiscard]] const event_log& events() const noexcept { return blocks_.events(); }
  /// Calls `visit(const cache_event&)` with every cached block as if it were stored now, none before the one it
  /// follows: a snapshot onto which later events can be replayed. The number of the last event that it includes.
  /// O(cached blocks), allocates nothing.
  template <class Visit>
  std::uint64_t visit_cached(Visit&& visit) const {
    return blocks_.visit_cached(visit);
  }
  /// The eviction policy, for what it can tell or learn beyond its order. Do not call what the manager calls.
  [[nodiscard]] eviction_type& policy() noexcept { return blocks_.policy(); }
  [[nodiscard]] const eviction_type& policy() const noexcept { return blocks_.policy(); }

  /// Blocks in each state. O(1).
  [[nodiscard]] block_counts counts() const noexcept { return blocks_.pool.counts(); }
  /// Blocks that tokens can use. O(1).
  [[nodiscard]] std::uint32_t capacity() const noexcept { return blocks_.pool.capacity(); }
  /// Precondition, as for ref_count and cached: 1 <= block <= capacity().
  [[nodiscard]] block_state state(block_id block) const noexcept { return blocks_.pool.state(block); }
  /// Sequences that hold the block.
  [[nodiscard]] std::uint32_t ref_count(block_id block) const noexcept { return blocks_.pool.ref_count(block); }
  /// Whether the block can be found by its content.
  [[nodiscard]] bool cached(block_id block) const noexcept { return blocks_.index.contains(block); }
  /// Layer groups of the pool. O(1), as all below.
  [[nodiscard]] std::uint32_t layer_group_count() const noexcept { return blocks_.groups.size(); }
  /// Tokens in a block of one layer group.
  [[nodiscard]] std::uint32_t block_size(std::uint32_t layer_group = 0) const noexcept {
    return blocks_.groups.block_size(layer_group);
  }
  /// Whether a query sees only the newest tokens in one layer group.
  [[nodiscard]] bool windowed(std::uint32_t layer_group = 0) const noexcept {
    return blocks_.groups.windowed(layer_group);
  }
  /// Blocks of the tail pool of one layer group; 0: its blocks are not sealed.
  [[nodiscard]] std::uint32_t tail_blocks(std::uint32_t layer_group = 0) const noexcept {
    return blocks_.groups.tail_blocks(layer_group);
  }
  /// Those that a step can draw on.
  [[nodiscard]] std::uint32_t tail_blocks_available(std::uint32_t layer_group = 0) const noexcept {
    return tail_blocks(layer_group) == 0 ? 0 : blocks_.tails.available(layer_group);
  }
  /// First blocks of each sequence that stay in the tail pool.
  [[nodiscard]] std::uint64_t wide_blocks(std::uint32_t layer_group = 0) const noexcept {
    return blocks_.groups.wide_blocks(layer_group);
  }
  /// As block_manager_options::partial_reuse.
  [[nodiscard]] bool partial_reuse() const noexcept { return blocks_.partial_reuse; }
  /// Steps begun and neither dropped nor retired.
  [[nodiscard]] std::uint32_t steps_in_flight() const noexcept {
    return static_cast<std::uint32_t>(blocks_.steps.open().size());
  }
  /// Running sums since the pool was built.
  [[nodiscard]] block_statistics statistics() const noexcept {
    block_statistics s = statistics_;
    s.evicted_blocks = blocks_.evicted;
    return s;
  }

 private:
  detail::block_keeper<eviction_type> blocks_;
  detail::sequence_keeper<eviction_type> sequences_;
  detail::step_keeper<eviction_type> steps_;
  block_statistics statistics_;

  // Last in the class, since some compilers leave out what follows a mandate that fails.
  static_assert(
      eviction_policy<Eviction>,
      "kvcache::block_manager<Eviction> needs an eviction policy: constructible from block_id, nothrow move "
      "constructible, static const char* name, void insert(block_id) noexcept, void erase(block_id) noexcept, "
      "block_id victim() const noexcept; of the policies here, it needs the header, kvcache/eviction/*.hpp");
};

}  // namespace kvcache
