// SPDX-License-Identifier: Apache-2.0
// Random calls against a block manager and, beside it, a naive model: what every sequence holds token by token, what
// bytes lie in every slot, which prefixes are cached. Steps run late: what a step reads and writes is carried out at
// any time before it retires, so a block that goes back too early is caught by its bytes. Seals of blocks of the tail
// pools run late too.
#pragma once

#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/concepts.hpp>
#include <kvcache/eviction/priority.hpp>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "catch.hpp"
#include "pool_cells.hpp"
#include "worth_model.hpp"

namespace kvcache_test {

struct random_load {
  std::uint64_t seed = 1;
  std::uint32_t blocks = 24;
  std::vector<kvcache::layer_group> groups{{4}};
  unsigned hash_bits = 64;
  std::int32_t alphabet = 2;  ///< few tokens, so that contents meet again
  std::size_t most_sequences = 6;
  bool partial_reuse = false;
  std::size_t events = 0;
  bool check = true;  ///< hold every call against the model; the calls are the same without
};

/// Choices that a seed decides; they never end.
class seeded_choices {
 public:
  explicit seeded_choices(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  std::uint32_t below(std::uint32_t limit) {
    state_ += 0x9e3779b97f4a7c15u;
    std::uint64_t x = state_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return static_cast<std::uint32_t>(((x ^ (x >> 31)) >> 32) % limit);
  }
  [[nodiscard]] static bool ended() { return false; }

 private:
  std::uint64_t state_;
};

/// Choices decides what is called with what: below(limit) gives a number, ended() says that there is nothing left to
/// decide by.
template <class Manager, class Choices = seeded_choices>
class random_driver {
 public:
  explicit random_driver(const random_load& load) : random_driver(load, Choices(load.seed)) {}
  random_driver(const random_load& load, Choices choices)
      : load_(load),
        m_({.blocks = load.blocks,
            .layer_groups = load_.groups,
            .partial_reuse = load.partial_reuse,
            .events = load.events,
            .hash_bits = load.hash_bits}),
        choices_(std::move(choices)),
        cells_(load.blocks, load_.groups),
        keys_(load.blocks + 1),
        worth_(load.blocks) {
    for (auto& prompt : prompts_)
      for (std::uint32_t i = 0; i < 5 * largest(); ++i) prompt.push_back(token());
    for (std::size_t i = 1; i < prompts_.size(); ++i)  // some have a common head
      std::copy_n(prompts_[0].begin(), pick(static_cast<std::uint32_t>(prompts_[0].size())), prompts_[i].begin());
  }

  /// So many calls, or fewer where the choices end.
  void run(std::size_t calls) {
    for (std::size_t i = 0; i < calls && !choices_.ended(); ++i) {
      switch (pick(16)) {
        case 0:
        case 1:
        case 2: open(); break;
        case 3:
        case 4:
        case 5: begin(); break;
        case 6:
        case 7: accept(); break;
        case 8:
        case 9: retire(); break;
        case 10:
        case 11: commit(); break;
        case 12: fork(); break;
        case 13: truncate(); break;
        case 14: pick(2) == 0 ? close(pick_sequence()) : close_stale(); break;
        default:
          switch (pick(9)) {
            case 0: drop(); break;
            case 1:
            case 2: pin(); break;
            case 3:
            case 4: advance(); break;
            case 5: retain(); break;
            case 6: reset(); break;
            default: look(); break;
          }
      }
      check();
    }
  }

  /// Ends everything: the whole pool is available again.
  void finish() {
    while (!flights_.empty()) {
      if (!flights_.front().step.accepted()) {
        REQUIRE(flights_.front().step.accept().has_value());
        accepted(flights_.front(), {});
      }
      execute(0);
      REQUIRE(m_.retire(flights_.front().step).has_value());
      flights_.pop_front();
      check();
    }
    while (!live_.empty()) close(live_.size() - 1);
    carry_out();
    check();
    REQUIRE(m_.counts().available() == m_.capacity());
    REQUIRE(m_.counts().held == 0);
    for (std::uint32_t g = 0; g < group_count(); ++g) REQUIRE(m_.tail_blocks_available(g) == m_.tail_blocks(g));
  }

  /// Everything the manager answered, in order.
  [[nodiscard]] const std::vector<std::uint64_t>& log() const { return log_; }
  /// How often each kind of event came up, so that a test can tell that it saw them.
  std::uint64_t refused = 0, opened = 0, hits = 0, copies = 0, duplicates = 0, shortened = 0, dropped = 0, revived = 0,
                overlapped = 0, heads = 0, behind = 0, pins = 0, expired = 0, ranked = 0, resets = 0, sealed = 0,
                reopened = 0, kept_wide = 0, no_tails = 0;
  [[nodiscard]] const Manager& manager() const { return m_; }

 private:
  using eviction = typename Manager::eviction_type;
  static constexpr bool keeps_priorities = kvcache::told_of_priorities<eviction>;

  struct sequence {
    kvcache::sequence_id id;
    std::vector<std::int32_t> prompt;
    std::vector<std::int32_t> content;  // what steps begun so far will have computed
    std::vector<std::uint64_t> values;  // of every token: its bytes, which depend on all before it and on the keys
    std::uint32_t accepted = 0;
    std::uint32_t committed = 0;
    std::size_t keys = 0;
    std::uint64_t expires = kvcache::never;
    std::vector<kvcache::retention_range> retention{};
    int open_steps = 0;
    bool pinned = false;   // and neither computed on nor cut since
    bool settled = false;  // accepted or committed since it was opened or cut: its windows have let go
  };
  struct flight_row {
    kvcache::sequence_id id;
    std::uint32_t start = 0;
    std::uint32_t tokens = 0;
    std::vector<std::uint64_t> values;
    std::vector<std::size_t> held;  // blocks before the step, by group
  };
  struct flight {
    kvcache::step step;
    std::vector<flight_row> rows;
    std::uint64_t accepted_before = 0;  // steps accepted when it began
    bool executed = false;
  };
  // What the model knows of a cached block: group, number of its last token, and that token's value.
  struct key {
    std::uint32_t group = 0;
    std::size_t end = 0;
    std::uint64_t value = 0;
    std::uint64_t parent = 0;  // value of the token before the block, or 0
    std::uint64_t before = 0;  // the same, or what the keys begin with
    std::vector<std::int32_t> content{};
  };

  std::uint32_t pick(std::uint32_t below) { return choices_.below(below); }
  std::int32_t token() { return static_cast<std::int32_t>(pick(static_cast<std::uint32_t>(load_.alphabet))); }
  [[nodiscard]] std::uint32_t group_count() const { return static_cast<std::uint32_t>(load_.groups.size()); }
  [[nodiscard]] std::uint32_t size_of(std::uint32_t group) const { return load_.groups[group].block_size; }
  [[nodiscard]] std::size_t blocks_for(std::uint32_t group, std::size_t tokens) const {
    return (tokens + size_of(group) - 1) / size_of(group);
  }
  [[nodiscard]] bool windowed(std::uint32_t group) const {
    return load_.groups[group].window != kvcache::layer_group::full;
  }
  /// The first token that the query at `position` sees in a group.
  [[nodiscard]] std::size_t first_seen(std::uint32_t group, std::size_t position) const {
    return windowed(group) && position + 1 > load_.groups[group].window ? position + 1 - load_.groups[group].window : 0;
  }
  [[nodiscard]] std::uint32_t largest() const {
    std::uint32_t most = 0;
    for (const auto& g : load_.groups) most = std::max(most, g.block_size);
    return most;
  }
  std::size_t pick_sequence() { return live_.empty() ? 0 : pick(static_cast<std::uint32_t>(live_.size())); }
  sequence* find(kvcache::sequence_id id) {
    for (sequence& s : live_)
      if (s.id == id) return &s;
    return nullptr;
  }

  static std::uint64_t value_after(std::uint64_t before, std::int32_t token) {
    std::uint64_t x = (before ^ static_cast<std::uint32_t>(token)) * 0x9fb21c651e98df25u + 0x632be59bd9b4e019u;
    return x ^ (x >> 29);
  }
  std::uint64_t root(std::size_t keys) const { return 0x1234567 + (static_cast<std::uint64_t>(keys) << 32); }
  void append(sequence& s, std::int32_t t) const {
    s.values.push_back(value_after(s.values.empty() ? root(s.keys) : s.values.back(), t));
    s.content.push_back(t);
  }
  static void cut(sequence& s, std::size_t tokens) {
    s.content.resize(tokens);
    s.values.resize(tokens);
  }

  void note(std::uint64_t value) { log_.push_back(value); }
  void note(const kvcache::failure& f) {
    note(1000 + static_cast<std::uint64_t>(f.code));
    note(f.value);
    note(f.limit);
  }
  void note_table(kvcache::sequence_id id) {
    for (std::uint32_t g = 0; g < group_count(); ++g) {
      const auto table = m_.table(id, g);
      for (const kvcache::block_id b : *table) note(b);
      if (cells_.sealing(g))
        for (const kvcache::block_id b : *table) note(m_.table_entry(b));
    }
  }

  /// All seals that are due. What accepted steps have to do comes before.
  void carry_out() {
    if (!cells_.any_sealing()) return;
    std::size_t ready = 0;
    while (ready < flights_.size() && flights_[ready].step.accepted()) ++ready;
    if (ready != 0) execute(ready - 1);
    cells_.seal_all();
    sealed += m_.seals().size();
    m_.sealed();
    REQUIRE(m_.seals().empty());
  }
  /// After a step was accepted: takes down what is to be sealed by now, and maybe does it.
  void take_seals() {
    cells_.accept_step();
    if (!cells_.any_sealing()) return;
    const auto seals = m_.seals();
    note(seals.size());
    cells_.take(seals, load_.check);
    if (pick(2) == 0) carry_out();
  }

  using cached_set = std::set<std::tuple<std::uint32_t, std::size_t, std::uint64_t>>;
  [[nodiscard]] cached_set cached_now() const {
    cached_set cached;
    for (kvcache::block_id b = 1; b <= m_.capacity(); ++b)
      if (m_.cached(b)) cached.insert({keys_[b].group, keys_[b].end, keys_[b].value});
    return cached;
  }
  [[nodiscard]] std::vector<std::uint64_t> values_of(const std::vector<std::int32_t>& content, std::size_t keys) const {
    std::vector<std::uint64_t> values{root(keys)};  // one more than there are tokens
    for (const std::int32_t t : content) values.push_back(value_after(values.back(), t));
    return values;
  }
  // The longest prefix of `limit` tokens of which every group has what the next query sees, found by trying all.
  [[nodiscard]] std::uint32_t longest(const std::vector<std::int32_t>& content, std::size_t keys,
                                      std::size_t limit) const {
    const cached_set cached = cached_now();
    const auto values = values_of(content, keys);
    for (std::size_t n = limit; n > 0; --n) {
      bool warm = true;
      for (std::uint32_t g = 0; g < group_count() && warm; ++g) {
        warm = n % size_of(g) == 0;
        for (std::size_t i = first_seen(g, n) / size_of(g); warm && i < n / size_of(g); ++i)
          warm = cached.contains({g, (i + 1) * size_of(g), values[(i + 1) * size_of(g)]});
      }
      if (warm) return static_cast<std::uint32_t>(n);
    }
    return 0;
  }
  // How many tokens after the first `n` some cached block begins with, up to `limit` in all.
  [[nodiscard]] std::uint32_t longest_head(const std::vector<std::int32_t>& content, std::size_t keys, std::size_t n,
                                           std::size_t limit) const {
    if (!load_.partial_reuse) return 0;
    const cached_set cached = cached_now();
    const auto values = values_of(content, keys);
    std::size_t most = 0;
    for (kvcache::block_id b = 1; b <= m_.capacity(); ++b) {
      const key& k = keys_[b];
      if (!m_.cached(b) || k.before != values[n] || k.end != n + size_of(0)) continue;
      bool everywhere = true;
      for (std::uint32_t g = 0; g < group_count(); ++g) everywhere = everywhere && cached.contains({g, k.end, k.value});
      std::size_t equal = 0;
      while (n + equal < limit && equal < k.content.size() && content[n + equal] == k.content[equal]) ++equal;
      if (everywhere) most = std::max(most, equal);
    }
    return static_cast<std::uint32_t>(most);
  }

  std::vector<std::int32_t> some_prompt() {
    const auto& base = prompts_[pick(static_cast<std::uint32_t>(prompts_.size()))];
    std::vector<std::int32_t> prompt(base.begin(), base.begin() + pick(static_cast<std::uint32_t>(base.size()) + 1));
    for (std::uint32_t i = pick(largest() + 1); i > 0; --i) prompt.push_back(token());
    return prompt;
  }

  void open() {
    if (live_.size() >= load_.most_sequences) return close(pick_sequence());
    sequence s;
    s.prompt = some_prompt();
    s.keys = pick(6) == 0 ? pick(static_cast<std::uint32_t>(key_sets_.size())) : 0;
    s.retention = some_retention();
    const std::size_t n = s.prompt.size();
    const std::uint64_t reserve = pick(3) == 0 ? 0 : pick(4) == 0 ? pick(2 * static_cast<std::uint32_t>(n) + 1) : n;
    const kvcache::open_request request{.content = s.prompt,
                                        .keys = key_sets_[s.keys],
                                        .reserve = reserve,
                                        .chunk = pick(3) == 0 ? 1 + pick(2 * largest()) : 0,
                                        .retention = s.retention};
    const kvcache::block_counts before = m_.counts();
    const auto statistics = m_.statistics();
    const kvcache::admission a = m_.predict(request);
    const std::uint32_t whole = load_.check && n != 0 ? longest(s.prompt, s.keys, n - 1) : 0;
    const std::uint32_t head = load_.check && n != 0 ? longest_head(s.prompt, s.keys, whole, n - 1) : 0;
    const auto result = m_.open(request);
    note(result.has_value());
    if (!result) {
      ++refused;
      note(result.error());
      REQUIRE(((n == 0) != !a.fits()));
      REQUIRE(m_.counts() == before);
      REQUIRE(m_.statistics() == statistics);
      return;
    }
    ++opened;
    note(result->sequence.index);
    note(result->sequence.generation);
    note_table(result->sequence);
    REQUIRE(n != 0);
    REQUIRE(a.fits());
    REQUIRE(m_.counts().available() == before.available() - a.needs);
    REQUIRE(result->reused_tokens == a.reused_tokens);
    if (load_.check && result->reused_tokens != whole + head) {
      // The head of a block is left alone where its copy, or the longer first chunk in a window, would not fit.
      REQUIRE(result->reused_tokens == whole);
      REQUIRE((a.needs + 2 * group_count() > a.available || a.total_blocks + group_count() > a.capacity));
    }
    heads += result->reused_tokens % size_of(0) != 0;
    hits += result->reused_tokens != 0;
    revived += a.revived_blocks;
    s.id = result->sequence;
    for (std::uint32_t i = 0; i < result->reused_tokens; ++i) append(s, s.prompt[i]);
    s.accepted = s.committed = result->reused_tokens;
    retain_held(s);
    live_.push_back(std::move(s));
  }

  // Ranges with gaps between them, the last maybe open; a level only where the policy keeps one.
  std::vector<kvcache::retention_range> some_retention() {
    std::vector<kvcache::retention_range> ranges;
    std::uint32_t end = 0;
    for (std::uint32_t more = pick(2) == 0 ? 1 + pick(3) : 0; more > 0; --more) {
      kvcache::retention_range r{.first = end + (pick(2) == 0 ? 0 : pick(2 * largest()))};
      end = r.first + 1 + pick(3 * largest());
      r.end = more == 1 && pick(2) == 0 ? kvcache::retention_range::open_end : end;
      if (keeps_priorities) {
        r.priority = static_cast<std::uint8_t>(25 * pick(5));
        if (pick(2) == 0) r.duration = pick(30);
      }
      if (pick(4) != 0) r.time_to_live = pick(12);
      ranges.push_back(r);
    }
    return ranges;
  }
  void retain_held(const sequence& s) {
    for (std::uint32_t g = 0; g < group_count(); ++g) {
      const auto table = *m_.table(s.id, g);
      for (std::size_t i = 0; i < s.committed / size_of(g); ++i)
        if (table[i] != kvcache::null_block && m_.cached(table[i]))
          worth_.retain(table[i], i * size_of(g), s.retention);
    }
  }

  void retain() {
    if (live_.empty()) return;
    sequence& s = live_[pick_sequence()];
    s.retention = some_retention();
    REQUIRE(m_.retain(s.id, s.retention).has_value());
    retain_held(s);
  }

  // Mostly refused, unless everything is given back before.
  void reset() {
    if (pick(6) == 0) finish();
    const auto before = m_.counts();
    const cached_set cached = cached_now();
    const auto result = m_.reset();
    note(result.has_value());
    REQUIRE(result.has_value() == (before.referenced + before.held == 0));
    if (!result) {
      REQUIRE(result.error().code == kvcache::errc::in_use);
      REQUIRE(m_.counts() == before);
      REQUIRE(cached_now() == cached);
      return;
    }
    resets += !cached.empty();
    REQUIRE(m_.counts().free == m_.capacity());
    for (const auto& prompt : prompts_)
      for (const auto& keys : key_sets_) REQUIRE(m_.probe(prompt, keys).tokens == 0);
  }

  void pin() {
    if (live_.size() >= load_.most_sequences) return close(pick_sequence());
    sequence s;
    s.prompt = some_prompt();
    s.keys = pick(static_cast<std::uint32_t>(key_sets_.size()));
    const std::uint32_t found = load_.check ? longest(s.prompt, s.keys, s.prompt.size()) : 0;
    s.expires = pick(2) == 0 ? kvcache::never : now_ + pick(60) + 1;
    const kvcache::pinned pinned = m_.pin(s.prompt, key_sets_[s.keys], s.expires);
    note(pinned.tokens);
    if (load_.check) REQUIRE(pinned.tokens == found);
    s.id = pinned.sequence;
    for (std::uint32_t i = 0; i < pinned.tokens; ++i) append(s, s.prompt[i]);
    s.accepted = s.committed = pinned.tokens;
    s.pinned = pinned.tokens != 0;
    pins += pinned.tokens != 0;
    live_.push_back(std::move(s));
  }

  void advance() {
    const auto before = m_.counts();
    if (now_ != 0 && pick(4) == 0) m_.advance(pick(static_cast<std::uint32_t>(now_)));
    REQUIRE(m_.counts() == before);
    now_ += pick(20);
    m_.advance(now_);
    std::erase_if(live_, [&](const sequence& s) { return s.expires <= now_; });
    expired += m_.counts().free > before.free;
    REQUIRE(m_.counts().available() >= before.available());
    worth_.advance(now_);
    if (load_.check) check_expired();
  }

  // Content goes that was unused for its time to live and what follows such content, and nothing else.
  void check_expired() const {
    std::map<std::tuple<std::uint32_t, std::size_t, std::uint64_t>, kvcache::block_id> cached;
    for (kvcache::block_id b = 1; b <= m_.capacity(); ++b)
      if (worth_.cached(b)) cached[{keys_[b].group, keys_[b].end, keys_[b].value}] = b;
    for (const auto& [identity, block] : cached) {
      if (m_.state(block) == kvcache::block_state::evictable) REQUIRE_FALSE(worth_.expired(block));
      if (m_.cached(block)) continue;
      const key* k = &keys_[block];
      bool follows = worth_.expired(block);
      while (!follows && !windowed(k->group) && k->parent != 0) {
        const kvcache::block_id parent = cached.at({k->group, k->end - size_of(k->group), k->parent});
        follows = worth_.expired(parent);
        k = &keys_[parent];
      }
      REQUIRE(follows);
    }
  }

  void begin() {
    std::vector<kvcache::want> wants;
    std::vector<std::size_t> chosen;
    for (std::size_t i = 0; i < live_.size(); ++i)
      if (pick(2) == 0) chosen.push_back(i);
    for (std::size_t i = chosen.size(); i > 1; --i)
      std::swap(chosen[i - 1], chosen[pick(static_cast<std::uint32_t>(i))]);
    for (const std::size_t i : chosen) wants.push_back({live_[i].id, pick(3) == 0 ? pick(3 * largest()) : pick(3)});
    std::vector<std::vector<std::size_t>> held(wants.size());
    for (std::size_t i = 0; i < wants.size(); ++i)
      for (std::uint32_t g = 0; g < group_count(); ++g) held[i].push_back(m_.table(wants[i].sequence, g)->size());
    const auto before = m_.counts();
    const auto needed = m_.blocks_needed(wants);
    auto step = m_.begin(wants);
    note(step.has_value());
    if (!step) {
      ++refused;
      note(step.error());
      if (needed) REQUIRE(*needed > before.available());
      no_tails += step.error().code == kvcache::errc::out_of_tail_blocks;
      REQUIRE(m_.counts() == before);
      return;
    }
    REQUIRE(needed.has_value());
    REQUIRE(m_.counts().available() == before.available() - *needed);
    copies += step->copies().size();
    for (const auto& c : step->copies()) {
      note(c.source);
      note(c.destination);
      REQUIRE(((c.destination & kvcache::tail_bit) != 0) == cells_.sealing(c.layer_group));
      reopened += (c.source & kvcache::tail_bit) == 0 && (c.destination & kvcache::tail_bit) != 0;
    }
    overlapped += !flights_.empty();
    flight f;
    for (std::size_t i = 0; i < wants.size(); ++i) {
      sequence& s = live_[chosen[i]];
      flight_row row{s.id, static_cast<std::uint32_t>(s.content.size()), wants[i].tokens, {}, std::move(held[i])};
      for (std::uint32_t t = 0; t < wants[i].tokens; ++t)
        append(s, s.content.size() < s.prompt.size() ? s.prompt[s.content.size()] : token());
      row.values = s.values;
      s.pinned = s.pinned && wants[i].tokens == 0;
      ++s.open_steps;
      f.rows.push_back(std::move(row));
      note_table(s.id);
    }
    f.step = std::move(*step);
    f.accepted_before = cells_.accepted();
    if (load_.check) check_batch(f);
    flights_.push_back(std::move(f));
  }

  void check_batch(const flight& f) {
    for (std::uint32_t g = 0; g < group_count(); ++g) {
      const kvcache::batch_view batch = f.step.batch(g);
      const kvcache::block_tables padded = f.step.padded(g);
      REQUIRE(batch.rows() == f.rows.size());
      std::vector<kvcache::slot_id> slots(batch.slots.begin(), batch.slots.end());
      std::size_t at = 0;
      for (std::uint32_t r = 0; r < batch.rows(); ++r) {
        REQUIRE(batch.query_offsets[r] == at);
        REQUIRE(batch.kv_lengths[r] == f.rows[r].values.size());
        const auto row = batch.tables.row(r);
        const auto whole = *m_.table(f.rows[r].id, g);
        REQUIRE(row.size() == blocks_for(g, batch.kv_lengths[r]));
        REQUIRE(std::equal(
            row.begin(), row.end(), whole.begin(),
            [&](kvcache::block_id entry, kvcache::block_id block) { return entry == m_.table_entry(block); }));
        for (std::uint32_t t = 0; t < f.rows[r].tokens; t += size_of(g) - (f.rows[r].start + t) % size_of(g)) {
          const std::size_t i = (f.rows[r].start + t) / size_of(g);
          REQUIRE(m_.ref_count(whole[i]) == 1);
          REQUIRE(((row[i] & kvcache::tail_bit) != 0) == cells_.sealing(g));  // what is written is not sealed
        }
        for (std::size_t i = f.rows[r].start / size_of(g); i-- > 0;)
          kept_wide += (row[i] & kvcache::tail_bit) != 0 && m_.cached(whole[i]);
        REQUIRE(std::equal(row.begin(), row.end(), padded.row(r).begin()));
        for (std::uint32_t t = 0; t < f.rows[r].tokens; ++t) {
          const std::uint32_t position = f.rows[r].start + t;
          REQUIRE(slots[at++] == kvcache::make_slot(row[position / size_of(g)], position % size_of(g), size_of(g)));
        }
      }
      REQUIRE(at == slots.size());
      // Nobody writes where another writes, or where another's valid tokens lie.
      std::sort(slots.begin(), slots.end());
      REQUIRE(std::adjacent_find(slots.begin(), slots.end()) == slots.end());
      for (std::uint32_t r = 0; r < batch.rows(); ++r) check_unread(f, g, r);
    }
  }

  // A row writes over nothing that a step in flight reads for another sequence, or copies. Where the sequence is in
  // that step too, its own writes there come after the copies already.
  void check_unread(const flight& f, std::uint32_t g, std::uint32_t r) const {
    const flight_row& row = f.rows[r];
    const auto table = f.step.batch(g).tables.row(r);
    const auto check_read = [&](kvcache::block_id block, std::size_t tokens) {
      for (std::size_t p = row.start; p < row.values.size(); p += size_of(g) - p % size_of(g))
        REQUIRE((table[p / size_of(g)] != block || p % size_of(g) >= tokens));
    };
    for (const flight& other : flights_) {
      const bool in_it = std::any_of(other.rows.begin(), other.rows.end(), [&](auto& o) { return o.id == row.id; });
      for (const auto& c : other.step.copies())
        if (c.layer_group == g && !in_it) check_read(c.source, c.tokens);
      const kvcache::batch_view batch = other.step.batch(g);
      for (std::uint32_t o = 0; o < other.rows.size(); ++o) {
        if (other.rows[o].id == row.id) continue;
        std::size_t tokens = batch.kv_lengths[o];
        for (const kvcache::block_id block : batch.tables.row(o)) {
          check_read(block, tokens);
          tokens -= std::min<std::size_t>(tokens, size_of(g));
        }
      }
    }
  }

  // Copies, writes and reads of all steps up to `last`, in their order.
  void execute(std::size_t last) {
    if (!load_.check) return;
    for (std::size_t i = 0; i <= last; ++i) {
      flight& f = flights_[i];
      if (std::exchange(f.executed, true)) continue;
      cells_.seal_until(f.accepted_before);
      for (const kvcache::block_copy& c : f.step.copies())
        std::copy_n(cells_.at(c.layer_group, c.source).begin(), c.tokens,
                    cells_.at(c.layer_group, c.destination).begin());
      for (std::uint32_t g = 0; g < group_count(); ++g) {
        const kvcache::batch_view batch = f.step.batch(g);
        for (std::size_t r = 0; r < f.rows.size(); ++r)
          for (std::uint32_t t = 0; t < f.rows[r].tokens; ++t) {
            const auto slot = static_cast<std::uint64_t>(batch.slots[batch.query_offsets[r] + t]);
            cells_.at(g, static_cast<kvcache::block_id>(slot / size_of(g)))[slot % size_of(g)] =
                f.rows[r].values[f.rows[r].start + t];
          }
        for (std::uint32_t r = 0; r < f.rows.size(); ++r) {
          const auto row = batch.tables.row(r);
          for (std::size_t p = first_seen(g, f.rows[r].start); p < f.rows[r].values.size(); ++p)
            if (cells_.at(g, row[p / size_of(g)])[p % size_of(g)] != f.rows[r].values[p]) {
              CAPTURE(g, r, p, row[p / size_of(g)]);
              FAIL("a step reads bytes that are not its sequence's");
            }
        }
      }
    }
  }

  void accepted(const flight& f, std::span<const std::uint32_t> counts) {
    take_seals();
    for (std::size_t r = 0; r < f.rows.size(); ++r) {
      sequence* s = find(f.rows[r].id);
      if (s == nullptr) continue;
      const std::uint32_t count = counts.empty() ? f.rows[r].tokens : counts[r];
      s->settled = true;
      s->accepted = f.rows[r].start + count;
      --s->open_steps;
      if (count == f.rows[r].tokens) continue;
      cut(*s, s->accepted);
      // What the step took beyond is given back.
      for (std::uint32_t g = 0; g < group_count(); ++g)
        REQUIRE(m_.table(s->id, g)->size() <= std::max(f.rows[r].held[g], blocks_for(g, s->accepted)));
    }
  }

  void accept() {
    std::size_t i = 0;
    while (i < flights_.size() && flights_[i].step.accepted()) ++i;
    if (i == flights_.size()) return begin();
    if (i + 1 < flights_.size() && pick(4) == 0)
      REQUIRE(flights_.back().step.accept().error().code == kvcache::errc::step_order);
    flight& f = flights_[i];
    if (pick(2) == 0) {
      REQUIRE(f.step.accept().has_value());
      accepted(f, {});
      return;
    }
    std::vector<std::uint32_t> counts;
    bool relied_on = false;
    for (const flight_row& row : f.rows) {
      counts.push_back(row.tokens - (pick(2) == 0 ? pick(row.tokens + 1) : 0));
      const sequence* s = find(row.id);
      relied_on = relied_on || (s != nullptr && counts.back() < row.tokens && s->open_steps > 1);
    }
    execute(i);
    const auto result = f.step.accept(counts);
    note(result.has_value());
    REQUIRE(result.has_value() == !relied_on);
    if (!result) {
      REQUIRE(result.error().code == kvcache::errc::step_order);
      return;
    }
    ++shortened;
    accepted(f, counts);
  }

  void retire() {
    std::size_t ready = 0;
    while (ready < flights_.size() && flights_[ready].step.accepted()) ++ready;
    if (ready < flights_.size() && pick(4) == 0)
      REQUIRE(m_.retire(flights_.back().step).error().code == kvcache::errc::step_order);
    if (ready == 0) return;
    const std::size_t count = pick(static_cast<std::uint32_t>(ready)) + 1;
    execute(count - 1);
    if (count == ready && pick(2) == 0)
      m_.retire_accepted();
    else
      REQUIRE(m_.retire(flights_[count - 1].step).has_value());
    for (std::size_t i = 0; i < count; ++i) {
      REQUIRE_FALSE(flights_.front().step.open());
      flights_.pop_front();
    }
  }

  void drop() {
    std::size_t first = 0;
    while (first < flights_.size() && flights_[first].step.accepted()) ++first;
    if (first == flights_.size()) return;
    first += pick(static_cast<std::uint32_t>(flights_.size() - first));
    flights_[first].step.drop();
    for (; flights_.size() > first; flights_.pop_back()) {
      ++dropped;
      for (auto row = flights_.back().rows.rbegin(); row != flights_.back().rows.rend(); ++row)
        if (sequence* s = find(row->id); s != nullptr) {
          cut(*s, row->start);
          --s->open_steps;
        }
    }
  }

  void commit() {
    if (live_.empty()) return;
    sequence& s = live_[pick_sequence()];
    if (pick(8) == 0) {
      const std::vector<std::int32_t> beyond(s.accepted - s.committed + 1);
      REQUIRE(m_.commit(s.id, beyond).error().code == kvcache::errc::beyond_length);
    }
    const std::uint32_t n = pick(3) == 0 ? pick(s.accepted - s.committed + 1) : s.accepted - s.committed;
    const kvcache::content_view content(s.content.data() + s.committed, n);
    std::vector<std::vector<kvcache::block_id>> before;
    std::vector<std::pair<std::uint32_t, std::size_t>> keyed;  // group and number of what is not cached in this table
    for (std::uint32_t g = 0; g < group_count(); ++g) {
      const auto table = *m_.table(s.id, g);
      before.emplace_back(table.begin(), table.end());
      for (std::size_t i = s.committed / size_of(g); i < (s.committed + n) / size_of(g); ++i)
        if (table[i] != kvcache::null_block && !m_.cached(table[i])) keyed.emplace_back(g, i);
    }
    REQUIRE(m_.commit(s.id, content).has_value());
    s.committed += n;
    s.settled = true;
    note_table(s.id);
    for (std::uint32_t g = 0; g < group_count(); ++g) {
      const auto table = *m_.table(s.id, g);
      for (std::size_t i = 0; i < s.committed / size_of(g); ++i) {
        kvcache::block_id b = table[i];
        if (b == kvcache::null_block) {  // given back, maybe by this call
          b = before[g][i];
          if (b == kvcache::null_block || !m_.cached(b)) continue;
        } else {
          duplicates += b != before[g][i];
          REQUIRE(m_.cached(b));
        }
        const std::size_t begin = i * size_of(g);
        const std::size_t end = begin + size_of(g);
        keys_[b] = {g,
                    end,
                    s.values[end - 1],
                    i == 0 ? 0 : s.values[begin - 1],
                    i == 0 ? root(s.keys) : s.values[begin - 1],
                    {s.content.begin() + static_cast<std::ptrdiff_t>(begin),
                     s.content.begin() + static_cast<std::ptrdiff_t>(end)}};
      }
    }
    for (const auto& [g, i] : keyed)
      if (const auto b = find_cached(g, (i + 1) * size_of(g), s.values[(i + 1) * size_of(g) - 1]))
        worth_.retain(b, i * size_of(g), s.retention);
  }
  [[nodiscard]] kvcache::block_id find_cached(std::uint32_t group, std::size_t end, std::uint64_t value) const {
    for (kvcache::block_id b = 1; b <= m_.capacity(); ++b)
      if (m_.cached(b) && keys_[b].group == group && keys_[b].end == end && keys_[b].value == value) return b;
    return kvcache::null_block;
  }

  void fork() {
    if (live_.empty()) return;
    if (live_.size() >= load_.most_sequences) return close(pick_sequence());
    const sequence& from = live_[pick_sequence()];
    const std::uint32_t tokens = pick(2) == 0 ? from.accepted : pick(from.accepted + 1);
    const auto id = m_.fork(from.id, tokens);
    if (!id && id.error().code == kvcache::errc::behind_window) return check_behind(from, tokens, id.error());
    REQUIRE(id.has_value() == (from.open_steps == 0));
    if (!id) return;
    note(id->index);
    sequence to = from;
    to.id = *id;
    cut(to, tokens);
    to.accepted = tokens;
    to.committed = std::min(to.committed, tokens);
    to.expires = kvcache::never;
    to.pinned = false;
    live_.push_back(std::move(to));
  }

  void truncate() {
    if (live_.empty()) return;
    sequence& s = live_[pick_sequence()];
    const std::uint32_t tokens = pick(2) == 0 ? s.accepted - std::min(s.accepted, pick(4)) : pick(s.accepted + 1);
    const auto result = m_.truncate(s.id, tokens);
    if (!result && result.error().code == kvcache::errc::behind_window) return check_behind(s, tokens, result.error());
    REQUIRE(result.has_value() == (s.open_steps == 0));
    if (!result) return;
    cut(s, tokens);
    s.pinned = false;
    s.accepted = tokens;
    s.committed = std::min(s.committed, tokens);
  }

  // A cut that a window does not allow: there is a reason, and the least cut that is named is possible.
  void check_behind(const sequence& s, std::uint32_t tokens, const kvcache::failure& f) {
    ++behind;
    note(f);
    REQUIRE(s.open_steps == 0);
    REQUIRE(f.value == tokens);
    REQUIRE(f.limit > tokens);
    REQUIRE(f.limit <= s.accepted);
    bool missing = false;
    for (std::uint32_t g = 0; g < group_count(); ++g) {
      const auto table = *m_.table(s.id, g);
      for (std::size_t i = first_seen(g, tokens) / size_of(g); i * size_of(g) < tokens; ++i)
        missing = missing || table[i] == kvcache::null_block;
    }
    REQUIRE(missing);
    const auto least = m_.fork(s.id, static_cast<std::uint32_t>(f.limit));
    REQUIRE(least.has_value());
    REQUIRE(m_.close(*least).has_value());
  }

  void close(std::size_t i) {
    if (i >= live_.size()) return;
    REQUIRE(m_.close(live_[i].id).has_value());
    closed_ = live_[i].id;
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  void close_stale() {
    const auto before = m_.counts();
    REQUIRE(m_.close(closed_).error().code == kvcache::errc::stale_id);
    REQUIRE(m_.counts() == before);
  }

  void look() {
    const auto content = some_prompt();
    const std::size_t keys = pick(static_cast<std::uint32_t>(key_sets_.size()));
    const auto found = m_.probe(content, key_sets_[keys]);
    note(found.tokens);
    if (!load_.check) return;
    const std::uint32_t whole = longest(content, keys, content.size());
    REQUIRE(found.tokens == whole + longest_head(content, keys, whole, content.size()));
  }

  // R9, R3 and everything else that has to hold between any two calls.
  void check() {
    const kvcache::block_counts counts = m_.counts();
    note(counts.free);
    note(counts.evictable);
    note(counts.held);
    if (!load_.check) return;
    REQUIRE(counts.capacity() == m_.capacity());
    std::vector<std::uint32_t> references(m_.capacity() + 1);
    for (const sequence& s : live_) {
      REQUIRE(*m_.length(s.id) == s.accepted);
      REQUIRE(*m_.committed(s.id) == s.committed);
      if (s.pinned) REQUIRE(m_.probe(s.content, key_sets_[s.keys]).tokens == s.content.size());
      for (std::uint32_t g = 0; g < group_count(); ++g) {
        const auto table = *m_.table(s.id, g);
        REQUIRE(table.size() * size_of(g) >= s.content.size());
        for (const kvcache::block_id b : table) ++references[b];
        for (std::size_t i = 0; i < s.committed / size_of(g); ++i)
          REQUIRE((table[i] == kvcache::null_block || m_.cached(table[i])));
        // Holes are where nobody looks, and what nobody looks at is a hole once it can be found by its content.
        const std::size_t seen = first_seen(g, s.accepted) / size_of(g);
        for (std::size_t i = 0; i < table.size(); ++i) {
          if (i >= seen) REQUIRE(table[i] != kvcache::null_block);
          if (i < seen && i < s.committed / size_of(g) && s.settled) REQUIRE(table[i] == kvcache::null_block);
        }
      }
    }
    references[kvcache::null_block] = 0;
    kvcache::block_counts seen;
    std::map<std::tuple<std::uint32_t, std::size_t, std::uint64_t>, kvcache::block_id> cached;
    for (kvcache::block_id b = 1; b <= m_.capacity(); ++b) {
      REQUIRE(m_.ref_count(b) == references[b]);
      const kvcache::block_state state = m_.state(b);
      REQUIRE((state == kvcache::block_state::referenced) == (references[b] != 0));
      if (state == kvcache::block_state::free) REQUIRE_FALSE(m_.cached(b));
      if (state == kvcache::block_state::evictable) REQUIRE(m_.cached(b));
      seen.free += state == kvcache::block_state::free;
      seen.evictable += state == kvcache::block_state::evictable;
      seen.referenced += state == kvcache::block_state::referenced;
      seen.held += state == kvcache::block_state::held;
      // R7: nothing is cached twice.
      if (m_.cached(b)) REQUIRE(cached.insert({{keys_[b].group, keys_[b].end, keys_[b].value}, b}).second);
    }
    REQUIRE(seen == counts);
    // R7: no cached block lacks the one before it. R4: nor is that one available while it is itself in use.
    std::vector<bool> leaf(m_.capacity() + 1, true);
    for (kvcache::block_id b = 1; b <= m_.capacity(); ++b) {
      if (!m_.cached(b) || keys_[b].parent == 0 || windowed(keys_[b].group)) continue;
      const auto parent = cached.find({keys_[b].group, keys_[b].end - size_of(keys_[b].group), keys_[b].parent});
      REQUIRE(parent != cached.end());
      leaf[parent->second] = false;
      if (m_.state(b) != kvcache::block_state::evictable)
        REQUIRE(m_.state(parent->second) != kvcache::block_state::evictable);
    }
    check_evicted(std::move(leaf));
    worth_.observe(m_);
    // Nothing that a step in flight may touch is available.
    for (const flight& f : flights_)
      for (std::uint32_t g = 0; g < group_count(); ++g) {
        const auto busy = [&](kvcache::block_id b) {
          if ((b & kvcache::tail_bit) != 0) return true;
          const auto state = m_.state(b);
          // Places in a tail pool have no state to ask for: their bytes tell.
          return state == kvcache::block_state::referenced || state == kvcache::block_state::held;
        };
        for (std::uint32_t r = 0; r < f.rows.size(); ++r)
          for (const kvcache::block_id b : f.step.batch(g).tables.row(r))
            REQUIRE((b == kvcache::null_block || busy(b)));
        for (const auto& c : f.step.copies()) REQUIRE(busy(c.source));
      }
  }

  // Where all that a call made the cache lose was evicted, no leaf that could have gone instead is worth less.
  void check_evicted(std::vector<bool> leaf) {
    const std::uint64_t evicted =
        m_.statistics().evicted_blocks - std::exchange(evicted_, m_.statistics().evicted_blocks);
    std::vector<kvcache::block_id> gone, kept;
    for (kvcache::block_id b = 1; b <= m_.capacity(); ++b)
      if (worth_.cached(b) && !m_.cached(b))
        gone.push_back(b);
      else if (leaf_[b] && worth_.evictable(b) && m_.state(b) == kvcache::block_state::evictable && worth_.level(b))
        kept.push_back(b);
    leaf_ = std::move(leaf);
    if (!std::is_same_v<eviction, kvcache::priority> || evicted != gone.size()) return;
    for (const kvcache::block_id g : gone)
      for (const kvcache::block_id k : kept) {
        // A window's blocks also go where those are gone that they are found by.
        if (windowed(keys_[g].group) || !worth_.level(g)) continue;
        REQUIRE(*worth_.level(g) <= *worth_.level(k));
        ranked += *worth_.level(g) < *worth_.level(k);
      }
  }

  random_load load_;
  Manager m_;
  Choices choices_;
  pool_cells cells_;
  std::vector<key> keys_;
  worth_model worth_;
  std::vector<bool> leaf_ = std::vector<bool>(load_.blocks + 1, true);  // after the last call: has no cached child
  std::uint64_t evicted_ = 0;
  std::array<std::vector<std::int32_t>, 5> prompts_;
  const std::vector<std::vector<kvcache::extra_key>> key_sets_{
      {}, {{kvcache::key_kind::salt, "a"}}, {{kvcache::key_kind::adapter, "a"}, {kvcache::key_kind::salt, "b"}}};
  std::vector<sequence> live_;
  std::deque<flight> flights_;
  kvcache::sequence_id closed_;
  std::uint64_t now_ = 0;
  std::vector<std::uint64_t> log_;
};

}  // namespace kvcache_test
