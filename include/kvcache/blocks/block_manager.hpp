// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/block_pool.hpp>
#include <kvcache/blocks/block_table.hpp>
#include <kvcache/blocks/block_use.hpp>
#include <kvcache/blocks/layer_groups.hpp>
#include <kvcache/blocks/prefix_index.hpp>
#include <kvcache/blocks/requests.hpp>
#include <kvcache/blocks/step.hpp>
#include <kvcache/concepts.hpp>
#include <kvcache/error.hpp>
#include <kvcache/eviction/lru.hpp>
#include <kvcache/fwd.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <type_traits>
#include <vector>

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
class block_manager : private detail::step_owner {
  static_assert(
      eviction_policy<Eviction>,
      "kvcache::block_manager<Eviction> needs an eviction policy: constructible from block_id, nothrow move "
      "constructible, static const char* name, void insert(block_id) noexcept, void erase(block_id) noexcept, "
      "block_id victim() const noexcept");

 public:
  using eviction_type = std::conditional_t<eviction_policy<Eviction>, Eviction, lru>;

  /// As `tokens` of fork: all of them.
  static constexpr std::uint32_t all_tokens = std::numeric_limits<std::uint32_t>::max();

  /// Raises invalid_argument where blocks is 0 or more than max_blocks, a block size is 0, or hash_bits more than 64.
  /// O(blocks).
  explicit block_manager(const block_manager_options& options)
      : groups_(options.layer_groups, options.block_size),
        pool_(options.blocks),
        index_(options.blocks, groups_, options.hash_bits),
        policy_(options.blocks),
        uses_(std::size_t{options.blocks} + 1),
        sequences_(groups_.size()),
        chains_(groups_.size()) {}
  block_manager(const block_manager&) = delete;
  block_manager& operator=(const block_manager&) = delete;
  ~block_manager() = default;

  // Sequences ---------------------------------------------------------------------------------------------------

  /// Opens a sequence. Finds the longest prefix of its content that is cached in every layer group under equal keys
  /// (at most content.size() - 1 tokens, so that there is a token to compute), references it whole, and then
  /// allocates what is missing to hold `reserve` tokens. The sequence starts with reused_tokens as its length, these
  /// committed.
  /// empty_content: no content. exceeds_pool: content or reserve never fits. out_of_blocks: not now.
  /// O(content + blocks + keys).
  result<opened> open(const open_request& request) noexcept;

  /// What `open` would do now; open succeeds exactly where fits() says so and the content is not empty. Changes and
  /// touches nothing. O(content + blocks + keys).
  [[nodiscard]] admission predict(const open_request& request) const noexcept;

  /// Tokens of the longest cached prefix of `content`, its last token not excepted. Changes and touches nothing.
  /// O(content).
  [[nodiscard]] prefix_match probe(content_view content, std::span<const extra_key> keys = {}) const noexcept;

  /// A new sequence that shares the first `tokens` tokens of `sequence`. A block that both hold is copied when one
  /// of them writes into it.
  /// stale_id. beyond_length. step_order: the sequence is in a step that is not accepted yet. O(blocks shared).
  result<sequence_id> fork(sequence_id sequence, std::uint32_t tokens = all_tokens) noexcept;

  /// Cuts a sequence to its first `tokens` tokens and gives back all blocks beyond them, reserved ones included.
  /// stale_id. beyond_length. step_order: the sequence is in a step that is not accepted yet. O(blocks given back).
  result<void> truncate(sequence_id sequence, std::uint32_t tokens) noexcept;

  /// Ends a sequence at any time. Its blocks go back, its tail first: to the free list, or, where they are cached,
  /// to the eviction order. Those that a step in flight may touch are held until that step retires.
  /// stale_id. O(blocks).
  result<void> close(sequence_id sequence) noexcept;

  /// Says what the next accepted tokens of a sequence are, continuing where the last commit ended. Each block that
  /// becomes full can from now on be found by its content. Where an equal block is cached already, the sequence
  /// takes that one and gives its own back.
  /// stale_id. beyond_length: more tokens than accepted. Precondition: sequences that share a block commit the same
  /// content for it. O(tokens).
  result<void> commit(sequence_id sequence, content_view tokens) noexcept;

  // Steps -------------------------------------------------------------------------------------------------------

  /// Makes room for the next `tokens` tokens of every want, in their order, assuming that earlier steps are accepted
  /// in full; a tail block that others hold, or that a step in flight of others may touch, is replaced by a copy.
  /// stale_id. duplicate_id: a sequence named twice. beyond_length: a length that 32 bits do not hold. exceeds_pool:
  /// a sequence that the pool can never hold. out_of_blocks: not now.
  /// O(wants + blocks in their tables + tokens).
  result<step> begin(std::span<const want> wants) noexcept;

  /// Blocks that leave `available` when `begin` is called now; begin succeeds exactly where they are available.
  /// Fails as begin does, but for out_of_blocks. O(wants * groups).
  [[nodiscard]] result<std::uint64_t> blocks_needed(std::span<const want> wants) const noexcept;

  /// Ends a step whose work is done, and all earlier ones: blocks released meanwhile become free or evictable. The
  /// handle is empty afterwards.
  /// stale_id. step_order: this step or an earlier one is not accepted yet. O(blocks held).
  result<void> retire(step& done) noexcept;

  /// Ends all accepted steps up to the first one that is not; for engines that wait for all work at once.
  /// O(blocks held).
  void retire_accepted() noexcept;

  // What is there -----------------------------------------------------------------------------------------------

  /// Whether the id names a sequence that is open.
  [[nodiscard]] bool contains(sequence_id sequence) const noexcept { return sequences_.find(sequence) != nullptr; }
  /// Accepted tokens. stale_id.
  [[nodiscard]] result<std::uint32_t> length(sequence_id sequence) const noexcept;
  /// Tokens whose content was committed. stale_id.
  [[nodiscard]] result<std::uint32_t> committed(sequence_id sequence) const noexcept;
  /// All blocks that a sequence holds, reserved ones included, in the order of its tokens. Valid until the next call
  /// that changes the sequence or opens one. stale_id.
  [[nodiscard]] result<std::span<const block_id>> table(sequence_id sequence,
                                                        std::uint32_t layer_group = 0) const noexcept;
  /// Writes the slots of tokens [first, first + out.size()). stale_id. beyond_length: no block is there for them.
  result<void> slots(sequence_id sequence, std::uint32_t first, std::span<slot_id> out,
                     std::uint32_t layer_group = 0) const noexcept;

  /// Blocks in each state. O(1).
  [[nodiscard]] block_counts counts() const noexcept { return pool_.counts(); }
  /// Blocks that tokens can use.
  [[nodiscard]] std::uint32_t capacity() const noexcept { return pool_.capacity(); }
  /// Precondition, as for ref_count and cached: 1 <= block <= capacity().
  [[nodiscard]] block_state state(block_id block) const noexcept { return pool_.state(block); }
  /// Sequences that hold the block.
  [[nodiscard]] std::uint32_t ref_count(block_id block) const noexcept { return pool_.ref_count(block); }
  /// Whether the block can be found by its content.
  [[nodiscard]] bool cached(block_id block) const noexcept { return index_.contains(block); }
  [[nodiscard]] std::uint32_t groups() const noexcept { return groups_.size(); }
  [[nodiscard]] std::uint32_t block_size(std::uint32_t layer_group = 0) const noexcept {
    return groups_.block_size(layer_group);
  }
  /// Steps begun and neither dropped nor retired.
  [[nodiscard]] std::uint32_t steps_in_flight() const noexcept {
    return static_cast<std::uint32_t>(open_steps_.size());
  }
  [[nodiscard]] const block_statistics& statistics() const noexcept { return statistics_; }

 private:
  using record = detail::step_record;
  using sequence_state = detail::sequence_state;

  // sequences
  std::uint32_t look_up(prefix_index::key_set keys, content_view content, std::size_t limit) const noexcept;
  void carry_tail(const sequence_state& from, sequence_state& to, std::uint32_t tokens) noexcept;
  void commit_block(sequence_state& s, std::uint32_t group, content_view content) noexcept;
  [[nodiscard]] std::uint32_t tail_start(std::uint32_t tokens) const noexcept;
  [[nodiscard]] failure stale(sequence_id sequence) const noexcept;
  [[nodiscard]] failure in_open_step(const sequence_state& s) const noexcept;

  // blocks
  block_id allocate() noexcept;
  void add_holder(block_id block) noexcept;
  void let_go(block_id block, std::uint64_t step_number) noexcept;
  void settle(block_id block) noexcept;
  void forget(block_id block) noexcept;
  void forget_subtree(block_id block) noexcept;
  void flush_unkeyed() noexcept;
  void release_held(detail::held_list& held) noexcept;
  template <class Keep>
  void release_beyond(sequence_state& s, std::uint64_t step_number, Keep&& keep) noexcept;

  // steps
  [[nodiscard]] bool in_flight(std::uint64_t step_number) const noexcept;
  [[nodiscard]] std::uint64_t newest_step() const noexcept { return retired_ + open_steps_.size(); }
  result<void> count_wants(std::span<const want> wants, std::uint64_t& needed) const noexcept;
  record& new_record() noexcept;
  void recycle(record& r) noexcept;
  void make_room(record& r, sequence_state& s, bool others_in_flight) noexcept;
  void describe(record& r) noexcept;
  void roll_back_newest() noexcept;
  void free_unused(block_id block) noexcept;
  void retire_oldest(std::size_t steps) noexcept;
  result<void> accept_step(record& r, const std::uint32_t* counts, std::size_t size) noexcept override;
  void drop_step(record& r) noexcept override;

  layer_groups groups_;
  block_pool pool_;
  prefix_index index_;
  eviction_type policy_;
  mutable std::vector<detail::block_use> uses_;  // by block
  detail::sequence_table sequences_;
  std::vector<std::unique_ptr<record>> records_;
  std::vector<record*> unused_records_;
  std::vector<record*> open_steps_;  // the oldest first; their numbers follow retired_ without a gap
  std::uint64_t retired_ = 0;        // number of the newest step that is retired
  std::uint64_t stamps_ = 0;
  std::uint64_t batches_ = 0;                        // calls that released blocks
  std::vector<block_id> unkeyed_;                    // to go to the free list when the call's last block is released
  mutable std::vector<prefix_index::chain> chains_;  // per group, what look_up found
  block_statistics statistics_;
};

}  // namespace kvcache

#include <kvcache/blocks/block_manager_blocks.inl>
#include <kvcache/blocks/block_manager_sequences.inl>
#include <kvcache/blocks/block_manager_steps.inl>
