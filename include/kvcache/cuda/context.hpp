// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/fp8.hpp>

#include <concepts>
#include <cstdint>
#include <type_traits>

// Kernels are bodies: functions of a context, which is all that they know of the machine. On the device the context is
// an empty type that forwards to the hardware's instructions (device_context.cuh). On the host each thread can be a
// fiber, so that the very same body is run, checked and debugged without a device.

namespace kvcache::device {

inline constexpr unsigned warp_lanes = 32;

/// What one instruction loads, stores or copies at most; also what addresses are aligned to where nothing smaller fits.
struct alignas(16) words4 {
  std::uint32_t w[4];
};
struct alignas(8) words2 {
  std::uint32_t w[2];
};

/// What a body may ask for. Blocks of threads are one-dimensional. Everything that says `warp` is called by all lanes
/// of a warp together, `sync` by all threads of a block; what they return or write is what PTX says of the instruction
/// of the same name.
///
///     thread(), threads(), lane(), warp(), block(), blocks()      where a thread is; blocks of a grid have one number
///     load(p), store(p, x)                                        global memory; 1 to 16 bytes, aligned to their size
///     atomic_add(p, n)                                            the number before
///     sync(), sync_warp()                                         shared memory is the same for all afterwards
///     shuffle(x, lane), shuffle_xor(x, mask), any(condition)      warp
///     copy_async<Bytes>(shared, global, there)                    4, 8 or 16 bytes; zeros unless `there`
///     copy_async_commit(), copy_async_wait<Newer>()               copies of a thread go in groups
///     load_matrices(rows, out), load_matrices_transposed(...)     warp; ldmatrix .x4, lane i names row i % 8 of matrix
///     i / 8 multiply_add(T{}, c, a, b)                                  warp; mma m16n8k16, T f16 or bf16, sums f32
///     pack(T{}, x, y)                                             two floats as T in one register, x in the lower half
///     widen(T{}, two)                                             two fp8 as two f16
///     exp2(x), log2(x), tanh(x), reciprocal(x)                    to some 2^-22
///     divide(x, y)                                                rounds as IEEE does; a call on the device
template <class C>
concept context = requires(C& c, std::uint32_t* word, const std::uint32_t* source, float x, unsigned n,
                           std::uint32_t (&four)[4], const std::uint32_t (&two)[2], float (&sums)[4]) {
  { c.thread() } -> std::same_as<unsigned>;
  { c.threads() } -> std::same_as<unsigned>;
  { c.lane() } -> std::same_as<unsigned>;
  { c.warp() } -> std::same_as<unsigned>;
  { c.block() } -> std::same_as<unsigned>;
  { c.blocks() } -> std::same_as<unsigned>;
  { c.load(source) } -> std::same_as<std::uint32_t>;
  c.store(word, n);
  { c.atomic_add(word, n) } -> std::same_as<std::uint32_t>;
  c.sync();
  c.sync_warp();
  { c.shuffle(x, n) } -> std::same_as<float>;
  { c.shuffle_xor(x, n) } -> std::same_as<float>;
  { c.any(true) } -> std::same_as<bool>;
  c.template copy_async<16>(word, source, true);
  c.copy_async_commit();
  c.template copy_async_wait<0>();
  c.load_matrices(word, four);
  c.load_matrices_transposed(word, four);
  { c.pack(bf16{}, x, x) } -> std::same_as<std::uint32_t>;
  { c.widen(fp8_e4m3{}, std::uint16_t{}) } -> std::same_as<std::uint32_t>;
  c.multiply_add(bf16{}, sums, four, two);
  { c.exp2(x) } -> std::same_as<float>;
  { c.log2(x) } -> std::same_as<float>;
  { c.tanh(x) } -> std::same_as<float>;
  { c.reciprocal(x) } -> std::same_as<float>;
  { c.divide(x, x) } -> std::same_as<float>;
};

}  // namespace kvcache::device
