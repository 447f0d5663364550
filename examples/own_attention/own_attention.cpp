// SPDX-License-Identifier: Apache-2.0
// Shows an engine that keeps its own KV bytes and attention, and only borrows the bookkeeping: `block_manager` says
// which blocks a sequence holds, where new tokens go, what to copy before writing, and what is cached already.

#include <kvcache/blocks/block_manager.hpp>

#include <cstdio>
#include <numeric>
#include <vector>

namespace {

constexpr unsigned block_size = 4;

/// Stands for the engine's own KV: one number a token instead of vectors, so that the example shows the bookkeeping.
class engine_kv {
 public:
  explicit engine_kv(unsigned blocks) : values_((blocks + 1) * block_size) {}

  void write(kvcache::slot_id slot, float value) { values_[static_cast<std::size_t>(slot)] = value; }
  void copy(const kvcache::block_copy& c) {
    for (unsigned i = 0; i < c.tokens; ++i)
      write(kvcache::make_slot(c.destination, i, block_size), at(kvcache::make_slot(c.source, i, block_size)));
  }
  /// The engine's own attention: here the mean of what a sequence has stored.
  float attend(std::span<const kvcache::block_id> table, unsigned length) const {
    float sum = 0;
    for (unsigned t = 0; t < length; ++t)
      sum += at(kvcache::make_slot(table[t / block_size], t % block_size, block_size));
    return sum / static_cast<float>(length);
  }

 private:
  float at(kvcache::slot_id slot) const { return values_[static_cast<std::size_t>(slot)]; }
  std::vector<float> values_;
};

/// Computes the next tokens of some sequences in one step; row r writes `values[r]` for each of its tokens.
void run_step(kvcache::block_manager<>& blocks, engine_kv& kv, std::span<const kvcache::want> wants,
              std::span<const float> values) {
  auto step = blocks.begin(wants).value();
  for (const auto& copy : step.copies()) kv.copy(copy);  // copy-on-write, before anything is written
  const kvcache::batch_view batch = step.batch();
  for (unsigned r = 0; r < batch.rows(); ++r)
    for (unsigned i = batch.query_offsets[r]; i < batch.query_offsets[r + 1]; ++i) kv.write(batch.slots[i], values[r]);
  for (unsigned r = 0; r < batch.rows(); ++r)
    std::printf("  sequence %u: %2u tokens in %zu blocks, attention %.3f\n", wants[r].sequence.index,
                batch.kv_lengths[r], batch.tables.row(r).size(), kv.attend(batch.tables.row(r), batch.kv_lengths[r]));
  step.accept().value();
  blocks.retire(step).value();
}

void print_counts(const kvcache::block_manager<>& blocks) {
  const auto c = blocks.counts();
  std::printf("  %u referenced, %u cached, %u free\n", c.referenced, c.evictable, c.free);
}

}  // namespace

int main() {
  kvcache::block_manager<> blocks({.blocks = 16, .block_size = block_size});
  engine_kv kv(16);
  std::vector<int> prompt(10);
  std::iota(prompt.begin(), prompt.end(), 100);

  std::puts("a prompt of 10 tokens");
  const auto first = blocks.open({.content = prompt, .reserve = 12}).value();
  const kvcache::want prefill[]{{first.sequence, 10}};
  run_step(blocks, kv, prefill, std::vector<float>{1.0f});
  blocks.commit(first.sequence, prompt).value();

  std::puts("two continuations: the tail block is copied for the one that writes first");
  const auto second = blocks.fork(first.sequence).value();
  const kvcache::want decode[]{{first.sequence, 1}, {second, 1}};
  run_step(blocks, kv, decode, std::vector<float>{2.0f, 3.0f});
  print_counts(blocks);

  std::puts("closed: full blocks stay cached, and the same prompt finds them");
  blocks.close(first.sequence).value();
  blocks.close(second).value();
  print_counts(blocks);
  const auto again = blocks.open({.content = prompt}).value();
  std::printf("  %u of 10 tokens reused\n", again.reused_tokens);
  blocks.close(again.sequence).value();
  return again.reused_tokens == 8 ? 0 : 1;
}
