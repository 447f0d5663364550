// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/error.hpp>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

namespace kvcache {

/// A small executor: threads that wait for the next call, first spinning for some microseconds, then asleep. The
/// calling thread is one of them. Calls from several threads take turns; a call from inside a call would wait for
/// itself and is not allowed. What f throws, run throws, once all threads have ended.
class thread_pool {
 public:
  /// 0: as many threads as the machine has. Raises system_failure, with no thread left, where the system refuses one.
  explicit thread_pool(unsigned threads = 0) {
    threads = threads != 0 ? threads : std::thread::hardware_concurrency();
    threads_ = threads != 0 ? threads : 1;
    workers_.reserve(threads_ - 1);
#if KVCACHE_HAS_EXCEPTIONS
    try {
      start();
    } catch (const std::system_error& fault) {
      const std::size_t started = workers_.size() + 1;
      stop();
      detail::raise<system_failure>("thread_pool: " + std::to_string(threads_) +
                                    " threads asked for, the system gave " + std::to_string(started) + " (" +
                                    fault.what() + "); ask for fewer");
    }
#else
    start();
#endif
  }
  thread_pool(const thread_pool&) = delete;
  thread_pool& operator=(const thread_pool&) = delete;
  ~thread_pool() { stop(); }

  /// Threads that run a call, the calling one included.
  [[nodiscard]] unsigned threads() const noexcept { return threads_; }

  /// f(ith, threads()) once for each ith in [0, threads()); returns when all have returned.
  template <class F>
  void run(F&& f) {
    const std::lock_guard turn(turn_);
    if (threads_ > 1) {
      call_ = [](void* context, unsigned ith, unsigned nth) {
        (*static_cast<std::remove_reference_t<F>*>(context))(ith, nth);
      };
      context_ = const_cast<void*>(static_cast<const void*>(std::addressof(f)));
      running_.store(threads_ - 1, std::memory_order_relaxed);
      {
        const std::lock_guard lock(sleep_);
        round_.fetch_add(1, std::memory_order_release);
      }
      wake_.notify_all();
    }
    guarded([&] { f(0u, threads_); });
    if (!spin([&] { return running_.load(std::memory_order_acquire) == 0; })) {
      std::unique_lock lock(sleep_);
      done_.wait(lock, [&] { return running_.load(std::memory_order_acquire) == 0; });
    }
    if (failure_) {
      const std::exception_ptr failure = std::move(failure_);
      failure_ = nullptr;
      std::rethrow_exception(failure);
    }
  }

 private:
  void start() {
    for (unsigned ith = 1; ith < threads_; ++ith) workers_.emplace_back([this, ith] { work(ith); });
  }

  void stop() {
    {
      const std::lock_guard lock(sleep_);
      stop_ = true;
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& t : workers_) t.join();
  }

  template <class Ready>
  static bool spin(const Ready& ready) {
    for (unsigned i = 0; i < 1000; ++i) {
      if (ready()) return true;
      KVCACHE_PAUSE();
    }
    return false;
  }

  template <class F>
  void guarded(const F& f) noexcept {
#if KVCACHE_HAS_EXCEPTIONS
    try {
      f();
    } catch (...) {
      const std::lock_guard lock(sleep_);
      if (!failure_) failure_ = std::current_exception();
    }
#else
    f();
#endif
  }

  void work(unsigned ith) {
    std::uint64_t seen = 0;
    for (;;) {
      if (!spin([&] { return round_.load(std::memory_order_acquire) != seen; })) {
        std::unique_lock lock(sleep_);
        wake_.wait(lock, [&] { return round_.load(std::memory_order_acquire) != seen; });
      }
      seen = round_.load(std::memory_order_acquire);
      if (stop_) return;
      guarded([&] { call_(context_, ith, threads_); });
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        const std::lock_guard lock(sleep_);
        done_.notify_one();
      }
    }
  }

  unsigned threads_ = 1;
  std::mutex turn_;   // one call at a time
  std::mutex sleep_;  // for falling asleep and waking, and for failure_
  std::condition_variable wake_;
  std::condition_variable done_;
  std::atomic<std::uint64_t> round_{0};
  std::atomic<unsigned> running_{0};
  void (*call_)(void*, unsigned, unsigned) = nullptr;
  void* context_ = nullptr;
  std::exception_ptr failure_;
  bool stop_ = false;
  std::vector<std::thread> workers_;
};

static_assert(executor<thread_pool>);

/// The pool that attention runs on when it is given no executor: as many threads as the machine has, started when first
/// used.
[[nodiscard]] inline thread_pool& default_thread_pool() {
  static thread_pool pool;
  return pool;
}

}  // namespace kvcache
