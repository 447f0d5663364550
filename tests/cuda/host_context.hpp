// SPDX-License-Identifier: Apache-2.0
// The context of a device thread that is a fiber on the host. It does what PTX says, but as late as it may: copies are
// carried out when they are waited for, and until then their destination holds no numbers.
#pragma once

#include "host_block.hpp"

#include <kvcache/cuda/context.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/fp8.hpp>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace kvcache_test {

using kvcache::bf16;
using kvcache::f16;

/// Where the elements of a fragment of mma m16n8k16 lie: element i of lane l. Registers hold two neighbours each, the
/// first in the lower half. Held against a table of its own by instructions.cpp.
struct mma_place {
  unsigned row;
  unsigned column;

  static constexpr mma_place a(unsigned lane, unsigned i) {  // 16 rows, 16 columns
    return {lane / 4 + (i / 2 % 2) * 8, lane % 4 * 2 + i % 2 + (i / 4) * 8};
  }
  static constexpr mma_place b(unsigned lane, unsigned i) {  // 16 rows, 8 columns
    return {lane % 4 * 2 + i % 2 + (i / 2) * 8, lane / 4};
  }
  static constexpr mma_place c(unsigned lane, unsigned i) {  // 16 rows, 8 columns
    return {lane / 4 + (i / 2) * 8, lane % 4 * 2 + i % 2};
  }
};

class host_context {
 public:
  host_context(host_block& block, unsigned thread) : block_(&block), thread_(thread) {}
  host_context(host_context&&) = default;
  host_context& operator=(host_context&&) = delete;

  [[nodiscard]] unsigned thread() const { return thread_; }
  [[nodiscard]] unsigned threads() const { return block_->threads(); }
  [[nodiscard]] unsigned lane() const { return thread_ % host_block::lanes; }
  [[nodiscard]] unsigned warp() const { return thread_ / host_block::lanes; }
  [[nodiscard]] unsigned block() const { return block_->block(); }
  [[nodiscard]] unsigned blocks() const { return block_->blocks(); }

  template <class T>
  [[nodiscard]] std::remove_cv_t<T> load(const T* from) const {
    block_->memory().check(from, sizeof(T), sizeof(T), false);
    std::remove_cv_t<T> x;
    std::memcpy(&x, from, sizeof x);
    return x;
  }
  template <class T>
  void store(T* to, std::type_identity_t<T> x) const {
    block_->memory().check(to, sizeof(T), sizeof(T), true);
    std::memcpy(to, &x, sizeof x);
  }
  std::uint32_t atomic_add(std::uint32_t* to, std::uint32_t n) const {
    block_->memory().check(to, sizeof *to, sizeof *to, true);
    const std::uint32_t before = *to;
    *to = before + n;
    return before;
  }

  void sync() { block_->meet_block(thread_, "sync"); }
  void sync_warp() {
    char nothing = 0;
    block_->meet_warp(thread_, "sync_warp", nothing, [](char*(&)[host_block::lanes]) {});
  }

  template <class T>
  [[nodiscard]] T shuffle(T x, unsigned from) {
    struct {
      T mine;
      unsigned from;
      T out;
    } s{x, from, x};
    block_->meet_warp(thread_, "shuffle", s, [](auto& each) {
      for (auto* one : each) one->out = each[one->from % host_block::lanes]->mine;
    });
    return s.out;
  }
  template <class T>
  [[nodiscard]] T shuffle_xor(T x, unsigned mask) {
    struct {
      T mine;
      unsigned mask;
      T out;
    } s{x, mask, x};
    block_->meet_warp(thread_, "shuffle_xor", s, [](auto& each) {
      for (unsigned i = 0; i < host_block::lanes; ++i) {
        const unsigned other = i ^ each[i]->mask;
        if (other >= host_block::lanes) throw kernel_fault("shuffle_xor beyond the warp");
        each[i]->out = each[other]->mine;
      }
    });
    return s.out;
  }
  [[nodiscard]] bool any(bool condition) {
    bool mine = condition;
    block_->meet_warp(thread_, "any", mine, [](auto& each) {
      bool all = false;
      for (const bool* one : each) all = all || *one;
      for (bool* one : each) *one = all;
    });
    return mine;
  }

  template <unsigned Bytes>
  void copy_async(void* shared, const void* global, bool there) {
    static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16);
    block_->check_shared(shared, Bytes, Bytes);
    if (there) block_->memory().check(global, Bytes, Bytes, false);
    std::memset(shared, 0xff, Bytes);
    open_.push_back({shared, there ? global : nullptr, Bytes});
  }
  void copy_async_commit() {
    groups_.push_back(open_);
    open_.clear();
  }
  template <unsigned Newer>
  void copy_async_wait() {
    while (groups_.size() > Newer) {
      for (const copy& c : groups_.front()) {
        if (c.from == nullptr)
          std::memset(c.to, 0, c.bytes);
        else
          std::memcpy(c.to, c.from, c.bytes);
      }
      groups_.erase(groups_.begin());
    }
  }
  /// What a body has left behind when it returns: copies that nobody waited for.
  void finish() const {
    for (const auto& group : groups_)
      if (!group.empty()) throw kernel_fault("returns with copies in flight that it has not waited for");
    if (!open_.empty()) throw kernel_fault("returns with copies that it has not committed");
  }

  void load_matrices(const void* row, std::uint32_t (&out)[4]) { load_eights(row, out, false); }
  void load_matrices_transposed(const void* row, std::uint32_t (&out)[4]) { load_eights(row, out, true); }

  template <class T>
  void multiply_add(T, float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    static_assert(std::is_same_v<T, f16> || std::is_same_v<T, bf16>);
    struct operands {
      float* c;
      const std::uint32_t* a;
      const std::uint32_t* b;
    } mine{c, a, b};
    block_->meet_warp(thread_, "multiply_add", mine, [](operands*(&each)[host_block::lanes]) {
      double left[16][16];
      double right[16][8];
      for (unsigned l = 0; l < host_block::lanes; ++l) {
        for (unsigned i = 0; i < 8; ++i) {
          const mma_place p = mma_place::a(l, i);
          left[p.row][p.column] = half_of<T>(each[l]->a[i / 2], i % 2);
        }
        for (unsigned i = 0; i < 4; ++i) {
          const mma_place p = mma_place::b(l, i);
          right[p.row][p.column] = half_of<T>(each[l]->b[i / 2], i % 2);
        }
      }
      for (unsigned l = 0; l < host_block::lanes; ++l)
        for (unsigned i = 0; i < 4; ++i) {
          const mma_place p = mma_place::c(l, i);
          double sum = static_cast<double>(each[l]->c[i]);
          for (unsigned k = 0; k < 16; ++k) sum += left[p.row][k] * right[k][p.column];
          each[l]->c[i] = static_cast<float>(sum);
        }
    });
  }

  template <class T>
  [[nodiscard]] std::uint32_t pack(T, float x, float y) const {
    return kvcache::from_float<T>(x).bits | static_cast<std::uint32_t>(kvcache::from_float<T>(y).bits) << 16;
  }
  template <class T>
  [[nodiscard]] std::uint32_t widen(T, std::uint16_t two) const {
    return pack(f16{}, to_float(T{static_cast<std::uint8_t>(two)}), to_float(T{static_cast<std::uint8_t>(two >> 8)}));
  }

  [[nodiscard]] float exp2(float x) const { return std::exp2(x); }
  [[nodiscard]] float log2(float x) const { return std::log2(x); }
  [[nodiscard]] float tanh(float x) const { return std::tanh(x); }
  [[nodiscard]] float reciprocal(float x) const { return 1 / x; }
  [[nodiscard]] float divide(float x, float y) const { return x / y; }

 private:
  struct copy {
    void* to;
    const void* from;  // null: zeros
    unsigned bytes;
  };

  template <class T>
  static double half_of(std::uint32_t two, unsigned upper) {
    return static_cast<double>(to_float(T{static_cast<std::uint16_t>(two >> (16 * upper))}));
  }

  /// Lane i names row i % 8 of matrix i / 8; lane i gets of matrix m the elements 2 (i % 4) and the next of row i / 4,
  /// or of column i / 4.
  void load_eights(const void* row, std::uint32_t (&out)[4], bool transposed) {
    block_->check_shared(row, 16, 16);
    struct rows {
      const std::byte* row;
      std::uint32_t* out;
    } mine{static_cast<const std::byte*>(row), out};
    block_->meet_warp(thread_, transposed ? "load_matrices_transposed" : "load_matrices", mine,
                      [transposed](rows*(&each)[host_block::lanes]) {
                        for (unsigned l = 0; l < host_block::lanes; ++l)
                          for (unsigned m = 0; m < 4; ++m) {
                            std::uint16_t two[2];
                            for (unsigned i = 0; i < 2; ++i) {
                              const unsigned along = l % 4 * 2 + i;
                              const unsigned r = transposed ? along : l / 4;
                              const unsigned c = transposed ? l / 4 : along;
                              std::memcpy(&two[i], each[m * 8 + r]->row + 2 * c, 2);
                            }
                            each[l]->out[m] = two[0] | static_cast<std::uint32_t>(two[1]) << 16;
                          }
                      });
  }

  host_block* block_;
  unsigned thread_;
  std::vector<copy> open_;
  std::vector<std::vector<copy>> groups_;
};

static_assert(kvcache::device::context<host_context>);

struct host_options {
  global_memory memory{};
  thread_order order = thread_order::forward;
};

/// Runs a kernel's body on the host as a grid of `blocks` blocks. `make(host_context)` may put another context in
/// between. Throws kernel_fault.
template <class Body, class Make>
void run_on_host(unsigned blocks, const typename Body::params& params, const host_options& options, const Make& make) {
  host_block block(Body::threads, sizeof(typename Body::shared), blocks, options.memory);
  for (unsigned b = 0; b < blocks; ++b)
    block.run(b, options.order, [&](unsigned thread) {
      auto context = make(host_context(block, thread));
      Body::run(context, *reinterpret_cast<typename Body::shared*>(block.shared()), params);
      context.finish();
    });
}
template <class Body>
void run_on_host(unsigned blocks, const typename Body::params& params, const host_options& options = {}) {
  run_on_host<Body>(blocks, params, options, [](host_context&& c) { return std::move(c); });
}

}  // namespace kvcache_test
