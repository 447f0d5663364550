// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/detail/content_memory.hpp>
#include <kvcache/detail/reuse_classes.hpp>
#include <kvcache/types.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace kvcache {

/// Evicts the leaf that is worth least: the one of lowest Gittins index (Gittins 1979, Bandit processes and dynamic
/// allocation indices). After each reference a block is a stopping problem: time in the cache is the price, the next
/// reference the reward. The law of the time between references is learned for classes of blocks while requests come
/// and go (reuse_classes.hpp); that a cache can rank by learned hit densities is the idea of LHD and EVA
/// (Beckmann, Chen and Cidon 2018; Beckmann and Sanchez 2017). Most blocks of a language model's cache are never used
/// again, and the others after a time in which nothing happens: a person reads. Recency sees neither.
///
/// It also remembers evicted blocks (content_memory.hpp), as a law learned only from what was kept would confirm
/// itself. Some 820 bytes a block up to 262,144 blocks, falling to 310 at 1,048,576, and 340 KB. Nothing is allocated
/// after construction. victim() is O(1); insert, erase, evict and, on average, open for each fingerprint are O(1) but
/// for a heap of a few thousand entries whose size does not depend on the pool. One thread at a time. Where integers
/// have to agree across CPUs, compile with -ffp-contract=off.
class gittins {
  using classes = detail::reuse_classes;

 public:
  static constexpr const char* name = "gittins";

  /// An empty order over the blocks 1 to `highest`.
  explicit gittins(block_id highest)
      : highest_(highest),
        blocks_(std::size_t{highest} + 1),
        records_(highest),
        groups_(records_.size() + highest),
        cells_(std::size_t{classes::count} * classes::bins),
        heap_(cells_.size()) {}

  /// A request begins: its blocks, known or not, take its class now. Those that are committed later find it here.
  void open(std::span<const std::uint64_t> fingerprints, std::uint32_t /*hits*/, std::uint32_t block_tokens) noexcept {
    tick();
    const std::size_t size = fingerprints.size();
    const std::size_t n = (std::min<std::size_t>)(size, highest_);  // the others will hardly find room
    // What is known counts, be it resident or evicted since: what people do does not depend on our evictions.
    std::size_t known = 0;
    std::size_t shared = 0;  // up to the last fork into many conversations
    std::uint32_t last_known = 0;
    for (; known < n; ++known) {
      const std::uint32_t r = records_.find(fingerprints[known]);
      if (r == 0) break;
      records_.refresh(r);
      last_known = r;
      if (records_[r].children >= detail::content_memory::many) shared = known + 1;
    }
    std::uint32_t turn = 0;
    if (known > 0) {
      const auto& before = records_[last_known];
      if (shared < known) turn = before.turn;
      // The conversation went on, but not with the block that followed last time: that end is dead.
      if (known < n && before.children == 1) supersede(last_known);
    }
    const std::uint32_t column = classes::column(std::uint64_t{size - known} * block_tokens, turn);
    // By tokens, lest small blocks of the same end be taken for something else.
    const std::size_t last = (std::max<std::size_t>)(1, 512 / (std::max)(1u, block_tokens));
    own_groups_.fill(0);
    std::uint32_t parent = 0;
    std::size_t touched = 0;
    for (; touched < n; ++touched) {
      std::uint32_t r = records_.find(fingerprints[touched]);
      std::uint32_t waited = 0;
      if (r == 0) {
        r = remember(fingerprints[touched], parent, turn);
      } else {
        const group& g = groups_[records_[r].group];
        if (g.time == now_) break;  // a fingerprint twice in one request: a collision
        waited = g.bin;
        statistics_.hit(g.kind, g.bin);
        records_.refresh(r);  // it may follow one that was forgotten, and must not be the next to go
        records_[r].parent = parent;
      }
      touch(r, touched < shared, touched + last >= size, waited, column);
      parent = r;
    }
    // Heads are forgotten after their tails, as they are evicted.
    for (; touched > 0; --touched, parent = records_[parent].parent) records_.refresh(parent);
  }

  /// The block holds this content from now on. What no request announced is generated text.
  void reference(block_id block, std::uint64_t fingerprint, block_id parent) noexcept {
    entry& b = blocks_[block];
    std::uint32_t r = records_.find(fingerprint);
    if (b.record != r) unbind(block);
    if (r == 0) r = generated(fingerprint, parent == null_block ? 0 : blocks_[parent].record);
    if (records_[r].block == null_block) records_.unlink_ghost(r);
    records_[r].block = block;
    b.record = r;
    b.parent = parent;
  }

  /// Precondition: not in the order.
  void insert(block_id block) noexcept {
    entry& b = blocks_[block];
    // A caller without references: the block stands for its content.
    if (b.record == 0) reference(block, ~std::uint64_t{block}, null_block);
    b.evictable = true;
    if (b.parent != null_block) {
      entry& p = blocks_[b.parent];
      if (p.children++ == 0 && p.evictable) remove_leaf(b.parent);
    }
    if (b.children == 0) add_leaf(block);
  }
  /// Precondition: in the order.
  void erase(block_id block) noexcept {
    entry& b = blocks_[block];
    if (b.children == 0) remove_leaf(block);
    b.evictable = false;
    if (b.parent != null_block) {
      entry& p = blocks_[b.parent];
      if (--p.children == 0 && p.evictable) add_leaf(b.parent);
    }
  }
  /// Precondition: in the order.
  void evict(block_id block) noexcept {
    erase(block);
    unbind(block);
  }
  /// A leaf of lowest index, the oldest of its class and age; the null block where there is none.
  [[nodiscard]] block_id victim() const noexcept {
    return heap_size_ == 0 ? null_block : groups_[cells_[heap_[0]].first].leaf;
  }

 private:
  /// A block of the pool. Links are 0 at an end.
  struct entry {
    std::uint32_t record = 0;
    block_id parent = null_block;
    std::uint32_t children = 0;  // evictable ones: without any an evictable block is a leaf
    std::uint32_t group = 0;     // in whose leaves it is, and its neighbours there
    block_id previous = null_block;
    block_id next = null_block;
    bool evictable = false;
  };
  /// The blocks that one request put into one class: they age together, and for the most part come back together.
  struct group {
    std::uint32_t time = 0;  // of their last reference
    std::uint32_t alive = 0;
    block_id leaf = null_block;
    std::uint32_t younger = 0, older = 0;            // groups in this bin of age
    std::uint32_t cell_next = 0, cell_previous = 0;  // groups with leaves in this class and bin
    std::uint16_t kind = 0;
    std::uint8_t column = 0;
    std::uint8_t bin = 0;
    bool is_generated = false;
  };
  /// The groups of one class and bin that have leaves: all of the same index, the oldest first.
  struct cell {
    std::uint32_t first = 0;
    std::uint32_t last = 0;
    std::uint32_t position = 0;  // in the heap
  };
  struct ends {
    std::uint32_t oldest = 0;
    std::uint32_t youngest = 0;
  };

  std::uint32_t remember(std::uint64_t fingerprint, std::uint32_t parent, std::uint32_t turn) noexcept {
    return records_.remember(fingerprint, parent, turn, [this](std::uint32_t gone) noexcept { leave(gone); });
  }
  /// The block's content is no longer there.
  void unbind(block_id block) noexcept {
    const std::uint32_t r = blocks_[block].record;
    blocks_[block].record = 0;
    if (r == 0 || records_[r].block != block) return;
    records_[r].block = null_block;
    records_.append_ghost(r);
  }

  // ------------------------------------------------------------------------------------------------ groups
  std::uint32_t add_group(std::uint32_t kind, std::uint32_t column) noexcept {
    std::uint32_t g = free_group_;
    if (g != 0) {
      free_group_ = groups_[g].younger;
    } else {
      g = ++used_groups_;
    }
    groups_[g] = {};
    groups_[g].time = now_;
    groups_[g].kind = static_cast<std::uint16_t>(kind);
    groups_[g].column = static_cast<std::uint8_t>(column);
    append_age(g);
    return g;
  }
  void drop_if_empty(std::uint32_t g) noexcept {
    if (groups_[g].alive != 0 || groups_[g].leaf != null_block) return;
    unlink_age(g);
    groups_[g].younger = free_group_;
    free_group_ = g;
  }
  void append_age(std::uint32_t g) noexcept {
    ends& list = ages_[groups_[g].bin];
    groups_[g].older = list.youngest;
    groups_[g].younger = 0;
    (list.youngest != 0 ? groups_[list.youngest].younger : list.oldest) = g;
    list.youngest = g;
  }
  void unlink_age(std::uint32_t g) noexcept {
    const group& gone = groups_[g];
    ends& list = ages_[gone.bin];
    (gone.older != 0 ? groups_[gone.older].younger : list.oldest) = gone.younger;
    (gone.younger != 0 ? groups_[gone.younger].older : list.youngest) = gone.older;
  }
  void leave(std::uint32_t g) noexcept {
    if (g == 0) return;
    --groups_[g].alive;
    drop_if_empty(g);
  }
  void join(std::uint32_t r, std::uint32_t g) noexcept {
    statistics_.joined(groups_[g].kind, groups_[g].bin, groups_[g].alive);
    ++groups_[g].alive;
    const std::uint32_t before = records_[r].group;
    records_[r].group = g;
    const block_id block = records_[r].block;
    if (block != null_block && blocks_[block].evictable && blocks_[block].children == 0) {
      remove_leaf(block);
      add_leaf(block);
    }
    leave(before);
  }
  /// One more reference, by the request that is being opened.
  void touch(std::uint32_t r, bool is_shared, bool last, std::uint32_t waited, std::uint32_t column) noexcept {
    auto& touched = records_[r];
    if (touched.refs < classes::most_refs) ++touched.refs;
    const std::uint32_t kind = is_shared ? classes::shared(waited) : classes::prompt(touched.refs, last, column);
    std::uint32_t& g =
        own_groups_[is_shared ? 2 * classes::most_refs + waited : (last ? classes::most_refs : 0) + touched.refs - 1];
    if (g == 0) g = add_group(kind, column);
    join(r, g);
  }
  /// A block is kept by its request's group of generated text; the first one makes it.
  std::uint32_t generated(std::uint64_t fingerprint, std::uint32_t parent) noexcept {
    std::uint32_t g = 0;
    std::uint32_t column = 0;
    std::uint32_t turn = 0;
    if (parent != 0) {
      records_.refresh(parent);  // not to be forgotten for its child
      const group& before = groups_[records_[parent].group];
      column = before.column;
      turn = records_[parent].turn - 1u;
      if (before.is_generated) g = records_[parent].group;
    }
    if (g == 0) {
      g = add_group(classes::generated(column), column);
      groups_[g].is_generated = true;
    }
    const std::uint32_t r = remember(fingerprint, parent, turn);
    records_[r].refs = 1;
    join(r, g);
    return r;
  }
  /// All that follows on a block with one child, up to the next fork.
  void supersede(std::uint32_t parent) noexcept {
    std::array<std::uint32_t, 2> own{};
    while (records_[parent].children == 1) {
      const std::uint32_t r = records_[parent].last_child;
      if (records_[r].parent != parent) return;  // forgotten: the record is another one's now
      const bool used_twice = records_[r].refs > 1;
      const std::uint32_t kind = classes::superseded(used_twice);
      if (groups_[records_[r].group].kind == kind) return;
      if (own[used_twice] == 0) own[used_twice] = add_group(kind, 0);
      join(r, own[used_twice]);
      parent = r;
    }
  }

  // ------------------------------------------------------------------------------------------------ leaves
  void add_leaf(block_id block) noexcept {
    entry& b = blocks_[block];
    b.group = records_[b.record].group;
    group& g = groups_[b.group];
    b.previous = null_block;
    b.next = g.leaf;
    if (g.leaf != null_block) blocks_[g.leaf].previous = block;
    g.leaf = block;
    if (b.next == null_block) add_to_cell(b.group);
  }
  void remove_leaf(block_id block) noexcept {
    const entry& b = blocks_[block];
    group& g = groups_[b.group];
    (b.previous != null_block ? blocks_[b.previous].next : g.leaf) = b.next;
    if (b.next != null_block) blocks_[b.next].previous = b.previous;
    if (g.leaf != null_block) return;
    remove_from_cell(b.group);
    drop_if_empty(b.group);
  }
  [[nodiscard]] static std::uint32_t cell_of(const group& g) noexcept { return g.kind * classes::bins + g.bin; }
  void add_to_cell(std::uint32_t g) noexcept {
    group& added = groups_[g];
    const std::uint32_t c = cell_of(added);
    cell& list = cells_[c];
    added.cell_previous = added.cell_next = 0;
    if (list.first == 0) {
      list.first = list.last = g;
      add_to_heap(c);
    } else if (now_ - added.time >
               now_ - groups_[list.first].time) {  // its leaf came late: the order need not be exact
      added.cell_next = list.first;
      groups_[list.first].cell_previous = g;
      list.first = g;
    } else {
      added.cell_previous = list.last;
      groups_[list.last].cell_next = g;
      list.last = g;
    }
  }
  void remove_from_cell(std::uint32_t g) noexcept {
    const group& gone = groups_[g];
    const std::uint32_t c = cell_of(gone);
    cell& list = cells_[c];
    (gone.cell_previous != 0 ? groups_[gone.cell_previous].cell_next : list.first) = gone.cell_next;
    (gone.cell_next != 0 ? groups_[gone.cell_next].cell_previous : list.last) = gone.cell_previous;
    if (list.first == 0) remove_from_heap(c);
  }

  // ------------------------------------------------------------------------------------------------ a heap of cells
  [[nodiscard]] bool before(std::uint32_t a, std::uint32_t b) const noexcept {
    const double x = statistics_.index(a / classes::bins, a % classes::bins);
    const double y = statistics_.index(b / classes::bins, b % classes::bins);
    return x < y || (x == y && a > b);
  }
  void place(std::uint32_t at, std::uint32_t c) noexcept {
    heap_[at] = c;
    cells_[c].position = at;
  }
  void sift_up(std::uint32_t at) noexcept {
    const std::uint32_t c = heap_[at];
    for (; at > 0 && before(c, heap_[(at - 1) / 2]); at = (at - 1) / 2) place(at, heap_[(at - 1) / 2]);
    place(at, c);
  }
  void sift_down(std::uint32_t at) noexcept {
    const std::uint32_t c = heap_[at];
    for (std::uint32_t child = 2 * at + 1; child < heap_size_; child = 2 * at + 1) {
      if (child + 1 < heap_size_ && before(heap_[child + 1], heap_[child])) ++child;
      if (!before(heap_[child], c)) break;
      place(at, heap_[child]);
      at = child;
    }
    place(at, c);
  }
  void add_to_heap(std::uint32_t c) noexcept {
    place(heap_size_, c);
    sift_up(heap_size_++);
  }
  void remove_from_heap(std::uint32_t c) noexcept {
    const std::uint32_t moved = heap_[--heap_size_];
    if (moved == c) return;
    place(cells_[c].position, moved);
    sift_up(cells_[moved].position);
    sift_down(cells_[moved].position);
  }

  // ------------------------------------------------------------------------------------------------ time
  void tick() noexcept {
    ++now_;
    for (std::uint32_t bin = classes::bins - 1; bin-- > 0;) {
      for (std::uint32_t g = ages_[bin].oldest; g != 0; g = ages_[bin].oldest) {
        group& old = groups_[g];
        if (now_ - old.time < classes::edges[bin + 1]) break;
        if (old.leaf != null_block) remove_from_cell(g);
        unlink_age(g);
        ++old.bin;
        append_age(g);
        if (old.leaf != null_block) add_to_cell(g);
        statistics_.aged(old.kind, old.bin, old.alive);
      }
    }
    if (--until_learning_ == 0) {
      until_learning_ = std::clamp(now_ / 16, 1u, 64u);  // at first each request changes much
      statistics_.learn();
      for (std::uint32_t i = heap_size_ / 2; i-- > 0;) sift_down(i);
    }
  }

  block_id highest_;
  std::uint32_t now_ = 0;  // requests; differences only, so it may wrap
  std::uint32_t until_learning_ = 1;
  std::uint32_t used_groups_ = 0;
  std::uint32_t free_group_ = 0;  // linked by `younger`
  std::uint32_t heap_size_ = 0;
  std::array<ends, classes::bins> ages_{};
  std::array<std::uint32_t, 2 * classes::most_refs + classes::bins> own_groups_{};  // of the request being opened
  detail::reuse_classes statistics_;
  std::vector<entry> blocks_;
  detail::content_memory records_;
  std::vector<group> groups_;
  std::vector<cell> cells_;          // by class and bin
  std::vector<std::uint32_t> heap_;  // the cells that are not empty, the lowest index at the front
};

static_assert(eviction_policy<gittins>);

}  // namespace kvcache
