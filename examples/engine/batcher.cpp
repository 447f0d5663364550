// SPDX-License-Identifier: Apache-2.0
#include "batcher.hpp"

#include "bad_input.hpp"

#include <kvcache/blocks/extra_key.hpp>
#include <kvcache/geometry.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace engine {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

const batch_options& checked(const batch_options& options) {
  if (options.max_sequences == 0) throw bad_input("the number of requests served at once is 0, the least is 1");
  if (options.chunk == 0) throw bad_input("the number of prompt tokens in a step is 0, the least is 1");
  return options;
}

std::uint32_t sum(std::uint32_t a, std::uint32_t b) { return a > ~b ? ~std::uint32_t{0} : a + b; }

}  // namespace

batcher::batcher(llama& model, kv_cache& cache, const batch_options& options, listener& hears)
    : model_(model),
      cache_(cache),
      options_(checked(options)),
      listener_(hears),
      scheduler_(cache.manager(), {.running = options.max_sequences,
                                   .step_tokens = sum(options.max_sequences, options.chunk),
                                   .prefill_tokens = options.chunk}),
      hits_(options.window) {}

std::string batcher::never_fits(const request& what) const {
  if (what.prompt.empty()) return "has a prompt of 0 tokens, the least is 1";
  if (what.max_tokens == 0) return "asks for 0 tokens, the least is 1";
  const std::uint64_t positions = std::uint64_t{what.prompt.size()} + what.max_tokens - 1;
  const std::string size =
      std::to_string(what.prompt.size()) + " prompt tokens and up to " + std::to_string(what.max_tokens) + " new ones";
  if (positions > model_.shape().context)
    return "has " + size + ", the model knows " + std::to_string(model_.shape().context) +
           " positions; shorten the prompt or ask for fewer tokens";
  const auto& manager = cache_.manager();
  const std::uint64_t blocks = kvcache::blocks_for(positions, manager.block_size());
  if (blocks > manager.capacity())
    return "has " + size + ", which take " + std::to_string(blocks) + " blocks of " +
           std::to_string(manager.block_size()) + " tokens, the pool has " + std::to_string(manager.capacity()) +
           "; shorten the prompt, ask for fewer tokens or give the pool more blocks";
  return {};
}

void batcher::fail(std::size_t index, const std::string& why) {
  answers_[index].how = finish::failed;
  answers_[index].error = "request '" + answers_[index].id + "' " + why;
  listener_.finished(index, answers_[index]);
}

void batcher::submit(request what) {
  const std::size_t index = answers_.size();
  answer& result = answers_.emplace_back();
  result.id = what.id;
  result.prompt_tokens = static_cast<std::uint32_t>(what.prompt.size());
  if (const std::string why = never_fits(what); !why.empty()) return fail(index, why);
  // A salt of its own keeps a request from all that others have computed.
  const std::string own = std::to_string(index);
  const kvcache::extra_key salt{kvcache::key_kind::salt, own};
  const kvcache::request_id id = scheduler_
                                     .submit({.prompt = what.prompt,
                                              .keys = {&salt, options_.reuse ? std::size_t{0} : std::size_t{1}},
                                              .max_tokens = what.max_tokens})
                                     .value();
  live_.push_back({.index = index,
                   .id = id,
                   .prompt_tokens = result.prompt_tokens,
                   .max_tokens = what.max_tokens,
                   .ignore_end = what.ignore_end,
                   .choose = sampler(what.how),
                   .since = clock::now()});
}

batcher::live& batcher::live_one(kvcache::request_id id) {
  return *std::find_if(live_.begin(), live_.end(), [&](const live& l) { return l.id == id; });
}

bool batcher::step() {
  const auto start = clock::now();
  const kvcache::step_plan plan = scheduler_.next();
  note_ends();
  if (plan.empty()) return false;
  count_hits(plan);
  compute(plan);
  note_ends();
  ++statistics_.steps;
  statistics_.prefilled_tokens = scheduler_.statistics().prefilled_tokens;
  statistics_.recomputed_tokens = scheduler_.statistics().recomputed_tokens;
  statistics_.preemptions = scheduler_.statistics().preemptions;
  statistics_.busy_s += seconds_since(start);
  return !scheduler_.idle();
}

// A request is counted when a step has its first row after an admission; what it found then is all before that row.
void batcher::count_hits(const kvcache::step_plan& plan) {
  for (const kvcache::plan_row& row : plan.rows) {
    live& who = live_one(row.request);
    const kvcache::request_progress p = scheduler_.progress(row.request).value();
    if (who.admitted == p.preemptions + 1) continue;
    if (who.admitted == 0) {
      hits_.record({.requests = 1, .queried = p.prompt, .hit = p.reused});
      answers_[who.index].reused_tokens = p.reused;
    } else {
      hits_.record_again({.requests = 1, .queried = std::uint64_t{p.prompt} + p.generated, .hit = row.first});
    }
    who.admitted = p.preemptions + 1;
  }
  statistics_.window = hits_.window();
  statistics_.again = hits_.again();
}

void batcher::compute(const kvcache::step_plan& plan) {
  tokens_.clear();
  positions_.clear();
  logit_rows_.clear();
  for (const kvcache::plan_row& row : plan.rows) {
    const kvcache::content_view content = scheduler_.tokens(row.request).value();
    for (std::uint32_t t = row.first; t < row.first + row.tokens; ++t) {
      tokens_.push_back(static_cast<token_id>(content[t]));
      positions_.push_back(t);
    }
    if (row.samples) logit_rows_.push_back(static_cast<std::uint32_t>(tokens_.size()) - 1);
  }
  cache_.prepare(*plan.blocks);
  const std::span<const float> logits =
      model_.forward({.tokens = tokens_, .positions = positions_, .logit_rows = logit_rows_}, cache_);
  count_blocks(plan);
  take_tokens(plan, logits);
}

void batcher::take_tokens(const kvcache::step_plan& plan, std::span<const float> logits) {
  const std::size_t vocabulary = model_.shape().vocabulary;
  chosen_.assign(plan.rows.size(), 0);
  results_.assign(plan.rows.size(), {});
  std::size_t logit_row = 0;
  for (std::size_t i = 0; i < plan.rows.size(); ++i) {
    const kvcache::plan_row& row = plan.rows[i];
    live& who = live_one(row.request);
    const answer& result = answers_[who.index];
    if (result.tokens.empty() && row.tokens < who.prompt_tokens - result.reused_tokens)
      listener_.prompt_progress(who.index, row.first + row.tokens, who.prompt_tokens);
    if (row.samples) take_token(who, logits.subspan(logit_row++ * vocabulary, vocabulary), chosen_[i], results_[i]);
  }
  scheduler_.finish(plan, results_).value();
}

void batcher::take_token(live& who, std::span<const float> logits, token_id& token, kvcache::row_result& result) {
  listener_.logits(who.index, logits);
  token = who.choose.choose(logits);
  answer& said = answers_[who.index];
  said.last_token_s = seconds_since(who.since);
  if (said.tokens.empty()) said.first_token_s = said.last_token_s;
  ++statistics_.generated_tokens;
  if (token == options_.end_of_sequence && !who.ignore_end) {
    result.ends = true;
    return;
  }
  result.tokens = kvcache::content_view(&token, 1);
  said.tokens.push_back(token);
  listener_.token(who.index, token);
}

void batcher::count_blocks(const kvcache::step_plan& plan) {
  const auto& manager = cache_.manager();
  const std::uint64_t block_size = manager.block_size();
  std::uint64_t held = 0;
  std::uint64_t used = 0;
  std::uint64_t contiguous = 0;
  for (const live& l : live_) {
    const kvcache::request_progress p = scheduler_.progress(l.id).value();
    if (!p.running) continue;
    held += manager.table(p.sequence).value().size() * block_size;
    used += p.computed;
    contiguous += l.most_tokens();
  }
  for (const kvcache::plan_row& row : plan.rows) used += row.tokens;
  const std::uint32_t blocks = manager.counts().referenced;
  statistics_.unused_slots += held - used;
  statistics_.allocated_slots += blocks * block_size;
  statistics_.peak_blocks = std::max(statistics_.peak_blocks, blocks);
  statistics_.peak_sequences = std::max(statistics_.peak_sequences, static_cast<std::uint32_t>(plan.rows.size()));
  statistics_.peak_contiguous_tokens = std::max(statistics_.peak_contiguous_tokens, contiguous);
  statistics_.peak_context_tokens =
      std::max(statistics_.peak_context_tokens, scheduler_.running() * std::uint64_t{model_.shape().context});
}

void batcher::note_ends() {
  for (const kvcache::ended_request& e : scheduler_.ended()) {
    const auto at = std::find_if(live_.begin(), live_.end(), [&](const live& l) { return l.id == e.request; });
    const std::size_t index = at->index;
    live_.erase(at);
    if (e.reason == kvcache::end_reason::failed) {
      fail(index, "cannot be served: " + kvcache::message(e.why));
      continue;
    }
    answers_[index].how = e.reason == kvcache::end_reason::stopped ? finish::end : finish::length;
    listener_.finished(index, answers_[index]);
  }
}

}  // namespace engine
