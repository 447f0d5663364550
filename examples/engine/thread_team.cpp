// SPDX-License-Identifier: Apache-2.0
#include "thread_team.hpp"

#include "bad_input.hpp"

#include <algorithm>
#include <string>

namespace engine {
namespace {

/// Looks often for a while before it sleeps: a step runs hundreds of short tasks, and waking a thread costs more than
/// many of them.
template <class Done>
void wait_until(std::atomic<std::uint32_t>& value, Done done) {
  constexpr int looks = 4000;
  for (int i = 0; i < looks; ++i)
    if (done(value.load(std::memory_order_acquire))) return;
  for (std::uint32_t now = value.load(std::memory_order_acquire); !done(now);
       now = value.load(std::memory_order_acquire))
    value.wait(now, std::memory_order_acquire);
}

}  // namespace

thread_team::thread_team(unsigned threads) {
  constexpr unsigned most = 1024;
  if (threads == 0 || threads > most)
    throw bad_input("threads is " + std::to_string(threads) + ", 1 to " + std::to_string(most) + " are possible");
  others_.reserve(threads - 1);
  for (unsigned ith = 1; ith < threads; ++ith) others_.emplace_back([this, ith] { work(ith); });
}

thread_team::~thread_team() {
  task_ = nullptr;
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  for (std::thread& thread : others_) thread.join();
}

void thread_team::run_task(task what, void* context) {
  task_ = what;
  context_ = context;
  busy_.store(static_cast<std::uint32_t>(others_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
  what(context, 0, threads());
  wait_until(busy_, [](std::uint32_t busy) { return busy == 0; });
}

void thread_team::work(unsigned ith) {
  // Set before the constructor began; a run may already have begun when this thread starts.
  std::uint32_t seen = 0;
  for (;;) {
    wait_until(round_, [seen](std::uint32_t round) { return round != seen; });
    ++seen;
    if (task_ == nullptr) return;
    task_(context_, ith, threads());
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

share share_of(std::size_t size, std::size_t grain, unsigned ith, unsigned nth) noexcept {
  const std::size_t grains = (size + grain - 1) / grain;
  return {std::min(size, grains * ith / nth * grain), std::min(size, grains * (ith + 1) / nth * grain)};
}

}  // namespace engine
