// SPDX-License-Identifier: Apache-2.0
// What the tests of attention share: a pool made by hand, in which everything that is not a token of a sequence is
// poison; batches over it; and a comparison with the reference in double precision.
#pragma once

#include <kvcache/attention/attention.hpp>
#include <kvcache/attention/reference.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "catch.hpp"
#include "cpu_kernels.hpp"

namespace kvcache_test {

using namespace kvcache;

// Sweeps are thinned out where code runs ten times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || !defined(__OPTIMIZE__)
inline constexpr bool thorough = false;
#else
inline constexpr bool thorough = true;
#endif

/// By bits, so that it holds under -ffast-math.
inline bool is_number(float x) { return (std::bit_cast<std::uint32_t>(x) & 0x7f80'0000u) != 0x7f80'0000u; }
inline bool is_minus_infinity(float x) { return std::bit_cast<std::uint32_t>(x) == 0xff80'0000u; }
inline bool is_minus_infinity(double x) { return std::bit_cast<std::uint64_t>(x) == 0xfff0'0000'0000'0000u; }

inline std::vector<cpu_isa> isas() {
  std::vector<cpu_isa> all;
  for (const cpu_isa isa : {cpu_isa::scalar, cpu_isa::avx2, cpu_isa::avx512, cpu_isa::avx512_dot})
    if (isa <= best_isa()) all.push_back(isa);
  return all;
}

struct shape {
  std::uint32_t block_size = 16;
  std::uint32_t kv_heads = 2;
  std::uint32_t group = 2;
  std::uint32_t head_dim = 64;
  std::uint32_t head_dim_v = 0;  ///< 0: as head_dim
  bool heads_outside = false;    ///< [block, head, token, dim] and not [block, token, head, dim]
  bool tails = false;            ///< every third block lies in the tail pool
  bool tails_alike = false;      ///< the tail pool has the strides of the other one
  float largest = 1;             ///< standard deviation of K and V

  [[nodiscard]] std::uint32_t v_dim() const { return head_dim_v != 0 ? head_dim_v : head_dim; }
  [[nodiscard]] std::uint32_t query_heads() const { return kv_heads * group; }
};

struct sequence {
  std::uint32_t queries = 1;
  std::uint32_t kv_length = 1;
};

/// K or V of a pool. The strides have gaps, the base is aligned to 8 bytes and no more, and every element that nobody
/// wrote is no number or infinite.
template <class T>
class plane {
 public:
  plane() = default;
  plane(const shape& s, std::uint32_t dim, std::uint32_t blocks, std::uint32_t gap) {
    const auto size = static_cast<std::int64_t>(sizeof(T));
    const std::int64_t row = (std::int64_t{dim} + gap) * size;
    if (s.heads_outside) {
      view_.token_stride = row;
      view_.head_stride = row * s.block_size + 8 * gap;
    } else {
      view_.head_stride = row;
      view_.token_stride = row * s.kv_heads + 8 * gap;
    }
    view_.block_stride = row * s.kv_heads * s.block_size + 8 * gap * (s.kv_heads + s.block_size) + 64;
    bytes_.resize(static_cast<std::size_t>(view_.block_stride) * blocks + 128);
    auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    while (address % 16 != 8) ++address;
    view_.base = reinterpret_cast<std::byte*>(address);
    poison(view_.base, bytes_.size() - static_cast<std::size_t>(view_.base - bytes_.data()));
  }
  plane(const plane&) = delete;
  plane& operator=(const plane&) = delete;
  plane(plane&&) noexcept = default;  // a vector keeps its memory when it moves
  plane& operator=(plane&&) noexcept = default;

  [[nodiscard]] const plane_view& view() const { return view_; }
  void write(block_id block, std::uint32_t token, std::uint32_t head, std::uint32_t d, float x) {
    const T stored = from_float<T>(x);
    std::memcpy(view_.at(block, token, head) + d * sizeof(T), &stored, sizeof stored);
  }

 private:
  static void poison(std::byte* to, std::size_t bytes) {
    for (std::size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
      const std::uint32_t f = i / sizeof(T) % 3 == 0   ? 0x7f80'0000u
                              : i / sizeof(T) % 3 == 1 ? 0x7fc0'0000u
                                                       : 0xff80'0000u;
      const T stored = from_float<T>(std::bit_cast<float>(f));
      std::memcpy(to + i, &stored, sizeof stored);
    }
  }

  std::vector<std::byte> bytes_;
  plane_view view_;
};

/// Sequences in a pool, with queries: everything that attention needs, and what it should find.
template <class K, class V = K>
class scene {
 public:
  scene(const shape& s, std::vector<sequence> sequences, unsigned seed = 1)
      : shape_(s), sequences_(std::move(sequences)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, s.largest);
    std::uint32_t needed = 0;
    offsets_.push_back(0);
    table_offsets_.push_back(0);
    for (const sequence& next : sequences_) {
      offsets_.push_back(offsets_.back() + next.queries);
      lengths_.push_back(next.kv_length);
      needed += (next.kv_length + s.block_size - 1) / s.block_size;
      table_offsets_.push_back(needed);
    }
    blocks_ = needed + 3;
    std::vector<block_id> ids(blocks_ - 1);
    std::iota(ids.begin(), ids.end(), block_id{1});
    std::shuffle(ids.begin(), ids.end(), random);
    table_.assign(ids.begin(), ids.begin() + needed);
    if (s.tails)
      for (std::size_t i = 0; i < table_.size(); i += 3) table_[i] |= tail_bit;

    k_ = plane<K>(s, s.head_dim, blocks_, 2);
    v_ = plane<V>(s, s.v_dim(), blocks_, 6);
    if (s.tails) {
      k_tail_ = plane<K>(s, s.head_dim, blocks_, s.tails_alike ? 2 : 4);
      v_tail_ = plane<V>(s, s.v_dim(), blocks_, s.tails_alike ? 6 : 8);
    }
    for (std::size_t r = 0; r < sequences_.size(); ++r) {
      for (std::uint32_t t = 0; t < lengths_[r]; ++t) {
        for (std::uint32_t h = 0; h < s.kv_heads; ++h) {
          for (std::uint32_t d = 0; d < s.head_dim; ++d) write_k(r, t, h, d, normal(random));
          for (std::uint32_t d = 0; d < s.v_dim(); ++d) write_v(r, t, h, d, normal(random));
        }
      }
    }
    q.resize(std::size_t{rows()} * s.query_heads() * s.head_dim);
    std::normal_distribution<float> unit;
    for (float& x : q) x = to_float(from_float<bf16>(unit(random)));  // so that q may be handed over as bf16 too
  }

  [[nodiscard]] const shape& form() const { return shape_; }
  [[nodiscard]] std::uint32_t rows() const { return offsets_.back(); }
  [[nodiscard]] batch_view batch() const {
    return {offsets_, lengths_, block_tables::csr(table_.data(), table_offsets_), {}, shape_.block_size};
  }
  [[nodiscard]] kv_view view() const {
    kv_view r;
    r.k = k_.view();
    r.v = v_.view();
    r.k_tail = k_tail_.view();
    r.v_tail = v_tail_.view();
    r.blocks = blocks_;
    r.tail_blocks = shape_.tails ? blocks_ : 0;
    r.block_size = shape_.block_size;
    r.kv_heads = shape_.kv_heads;
    r.head_dim = shape_.head_dim;
    r.head_dim_v = shape_.v_dim();
    r.k_dtype = dtype_traits<K>::id;
    r.v_dtype = dtype_traits<V>::id;
    return r;
  }
  [[nodiscard]] rows_view<const float> queries() const {
    return {q.data(), rows(), shape_.query_heads(), shape_.head_dim};
  }
  [[nodiscard]] attention_shape heads() const {
    return {shape_.query_heads(), shape_.kv_heads, shape_.head_dim, shape_.v_dim()};
  }

  void write_k(std::size_t r, std::uint32_t token, std::uint32_t head, std::uint32_t d, float x) {
    const block_id entry = table_[table_offsets_[r] + token / shape_.block_size];
    ((entry & tail_bit) != 0 ? k_tail_ : k_).write(entry & ~tail_bit, token % shape_.block_size, head, d, x);
  }
  void write_v(std::size_t r, std::uint32_t token, std::uint32_t head, std::uint32_t d, float x) {
    const block_id entry = table_[table_offsets_[r] + token / shape_.block_size];
    ((entry & tail_bit) != 0 ? v_tail_ : v_).write(entry & ~tail_bit, token % shape_.block_size, head, d, x);
  }
  /// Every element of one token.
  void fill_k(std::size_t r, std::uint32_t token, float x) {
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h)
      for (std::uint32_t d = 0; d < shape_.head_dim; ++d) write_k(r, token, h, d, x);
  }
  void fill_v(std::size_t r, std::uint32_t token, float x) {
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h)
      for (std::uint32_t d = 0; d < shape_.v_dim(); ++d) write_v(r, token, h, d, x);
  }
  std::vector<block_id>& table() { return table_; }
  std::vector<std::uint32_t>& lengths() { return lengths_; }
  [[nodiscard]] const std::vector<std::uint32_t>& offsets() const { return offsets_; }

  std::vector<float> q;

 private:
  shape shape_;
  std::vector<sequence> sequences_;
  std::vector<std::uint32_t> offsets_;
  std::vector<std::uint32_t> lengths_;
  std::vector<block_id> table_;
  std::vector<std::uint32_t> table_offsets_;
  std::uint32_t blocks_ = 0;
  plane<K> k_;
  plane<V> v_;
  plane<K> k_tail_;
  plane<V> v_tail_;
};

template <class Variant, class K, class V = K, bool Invariant = false>
struct bundle : policies {
  static constexpr unsigned block_size = dynamic;
  using dtype = kv_dtype<K, V>;
  using variant = Variant;
  static constexpr bool batch_invariant = Invariant;
};

struct outcome {
  std::vector<float> out;
  std::vector<float> lse;
  bool rounded = false;  ///< weights were rounded to bf16
};

inline float poison_value() { return std::bit_cast<float>(0x7fc0'0000u); }

/// One thread's share of a run. Where the processor's dot products are asked for, q goes in as bf16: otherwise they
/// would not be used.
template <class Attention>
void run_share(const Attention& a, const attention_plan& plan, const kv_view& view, rows_view<const float> q,
               rows_view<float> out, const variant_values& values = {}, lse_view<float> lse = {}) {
  if (a.options().backend.isa != cpu_isa::avx512_dot) return a.run(plan, view, q, out, 0, 1, values, lse);
  std::vector<bf16> short_q(std::size_t{q.rows} * q.heads * q.head_dim);
  std::size_t at = 0;
  for (std::uint32_t r = 0; r < q.rows; ++r)
    for (std::uint32_t h = 0; h < q.heads; ++h)
      for (std::uint32_t d = 0; d < q.head_dim; ++d) short_q[at++] = from_float<bf16>(q.at(r, h)[d]);
  a.run(plan, view, rows_view<const bf16>(short_q.data(), q.rows, q.heads, q.head_dim), out, 0, 1, values, lse);
}

/// Attention over a scene on the calling thread, cut for `threads` threads. Output and lse begin as no numbers.
template <class Variant, bool Invariant = false, class K, class V>
outcome attend(const scene<K, V>& s, const variant_values& values = {}, cpu_isa isa = cpu_isa::best,
               unsigned threads = 1) {
  const shape& f = s.form();
  outcome o{std::vector<float>(std::size_t{s.rows()} * f.query_heads() * f.v_dim(), poison_value()),
            std::vector<float>(std::size_t{s.rows()} * f.query_heads(), poison_value())};
  const attention<bundle<Variant, K, V, Invariant>> a(
      {.shape = s.heads(), .threads = threads, .backend = {.isa = isa}});
  const attention_plan plan = a.plan(s.batch());
  run_share(a, plan, s.view(), s.queries(), rows_view<float>(o.out.data(), s.rows(), f.query_heads(), f.v_dim()),
            values, {o.lse.data(), f.query_heads()});
  o.rounded = isa == cpu_isa::avx512_dot && std::is_same_v<K, bf16> && std::is_same_v<V, bf16>;
  return o;
}

struct expectation {
  std::vector<double> out;
  std::vector<double> lse;
  double largest = 1;  ///< of the outputs
};

template <class Variant, class K, class V>
expectation expected(const scene<K, V>& s, const variant_values& values = {}) {
  const shape& f = s.form();
  expectation e;
  e.out.resize(std::size_t{s.rows()} * f.query_heads() * f.v_dim());
  e.lse.resize(std::size_t{s.rows()} * f.query_heads());
  reference_attention<Variant>(s.batch(), s.view(), s.queries(),
                               rows_view<double>(e.out.data(), s.rows(), f.query_heads(), f.v_dim()), values,
                               lse_view<double>{e.lse.data(), f.query_heads()});
  for (const double x : e.out) e.largest = (std::max)(e.largest, std::fabs(x));
  return e;
}

/// How far an outcome is from what is expected, in units of what is allowed: 1e-5 of the largest output, and of an lse
/// 1e-5 relative, 1e-5 absolute below 1. A product of d terms of order 1 carries some sqrt(d) * 2^-24 = 1e-6 of
/// rounding, and the exponential turns an error of a logit into a relative one of a weight; 16-bit K and V are what
/// the reference reads too, so they add nothing. Where weights are rounded to bf16, each is off by 2^-8 of itself at
/// most, so an output by 2^-8 of how far values lie from it, and a sum of weights by 2^-8 of itself; but errors are of
/// both signs and where few weights count one of them is near 1. Beyond 1 too far; a value that is no number is 1e9
/// away.
inline double distance(const outcome& o, const expectation& e) {
  const double of_output = o.rounded ? 0x1p-8 : 1e-5;
  const double of_sum = o.rounded ? 0x1p-8 * 1.4427 : 0;
  double worst = 0;
  for (std::size_t i = 0; i < o.out.size(); ++i) {
    if (!is_number(o.out[i])) return 1e9;
    worst = (std::max)(worst, std::fabs(static_cast<double>(o.out[i]) - e.out[i]) / (of_output * e.largest));
  }
  for (std::size_t i = 0; i < o.lse.size(); ++i) {
    if (is_minus_infinity(e.lse[i])) {
      if (!is_minus_infinity(o.lse[i])) return 1e9;
      continue;
    }
    if (!is_number(o.lse[i])) return 1e9;
    const double allowed = of_sum + 1e-5 * (std::max)(1.0, std::fabs(e.lse[i]));
    worst = (std::max)(worst, std::fabs(static_cast<double>(o.lse[i]) - e.lse[i]) / allowed);
  }
  return worst;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline std::string text(const shape& s, cpu_isa isa, unsigned threads = 1) {
  return std::string(name(isa)) + " block_size " + std::to_string(s.block_size) + " kv_heads " +
         std::to_string(s.kv_heads) + " group " + std::to_string(s.group) + " head_dim " + std::to_string(s.head_dim) +
         "/" + std::to_string(s.v_dim()) + (s.heads_outside ? " heads outside" : "") + (s.tails ? " tails" : "") +
         (s.tails_alike ? " alike" : "") + " threads " + std::to_string(threads);
}

}  // namespace kvcache_test
