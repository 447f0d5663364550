// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace engine {

/// The engine's threads: matrix products, attention and everything between run on them, so that no two pools compete
/// for the cores. A kvcache `executor`. The caller is thread 0. One run at a time.
class thread_team {
 public:
  /// Throws bad_input where threads is 0 or above 1024.
  explicit thread_team(unsigned threads);
  thread_team(const thread_team&) = delete;
  thread_team& operator=(const thread_team&) = delete;
  ~thread_team();

  [[nodiscard]] unsigned threads() const noexcept { return static_cast<unsigned>(others_.size()) + 1; }

  /// f(ith, threads()) once for each ith; returns when all have returned. `f` must not throw.
  template <class F>
  void run(F&& f) {
    run_task([](void* context, unsigned ith,
                unsigned nth) { (*static_cast<std::remove_reference_t<F>*>(context))(ith, nth); },
             const_cast<void*>(static_cast<const void*>(std::addressof(f))));
  }

 private:
  using task = void (*)(void* context, unsigned ith, unsigned nth);

  void run_task(task what, void* context);
  void work(unsigned ith);

  task task_ = nullptr;  ///< null: the threads end
  void* context_ = nullptr;
  std::atomic<std::uint32_t> round_{0};
  std::atomic<std::uint32_t> busy_{0};
  std::vector<std::thread> others_;
};

/// The part [begin, end) of `size` things in steps of `grain` that thread `ith` of `nth` does.
struct share {
  std::size_t begin = 0;
  std::size_t end = 0;
};
[[nodiscard]] share share_of(std::size_t size, std::size_t grain, unsigned ith, unsigned nth) noexcept;

}  // namespace engine
