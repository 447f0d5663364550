// SPDX-License-Identifier: Apache-2.0
// A block of device threads on the host: each is a fiber, and runs until it has to wait for others. What a device
// answers with wrong numbers, once in a while, is a fault here, every time.
#pragma once

#include <boost/context/fiber.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace kvcache_test {

/// What is wrong with a kernel, in words.
struct kernel_fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Which of the threads that could go on does so: the first or the last of them, so that one gets as far ahead of the
/// others as it may, or any. A missing barrier shows in at least one of them.
enum class thread_order { forward, backward, shuffled };

/// Memory that kernels may touch; where nothing is named, they may touch all.
class global_memory {
 public:
  void add(const void* first, std::size_t bytes, std::string name, bool writable = false) {
    const auto at = reinterpret_cast<std::uintptr_t>(first);
    ranges_.push_back({at, at + bytes, std::move(name), writable});
  }
  /// Throws kernel_fault where [p, p + bytes) is not inside one range, or not aligned to `to`.
  void check(const void* p, std::size_t bytes, std::size_t to, bool write) const {
    const auto at = reinterpret_cast<std::uintptr_t>(p);
    if (at % to != 0)
      throw kernel_fault(std::to_string(bytes) + " bytes of global memory, aligned to " +
                         std::to_string(at & (~at + 1)));
    if (ranges_.empty()) return;
    for (const range& r : ranges_)
      if (at >= r.begin && at + bytes <= r.end) {
        if (write && !r.writable) throw kernel_fault("write to " + r.name + ", which is read only");
        return;
      }
    std::string nearest = "nothing";
    std::uintptr_t least = ~std::uintptr_t{0};
    for (const range& r : ranges_) {
      const std::uintptr_t distance = at >= r.end ? at - r.end : at < r.begin ? r.begin - at : 0;
      if (distance >= least) continue;
      least = distance;
      nearest = std::to_string(distance) + (at >= r.begin ? " bytes behind " : " bytes before ") + r.name;
    }
    throw kernel_fault(std::string(write ? "write" : "read") + " of " + std::to_string(bytes) +
                       " bytes outside global memory, " + nearest);
  }

 private:
  struct range {
    std::uintptr_t begin;
    std::uintptr_t end;
    std::string name;
    bool writable;
  };
  std::vector<range> ranges_;
};

/// Runs the threads of one block after another of a grid.
class host_block {
 public:
  static constexpr unsigned lanes = 32;
  static constexpr std::size_t stack_bytes = 128 * 1024;

  host_block(unsigned threads, std::size_t shared_bytes, unsigned blocks, const global_memory& memory)
      : threads_(threads), blocks_(blocks), memory_(memory), warps_((threads + lanes - 1) / lanes), stacks_(threads) {
    if (threads == 0 || threads % lanes != 0) throw kernel_fault("a block needs whole warps of threads");
    shared_.resize(shared_bytes + 2 * alignment);
    auto first = reinterpret_cast<std::uintptr_t>(shared_.data());
    shared_first_ = shared_.data() + (alignment - first % alignment);
    shared_bytes_ = shared_bytes;
    for (auto& s : stacks_) s = std::make_unique_for_overwrite<std::byte[]>(stack_bytes);
  }

  /// Runs `body(thread)` for every thread of block `block`. Throws the first kernel_fault.
  void run(unsigned block, thread_order order, const std::function<void(unsigned)>& body) {
    block_ = block;
    body_ = &body;
    fault_.clear();
    std::memset(shared_first_, 0xff, shared_bytes_);  // no number in any type
    waiting_ = rendezvous{};
    for (rendezvous& w : warps_) w = rendezvous{};
    fibers_.clear();
    fibers_.resize(threads_);
    left_ = threads_;
    for (unsigned t = 0; t < threads_; ++t) start(t);
    std::mt19937 random(block + 1);
    while (left_ != 0 && fault_.empty()) {
      const auto from = static_cast<unsigned>(order == thread_order::shuffled ? random() % threads_ : 0);
      unsigned i = 0;
      unsigned t = 0;
      do {
        t = order == thread_order::backward ? threads_ - 1 - i : (from + i) % threads_;
      } while ((fibers_[t].done || fibers_[t].waits) && ++i < threads_);
      if (i < threads_)
        resume(t);
      else
        fault_ = "threads wait for each other: " + who_waits();
    }
    abandoned_ = !fault_.empty();
    for (unsigned t = 0; t < threads_; ++t)
      if (!fibers_[t].done) resume(t);  // and find out that they are abandoned
    abandoned_ = false;
    fibers_.clear();
    if (!fault_.empty()) throw kernel_fault("block " + std::to_string(block) + ", " + fault_);
  }

  [[nodiscard]] unsigned block() const { return block_; }
  [[nodiscard]] unsigned blocks() const { return blocks_; }
  [[nodiscard]] unsigned threads() const { return threads_; }
  [[nodiscard]] std::byte* shared() const { return shared_first_; }
  [[nodiscard]] const global_memory& memory() const { return memory_; }

  void check_shared(const void* p, std::size_t bytes, std::size_t to) const {
    const auto at = static_cast<const std::byte*>(p);
    if (reinterpret_cast<std::uintptr_t>(p) % to != 0)
      throw kernel_fault(std::to_string(bytes) + " bytes of shared memory that are not aligned to as much");
    if (at < shared_first_ || at + bytes > shared_first_ + shared_bytes_)
      throw kernel_fault("address outside shared memory");
  }

  /// All threads of the block meet here.
  void meet_block(unsigned thread, const char* what) {
    meet(waiting_, thread, 0, threads_, what, [] {});
  }

  /// All lanes of the thread's warp meet here, each with something; the last one to come calls `all` with an array of
  /// what the lanes have brought.
  template <class Mine, class All>
  void meet_warp(unsigned thread, const char* what, Mine& mine, const All& all) {
    rendezvous& warp = warps_[thread / lanes];
    const unsigned first = thread / lanes * lanes;
    warp.brought[thread % lanes] = &mine;
    meet(warp, thread, first, first + lanes, what, [&] {
      Mine* each[lanes];
      for (unsigned i = 0; i < lanes; ++i) each[i] = static_cast<Mine*>(warp.brought[i]);
      all(each);
    });
  }

 private:
  static constexpr std::size_t alignment = 128;

  struct rendezvous {
    const char* what = nullptr;
    unsigned arrived = 0;
    void* brought[lanes] = {};
  };
  struct fiber {
    boost::context::fiber context;
    bool done = false;
    bool waits = false;
    const char* at = "";
    void* fake_stack = nullptr;
  };
  struct abandoned {};
  /// Stacks that live as long as the block.
  struct stack_of {
    std::byte* memory;
    boost::context::stack_context allocate() {
      boost::context::stack_context s;
      s.size = stack_bytes;
      s.sp = memory + stack_bytes;
      return s;
    }
    void deallocate(boost::context::stack_context&) noexcept {}
  };

  template <class Last>
  void meet(rendezvous& place, unsigned thread, unsigned first, unsigned end, const char* what, const Last& last) {
    if (place.arrived == 0) place.what = what;
    if (std::strcmp(place.what, what) != 0)
      throw kernel_fault("threads are at different places: " + std::string(what) + " and " + place.what);
    for (unsigned t = first; t < end; ++t)
      if (fibers_[t].done)
        throw kernel_fault(std::string(what) + " of threads of which " + std::to_string(t) + " has returned already");
    if (++place.arrived < end - first) {
      fibers_[thread].waits = true;
      fibers_[thread].at = what;
      yield(thread);
      return;
    }
    place.arrived = 0;
    last();
    for (unsigned t = first; t < end; ++t) fibers_[t].waits = false;
  }

  void start(unsigned t) {
    fibers_[t].context =
        boost::context::fiber(std::allocator_arg, stack_of{stacks_[t].get()}, [this, t](boost::context::fiber&& back) {
          entered(t);
          back_ = std::move(back);
          try {
            if (!abandoned_) (*body_)(t);
          } catch (const abandoned&) {
          } catch (const std::exception& e) {
            fault_ = "thread " + std::to_string(t) + ": " + e.what();
          }
          fibers_[t].done = true;
          --left_;
          leaving(nullptr);
          return std::move(back_);
        });
  }

  void resume(unsigned t) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, stacks_[t].get(), stack_bytes);
#endif
    fibers_[t].context = std::move(fibers_[t].context).resume();
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

  void yield(unsigned t) {
    leaving(&fibers_[t].fake_stack);
    back_ = std::move(back_).resume();
    entered(t);
    if (abandoned_) throw abandoned{};
  }

  void entered([[maybe_unused]] unsigned t) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fibers_[t].fake_stack, &main_stack_, &main_stack_bytes_);
#endif
  }
  void leaving([[maybe_unused]] void** keep) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(keep, main_stack_, main_stack_bytes_);
#endif
  }

  [[nodiscard]] std::string who_waits() const {
    std::string text;
    const char* last = nullptr;
    for (unsigned t = 0; t < threads_; ++t) {
      const char* at = fibers_[t].done ? "the end" : fibers_[t].at;
      if (last != nullptr && std::strcmp(at, last) == 0) continue;
      text += (last == nullptr ? "from thread " : ", from ") + std::to_string(t) + " on at " + at;
      last = at;
    }
    return text;
  }

  unsigned threads_;
  unsigned blocks_;
  const global_memory& memory_;
  std::vector<std::byte> shared_;
  std::byte* shared_first_ = nullptr;
  std::size_t shared_bytes_ = 0;
  rendezvous waiting_;
  std::vector<rendezvous> warps_;
  std::vector<std::unique_ptr<std::byte[]>> stacks_;
  std::vector<fiber> fibers_;
  boost::context::fiber back_;
  const std::function<void(unsigned)>* body_ = nullptr;
  std::string fault_;
  unsigned block_ = 0;
  unsigned left_ = 0;
  bool abandoned_ = false;
  // Of use where AddressSanitizer is told of stacks.
  [[maybe_unused]] void* fake_stack_ = nullptr;
  [[maybe_unused]] const void* main_stack_ = nullptr;
  [[maybe_unused]] std::size_t main_stack_bytes_ = 0;
};

}  // namespace kvcache_test
