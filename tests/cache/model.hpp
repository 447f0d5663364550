// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/attention/reference.hpp>
#include <kvcache/kvcache.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../support/cpu_kernels.hpp"
#include "../support/how_far.hpp"

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

/// How far a stored element may be from x as it was given, where what shares its scale lies in [low, high]: half a unit
/// in the last place of a float; half a step of a scale, a whole one where codes go further down than up. Scales and
/// zero points are bf16, rounded away from what they have to cover.
inline double stored_within(kvcache::dtype_id id, double x, double low, double high) {
  using enum kvcache::dtype_id;
  const kvcache::quantization q = kvcache::quantization_of(id);
  if (q.bits == 0) {
    switch (kvcache::without_rotation(id)) {
      case float16: return std::fabs(x) * 0x1p-11 + 0x1p-25;
      case bfloat16: return std::fabs(x) * 0x1p-8;
      case float8_e4m3: return std::fabs(x) * 0x1p-4 + 0x1p-10;
      case float8_e5m2: return std::fabs(x) * 0x1p-3 + 0x1p-17;
      default: return 0;
    }
  }
  const double largest = (std::max)(std::fabs(low), std::fabs(high));
  const bool one_more_below = !q.zero_points && q.bits == 4;
  const double step =
      q.zero_points ? (high - low + largest * 0x1p-7) / ((1 << q.bits) - 1) : largest / (one_more_below ? 8 : 127);
  return step * (1 + 0x1p-7) * (one_more_below ? 1 : 0.5) * (1 + 0x1p-15);
}

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
    double misread = 0;  ///< how far these are from attention over what is stored, in units of what is allowed
  };

  // Kernels that round queries or weights to fewer bits are held against the reference elsewhere.
  explicit toy_engine(typename kvcache::cache<Policies>::options options)
      : cache(toy_model::geometry, std::move(options)),
        attention({.backend = {.isa = (std::min)(kvcache::best_isa(), kvcache::cpu_isa::avx512)}}) {}

  sequence open(std::vector<std::int32_t> prompt) {
    const auto o = cache.open({.content = prompt}).value();
    return {o.sequence, std::move(prompt), o.reused_tokens, {}};
  }
  sequence fork(const sequence& from, std::uint32_t length) {
    reopened_ = true;
    return {
        cache.manager().fork(from.id, length).value(), {from.tokens.begin(), from.tokens.begin() + length}, length, {}};
  }
  void truncate(sequence& s, std::uint32_t length) {
    reopened_ = true;
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
    std::vector<double> read;
    for (std::uint32_t layer = 0; layer < toy_model::layers; ++layer) {
      toy_model::rows rows;
      for (std::size_t i = 0; i < batch.size(); ++i)
        for (std::uint32_t t = 0; t < wants[i].tokens; ++t)
          rows.add(batch[i]->tokens[batch[i]->computed + t], batch[i]->computed + t, layer);
      cache.append(step, layer, rows.keys(), rows.values());
      out.assign(std::size_t{rows.count} * toy_model::query_heads * toy_model::head_dim_v, -1.0f);
      attention.run(plan, cache, layer, rows.queries(),
                    kvcache::rows_view<float>(out.data(), rows.count, toy_model::query_heads, toy_model::head_dim_v));
      read.resize(out.size());
      kvcache::reference_attention<typename Policies::variant>(
          step.batch(), cache.view(layer), rows.queries(),
          kvcache::rows_view<double>(read.data(), rows.count, toy_model::query_heads, toy_model::head_dim_v));
    }
    step.accept().value();
    auto next = out.begin();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      sequence& s = *batch[i];
      const auto size = static_cast<std::ptrdiff_t>(wants[i].tokens * toy_model::query_heads * toy_model::head_dim_v);
      s.out.assign(next, next + size);
      s.out_rows = wants[i].tokens;
      s.misread = 0;
      for (std::ptrdiff_t at = next - out.begin(), j = 0; j < size; ++j)
        s.misread = (std::max)(
            s.misread, how_far(out[static_cast<std::size_t>(at + j)], read[static_cast<std::size_t>(at + j)], 2e-5));
      next += size;
      cache.commit(s.id, kvcache::content_view(s.tokens).sub(s.computed, wants[i].tokens)).value();
      s.computed += wants[i].tokens;
    }
    cache.retire(step).value();
  }

  /// How far a sequence's newest outputs and what is stored for it are from what they should be, in units of what is
  /// allowed: outputs from attention computed from scratch where formats add nothing, and from attention over what is
  /// stored; what is stored from the model's K and V.
  [[nodiscard]] double error(const sequence& s) const {
    using k = typename Policies::dtype::k;
    using v = typename Policies::dtype::v;
    double worst = (std::max)(s.misread, misstored(s));
    if constexpr (kvcache::element<k> && kvcache::element<v>) {
      const auto wanted = toy_model::expected<k, v>({s.tokens.begin(), s.tokens.begin() + s.computed}, s.out_rows);
      if (wanted.size() != s.out.size()) return too_far;
      // Outputs are weighted means of values below 2, summed in f32.
      for (std::size_t i = 0; i < s.out.size(); ++i) worst = (std::max)(worst, how_far(s.out[i], wanted[i], 4e-6));
    }
    return worst;
  }

  kvcache::cache<Policies> cache;
  kvcache::attention<Policies> attention;

 private:
  /// K and V of the last layer, where they lie by now.
  [[nodiscard]] double misstored(const sequence& s) const {
    const kvcache::kv_view view = cache.view(toy_model::layers - 1);
    const auto table = cache.manager().table(s.id).value();
    std::vector<toy_model::rows> given(s.computed);
    for (std::uint32_t t = 0; t < s.computed; ++t) given[t].add(s.tokens[t], t, toy_model::layers - 1);
    double worst = 0;
    for (std::uint32_t first = 0; first < s.computed; first += view.block_size) {
      const kvcache::block_id entry = cache.manager().table_entry(table[first / view.block_size]);
      const std::uint32_t tokens = (std::min)(view.block_size, s.computed - first);
      for (const bool keys : {true, false})
        for (std::uint32_t head = 0; head < view.kv_heads; ++head)
          worst = (std::max)(worst, misstored(view, entry, keys, head, {given.data() + first, tokens}));
    }
    return worst;
  }
  [[nodiscard]] double misstored(const kvcache::kv_view& view, kvcache::block_id entry, bool keys, std::uint32_t head,
                                 std::span<const toy_model::rows> given) const {
    const std::uint32_t dim = keys ? view.head_dim : view.v_dim();
    const auto of = [&](std::uint32_t t) { return keys ? view.k_head(entry, t, head) : view.v_head(entry, t, head); };
    const kvcache::dtype_id id = of(0).dtype;
    const kvcache::quantization q = kvcache::quantization_of(id);
    std::vector<std::vector<float>> wanted;
    for (const toy_model::rows& rows : given) {
      const float* const x = (keys ? rows.keys() : rows.values()).at(0, head);
      wanted.emplace_back(x, x + dim);
      if (kvcache::is_rotated(id)) kvcache::rotate(wanted.back().data(), dim);
    }
    double worst = 0;
    std::vector<float> found(dim);
    for (std::uint32_t t = 0; t < wanted.size(); ++t) {
      kvcache::read_head(of(t), dim, found.data());
      for (std::uint32_t d = 0; d < dim; ++d) {
        double low = 0;
        double high = 0;
        const auto share = [&](float x, bool is_first) {
          low = is_first ? static_cast<double>(x) : (std::min)(low, static_cast<double>(x));
          high = is_first ? static_cast<double>(x) : (std::max)(high, static_cast<double>(x));
        };
        const std::uint32_t begin = q.group == 0 ? 0 : d / q.group * q.group;
        const std::uint32_t end = q.group == 0 ? dim : (std::min)(dim, begin + q.group);
        if (q.per_channel)
          for (const auto& x : wanted) share(x[d], &x == wanted.data());
        else
          for (std::uint32_t i = begin; i < end; ++i) share(wanted[t][i], i == begin);
        const auto x = static_cast<double>(wanted[t][d]);
        double allowed = stored_within(id, x, low, high) + 1e-6 * std::fabs(x);
        // Blocks are sealed from bf16.
        if (kvcache::storage<Policies>::seals_blocks) allowed += (std::max)(std::fabs(low), std::fabs(high)) * 0x1p-8;
        if (reopened_) allowed += was_sealed(keys, dim);
        worst = (std::max)(worst, how_far(found[d], x, allowed));
      }
    }
    return worst;
  }
  /// What reading sealed bytes back and sealing them again adds, up to four times: the ranges of then are unknown.
  [[nodiscard]] static double was_sealed(bool keys, std::uint32_t dim) {
    const kvcache::dtype_id id = keys ? kvcache::dtype_traits<typename Policies::dtype::k>::id
                                      : kvcache::dtype_traits<typename Policies::dtype::v>::id;
    if (!kvcache::storage<Policies>::seals_blocks || kvcache::quantization_of(id).bits == 0) return 0;
    const double most = 2 * (kvcache::is_rotated(id) ? std::sqrt(static_cast<double>(dim & (~dim + 1))) : 1.0);
    return 4 * stored_within(id, most, -most, most);
  }

  bool reopened_ = false;
};

}  // namespace kvcache_test
