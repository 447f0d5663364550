// SPDX-License-Identifier: Apache-2.0
// What the tests of attention share: a pool made by hand, in which everything that is not a token of a sequence is
// poison; batches over it; and a comparison with the reference in double precision.
#pragma once

#include <kvcache/attention/attention.hpp>
#include <kvcache/attention/reference.hpp>
#include <kvcache/convert.hpp>
#include <kvcache/quantise.hpp>

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
#include "how_far.hpp"

namespace kvcache_test {

using namespace kvcache;

// Sweeps are thinned out where code runs ten times slower.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(KVCACHE_TEST_EMULATED) || \
    !defined(__OPTIMIZE__)
inline constexpr bool thorough = false;
#else
inline constexpr bool thorough = true;
#endif

inline std::vector<cpu_isa> isas() {
  std::vector<cpu_isa> all;
  for (const cpu_isa isa :
       {cpu_isa::scalar, cpu_isa::neon, cpu_isa::avx2, cpu_isa::avx512, cpu_isa::avx512_dot, cpu_isa::amx})
    if (has_isa(isa)) all.push_back(isa);
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
  std::uint32_t aligned = 8;     ///< the pool's first byte to so many, rows to as many where that is not 8

  [[nodiscard]] std::uint32_t v_dim() const { return head_dim_v != 0 ? head_dim_v : head_dim; }
  [[nodiscard]] std::uint32_t query_heads() const { return kv_heads * group; }
};

struct sequence {
  std::uint32_t queries = 1;
  std::uint32_t kv_length = 1;
};

/// K or V of a pool, with its scales. The strides have gaps, the base is aligned to 8 bytes and no more, and every
/// element, code and scale that nobody wrote is no number or infinite where it can be.
class plane {
 public:
  plane() = default;
  plane(const shape& s, dtype_id dtype, std::uint32_t dim, std::uint32_t blocks, std::uint32_t gap)
      : dtype_(dtype), dim_(dim), block_size_(s.block_size), kv_heads_(s.kv_heads) {
    const dtype_id stored = without_rotation(dtype);
    const quantization q = quantization_of(dtype);
    const std::uint32_t gap_bytes = q.bits != 0 ? gap : gap * bits(dtype) / 8;
    std::int64_t row_bytes = static_cast<std::int64_t>(code_bytes(dtype, dim)) + gap_bytes;
    if (s.aligned != 8) row_bytes = (row_bytes + s.aligned - 1) / s.aligned * s.aligned;
    lay_out(s, view_, row_bytes, 8 * gap);
    poison(codes_, view_, blocks, s.aligned, [&](std::size_t i) {
      if (q.bits != 0) return std::uint32_t{0xffff'ffff};
      if (stored == dtype_id::float8_e4m3) return std::uint32_t{0xff7f'ff7f};
      if (stored == dtype_id::float8_e5m2) return std::uint32_t{0x7ffc'ff7c};
      const float x = std::bit_cast<float>(i % 3 == 0 ? 0x7f80'0000u : i % 3 == 1 ? 0x7fc0'0000u : 0xff80'0000u);
      if (stored == dtype_id::float32) return std::bit_cast<std::uint32_t>(x);
      const std::uint32_t half = stored == dtype_id::float16 ? from_float<f16>(x).bits : from_float<bf16>(x).bits;
      return half | (i % 2 == 0 ? half : 0xffffu) << 16;
    });
    if (q.bits != 0) {
      const auto row = static_cast<std::int64_t>(scale_bytes(dtype, dim)) + 2 * gap;
      lay_out(s, scales_, row, 4 * gap);
      if (q.per_channel) {
        scales_.token_stride = 0;
        scales_.head_stride = row;
        scales_.block_stride = row * s.kv_heads + 6;
      }
      poison(scale_bytes_, scales_, blocks, 8, [](std::size_t i) {
        return i % 3 == 0 ? 0x7fc0'7f80u : i % 3 == 1 ? 0xff80'7fc0u : 0xffff'ff80u;
      });
    }
    // A format stores heads of tokens or of blocks as a whole.
    if (q.bits != 0 || is_rotated(dtype)) numbers_.resize(std::size_t{blocks} * s.block_size * s.kv_heads * dim);
  }
  plane(const plane&) = delete;
  plane& operator=(const plane&) = delete;
  plane(plane&&) noexcept = default;  // a vector keeps its memory when it moves
  plane& operator=(plane&&) noexcept = default;

  [[nodiscard]] const plane_view& view() const { return view_; }
  [[nodiscard]] const plane_view& scales() const { return scales_; }
  [[nodiscard]] bool stores_blocks() const { return seals(dtype_); }
  /// Takes an element; `store` has to follow when the head of the token, or of the block, is as it should be.
  void write(block_id block, std::uint32_t token, std::uint32_t head, std::uint32_t d, float x) {
    if (numbers_.empty())
      convert(&x, 1, view_.at(block, token, head) + d * (bits(dtype_) / 8), dtype_);
    else
      number(block, token, head)[d] = x;
  }
  [[nodiscard]] stored_head stored(block_id block, std::uint32_t token, std::uint32_t head) const {
    const bool scaled = scales_.base != nullptr;
    return {view_.at(block, token, head), scaled ? scales_.at(block, token, head) : nullptr, dtype_};
  }
  void store(block_id block, std::uint32_t token, std::uint32_t head) {
    if (numbers_.empty()) return;
    const dtype_id stored = without_rotation(dtype_);
    const auto read = [&](std::uint32_t t, float* x) {
      std::copy_n(number(block, t, head), dim_, x);
      if (is_rotated(dtype_)) rotate(x, dim_);
    };
    std::vector<float> x(dim_);
    if (seals(dtype_)) {
      seal_head(stored, block_size_, dim_, read, view_.at(block, 0, head), view_.token_stride,
                scales_.at(block, 0, head));
      return;
    }
    read(token, x.data());
    if (quantization_of(dtype_).bits == 0)
      convert(x.data(), dim_, view_.at(block, token, head), stored);
    else
      quantise_head(stored, x.data(), dim_, view_.at(block, token, head), scales_.at(block, token, head));
  }

 private:
  /// Strides of rows of so many bytes, with gaps behind rows, tokens or heads, and blocks.
  static void lay_out(const shape& s, plane_view& view, std::int64_t row, std::int64_t gap) {
    if (s.heads_outside) {
      view.token_stride = row;
      view.head_stride = row * s.block_size + gap;
    } else {
      view.head_stride = row;
      view.token_stride = row * s.kv_heads + gap;
    }
    view.block_stride = row * s.kv_heads * s.block_size + gap * (s.kv_heads + s.block_size) + 64;
  }
  /// Memory for a view, full of what `pattern` says of each four bytes.
  template <class Pattern>
  static void poison(std::vector<std::byte>& memory, plane_view& view, std::uint32_t blocks, std::uint32_t aligned,
                     const Pattern& pattern) {
    memory.resize(static_cast<std::size_t>(view.block_stride) * blocks + 128);
    auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    while (address % (2 * aligned) != aligned) ++address;
    view.base = reinterpret_cast<std::byte*>(address);
    const std::size_t size = memory.size() - static_cast<std::size_t>(view.base - memory.data());
    for (std::size_t i = 0; i + 4 <= size; i += 4) {
      const std::uint32_t four = pattern(i / 4);
      std::memcpy(view.base + i, &four, sizeof four);
    }
  }
  float* number(block_id block, std::uint32_t token, std::uint32_t head) {
    return numbers_.data() + ((std::size_t{block} * block_size_ + token) * kv_heads_ + head) * dim_;
  }

  std::vector<std::byte> codes_;
  std::vector<std::byte> scale_bytes_;
  std::vector<float> numbers_;
  plane_view view_;
  plane_view scales_;
  dtype_id dtype_ = dtype_id::float32;
  std::uint32_t dim_ = 0;
  std::uint32_t block_size_ = 0;
  std::uint32_t kv_heads_ = 0;
};

struct stored_format {
  dtype_id k = dtype_id::bfloat16;
  dtype_id v = dtype_id::bfloat16;
  dtype_id tail = dtype_id::bfloat16;
};

/// Sequences in a pool, with queries: everything that attention needs, and what it should find. Where a format seals
/// whole blocks, those that are not full lie in the tail pool.
class any_scene {
 public:
  any_scene(const shape& s, const stored_format& format, std::vector<sequence> sequences, unsigned seed)
      : shape_(s), format_(format), sequences_(std::move(sequences)) {
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
    const bool seal = seals(format.k) || seals(format.v);
    if (seal)
      for (std::size_t r = 0; r < sequences_.size(); ++r)
        if (lengths_[r] % s.block_size != 0) table_[table_offsets_[r + 1] - 1] |= tail_bit;

    k_ = plane(s, format.k, s.head_dim, blocks_, 2);
    v_ = plane(s, format.v, s.v_dim(), blocks_, 6);
    if (s.tails || seal) {
      tail_blocks_ = blocks_;
      k_tail_ = plane(s, view().k_tail_dtype(), s.head_dim, blocks_, s.tails_alike ? 2 : 4);
      v_tail_ = plane(s, view().v_tail_dtype(), s.v_dim(), blocks_, s.tails_alike ? 6 : 8);
    }
    write_all([&](bool, std::size_t, std::uint32_t, std::uint32_t, std::uint32_t) { return normal(random); });
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
    r.k_scales = k_.scales();
    r.v_scales = v_.scales();
    r.k_tail = k_tail_.view();
    r.v_tail = v_tail_.view();
    r.blocks = blocks_;
    r.tail_blocks = tail_blocks_;
    r.block_size = shape_.block_size;
    r.kv_heads = shape_.kv_heads;
    r.head_dim = shape_.head_dim;
    r.head_dim_v = shape_.v_dim();
    r.k_dtype = format_.k;
    r.v_dtype = format_.v;
    r.tail_dtype = format_.tail;
    if (!key_offset.empty()) r.key_offset = key_offset.data();
    return r;
  }
  [[nodiscard]] rows_view<const float> queries() const {
    return {q.data(), rows(), shape_.query_heads(), shape_.head_dim};
  }
  [[nodiscard]] attention_shape heads() const {
    return {shape_.query_heads(), shape_.kv_heads, shape_.head_dim, shape_.v_dim()};
  }

  void write_k(std::size_t r, std::uint32_t token, std::uint32_t head, std::uint32_t d, float x) {
    const place p = place_of(r, token);
    p.k.write(p.block, p.token, head, d, x);
    p.k.store(p.block, p.token, head);
  }
  void write_v(std::size_t r, std::uint32_t token, std::uint32_t head, std::uint32_t d, float x) {
    const place p = place_of(r, token);
    p.v.write(p.block, p.token, head, d, x);
    p.v.store(p.block, p.token, head);
  }
  /// Every element of one token.
  void fill_k(std::size_t r, std::uint32_t token, float x) {
    const place p = place_of(r, token);
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
      for (std::uint32_t d = 0; d < shape_.head_dim; ++d) p.k.write(p.block, p.token, h, d, x);
      p.k.store(p.block, p.token, h);
    }
  }
  void fill_v(std::size_t r, std::uint32_t token, float x) {
    const place p = place_of(r, token);
    for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
      for (std::uint32_t d = 0; d < shape_.v_dim(); ++d) p.v.write(p.block, p.token, h, d, x);
      p.v.store(p.block, p.token, h);
    }
  }
  /// Every element of every token: f(whether it is of K, sequence, token, head, d).
  template <class F>
  void write_all(const F& f) {
    for (std::size_t r = 0; r < sequences_.size(); ++r) {
      for (std::uint32_t t = 0; t < lengths_[r]; ++t) {
        const place p = place_of(r, t);
        const bool last = p.token + 1 == shape_.block_size || t + 1 == lengths_[r];
        for (std::uint32_t h = 0; h < shape_.kv_heads; ++h) {
          for (std::uint32_t d = 0; d < shape_.head_dim; ++d) p.k.write(p.block, p.token, h, d, f(true, r, t, h, d));
          for (std::uint32_t d = 0; d < shape_.v_dim(); ++d) p.v.write(p.block, p.token, h, d, f(false, r, t, h, d));
          if (last || !p.k.stores_blocks()) p.k.store(p.block, p.token, h);
          if (last || !p.v.stores_blocks()) p.v.store(p.block, p.token, h);
        }
      }
    }
  }
  /// Where a head of a token was written, whatever the view says.
  [[nodiscard]] stored_head stored(bool keys, std::size_t r, std::uint32_t token, std::uint32_t head) const {
    const block_id entry = table_[table_offsets_[r] + token / shape_.block_size];
    const bool tail = (entry & tail_bit) != 0;
    const plane& p = keys ? (tail ? k_tail_ : k_) : (tail ? v_tail_ : v_);
    return p.stored(entry & ~tail_bit, token % shape_.block_size, head);
  }
  std::vector<block_id>& table() { return table_; }
  [[nodiscard]] const std::vector<block_id>& table() const { return table_; }
  std::vector<std::uint32_t>& lengths() { return lengths_; }
  [[nodiscard]] const std::vector<std::uint32_t>& offsets() const { return offsets_; }
  [[nodiscard]] const std::vector<std::uint32_t>& table_offsets() const { return table_offsets_; }

  std::vector<float> q;
  std::vector<float> key_offset;  ///< [kv_heads, head_dim], or nothing: what was subtracted from the keys written

 private:
  struct place {
    plane& k;
    plane& v;
    block_id block;
    std::uint32_t token;
  };
  [[nodiscard]] place place_of(std::size_t r, std::uint32_t token) {
    const block_id entry = table_[table_offsets_[r] + token / shape_.block_size];
    const bool tail = (entry & tail_bit) != 0;
    return {tail ? k_tail_ : k_, tail ? v_tail_ : v_, entry & ~tail_bit, token % shape_.block_size};
  }

  shape shape_;
  stored_format format_;
  std::vector<sequence> sequences_;
  std::vector<std::uint32_t> offsets_;
  std::vector<std::uint32_t> lengths_;
  std::vector<block_id> table_;
  std::vector<std::uint32_t> table_offsets_;
  std::uint32_t blocks_ = 0;
  std::uint32_t tail_blocks_ = 0;
  plane k_;
  plane v_;
  plane k_tail_;
  plane v_tail_;
};

/// The same with types, as a policy bundle has them.
template <class K, class V = K, class Tail = bf16>
class scene : public any_scene {
 public:
  scene(const shape& s, std::vector<sequence> sequences, unsigned seed = 1)
      : any_scene(s, {dtype_traits<K>::id, dtype_traits<V>::id, dtype_traits<Tail>::id}, std::move(sequences), seed) {}
};

template <class Variant, class K, class V = K, bool Invariant = false, class Tail = bf16>
struct bundle : policies {
  static constexpr unsigned block_size = dynamic;
  using dtype = kv_dtype<K, V>;
  using tail_dtype = Tail;
  using variant = Variant;
  static constexpr bool batch_invariant = Invariant;
};

struct outcome {
  std::vector<float> out;
  std::vector<float> lse;
  double rounding = 0;  ///< what queries or weights were rounded by, see rounding_of
};

/// What the kernels of avx512_dot round off beyond f32, as a part of the largest output. Weights of bf16 are each off
/// by 2^-8 of themselves at most. Whole numbers of 15 bits leave 2^-15 of the largest element of a query, those of 8
/// bits 2^-8 of it, 3 as a rule: over elements of either sign, which meet codes of either sign, a logit is off by 0.007
/// then, and by 2^-5 at worst; half as much again where keys are larger than 1, or alike. Weights of 8 bits leave less,
/// for they sum up to what they were.
inline double rounding_of(const shape& s, dtype_id k_dtype, dtype_id v_dtype, bool bf16_queries) {
  if (k_dtype == dtype_id::bfloat16 && v_dtype == dtype_id::bfloat16) return bf16_queries ? 0x1p-8 : 0;
  const auto whole_numbers = [](dtype_id id, std::uint32_t dim) {
    const quantization q = quantization_of(id);
    const bool whole =
        (q.bits == 8 || q.bits == 4) && dim >= 64 && dim % 16 == 0 && (q.per_channel || q.group == 0 || q.group >= 32);
    return whole ? q.bits : 0;
  };
  const unsigned k = whole_numbers(k_dtype, s.head_dim);
  const unsigned v = whole_numbers(v_dtype, s.v_dim());
  if (k == 0 || v == 0 || s.group >= 16) return 0;
  return k == 4 ? 0x1.8p-5 : v == 4 ? 0x1p-6 : 0x1p-11;
}
template <class K, class V>
double rounding_of(const shape& s, bool bf16_queries) {
  return rounding_of(s, dtype_traits<K>::id, dtype_traits<V>::id, bf16_queries);
}

inline float poison_value() { return std::bit_cast<float>(0x7fc0'0000u); }

/// What queries are handed over as.
enum class query_type : std::uint8_t {
  usual,  ///< f32, but bf16 where the processor's dot products are asked for, which would not be used otherwise
  as_f32,
  as_f16,
  as_bf16,
};

template <class Q>
std::vector<Q> narrowed(const rows_view<const float>& q) {
  std::vector<Q> narrow(std::size_t{q.rows} * q.heads * q.head_dim);
  std::size_t at = 0;
  for (std::uint32_t r = 0; r < q.rows; ++r)
    for (std::uint32_t h = 0; h < q.heads; ++h)
      for (std::uint32_t d = 0; d < q.head_dim; ++d) narrow[at++] = from_float<Q>(q.at(r, h)[d]);
  return narrow;
}

/// One thread's share of a run.
template <class Attention>
void run_share(const Attention& a, const attention_plan& plan, const kv_view& view, rows_view<const float> q,
               rows_view<float> out, const variant_values& values = {}, lse_view<float> lse = {},
               query_type type = query_type::usual) {
  if (type == query_type::usual)
    type = a.options().backend.isa >= cpu_isa::avx512_dot ? query_type::as_bf16 : query_type::as_f32;
  if (type == query_type::as_f32) return a.run(plan, view, q, out, 0, 1, values, lse);
  const auto run_narrow = [&]<class Q>(Q) {
    const std::vector<Q> short_q = narrowed<Q>(q);
    a.run(plan, view, rows_view<const Q>(short_q.data(), q.rows, q.heads, q.head_dim), out, 0, 1, values, lse);
  };
  if (type == query_type::as_f16) return run_narrow(f16{});
  run_narrow(bf16{});
}

/// Attention over a scene on the calling thread, cut for `threads` threads. Output and lse begin as no numbers.
template <class Variant, bool Invariant = false, class K, class V, class Tail>
outcome attend(const scene<K, V, Tail>& s, const variant_values& values = {}, cpu_isa isa = cpu_isa::best,
               unsigned threads = 1, query_type type = query_type::usual) {
  const shape& f = s.form();
  outcome o{std::vector<float>(std::size_t{s.rows()} * f.query_heads() * f.v_dim(), poison_value()),
            std::vector<float>(std::size_t{s.rows()} * f.query_heads(), poison_value())};
  const attention<bundle<Variant, K, V, Invariant, Tail>> a(
      {.shape = s.heads(), .threads = threads, .backend = {.isa = isa}});
  const attention_plan plan = a.plan(s.batch());
  run_share(a, plan, s.view(), s.queries(), rows_view<float>(o.out.data(), s.rows(), f.query_heads(), f.v_dim()),
            values, {o.lse.data(), f.query_heads()}, type);
  constexpr bool pairs = std::is_same_v<K, bf16> && std::is_same_v<V, bf16>;
  if (isa >= cpu_isa::avx512_dot && (pairs || !Invariant))
    o.rounding = rounding_of<K, V>(f, type == query_type::usual || type == query_type::as_bf16);
  return o;
}

/// Values of a variant and what they refer to.
struct given {
  std::vector<float> slopes;
  std::vector<float> sink_logits;
  std::vector<std::uint8_t> bits;
  variant_values values;
};

/// Values for everything that the variant uses.
template <class Variant>
given values_for(const any_scene& s, std::uint32_t window, unsigned seed) {
  given g;
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  constexpr variant_features f = Variant::features;
  if constexpr (f.window) g.values.window = window;
  if constexpr (f.soft_cap) g.values.soft_cap = 1.5f;
  if constexpr (f.alibi) {
    for (std::uint32_t h = 0; h < s.form().query_heads(); ++h)
      g.slopes.push_back(std::exp2(-8.0f * static_cast<float>(h + 1) / static_cast<float>(s.form().query_heads())));
    g.values.alibi_slopes = g.slopes;
  }
  if constexpr (f.sinks) {
    for (std::uint32_t h = 0; h < s.form().query_heads(); ++h) g.sink_logits.push_back(2 * normal(random));
    g.sink_logits[0] = empty_lse();
    g.values.sinks = g.sink_logits;
  }
  if constexpr (f.mask) {
    const std::size_t stride = 400;
    g.bits.resize(stride * s.rows());
    for (std::uint8_t& b : g.bits) b = static_cast<std::uint8_t>(random());
    if (!g.bits.empty()) std::fill_n(g.bits.begin(), stride, std::uint8_t{0});  // the first row sees nothing
    g.values.mask = {g.bits.data(), s.rows(), static_cast<std::int64_t>(stride)};
  }
  return g;
}

/// One row of the scene's only sequence, as a step of its own: the newest of `length` tokens.
template <class Attention>
std::vector<float> row_alone(const Attention& a, const any_scene& s, std::uint32_t row, std::uint32_t length,
                             const variant_values& values = {}) {
  const std::vector<std::uint32_t> offsets{0, 1};
  const std::vector<std::uint32_t> lengths{length};
  batch_view batch = s.batch();
  batch.query_offsets = offsets;
  batch.kv_lengths = lengths;
  const std::uint32_t heads = s.form().query_heads();
  const std::uint32_t dim = s.form().head_dim;
  const std::uint32_t dim_v = s.form().v_dim();
  std::vector<float> out(std::size_t{heads} * dim_v);
  run_share(a, a.plan(batch), s.view(),
            rows_view<const float>(s.q.data() + std::size_t{row} * heads * dim, 1, heads, dim),
            rows_view<float>(out.data(), 1, heads, dim_v), values);
  return out;
}

/// Whether a chunk's output has these bits in its row `row`.
inline bool has_row(const std::vector<float>& chunk, std::uint32_t row, const std::vector<float>& bits) {
  return std::memcmp(bits.data(), chunk.data() + row * bits.size(), bits.size() * sizeof(float)) == 0;
}

struct expectation {
  std::vector<double> out;
  std::vector<double> lse;
  double largest = 1;  ///< of the outputs
};

/// Of one sum of weights: that of no tokens is -inf, and nothing else is.
template <class Real>
double how_far_lse(Real found, double wanted, double allowed) {
  if (is_minus_infinity(wanted)) return is_minus_infinity(found) ? 0 : too_far;
  return how_far(found, wanted, allowed);
}

/// What the reference says. It has to say numbers: no scene asks for a row that sees something else.
template <class Variant>
expectation expected(const any_scene& s, const variant_values& values = {}) {
  const shape& f = s.form();
  expectation e;
  e.out.resize(std::size_t{s.rows()} * f.query_heads() * f.v_dim());
  e.lse.resize(std::size_t{s.rows()} * f.query_heads());
  reference_attention<Variant>(s.batch(), s.view(), s.queries(),
                               rows_view<double>(e.out.data(), s.rows(), f.query_heads(), f.v_dim()), values,
                               lse_view<double>{e.lse.data(), f.query_heads()});
  const bool numbers = std::all_of(e.out.begin(), e.out.end(), is_number) &&
                       std::all_of(e.lse.begin(), e.lse.end(), [](double x) { return how_far_lse(x, x, 1) < 1; });
  if (!numbers) FAIL("the reference's output or lse is no number");
  for (const double x : e.out) e.largest = (std::max)(e.largest, std::fabs(x));
  return e;
}

/// How far an outcome is from what is expected, in units of what is allowed: 1e-5 of the largest output, and of an lse
/// 1e-5 relative, 1e-5 absolute below 1. A product of d terms of order 1 carries some sqrt(d) * 2^-24 = 1e-6 of
/// rounding, and the exponential turns an error of a logit into a relative one of a weight; 16-bit K and V are what
/// the reference reads too, so they add nothing. What is rounded beyond that comes on top: see rounding_of; an output
/// is off by as much of how far values lie from it, and a sum of weights by as much of itself. Beyond 1 too far, as is
/// whatever is no number.
inline double distance(const outcome& o, const expectation& e) {
  const double of_output = (std::max)(1e-5, o.rounding);
  const double of_sum = o.rounding * 1.4427;
  if (o.out.size() != e.out.size() || (!o.lse.empty() && o.lse.size() != e.lse.size())) return too_far;
  double worst = 0;
  for (std::size_t i = 0; i < o.out.size(); ++i)
    worst = (std::max)(worst, how_far(o.out[i], e.out[i], of_output * e.largest));
  for (std::size_t i = 0; i < o.lse.size(); ++i) {
    const double allowed = of_sum + 1e-5 * (std::max)(1.0, std::fabs(e.lse[i]));
    worst = (std::max)(worst, how_far_lse(o.lse[i], e.lse[i], allowed));
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
