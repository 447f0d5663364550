// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/types.hpp>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

// clang-format 14 cannot lay out `noexcept ->` in a requirement.
// clang-format off

namespace kvcache {

/// An order over the evictable blocks of a pool. The block manager tells it when a block becomes evictable and when it
/// stops being so, and evicts only leaves of the prefix tree whatever order the policy keeps: it goes from the victim
/// down to a leaf. Equal calls give equal victims: no clock, pointer or hash order may decide. Constructed with the
/// highest block id. One thread at a time.
///
/// What else a policy wants to know, it says by having some of these members, all noexcept and returning nothing:
///
///     open(std::span<const std::uint64_t> fingerprints, std::uint32_t hits, std::uint32_t block_tokens)
///         A request begins, whose content has these full blocks in order, the first `hits` of which are cached. Called
///         once for each layer group.
///     reference(block_id block, std::uint64_t fingerprint, block_id parent)
///         A request uses a cached block, which is not evictable at that moment: `open` found it, or `commit` has just
///         cached it or found its like. The parent is the cached block before it, or the null block. Head first along a chain.
///     evict(block_id block)
///         Instead of erase, where the content is cached no longer: evicted to make room, out of its time, reset or, a
///         block in use that was inserted just for this, overwritten.
///     set_priority(block_id block, unsigned priority, std::uint64_t expires)
///         The content of a block that was referenced is worth so much until then.
///     advance(std::uint64_t now)
///         The caller's time is `now`, later than before.
///
/// A fingerprint is a hash of a block's content, all content before it and the extra keys. It outlives the block, so a
/// policy can remember what it has evicted.
template <class E>
concept eviction_policy = requires { sizeof(E); } &&  // a policy whose header is missing is declared only
                          std::is_nothrow_move_constructible_v<E> && std::constructible_from<E, block_id> &&
                          requires(E& policy, const E& constant, block_id block) {
                            { E::name } -> std::convertible_to<const char*>;
                            { policy.insert(block) } noexcept -> std::same_as<void>;
                            { policy.erase(block) } noexcept -> std::same_as<void>;
                            { constant.victim() } noexcept -> std::same_as<block_id>;
                          };

// What a policy wants to be told; see eviction_policy.
template <class E>
concept told_of_requests = requires(E& policy, std::span<const std::uint64_t> fingerprints, std::uint32_t count) {
                             { policy.open(fingerprints, count, count) } noexcept -> std::same_as<void>;
                           };
template <class E>
concept told_of_references = requires(E& policy, block_id block, std::uint64_t fingerprint) {
                               { policy.reference(block, fingerprint, block) } noexcept -> std::same_as<void>;
                             };
template <class E>
concept told_of_evictions = requires(E& policy, block_id block) {
                              { policy.evict(block) } noexcept -> std::same_as<void>;
                            };

template <class E>
concept told_of_time = requires(E& policy, std::uint64_t now) {
                         { policy.advance(now) } noexcept -> std::same_as<void>;
                       };
template <class E>
concept told_of_priorities = requires(E& policy, block_id block, unsigned priority, std::uint64_t expires) {
                               { policy.set_priority(block, priority, expires) } noexcept -> std::same_as<void>;
                             };

/// Memory for the bytes of a pool. `allocate` raises system_failure where it gets none and never returns null; the
/// alignment is a power of two. Thread safe as far as its own state goes.
template <class A>
concept memory_allocator = std::is_nothrow_move_constructible_v<A> && std::is_nothrow_move_assignable_v<A> &&
                           requires(A& allocator, void* memory, std::size_t bytes, std::size_t alignment) {
                             { A::name } -> std::convertible_to<const char*>;
                             { A::space } -> std::convertible_to<memory_space>;
                             { allocator.allocate(bytes, alignment) } -> std::same_as<void*>;
                             { allocator.deallocate(memory, bytes, alignment) } noexcept -> std::same_as<void>;
                           };

/// Where (token, head) lies inside one plane of one block, in bytes from the plane's start.
struct plane_strides {
  std::int64_t token = 0;
  std::int64_t head = 0;
  std::int64_t bytes = 0;  ///< of the whole plane
};

/// The order of tokens and heads inside a block.
template <class L>
concept kv_layout = requires(std::uint32_t block_size, std::uint32_t heads, std::uint64_t head_bytes) {
  { L::name } -> std::convertible_to<const char*>;
  { L::strides(block_size, heads, head_bytes) } noexcept -> std::same_as<plane_strides>;
};

// clang-format on

/// What a variant of attention does beyond the plain softmax. Chosen at compile time, so that what is not used
/// costs nothing; the values that go with it (window, slopes, ...) come at run time.
struct variant_features {
  bool causal = false;    ///< a query sees no token after its own position
  bool window = false;    ///< a query sees the newest tokens only
  bool soft_cap = false;  ///< logits pass through cap * tanh(logit / cap)
  bool alibi = false;     ///< a bias that falls linearly with distance, a slope for each query head
  bool sinks = false;     ///< one learned logit for each query head joins the softmax and adds no value
  bool mask = false;      ///< the caller's mask says which token a query sees

  friend constexpr bool operator==(const variant_features&, const variant_features&) = default;
};

template <class V>
concept attention_variant = requires {
  { V::name } -> std::convertible_to<const char*>;
  { V::features } -> std::convertible_to<variant_features>;
};

/// The dtype policy: `k` and `v` are element types or formats of quantization.hpp.
template <class D>
concept kv_dtype_policy = requires {
  requires stored_type<typename D::k>;
  requires stored_type<typename D::v>;
};

/// Threads that the engine lends. `run(f)` calls f(ith, threads()) once for each ith in [0, threads()), possibly at
/// the same time, and returns when all have returned.
template <class E>
concept executor = requires(E& e, void (*f)(unsigned, unsigned)) {
  { e.threads() } -> std::convertible_to<unsigned>;
  e.run(f);
};

}  // namespace kvcache
