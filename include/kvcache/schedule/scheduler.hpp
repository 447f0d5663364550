// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/blocks/block_manager.hpp>
#include <kvcache/blocks/key_sets.hpp>
#include <kvcache/blocks/requests.hpp>
#include <kvcache/blocks/step.hpp>
#include <kvcache/detail/span_of.hpp>
#include <kvcache/error.hpp>
#include <kvcache/fwd.hpp>
#include <kvcache/schedule/flights.hpp>
#include <kvcache/schedule/producers.hpp>
#include <kvcache/schedule/request_table.hpp>
#include <kvcache/schedule/requests.hpp>
#include <kvcache/schedule/step_plan.hpp>
#include <kvcache/schedule/strides.hpp>
#include <kvcache/schedule/waiting_queues.hpp>
#include <kvcache/types.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace kvcache {

/// Continuous batching over a block_manager: says step by step which requests compute which tokens.
///
/// Requests are submitted at any time. `next` makes the plan of a step: every request that generates adds one token
/// (and its drafts), the prompts of others share what is left of the step's tokens in chunks. The engine computes it
/// and hands the tokens it chose to `finish`. Plans may overlap: `next` may be called again before the step before has
/// finished, whose tokens are then not known yet; steps finish in order.
///
/// Admission is by priority, then in order of arrival, nobody passes a request that does not fit; what fits, the
/// manager's `predict` says, so a prompt gets all its blocks or none. A request whose prompt begins with blocks that a
/// running one is about to compute waits until they can be reused, and lends that one its priority; others pass it by.
/// (Who runs waits for nobody, so priorities are lent over one step only.)
/// Where a running request finds no block for its next token, another one gives back its blocks and computes them again
/// later, its prompt and what it has generated; what it had generated stays.
///
/// Nothing is decided by a clock or an address: equal calls give equal plans. Nothing is allocated per call once the
/// arrays have grown to what the load needs; tokens of live requests are kept, 8 bytes each.
///
/// The manager must outlive the scheduler. Sequences that others open in it are left alone; steps that others begin in
/// it have to be accepted in the order of all steps.
///
/// Thread safety: none, calls of const members included. Use one thread at a time.
template <class Manager>
class scheduler {
 public:
  /// Raises invalid_argument where `running` is 0, fewer tokens go into a step than requests run, hash_bits is more
  /// than 64, or a tail pool may be too small for a step.
  explicit scheduler(Manager& manager, const scheduler_options& options = {})
      : manager_(manager),
        options_(detail::checked(options)),
        strides_(detail::strides_of(manager)),
        queues_(requests_),
        producers_(requests_, strides_.prefix, manager.partial_reuse(), strides_.windows, options.hash_bits) {
    if (options_.watermark == scheduler_options::automatic) options_.watermark = manager.capacity() / 100;
    if (options_.prefill_tokens == 0) options_.prefill_tokens = options_.step_tokens;
    detail::check_tail_pools(manager, options_);
  }
  scheduler(const scheduler&) = delete;
  scheduler& operator=(const scheduler&) = delete;
  /// Closes the sequences of all requests and drops the steps in flight.
  ~scheduler() {
    for (const index r : running_) static_cast<void>(manager_.close(requests_[r].sequence));
  }

  // Requests ----------------------------------------------------------------------------------------------------

  /// Queues a request.
  /// empty_content: no prompt, or no token to generate. exceeds_pool: the whole pool does not hold the prompt and the
  /// tokens to generate (all but the last of them, which is never computed). bad_range, unsupported: as
  /// block_manager::retain. O(prompt + keys).
  result<request_id> submit(const request& what) noexcept {
    if (what.prompt.empty() || what.max_tokens == 0)
      return failure{errc::empty_content, what.prompt.empty() ? what.prompt.size() : what.max_tokens, 1};
    const std::uint64_t positions = std::uint64_t{what.prompt.size()} + what.max_tokens - 1;
    if (const result<void> good = manager_.check_retention(what.retention); !good) return good.error();
    const admission a = manager_.predict(
        {.content = what.prompt.sub(0, 1), .keys = what.keys, .reserve = positions, .chunk = options_.step_tokens});
    if (a.total_blocks > a.capacity) return failure{errc::exceeds_pool, a.total_blocks, a.capacity};
    const index r = requests_.add(what);
    requests_[r].key_set = key_sets_.acquire(what.keys);
    queues_.push(waiting_queue, r);
    ++statistics_.submitted;
    return requests_.id(r);
  }

  /// Ends a request in any state. What a step in flight computes for it is ignored. Where others wait for what it was
  /// about to produce, the first of them takes over.
  /// stale_id. O(blocks + log(requests)).
  result<void> abort(request_id id) noexcept {
    if (!requests_.contains(id)) return requests_.stale(id);
    if (requests_[id.index].running)
      stop_running(id.index);
    else
      leave_queue(id.index);
    ++statistics_.aborted;
    forget(id.index);
    return {};
  }

  // Steps -------------------------------------------------------------------------------------------------------

  /// Plans and begins a step. An empty plan: with a step in flight, that one has to finish first; with none, there is
  /// nothing left to do. Requests for which there is no room though nothing runs and nothing is in flight end here,
  /// see ended().
  /// O(running + tokens of the step) and, for at most as many waiting requests as may run, O(their tokens).
  step_plan next() noexcept {
    ended_.clear();
    bool with_drafts = true;
    bool admits = true;
    for (;;) {
      gather(with_drafts, admits || running_.empty());
      if (rows_.empty()) {
        if (!flights_.empty()) return {};
        KVCACHE_ASSERT(running_.empty(), "a running request has nothing to compute");
        const index first = queues_.top(waiting_queue);
        if (first == detail::no_request) return {};
        fail_waiting(first);
        continue;
      }
      auto begun = begin_rows();
      if (begun) return take_off(std::move(*begun));
      // Its tail pool is large enough for a step, so others in flight use it.
      if (begun.error().code == errc::out_of_tail_blocks && !flights_.empty()) return {};
      // Speculation must not cost anyone his blocks.
      if (std::exchange(with_drafts, false) && drafts_planned_) continue;
      admits = false;
      if (relieve(begun.error())) continue;
      keep_what_fits();
      if (rows_.empty()) return {};
      begun = begin_rows();
      if (begun) return take_off(std::move(*begun));
      return {};
    }
  }

  /// Ends the oldest step in flight with what came of its rows, in their order: lengths advance, full blocks can be
  /// reused, requests end that have max_tokens or whose result says so. Rows of requests that were aborted or have
  /// ended meanwhile are ignored, whatever their results say. Tokens for a request that was preempted meanwhile count.
  /// stale_id: the step has finished. step_order: an earlier one has not. beyond_length: not one result for each row,
  /// or more or fewer tokens than a row can have. O(rows + tokens to commit + blocks given back).
  result<void> finish(const step_plan& plan, std::span<const row_result> results) noexcept {
    ended_.clear();
    const std::uint64_t finished = flights_.finished();
    if (plan.number <= finished || plan.number > flights_.newest())
      return failure{errc::stale_id, plan.number, finished};
    if (plan.number != finished + 1) return failure{errc::step_order, plan.number, finished + 1};
    detail::flight& f = flights_.oldest();
    if (results.size() != f.rows.size()) return failure{errc::beyond_length, results.size(), f.rows.size()};
    bool whole = true;
    counts_.resize(results.size());
    for (std::size_t i = 0; i < results.size(); ++i) {
      const plan_row& row = f.rows[i];
      const std::size_t size = results[i].tokens.size();
      const std::size_t most = row.samples ? std::size_t{row.drafts} + 1 : 0;
      const bool possible = size <= most && (size != 0 || !row.samples || results[i].ends);
      if (!possible && requests_.lives(row.request)) return failure{errc::beyond_length, size, most};
      const std::size_t confirmed = size == 0 || !possible ? 0 : size - 1;
      counts_[i] = row.tokens - row.drafts + static_cast<std::uint32_t>(confirmed);
      whole = whole && confirmed == row.drafts;
    }
    auto accepted = whole ? f.blocks.accept() : f.blocks.accept(detail::span_of(counts_));
    if (!accepted) return accepted;

    std::uint64_t generated = 0;
    for (std::size_t i = 0; i < results.size(); ++i)
      if (take(f.rows[i], counts_[i], results[i])) generated += results[i].tokens.size();
    statistics_.generated_tokens += generated;
    accepted = manager_.retire(f.blocks);
    KVCACHE_ASSERT(accepted.has_value(), "an accepted step is the oldest one");
    flights_.finish_oldest();
    rows_.swap(f.rows);  // the next plan is made where this one lies in the processor's cache
    for (const ended_request& e : ended_) end(e);
    return accepted;
  }

  /// The requests that the last call of `next` or `finish` ended. Valid until the next call of either.
  [[nodiscard]] std::span<const ended_request> ended() const noexcept { return detail::span_of(ended_); }

  // What is there -----------------------------------------------------------------------------------------------

  /// Whether the id names a request that has not ended. O(1).
  [[nodiscard]] bool contains(request_id id) const noexcept { return requests_.contains(id); }
  /// stale_id. O(1).
  [[nodiscard]] result<request_progress> progress(request_id id) const noexcept {
    if (!requests_.contains(id)) return requests_.stale(id);
    const detail::request_record& r = requests_[id.index];
    return request_progress{
        r.prompt,  r.known() - r.prompt, r.running ? r.computed : 0, r.reused, r.preemptions, r.effective(), r.running,
        r.sequence};
  }
  /// The prompt and what was generated, as far as steps have finished. Valid until the next call that is not const.
  /// stale_id. O(1).
  [[nodiscard]] result<content_view> tokens(request_id id) const noexcept {
    if (!requests_.contains(id)) return requests_.stale(id);
    return requests_[id.index].tokens();
  }
  /// Requests admitted. O(1), as all below.
  [[nodiscard]] std::size_t running() const noexcept { return running_.size(); }
  /// Requests that wait, for room or for what another one computes.
  [[nodiscard]] std::size_t waiting() const noexcept { return requests_.size() - running_.size(); }
  /// Whether no request is left.
  [[nodiscard]] bool idle() const noexcept { return requests_.size() == 0; }
  /// Steps planned and not finished.
  [[nodiscard]] std::size_t steps_in_flight() const noexcept { return flights_.size(); }
  [[nodiscard]] const scheduler_statistics& statistics() const noexcept { return statistics_; }

 private:
  using index = detail::request_index;
  using record = detail::request_record;
  using requests = detail::request_table<scheduler>;
  using queues = detail::waiting_queues<requests>;
  using producers = detail::producers<requests>;
  using queue = typename queues::queue;
  using claim_id = typename producers::claim;

  // Why the first waiting request was refused last, so that it is not looked at again until that may have changed.
  struct refusal {
    request_id request;
    std::uint64_t needs = 0;
    std::uint64_t starts = 0;
  };

  static constexpr queue waiting_queue = 0;  // the others are those of claims
  static constexpr std::uint64_t not_counted = ~std::uint64_t{0};

  [[nodiscard]] std::uint64_t seed(const record& r) const noexcept { return key_sets_.hash(r.key_set); }

  // Planning ----------------------------------------------------------------------------------------------------

  /// Leaves in rows_ what is computed next.
  void gather(bool with_drafts, bool admits) noexcept {
    rows_.clear();
    prefills_.clear();
    drafts_planned_ = false;
    bool drafts = false;
    for (const index i : running_) {
      const record& r = requests_[i];
      if (r.begun < r.target) {
        prefills_.push_back(i);
        continue;
      }
      if (r.begun >= r.limit || r.verifying) continue;
      // Drafts follow a token that is known.
      if (r.with_drafts && with_drafts) {
        if (r.rows != 0) continue;
        drafts = true;
      }
      rows_.push_back({.request = {i, r.generation},
                       .sequence = r.sequence,
                       .first = r.begun,
                       .tokens = 1,
                       .known = r.begun < r.known() ? 1u : 0u,
                       .decodes = true,
                       .samples = true});
    }
    std::uint32_t left = options_.step_tokens - static_cast<std::uint32_t>(rows_.size());
    if (drafts) add_drafts(left);
    prompt_tokens_ = left < options_.prefill_tokens ? left : options_.prefill_tokens;
    add_prompts(admits);
  }

  /// Prompts that are being computed and requests that wait share the tokens that are left, whoever goes first.
  void add_prompts(bool admits) noexcept {
    sort_prefills(0);
    promised_ = not_counted;
    std::uint32_t looks = admits ? options_.running : 0;
    for (std::size_t at = 0; prompt_tokens_ != 0;) {
      const index waiting = looks != 0 ? queues_.top(waiting_queue) : detail::no_request;
      if (waiting != detail::no_request && (at == prefills_.size() || requests_.before(waiting, prefills_[at]))) {
        looks = look_at(waiting) ? looks - 1 : 0;
        sort_prefills(at);
      } else if (at != prefills_.size()) {
        add_prefill(prefills_[at++]);
      } else {
        break;
      }
    }
  }

  /// Those from `first` on; few have to move.
  void sort_prefills(std::size_t first) noexcept {
    for (std::size_t i = first + 1; i < prefills_.size(); ++i)
      for (std::size_t j = i; j > first && requests_.before(prefills_[j], prefills_[j - 1]); --j)
        std::swap(prefills_[j], prefills_[j - 1]);
  }

  /// Drafts take at most half of what they could leave to prompts.
  void add_drafts(std::uint32_t& left) noexcept {
    const bool prompts = !prefills_.empty() || queues_.top(waiting_queue) != detail::no_request;
    std::uint32_t spare = prompts ? left / 2 : left;
    for (plan_row& row : rows_) {
      const record& r = requests_[row.request.index];
      const std::uint32_t possible = r.limit - r.begun - 1;
      std::uint32_t drafts = r.drafts < possible ? r.drafts : possible;
      if (spare < drafts) drafts = spare;
      row.drafts = drafts;
      row.tokens += drafts;
      spare -= drafts;
      left -= drafts;
      drafts_planned_ = drafts_planned_ || drafts != 0;
    }
  }

  void add_prefill(index i) noexcept {
    const record& r = requests_[i];
    const std::uint32_t rest = r.target - r.begun;
    const std::uint32_t tokens = rest < prompt_tokens_ ? rest : prompt_tokens_;
    if (tokens == 0) return;
    prompt_tokens_ -= tokens;
    rows_.push_back({.request = {i, r.generation},
                     .sequence = r.sequence,
                     .first = r.begun,
                     .tokens = tokens,
                     .known = tokens,
                     .samples = tokens == rest});
  }

  /// Admits the first waiting request or lets it wait for its producer. False: neither; nobody passes it.
  bool look_at(index i) noexcept {
    const record& r = requests_[i];
    // Steps in flight may still bring tokens of its last admission.
    if (running_.size() == options_.running || r.rows != 0 || refused_before(i)) return false;
    if (promised_ == not_counted) {
      fill_wants();
      const auto needed = manager_.blocks_needed(detail::span_of(wants_));
      KVCACHE_ASSERT(needed || needed.error().code == errc::out_of_tail_blocks,
                     "a sequence of the scheduler was closed behind its back");
      promised_ = needed ? *needed : manager_.capacity();
    }
    ++statistics_.examined;
    const admission a = manager_.predict(wanted(r));
    if (const auto claim = producers_.find(i, a.reused_tokens, seed(r)); claim != 0) {
      wait_for(i, claim);
      return true;
    }
    const std::uint64_t needs = a.needs + (running_.empty() ? 0 : options_.watermark);
    if (needs + promised_ > a.available || a.total_blocks > a.capacity) {
      refused_ = {requests_.id(i), needs, starts_};
      return false;
    }
    start(i);
    return true;
  }

  [[nodiscard]] open_request wanted(const record& r) const noexcept {
    return {.content = r.tokens(),
            .keys = detail::span_of(r.keys),
            .reserve = r.content.size(),
            .chunk = options_.step_tokens,
            .retention = detail::span_of(r.retention),
            .counted = r.admitted};
  }
  /// A block that a running request comes to share with a refused one is needed no more and available no more, so it
  /// does not help; others that start may be somebody to wait for.
  [[nodiscard]] bool refused_before(index i) const noexcept {
    return !running_.empty() && refused_.request == requests_.id(i) && refused_.starts == starts_ &&
           manager_.counts().available() < refused_.needs;
  }

  void wait_for(index i, claim_id claim) noexcept {
    leave_queue(i);
    queues_.push(claim, i);
    record& producer = requests_[producers_.producer(claim)];
    if (requests_[i].priority > producer.lent) producer.lent = requests_[i].priority;
  }

  void start(index i) noexcept {
    leave_queue(i);
    record& r = requests_[i];
    const auto opened = manager_.open(wanted(r));
    KVCACHE_ASSERT(opened.has_value(), "predict and open disagree");
    r.sequence = opened->sequence;
    r.begun = r.computed = r.committed = r.reused_now = opened->reused_tokens;
    r.target = r.known();
    r.next_commit = detail::end_after(r.committed, strides_.commit);
    r.running = true;
    if (!r.admitted) {
      r.admitted = true;
      r.reused = r.reused_now;
      ++statistics_.admitted;
      statistics_.queried_tokens += r.prompt;
      statistics_.hit_tokens += r.reused;
    }
    running_.push_back(i);
    producers_.claim_all(i, already_there(r), seed(r), r.producing);
    ++starts_;
    add_prefill(i);
  }

  /// Tokens of a request that was just admitted which nobody has to produce: those that it reuses and, where it reuses
  /// the head of a block that holds just what it is about to compute, that block.
  [[nodiscard]] std::uint32_t already_there(const record& r) const noexcept {
    if (r.committed % strides_.prefix == 0) return r.committed;
    const std::uint32_t end = detail::end_after(r.committed, strides_.prefix);
    return end <= r.known() && manager_.probe(r.tokens().sub(0, end), detail::span_of(r.keys)).tokens == end
               ? end
               : r.committed;
  }

  void fill_wants() noexcept {
    wants_.clear();
    for (const plan_row& row : rows_) wants_.push_back({row.sequence, row.tokens});
  }
  result<step> begin_rows() noexcept {
    fill_wants();
    return manager_.begin(detail::span_of(wants_));
  }

  step_plan take_off(step&& begun) noexcept {
    detail::flight& f = flights_.add();
    f.blocks = std::move(begun);
    f.rows.swap(rows_);
    for (const plan_row& row : f.rows) {
      record& r = requests_[row.request.index];
      r.begun += row.tokens;
      ++r.rows;
      if (row.decodes) {
        r.verifying = row.drafts != 0;
        statistics_.decoded_tokens += row.tokens;
        continue;
      }
      const std::uint32_t again = r.reached <= row.first ? 0 : r.reached - row.first;
      const std::uint32_t recomputed = again < row.tokens ? again : row.tokens;
      statistics_.recomputed_tokens += recomputed;
      statistics_.prefilled_tokens += row.tokens - recomputed;
    }
    return {flights_.newest(), detail::span_of(f.rows), &f.blocks};
  }

  // Running short -----------------------------------------------------------------------------------------------

  /// Sees to it that blocks come back. True: the plan has to be made anew. False: they come back only when a step in
  /// flight has finished.
  bool relieve(const failure& short_of) noexcept {
    const std::uint64_t coming = flights_.empty() ? 0 : manager_.counts().held;
    if (short_of.value <= short_of.limit + coming) return false;
    if (running_.size() > 1) {
      preempt(victim());
      return true;
    }
    if (!flights_.empty()) return false;
    const index last = running_.front();
    const request_id id = requests_.id(last);
    stop_running(last);
    ended_.push_back({id, end_reason::failed, short_of});
    end(ended_.back());
    return true;
  }

  /// Who gives his blocks back: of those with the lowest priority, lent ones included, the one that has computed the
  /// fewest tokens since its admission, as those have to be computed again; of equal ones the last to come. The one of
  /// them that came first is spared, so that among equals there is always one that gets on until it ends.
  [[nodiscard]] index victim() const noexcept {
    index spared = running_.front();
    for (const index i : running_)
      if (rank_of(i) < rank_of(spared) ||
          (rank_of(i) == rank_of(spared) && requests_[i].arrival < requests_[spared].arrival))
        spared = i;
    index chosen = detail::no_request;
    for (const index i : running_) {
      if (i == spared || rank_of(i) != rank_of(spared)) continue;
      if (chosen == detail::no_request || cost(i) < cost(chosen) ||
          (cost(i) == cost(chosen) && requests_[i].arrival > requests_[chosen].arrival))
        chosen = i;
    }
    return chosen == detail::no_request ? spared : chosen;
  }
  [[nodiscard]] std::int32_t rank_of(index i) const noexcept { return requests_[i].effective(); }
  [[nodiscard]] std::uint32_t cost(index i) const noexcept { return requests_[i].begun - requests_[i].reused_now; }

  void preempt(index i) noexcept {
    stop_running(i);
    record& r = requests_[i];
    if (r.begun > r.reached) r.reached = r.begun;
    ++r.preemptions;
    ++statistics_.preemptions;
    queues_.push(waiting_queue, i);
  }

  /// Leaves in rows_ those for which there are blocks now; whoever goes first chooses first.
  void keep_what_fits() noexcept {
    order_.clear();
    for (std::uint32_t at = 0; at < rows_.size(); ++at) {
      order_.push_back(at);
      for (std::size_t j = at; j > 0 && goes_before(order_[j], order_[j - 1]); --j) std::swap(order_[j], order_[j - 1]);
    }
    std::uint64_t left = manager_.counts().available();
    for (const std::uint32_t at : order_) {
      const want w{rows_[at].sequence, rows_[at].tokens};
      const auto needed = manager_.blocks_needed({&w, 1});
      if (needed && *needed <= left)
        left -= *needed;
      else
        rows_[at].tokens = 0;
    }
    std::size_t kept = 0;
    for (const plan_row& row : rows_)
      if (row.tokens != 0) rows_[kept++] = row;
    rows_.resize(kept);
  }
  [[nodiscard]] bool goes_before(std::uint32_t a, std::uint32_t b) const noexcept {
    return requests_.before(rows_[a].request.index, rows_[b].request.index);
  }

  // Ends --------------------------------------------------------------------------------------------------------

  /// Takes what came of one row. False: its request is gone.
  KVCACHE_ALWAYS_INLINE bool take(const plan_row& row, std::uint32_t accepted, const row_result& result) noexcept {
    if (!requests_.lives(row.request)) return false;
    record& r = requests_[row.request.index];
    --r.rows;
    for (std::size_t t = 0; t < result.tokens.size(); ++t) r.content.push_back(result.tokens[t]);
    // So that the line that follows is there when a token begins it.
    KVCACHE_PREFETCH(r.content.data() + r.content.size() + 64 / sizeof(content_unit));
    if (r.sequence == row.sequence) {  // not preempted meanwhile
      r.computed = row.first + accepted;
      if (r.verifying) {
        r.begun = r.computed;
        r.verifying = false;
      }
      if (r.computed >= r.next_commit) commit(r);
    }
    if (result.ends)
      ended_.push_back({row.request, end_reason::stopped, {}});
    else if (r.known() > r.limit)
      ended_.push_back({row.request, end_reason::length, {}});
    return true;
  }

  /// A call for each token would cost more than the rest.
  KVCACHE_NOINLINE void commit(record& r) noexcept {
    const auto whole = static_cast<std::uint32_t>(r.computed / strides_.commit * strides_.commit);
    const auto done = manager_.commit(r.sequence, r.tokens().sub(r.committed, whole - r.committed));
    KVCACHE_ASSERT(done.has_value(), "a sequence of the scheduler was changed behind its back");
    static_cast<void>(done);
    r.committed = whole;
    r.next_commit = detail::end_after(whole, strides_.commit);
    if (r.producing != 0) release_claims(r, whole);
  }

  /// Gives up the claims on the first `produced` tokens: who waits for them goes on.
  void release_claims(record& r, std::uint64_t produced) noexcept {
    bool waited_for = false;
    while (r.producing != 0 && producers_.end(r.producing) <= produced) {
      waited_for = waited_for || queues_.top(r.producing) != detail::no_request;
      queues_.move_all(r.producing, waiting_queue);
      r.producing = producers_.remove(r.producing);
    }
    if (waited_for) update_lent(r);
  }

  void update_lent(record& r) noexcept {
    r.lent = r.priority;
    for (auto c = r.producing; c != 0; c = producers_.next(c))
      if (const index i = queues_.top(c); i != detail::no_request && requests_[i].priority > r.lent)
        r.lent = requests_[i].priority;
  }

  /// Takes a waiting request out of the queue it is in.
  void leave_queue(index i) noexcept {
    queue from = waiting_queue;
    if (queues_.erase(i, from) && from != waiting_queue) update_lent(requests_[producers_.producer(from)]);
  }

  /// A running request gives back its blocks and its claims.
  void stop_running(index i) noexcept {
    record& r = requests_[i];
    const auto closed = manager_.close(r.sequence);
    KVCACHE_ASSERT(closed.has_value(), "a sequence of the scheduler was closed behind its back");
    static_cast<void>(closed);
    release_claims(r, max_length + 1 + strides_.prefix);
    r.running = r.verifying = false;
    r.sequence = {};
    std::size_t at = 0;
    while (running_[at] != i) ++at;
    running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(at));
  }

  void fail_waiting(index i) noexcept {
    const admission a = manager_.predict(wanted(requests_[i]));
    leave_queue(i);
    ended_.push_back({requests_.id(i), end_reason::failed,
                      a.total_blocks > a.capacity ? failure{errc::exceeds_pool, a.total_blocks, a.capacity}
                                                  : failure{errc::out_of_blocks, a.needs, a.available}});
    end(ended_.back());
  }

  /// Forgets a request that has ended.
  void end(const ended_request& e) noexcept {
    const index i = e.request.index;
    switch (e.reason) {
      case end_reason::stopped: ++statistics_.stopped; break;
      case end_reason::length: ++statistics_.length; break;
      case end_reason::failed: ++statistics_.failed; break;
    }
    if (e.reason != end_reason::failed) {
      if (requests_[i].running)
        stop_running(i);
      else
        leave_queue(i);
    }
    forget(i);
  }
  void forget(index i) noexcept {
    key_sets_.drop_user(requests_[i].key_set);
    requests_.remove(i);
  }

  Manager& manager_;
  scheduler_options options_;
  detail::strides strides_;
  requests requests_;
  detail::key_sets<scheduler> key_sets_;
  queues queues_;
  producers producers_;
  std::vector<index> running_;  // in the order of admission
  detail::flights<scheduler> flights_;
  std::uint64_t starts_ = 0;  // admissions, each time anew
  refusal refused_;
  scheduler_statistics statistics_;
  std::vector<ended_request> ended_;

  // Of the plan in the making.
  std::vector<plan_row> rows_;
  std::vector<index> prefills_;
  std::vector<want> wants_;
  std::vector<std::uint32_t> order_;
  std::vector<std::uint32_t> counts_;  // of a step that finishes
  std::uint32_t prompt_tokens_ = 0;    // that may still be added
  std::uint64_t promised_ = 0;         // blocks for the rows planned before the first look at a waiting request
  bool drafts_planned_ = false;
};

}  // namespace kvcache
