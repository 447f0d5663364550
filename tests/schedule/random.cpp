// SPDX-License-Identifier: Apache-2.0
// Random calls: requests that share prefixes come and are aborted, steps overlap, drafts fail, others take blocks of
// the pool. Whatever happens, a request ends with the tokens it would have alone, and no block is lost.
#include <algorithm>
#include <array>
#include <random>
#include <set>

#include "random_calls.hpp"
#include "support.hpp"

using namespace kvcache_test;

namespace {

struct random_load {
  std::uint64_t seed = 1;
  std::uint32_t blocks = 40;
  std::uint32_t block_size = 4;
  kvcache::scheduler_options options{};
  std::size_t depth = 1;
  std::uint32_t drafts = 0;
  bool aborts = true;
  bool others = true;  ///< sequences that are not the scheduler's hold blocks at times
  std::uint32_t priorities = 3;
  std::size_t most_live = 40;
  std::vector<kvcache::layer_group> groups{};  ///< instead of one of block_size, all of that size
  bool partial_reuse = false;
};

class driver {
 public:
  explicit driver(const random_load& load)
      : load_(load),
        random_(load.seed * 0x9e3779b97f4a7c15u + 1),
        m({.blocks = load.blocks,
           .block_size = load.block_size,
           .layer_groups = load_.groups,
           .partial_reuse = load.partial_reuse,
           .hash_bits = load.options.hash_bits}),
        s(m, load.options),
        engine(m, alphabet, windows(load)) {
    for (auto& base : bases_)
      for (std::uint32_t i = 0; i < 8 * load.block_size; ++i) base.push_back(pick(alphabet));
    for (std::size_t i = 1; i < bases_.size(); ++i)
      std::copy_n(bases_[0].begin(), pick(static_cast<std::uint32_t>(bases_[0].size())), bases_[i].begin());
  }

  void run(std::size_t calls) {
    for (std::size_t i = 0; i < calls; ++i) {
      switch (pick(12)) {
        case 0:
        case 1: submit(); break;
        case 2: abort(); break;
        case 3: hold(); break;
        case 4:
        case 5:
        case 6:
        case 7:
          if (engine.flights.size() < load_.depth && engine.plan(s)) check_plan();
          break;
        default:
          if (!engine.flights.empty()) engine.finish(s);
          break;
      }
      check();
    }
  }

  void finish() {
    for (const auto& h : held_) REQUIRE(m.close(h).has_value());
    held_.clear();
    engine.run(s, load_.depth);
    check();
    engine.check_tokens(s.statistics().failed);
    CHECK((load_.others || s.statistics().failed == 0));
    check_empty(m, s);
  }

  [[nodiscard]] const std::vector<std::uint64_t>& log() const { return log_; }

 private:
  static constexpr std::uint32_t alphabet = 2;
  const random_load load_;
  std::uint64_t random_;

 public:
  manager m;
  scheduler s;
  hash_engine engine;
  std::uint64_t overlapped = 0;

 private:
  static std::vector<std::uint32_t> windows(const random_load& load) {
    std::vector<std::uint32_t> w;
    for (const auto& g : load.groups) w.push_back(g.window);
    return w;
  }
  std::uint32_t pick(std::uint32_t below) {
    random_ += 0x9e3779b97f4a7c15u;
    std::uint64_t x = random_;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return static_cast<std::uint32_t>(((x ^ (x >> 31)) >> 32) % below);
  }

  void submit() {
    if (s.running() + s.waiting() >= load_.most_live) return;
    const text& base = bases_[pick(static_cast<std::uint32_t>(bases_.size()))];
    text prompt = head_of(base, 1 + pick(static_cast<std::uint32_t>(base.size())));
    for (std::uint32_t i = pick(2 * load_.block_size); i > 0; --i) prompt.push_back(pick(alphabet));
    const std::uint32_t most = 1 + pick(4 * load_.block_size);
    const std::uint32_t positions = static_cast<std::uint32_t>(prompt.size()) + most - 1;
    const kvcache::extra_key key{kvcache::key_kind::salt, "a tenant"};
    const bool salted = pick(6) == 0;
    const auto priority = static_cast<std::int32_t>(pick(load_.priorities));
    const std::uint32_t drafts = load_.drafts == 0 ? 0 : pick(load_.drafts + 1);
    const kvcache::layer_groups groups(load_.groups, {load_.block_size});
    std::uint64_t needed = 0;
    for (std::uint32_t g = 0; g < groups.size(); ++g)
      needed += groups.most_blocks(g, positions, load_.options.step_tokens);
    if (needed > load_.blocks) {
      const auto refused = s.submit({.prompt = prompt, .max_tokens = most});
      REQUIRE(refused.error().code == kvcache::errc::exceeds_pool);
      return;
    }
    engine.submit(s, prompt, most, priority, drafts, {&key, salted ? 1u : 0u}, salted ? 77 : no_value,
                  pick(3) == 0 ? 1 + pick(most) : ~std::size_t{0});
  }

  void abort() {
    if (!load_.aborts || engine.jobs.empty() || pick(3) != 0) return;
    const std::size_t n = std::min<std::size_t>(engine.jobs.size(), 60);
    const std::size_t job = engine.jobs.size() - 1 - pick(static_cast<std::uint32_t>(n));
    if (engine.jobs[job].ended)
      REQUIRE(s.abort(engine.ids[job]).error().code == kvcache::errc::stale_id);
    else
      engine.abort(s, job);
  }

  void hold() {
    if (!load_.others) return;
    if (held_.size() < 3 && pick(2) == 0) {
      const text own = words(50 + held_.size(), 1 + pick(3 * load_.block_size));
      if (const auto opened = m.open({.content = own, .reserve = own.size()})) held_.push_back(opened->sequence);
    } else if (!held_.empty()) {
      REQUIRE(m.close(held_.back()).has_value());
      held_.pop_back();
    }
  }

  void check_plan() {
    const kvcache::step_plan& p = engine.flights.back();
    overlapped += engine.flights.size() > 1 ? 1 : 0;
    std::uint32_t tokens = 0, prompt_tokens = 0;
    for (const auto& row : p.rows) {
      tokens += row.tokens;
      if (!row.decodes) prompt_tokens += row.tokens;
      log_.push_back(engine.job_of(row.request));
      log_.push_back(row.first);
      log_.push_back(row.tokens);
    }
    for (const auto slot : p.blocks->batch().slots) log_.push_back(static_cast<std::uint64_t>(slot));
    REQUIRE(tokens <= load_.options.step_tokens);
    if (load_.options.prefill_tokens != 0) REQUIRE(prompt_tokens <= load_.options.prefill_tokens);
    check_producers();
  }

  /// R11: no two requests that run compute the same block, but for one that is no use to one of them.
  void check_producers() {
    std::set<std::pair<std::uint64_t, std::size_t>> claimed;
    for (std::size_t i = engine.jobs.size() - std::min<std::size_t>(engine.jobs.size(), 200); i < engine.jobs.size();
         ++i) {
      const auto progress = s.progress(engine.ids[i]);
      if (!progress || !progress->running) continue;
      const auto& j = engine.jobs[i];
      const std::size_t known = j.content.size();
      // Of the blocks that its prefill has still to compute. What decodes fill, nobody can know of.
      std::size_t computed = progress->computed;
      if (computed >= j.prompt) continue;
      std::uint64_t value = j.seed;
      for (std::size_t at = 0; at < known; ++at) {
        value = value_after(value, j.content[at]);
        if ((at + 1) % load_.block_size != 0 || at + 1 <= computed || at + 1 > known - 1) continue;
        REQUIRE(claimed.emplace(value, at).second);
      }
    }
  }

  void check() {
    const auto c = m.counts();
    REQUIRE(c.capacity() == m.capacity());
    REQUIRE(s.running() <= load_.options.running);
    REQUIRE(s.steps_in_flight() == engine.flights.size());
  }

  std::array<text, 4> bases_;
  std::vector<kvcache::sequence_id> held_;
  std::vector<std::uint64_t> log_;
};

}  // namespace

TEST_CASE("R9 random requests, aborts, drafts, overlapped steps: tokens as alone, no block lost") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u, 4u);
  const std::uint32_t block_size = GENERATE(1u, 2u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 2u, 4u);
  random_load load{.seed = seed, .blocks = 12 + static_cast<std::uint32_t>(seed * 4), .block_size = block_size};
  load.depth = depth;
  load.options = {.running = 4 + static_cast<std::uint32_t>(seed % 3) * 4,
                  .step_tokens = 10 + block_size * static_cast<std::uint32_t>(seed),
                  .prefill_tokens = seed % 2 == 0 ? 0 : 3 * block_size + 1,
                  .watermark = static_cast<std::uint32_t>(seed % 3)};
  load.drafts = seed % 2 == 0 ? 4 : 0;
  if (seed == 4) load.options.hash_bits = 1;
  INFO("seed " << seed << ", block size " << block_size << ", depth " << depth);
  driver d(load);
  d.run(calls(12'000));
  d.finish();
  const auto& t = d.s.statistics();
  CHECK(t.admitted > calls(12'000) / 100);
  CHECK((d.overlapped > 0) == (depth > 1));
  if (calls(12'000) < 12'000) return;  // too few for every kind of event
  CHECK(t.hit_tokens > 0);
  CHECK(t.preemptions > 0);
  CHECK((t.recomputed_tokens > 0 || block_size == 16));
  CHECK(t.aborted > 0);
  CHECK(t.stopped > 0);
  CHECK(t.length > 0);
}

TEST_CASE("R9 100,000 random calls") {
  const std::uint64_t seed = GENERATE(11u, 12u);
  INFO("seed " << seed);
  random_load load{.seed = seed, .blocks = 60, .block_size = 4};
  load.depth = 2;
  load.drafts = 2;
  load.options = {.running = 8, .step_tokens = 40, .watermark = 1};
  driver d(load);
  d.run(calls(100'000));
  d.finish();
  CHECK(d.s.statistics().submitted > calls(100'000) / 50);
}

TEST_CASE("R9 random requests over a window beside full attention, and with reuse of heads of blocks") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  const std::uint32_t block_size = GENERATE(2u, 4u);
  const std::size_t depth = GENERATE(1u, 2u);
  INFO("seed " << seed << ", block size " << block_size << ", depth " << depth);
  random_load load{.seed = seed, .blocks = 14 + static_cast<std::uint32_t>(seed * 3), .block_size = block_size};
  load.depth = depth;
  load.options = {.running = 6, .step_tokens = 10 + block_size, .watermark = 1};
  load.drafts = seed % 2 == 0 ? 3 : 0;
  SECTION("a window") {
    load.groups = {{block_size}, {block_size, 7}};
    load.blocks += 10;
  }
  SECTION("heads of blocks") { load.partial_reuse = true; }
  SECTION("both") {
    load.groups = {{block_size}, {block_size, 5}};
    load.partial_reuse = true;
    load.blocks += 10;
  }
  driver d(load);
  d.run(calls(8'000));
  d.finish();
  if (calls(8'000) < 8'000) return;
  CHECK(d.s.statistics().hit_tokens > 0);
  CHECK(d.s.statistics().preemptions > 0);
  CHECK((d.engine.copies > 0) == load.partial_reuse);
}

TEST_CASE("R11 random prompts in a large pool: every block is computed once") {
  const std::uint64_t seed = GENERATE(1u, 2u, 3u);
  const std::uint32_t block_size = GENERATE(2u, 4u, 16u);
  const std::size_t depth = GENERATE(1u, 3u);
  INFO("seed " << seed << ", block size " << block_size << ", depth " << depth);
  random_load load{.seed = seed, .blocks = 1'000'000 / block_size, .block_size = block_size};
  load.depth = depth;
  load.aborts = load.others = false;
  load.options = {.running = 12, .step_tokens = 12 + 2 * block_size};
  driver d(load);
  d.run(calls(6'000));
  d.finish();
  // A block that is of use to whoever has it, and what is left of each prompt.
  std::set<std::pair<std::uint64_t, std::size_t>> useful;
  std::uint64_t rest = 0;
  for (const auto& j : d.engine.jobs) {
    std::uint64_t value = j.seed;
    const std::size_t whole = (j.prompt - 1) / block_size * block_size;
    for (std::size_t at = 0; at < whole; ++at) {
      value = value_after(value, j.content[at]);
      if ((at + 1) % block_size == 0) useful.emplace(value, at);
    }
    rest += j.prompt - whole;
  }
  CHECK(d.s.statistics().preemptions == 0);
  CHECK(d.s.statistics().prefilled_tokens <= useful.size() * block_size + rest);
  CHECK(d.s.statistics().hit_tokens > 0);
}

TEST_CASE("R12 two schedulers that are told the same plan the same") {
  const std::uint64_t seed = GENERATE(1u, 2u);
  INFO("seed " << seed);
  random_load load{.seed = seed, .blocks = 30, .block_size = 4};
  load.depth = 2;
  load.drafts = 2;
  load.options = {.running = 6, .step_tokens = 30};
  driver one(load);
  const std::vector<std::string> elsewhere(1000, std::string(100, 'x'));
  driver two(load);
  one.run(calls(20'000));
  two.run(calls(20'000));
  one.finish();
  two.finish();
  REQUIRE(one.log().size() == two.log().size());
  CHECK(std::equal(one.log().begin(), one.log().end(), two.log().begin()));
  CHECK(one.s.statistics() == two.s.statistics());
}

TEST_CASE(
    "R11 while one prompt is computed for all who ask for it, the first of them does so with the highest priority") {
  const std::uint64_t seed = GENERATE(range(std::uint64_t{1}, std::uint64_t{60}));
  INFO("seed " << seed);
  std::mt19937_64 random(seed);
  const auto pick = [&](std::uint32_t below) { return static_cast<std::uint32_t>(random() % below); };
  manager m({.blocks = 4096, .block_size = 4});
  scheduler s(m, {.running = 64, .step_tokens = 64});
  const text prompt = words(1, 4000);
  struct asked {
    kvcache::request_id id;
    std::int32_t priority = 0;
  };
  std::vector<asked> live;  // in order of arrival
  const auto submit = [&] {
    const auto priority = static_cast<std::int32_t>(pick(5));
    live.push_back({s.submit({.prompt = prompt, .priority = priority}).value(), priority});
  };
  for (std::uint32_t i = 2 + pick(5); i != 0; --i) submit();
  std::size_t computes = live.size();  // nobody yet
  std::uint32_t aborted = 0;
  for (int round = 0; round < 50 && !live.empty(); ++round) {
    const kvcache::step_plan p = s.next();
    REQUIRE(p.rows.size() == 1);
    // max_element finds the first of equals.
    const auto lower = [](const asked& a, const asked& b) { return a.priority < b.priority; };
    const auto first = std::max_element(live.begin(), live.end(), lower);
    if (computes == live.size()) computes = static_cast<std::size_t>(first - live.begin());
    REQUIRE(p.rows[0].request == live[computes].id);
    CHECK(s.progress(live[computes].id).value().priority == first->priority);
    REQUIRE(s.finish(p, std::array{kvcache::row_result{}}).has_value());
    if (pick(3) == 0 && live.size() < 12) submit();
    if (pick(3) != 0) continue;
    const std::size_t gone = pick(2) == 0 ? computes : pick(static_cast<std::uint32_t>(live.size()));
    REQUIRE(s.abort(live[gone].id).has_value());
    live.erase(live.begin() + static_cast<std::ptrdiff_t>(gone));
    if (gone == computes)
      computes = live.size();
    else if (gone < computes)
      --computes;
    ++aborted;
  }
  CHECK(aborted > 0);
}
