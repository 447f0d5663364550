// SPDX-License-Identifier: Apache-2.0
#include "batcher.hpp"

#include "bad_input.hpp"

#include <kvcache/geometry.hpp>

#include <algorithm>
#include <string>
#include <utility>

namespace engine {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

batcher::batcher(llama& model, kv_cache& cache, const batch_options& options, listener& hears)
    : model_(model), cache_(cache), options_(options), listener_(hears) {
  if (options.max_sequences == 0) throw bad_input("the number of requests served at once is 0, the least is 1");
  if (options.chunk == 0) throw bad_input("the number of prompt tokens in a step is 0, the least is 1");
}

batcher::~batcher() {
  for (const active& a : running_) (void)cache_.manager().close(a.sequence);
}

void batcher::submit(request what) {
  const std::size_t index = answers_.size();
  answer& result = answers_.emplace_back();
  result.id = what.id;
  result.prompt_tokens = static_cast<std::uint32_t>(what.prompt.size());
  waiting_.push_back({index, std::move(what), clock::now()});
}

void batcher::fail(std::size_t index, const std::string& why) {
  answers_[index].how = finish::failed;
  answers_[index].error = "request '" + answers_[index].id + "' " + why;
  listener_.finished(index, answers_[index]);
}

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

// Blocks that the admitted requests may still take.
std::uint64_t batcher::promised_blocks() const {
  const auto& manager = cache_.manager();
  std::uint64_t blocks = 0;
  for (const active& a : running_)
    blocks += kvcache::blocks_for(a.most_tokens(), manager.block_size()) - manager.table(a.sequence).value().size();
  return blocks;
}

// True where the first waiting request left the queue, admitted or failed.
bool batcher::admit_first() {
  waiting& first = waiting_.front();
  std::string why = never_fits(first.what);
  if (why.empty()) {
    auto& manager = cache_.manager();
    const std::uint64_t most = std::uint64_t{first.what.prompt.size()} + first.what.max_tokens - 1;
    const kvcache::admission fit = manager.predict({.content = first.what.prompt, .reserve = most});
    if (fit.needs + promised_blocks() > fit.available) {
      if (!running_.empty()) return false;
      why = "needs " + std::to_string(fit.needs) + " blocks, " + std::to_string(fit.available) +
            " are available and no request runs that could give some back";
    }
  }
  if (!why.empty()) {
    fail(first.index, why);
    waiting_.pop_front();
    return true;
  }
  const kvcache::opened opened = cache_.manager().open({.content = first.what.prompt}).value();
  answers_[first.index].reused_tokens = opened.reused_tokens;
  running_.push_back({.index = first.index,
                      .sequence = opened.sequence,
                      .tokens = std::move(first.what.prompt),
                      .prompt_tokens = answers_[first.index].prompt_tokens,
                      .computed = opened.reused_tokens,
                      .max_tokens = first.what.max_tokens,
                      .ignore_end = first.what.ignore_end,
                      .choose = sampler(first.what.how),
                      .since = first.since});
  waiting_.pop_front();
  return true;
}

void batcher::admit() {
  while (!waiting_.empty() && running_.size() < options_.max_sequences && admit_first()) {
  }
}

// Requests that generate give one token each; the oldest prompts share the step's chunk.
void batcher::gather() {
  wants_.clear();
  members_.clear();
  tokens_.clear();
  positions_.clear();
  logit_rows_.clear();
  std::uint32_t chunk = options_.chunk;
  for (std::size_t i = 0; i < running_.size(); ++i) {
    const active& a = running_[i];
    const bool prefill = a.computed < a.prompt_tokens;
    const std::uint32_t count = prefill ? std::min(a.left(), chunk) : 1;
    if (count == 0) continue;
    if (prefill) chunk -= count;
    wants_.push_back({a.sequence, count});
    members_.push_back(i);
    for (std::uint32_t t = a.computed; t < a.computed + count; ++t) {
      tokens_.push_back(a.tokens[t]);
      positions_.push_back(t);
    }
    if (count == a.left()) logit_rows_.push_back(static_cast<std::uint32_t>(tokens_.size()) - 1);
  }
}

bool batcher::step() {
  const auto start = clock::now();
  admit();
  if (running_.empty()) return false;
  gather();
  compute();
  close_finished();
  ++statistics_.steps;
  statistics_.busy_s += seconds_since(start);
  return !running_.empty() || !waiting_.empty();
}

void batcher::compute() {
  auto& manager = cache_.manager();
  kvcache::step step = manager.begin(wants_).value();  // admission has promised the blocks
  cache_.prepare(step);
  const std::span<const float> logits =
      model_.forward({.tokens = tokens_, .positions = positions_, .logit_rows = logit_rows_}, cache_);
  step.accept().value();
  for (std::size_t i = 0; i < wants_.size(); ++i) {
    active& a = running_[members_[i]];
    manager.commit(a.sequence, kvcache::content_view(a.tokens).sub(a.computed, wants_[i].tokens)).value();
    a.computed += wants_[i].tokens;
  }
  manager.retire(step).value();
  count_blocks();
  take_tokens(logits);
}

void batcher::take_tokens(std::span<const float> logits) {
  const std::size_t vocabulary = model_.shape().vocabulary;
  std::size_t row = 0;
  for (std::size_t i = 0; i < wants_.size(); ++i) {
    active& a = running_[members_[i]];
    if (a.tokens.size() == a.prompt_tokens) {
      statistics_.prefilled_tokens += wants_[i].tokens;
      if (wants_[i].tokens < a.prompt_tokens - answers_[a.index].reused_tokens)
        listener_.prompt_progress(a.index, a.computed, a.prompt_tokens);
    }
    if (a.left() == 0) take_token(a, logits.subspan(row++ * vocabulary, vocabulary));
  }
}

void batcher::take_token(active& a, std::span<const float> logits) {
  listener_.logits(a.index, logits);
  const token_id token = a.choose.choose(logits);
  answer& result = answers_[a.index];
  result.last_token_s = seconds_since(a.since);
  if (a.tokens.size() == a.prompt_tokens) result.first_token_s = result.last_token_s;
  ++statistics_.generated_tokens;
  if (token == options_.end_of_sequence && !a.ignore_end) {
    a.done = true;
    result.how = finish::end;
    return;
  }
  a.tokens.push_back(token);
  result.tokens.push_back(token);
  listener_.token(a.index, token);
  if (result.tokens.size() < a.max_tokens) return;
  a.done = true;
  result.how = finish::length;
}

void batcher::count_blocks() {
  const auto& manager = cache_.manager();
  const std::uint64_t block_size = manager.block_size();
  std::uint64_t contiguous = 0;
  for (const active& a : running_) {
    statistics_.unused_slots += manager.table(a.sequence).value().size() * block_size - a.computed;
    contiguous += a.most_tokens();
  }
  const std::uint32_t blocks = manager.counts().referenced;
  statistics_.allocated_slots += blocks * block_size;
  statistics_.peak_blocks = std::max(statistics_.peak_blocks, blocks);
  statistics_.peak_sequences = std::max(statistics_.peak_sequences, static_cast<std::uint32_t>(wants_.size()));
  statistics_.peak_contiguous_tokens = std::max(statistics_.peak_contiguous_tokens, contiguous);
  statistics_.peak_context_tokens =
      std::max(statistics_.peak_context_tokens, running_.size() * std::uint64_t{model_.shape().context});
}

void batcher::close_finished() {
  for (const active& a : running_) {
    if (!a.done) continue;
    cache_.manager().close(a.sequence).value();
    listener_.finished(a.index, answers_[a.index]);
  }
  std::erase_if(running_, [](const active& a) { return a.done; });
}

}  // namespace engine
