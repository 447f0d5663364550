// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/fwd.hpp>

#include <string>

namespace kvcache {

/// The policy bundle, chosen at compile time. An engine derives its own and states only what differs:
///
///     struct mine : kvcache::policies {
///       static constexpr unsigned block_size = 32;
///       using dtype = kvcache::kv_dtype<kvcache::f16>;
///     };
///
/// A misspelt override is silently the default: print `describe<mine>()` once and look.
struct policies {
  /// Tokens in a block; `dynamic`: given at run time.
  static constexpr unsigned block_size = 16;
  /// What K and V are stored in: element types, or formats of <kvcache/quantization.hpp>.
  using dtype = kv_dtype<bf16>;
  /// What tokens wait in where a format seals whole blocks, and what layers are kept in that are not to be quantised:
  /// f32, f16 or bf16.
  using tail_dtype = bf16;
  /// Order of tokens and heads inside a block.
  using layout = nhd;
  /// Where storage takes its memory from.
  using allocator = aligned_allocator;
  /// Which cached block goes first when room is needed.
  using eviction = lru;
  /// What a query sees, and what happens to its logits.
  using variant = causal;
  /// What runs attention. Including <kvcache/attention/cpu/cpu.hpp> brings the kernels of `cpu_backend`.
  using backend = cpu_backend;
  /// Whether a row's result may never depend on what else is in the batch, bit for bit.
  static constexpr bool batch_invariant = false;
};

/// Every choice of a bundle, one a line, for logs. Needs the headers of the chosen policies. Allocates.
template <class Policies>
[[nodiscard]] std::string describe() {
  constexpr unsigned block_size = Policies::block_size;
  std::string text;
  text += "block_size      " + (block_size == ~0u ? std::string("dynamic") : std::to_string(block_size)) + '\n';
  text += std::string("dtype.k         ") + dtype_traits<typename Policies::dtype::k>::name + '\n';
  text += std::string("dtype.v         ") + dtype_traits<typename Policies::dtype::v>::name + '\n';
  text += std::string("tail_dtype      ") + dtype_traits<typename Policies::tail_dtype>::name + '\n';
  text += std::string("layout          ") + Policies::layout::name + '\n';
  text += std::string("allocator       ") + Policies::allocator::name + '\n';
  text += std::string("eviction        ") + Policies::eviction::name + '\n';
  text += std::string("variant         ") + Policies::variant::name + '\n';
  text += std::string("backend         ") + Policies::backend::name + '\n';
  text += std::string("batch_invariant ") + (Policies::batch_invariant ? "true" : "false") + '\n';
  return text;
}

}  // namespace kvcache
