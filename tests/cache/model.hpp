// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/reference.hpp>
#include <kvcache/kvcache.hpp>

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "../support/cpu_kernels.hpp"

namespace kvcache_test {

/// A stand-in for a model: what a token's q, k and v are depends on its id, its position and the layer, as rotated
/// projections do, so equal prefixes have equal KV and everything else differs.
class toy_model {
 public:
  static constexpr std::uint32_t layers = 2, query_heads = 6, kv_heads = 2, head_dim = 64, head_dim_v = 80;
  static constexpr kvcache::geometry geometry{
      .layers = layers, .kv_heads = kv_heads, .head_dim = head_dim, .head_dim_v = head_dim_v};

  struct rows {
    std::vector<float> q, k, v;
    std::uint32_t count = 0;

    void add(std::int32_t token, std::uint32_t position, std::uint32_t layer) {
      fill(q, query_heads * head_dim, 1, token, position, layer);
      fill(k, kv_heads * head_dim, 2, token, position, layer);
      fill(v, kv_heads * head_dim_v, 3, token, position, layer);
      ++count;
    }
    [[nodiscard]] kvcache::rows_view<const float> queries() const { return {q.data(), count, query_heads, head_dim}; }
    [[nodiscard]] kvcache::rows_view<const float> keys() const { return {k.data(), count, kv_heads, head_dim}; }
    [[nodiscard]] kvcache::rows_view<const float> values() const { return {v.data(), count, kv_heads, head_dim_v}; }

   private:
    static void fill(std::vector<float>& to, std::uint32_t elements, std::uint64_t kind, std::int32_t token,
                     std::uint32_t position, std::uint32_t layer) {
      std::uint64_t state = (kind << 60) ^ (std::uint64_t{layer} << 52) ^ (std::uint64_t{position} << 24) ^
                            static_cast<std::uint32_t>(token);
      for (std::uint32_t i = 0; i < elements; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const auto high = static_cast<std::int32_t>(static_cast<std::uint32_t>((state ^ (state >> 29)) >> 32));
        to.push_back(static_cast<float>(high) * 0x1p-30f);
      }
    }
  };

  template <class T>
  [[nodiscard]] static double rounded(float x) {
    if constexpr (kvcache::element<T>)
      return static_cast<double>(kvcache::to_float(kvcache::from_float<T>(x)));
    else
      return static_cast<double>(x);
  }

  /// The attention output of the last layer for the newest `count` tokens, computed from scratch over contiguous KV in
  /// double precision, with K and V rounded to the stored types where these are element types.
  template <class K, class V>
  [[nodiscard]] static std::vector<double> expected(const std::vector<std::int32_t>& tokens, std::uint32_t count) {
    const auto length = static_cast<std::uint32_t>(tokens.size());
    rows all;
    for (std::uint32_t i = 0; i < length; ++i) all.add(tokens[i], i, layers - 1);
    std::vector<double> out;
    for (std::uint32_t row = length - count; row < length; ++row)
      for (std::uint32_t head = 0; head < query_heads; ++head) {
        const std::uint32_t kv_head = head / (query_heads / kv_heads);
        std::vector<double> weights;
        double total = 0;
        for (std::uint32_t t = 0; t <= row; ++t) {
          double dot = 0;
          for (std::uint32_t d = 0; d < head_dim; ++d)
            dot += static_cast<double>(all.queries().at(row, head)[d]) * rounded<K>(all.keys().at(t, kv_head)[d]);
          weights.push_back(std::exp(dot / std::sqrt(static_cast<double>(head_dim))));
          total += weights.back();
        }
        for (std::uint32_t d = 0; d < head_dim_v; ++d) {
          double sum = 0;
          for (std::uint32_t t = 0; t <= row; ++t) sum += weights[t] * rounded<V>(all.values().at(t, kv_head)[d]);
          out.push_back(sum / total);
        }
      }
    return out;
  }
};

/// How far an output may be from one computed from scratch. Outputs are weighted means of values below 2, summed in
/// f32; with formats, each K and V is off by up to half a step of its scale, and logits by what keys are off.
template <class Policies>
inline constexpr double tolerance = [] {
  using dtype = typename Policies::dtype;
  if (kvcache::element<typename dtype::k> && kvcache::element<typename dtype::v>) return 4e-6;
  return kvcache::dtype_traits<typename dtype::k>::bits >= 8 && kvcache::dtype_traits<typename dtype::v>::bits >= 8
             ? 0.04
             : 0.5;
}();

/// What a cache of `blocks` blocks is made with; `size` where the policy leaves it open.
template <class Policies>
typename kvcache::cache<Policies>::options some_blocks(std::uint32_t blocks, std::uint32_t size = 7) {
  return {.blocks = blocks,
          .block_size = Policies::block_size == kvcache::dynamic ? size : 0,
          .tail_blocks = kvcache::storage<Policies>::seals_blocks ? 80u : 0u};
}

/// An engine in little: feeds tokens of several sequences through a cache and keeps what attention answered.
template <class Policies>
class toy_engine {
 public:
  struct sequence {
    kvcache::sequence_id id;
    std::vector<std::int32_t> tokens;  ///< of which the cache holds the first `computed`
    std::uint32_t computed = 0;
    std::vector<float> out;  ///< of the newest step
    std::uint32_t out_rows = 0;
  };

  explicit toy_engine(typename kvcache::cache<Policies>::options options)
      : cache(toy_model::geometry, std::move(options)) {}

  sequence open(std::vector<std::int32_t> prompt) {
    const auto o = cache.open({.content = prompt}).value();
    return {o.sequence, std::move(prompt), o.reused_tokens, {}, 0};
  }
  sequence fork(const sequence& from, std::uint32_t length) {
    return {cache.manager().fork(from.id, length).value(),
            {from.tokens.begin(), from.tokens.begin() + length},
            length,
            {},
            0};
  }
  void truncate(sequence& s, std::uint32_t length) {
    cache.manager().truncate(s.id, length).value();
    s.tokens.resize(length);
    s.computed = length;
  }
  void close(sequence& s) { cache.close(s.id).value(); }

  /// One step: of each sequence the next `chunk` tokens that are not computed yet.
  void run(std::vector<sequence*> batch, std::uint32_t chunk = ~0u) {
    std::vector<kvcache::want> wants;
    for (const sequence* s : batch) {
      const auto left = static_cast<std::uint32_t>(s->tokens.size()) - s->computed;
      wants.push_back({s->id, left < chunk ? left : chunk});
    }
    auto step = cache.begin(wants).value();
    cache.prepare(step);
    const auto plan = attention.plan(step.batch());
    std::vector<float> out;
    for (std::uint32_t layer = 0; layer < toy_model::layers; ++layer) {
      toy_model::rows rows;
      for (std::size_t i = 0; i < batch.size(); ++i)
        for (std::uint32_t t = 0; t < wants[i].tokens; ++t)
          rows.add(batch[i]->tokens[batch[i]->computed + t], batch[i]->computed + t, layer);
      cache.append(step, layer, rows.keys(), rows.values());
      out.assign(std::size_t{rows.count} * toy_model::query_heads * toy_model::head_dim_v, -1.0f);
      attention.run(plan, cache, layer, rows.queries(),
                    kvcache::rows_view<float>(out.data(), rows.count, toy_model::query_heads, toy_model::head_dim_v));
    }
    step.accept().value();
    auto next = out.begin();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      sequence& s = *batch[i];
      const auto size = static_cast<std::ptrdiff_t>(wants[i].tokens * toy_model::query_heads * toy_model::head_dim_v);
      s.out.assign(next, next + size);
      s.out_rows = wants[i].tokens;
      next += size;
      cache.commit(s.id, kvcache::content_view(s.tokens).sub(s.computed, wants[i].tokens)).value();
      s.computed += wants[i].tokens;
    }
    cache.retire(step).value();
  }

  /// Largest difference of a sequence's newest outputs to attention computed from scratch.
  static double error(const sequence& s) {
    const std::vector<std::int32_t> tokens(s.tokens.begin(), s.tokens.begin() + s.computed);
    const auto wanted =
        toy_model::expected<typename Policies::dtype::k, typename Policies::dtype::v>(tokens, s.out_rows);
    double worst = wanted.size() == s.out.size() ? 0 : 1e30;
    for (std::size_t i = 0; i < s.out.size() && i < wanted.size(); ++i) {
      const double off = std::fabs(wanted[i] - static_cast<double>(s.out[i]));
      if (!(off <= worst)) worst = off;  // a NaN counts
    }
    return worst;
  }

  kvcache::cache<Policies> cache;
  kvcache::attention<Policies> attention;
};

}  // namespace kvcache_test
