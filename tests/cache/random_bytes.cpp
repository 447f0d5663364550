// SPDX-License-Identifier: Apache-2.0
// Random chunks, drafts, cuts, forks and seals in caches whose formats seal whole blocks: what lies there of a sequence
// is, byte for byte, what one append of all its tokens leaves in a storage by itself.
#include <kvcache/cache.hpp>
#include <kvcache/dtype.hpp>
#include <kvcache/fp8.hpp>
#include <kvcache/quantise.hpp>
#include <kvcache/quantization.hpp>

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "../support/catch.hpp"
#include "../support/random_calls.hpp"

namespace {

using namespace kvcache;

template <class K, class V, class Tail>
struct with : policies {
  static constexpr unsigned block_size = dynamic;
  using dtype = kv_dtype<K, V>;
  using tail_dtype = Tail;
};
using keys_by_channel = with<int4_per_channel, int4_grouped<32>, bf16>;
using both_by_channel = with<int8_per_channel, int2_per_channel, f32>;
using beside_elements = with<fp8_e4m3, int4_per_channel_symmetric, f16>;
using turned = with<rotated<int4_per_channel>, rotated<int8_per_token>, bf16>;

constexpr geometry shape{.layers = 2, .kv_heads = 2, .head_dim = 48, .head_dim_v = 40};
constexpr std::uint32_t most_tokens = 130;

/// A token's K and V as they are given to append.
struct token {
  std::int32_t id = 0;
  std::vector<float> k;  // [layers, heads, head_dim]
  std::vector<float> v;
};

/// No two tokens are alike, so that sequences share what was forked and nothing else.
token make_token(std::int32_t id) {
  std::mt19937 random(static_cast<std::uint32_t>(id));
  std::normal_distribution<float> normal;
  const auto fill = [&](std::uint32_t dim) {
    std::vector<float> x(std::size_t{shape.layers} * shape.kv_heads * dim);
    for (float& y : x) y = random() % 64 == 0 ? 0.0f : random() % 64 == 0 ? 1e4f : normal(random);
    return x;
  };
  return {id, fill(shape.head_dim), fill(shape.v_dim())};
}

/// Rows of one layer.
struct layer_rows {
  layer_rows(std::span<const token> tokens, std::uint32_t layer) : count(static_cast<std::uint32_t>(tokens.size())) {
    for (const token& t : tokens) {
      const auto add = [&](const std::vector<float>& from, std::vector<float>& to, std::uint32_t dim) {
        const auto size = static_cast<std::ptrdiff_t>(shape.kv_heads * dim);
        to.insert(to.end(), from.begin() + layer * size, from.begin() + (layer + 1) * size);
      };
      add(t.k, k, shape.head_dim);
      add(t.v, v, shape.v_dim());
    }
  }
  [[nodiscard]] rows_view<const float> keys() const { return {k.data(), count, shape.kv_heads, shape.head_dim}; }
  [[nodiscard]] rows_view<const float> values() const { return {v.data(), count, shape.kv_heads, shape.v_dim()}; }

  std::uint32_t count;
  std::vector<float> k;
  std::vector<float> v;
};

/// Codes and scales of tokens, layer by layer, where `entry(i)` says where the ith block lies.
template <class View, class Entry>
std::vector<std::byte> stored(std::size_t count, std::uint32_t block_size, const View& view_of, const Entry& entry) {
  std::vector<std::byte> bytes;
  const auto add = [&](const stored_head& head, std::uint32_t dim) {
    bytes.insert(bytes.end(), head.codes, head.codes + code_bytes(head.dtype, dim));
    if (head.scales != nullptr) bytes.insert(bytes.end(), head.scales, head.scales + scale_bytes(head.dtype, dim));
  };
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const kv_view view = view_of(layer);
    for (std::uint32_t t = 0; t < count; ++t)
      for (std::uint32_t head = 0; head < view.kv_heads; ++head) {
        add(view.k_head(entry(t / block_size), t % block_size, head), view.head_dim);
        add(view.v_head(entry(t / block_size), t % block_size, head), view.v_dim());
      }
  }
  return bytes;
}

/// What one append of all tokens leaves, whole blocks of it sealed but for those that hold the first `wide` tokens.
template <class Policies>
std::vector<std::byte> appended_at_once(const std::vector<token>& tokens, std::uint32_t block_size,
                                        std::uint32_t wide) {
  const auto size = static_cast<std::uint32_t>(tokens.size());
  const std::uint32_t blocks = size / block_size + 1;
  storage<Policies> pool(shape, {.blocks = blocks, .block_size = block_size, .tail_blocks = blocks});
  std::vector<slot_id> slots;
  for (std::uint32_t t = 0; t < size; ++t)
    slots.push_back(make_slot(tail_bit | (t / block_size), t % block_size, block_size));
  for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
    const layer_rows rows(tokens, layer);
    pool.append(layer, rows.keys(), rows.values(), slots);
  }
  const std::uint32_t whole = size / block_size;
  std::vector<block_seal> seals;
  for (std::uint32_t b = 0; b < whole; ++b) seals.push_back({0, b, b + 1});
  pool.seal(seals);
  return stored(
      size, block_size, [&](std::uint32_t layer) { return pool.view(layer); },
      [&](std::uint32_t b) { return b * block_size >= wide && b < whole ? b + 1 : tail_bit | b; });
}

template <class Policies>
class driver {
 public:
  driver(std::uint32_t block_size, std::uint32_t wide, std::uint32_t seed)
      : cache_(shape, {.blocks = 300, .block_size = block_size, .tail_blocks = 300}, {.wide_tokens = wide}),
        block_size_(block_size),
        wide_(wide),
        random_(seed) {}

  void call() {
    switch (below(8)) {
      case 0: return open();
      case 1: return fork();
      case 2: return open_.empty() ? open() : truncate(any());
      case 3: return below(4) == 0 ? close() : step();
      default: return step();
    }
  }
  void close_all() {
    while (!open_.empty()) close();
    CHECK(cache_.manager().tail_blocks_available() == cache_.manager().tail_blocks());
    CHECK(cache_.manager().counts().available() == 300);
    CHECK(compared_ > kvcache_test::calls(100));
    CHECK((wide_ == 0) == (wide_compared_ == 0));
  }

 private:
  struct sequence {
    sequence_id id;
    std::vector<token> tokens;
    bool cut = false;  ///< inside a sealed block, which is reopened when the next token comes
  };
  static constexpr bool rotates = is_rotated(dtype_traits<typename Policies::dtype::k>::id) ||
                                  is_rotated(dtype_traits<typename Policies::dtype::v>::id);

  std::uint32_t below(std::size_t n) { return static_cast<std::uint32_t>(random_() % n); }
  sequence& any() { return open_[below(open_.size())]; }
  static std::vector<std::int32_t> ids(std::span<const token> tokens) {
    std::vector<std::int32_t> out;
    for (const token& t : tokens) out.push_back(t.id);
    return out;
  }
  [[nodiscard]] block_id entry(const sequence& s, std::uint32_t block) const {
    return cache_.manager().table_entry(cache_.manager().table(s.id).value()[block]);
  }

  void open() {
    if (open_.size() == 4) return;
    const std::int32_t prompt[] = {next_id_++};  // that nothing is found of
    open_.push_back({cache_.open({.content = prompt}).value().sequence, {}});
  }
  void close() {
    if (open_.empty()) return;
    const std::size_t i = below(open_.size());
    cache_.close(open_[i].id).value();
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  /// The first `length` tokens of a sequence, as a cut leaves them: what a sealed block that is cut holds is what was
  /// read from its codes. Where vectors are turned, no rows stand for that; such cuts are made before the block.
  sequence cut(const sequence& from, std::uint32_t length) {
    sequence s{from.id, {from.tokens.begin(), from.tokens.begin() + length}};
    const std::uint32_t begin = length / block_size_ * block_size_;
    if (begin == length || (entry(from, begin / block_size_) & tail_bit) != 0) return s;
    if (rotates) {
      s.tokens.resize(begin);
      return s;
    }
    s.cut = true;
    const auto reread = [&](const stored_head& head, std::uint32_t dim, float* x) {
      read_head(head, dim, x);
      if (quantization_of(head.dtype).bits == 0) return;
      for (std::uint32_t d = 0; d < dim; ++d) x[d] = to_float(from_float<typename Policies::tail_dtype>(x[d]));
    };
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      const kv_view view = cache_.view(layer);
      for (std::uint32_t t = begin; t < length; ++t)
        for (std::uint32_t head = 0; head < shape.kv_heads; ++head) {
          const block_id block = entry(from, begin / block_size_);
          const std::size_t row = std::size_t{layer} * shape.kv_heads + head;
          reread(view.k_head(block, t - begin, head), view.head_dim, s.tokens[t].k.data() + row * view.head_dim);
          reread(view.v_head(block, t - begin, head), view.v_dim(), s.tokens[t].v.data() + row * view.v_dim());
        }
    }
    return s;
  }
  void fork() {
    if (open_.empty() || open_.size() == 4) return;
    const sequence& from = any();
    sequence s = cut(from, below(from.tokens.size() + 1));
    s.id = cache_.manager().fork(from.id, static_cast<std::uint32_t>(s.tokens.size())).value();
    open_.push_back(std::move(s));
  }
  void truncate(sequence& s) {
    s = cut(s, below(s.tokens.size() + 1));
    cache_.manager().truncate(s.id, static_cast<std::uint32_t>(s.tokens.size())).value();
  }

  void step() {
    std::vector<sequence*> batch;
    std::vector<want> wants;
    std::vector<std::uint32_t> accepted;
    std::vector<token> tokens;
    for (sequence& s : open_) {
      if (s.tokens.size() > most_tokens) truncate(s);
      if (below(3) == 0) continue;
      const std::uint32_t count = 1 + below(below(3) == 0 ? 60 : 5);
      batch.push_back(&s);
      wants.push_back({s.id, count});
      accepted.push_back(below(4) == 0 ? below(count + 1) : count);
      for (std::uint32_t i = 0; i < count; ++i) tokens.push_back(make_token(next_id_++));
    }
    if (batch.empty()) return;
    auto begun = cache_.begin(wants).value();
    cache_.prepare(begun);
    for (std::uint32_t layer = 0; layer < shape.layers; ++layer) {
      const layer_rows rows(tokens, layer);
      cache_.append(begun, layer, rows.keys(), rows.values());
    }
    begun.accept(accepted).value();
    auto first = tokens.begin();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      const std::vector<token> added(first, first + accepted[i]);
      first += wants[i].tokens;
      cache_.commit(batch[i]->id, content_view(ids(added))).value();
      batch[i]->tokens.insert(batch[i]->tokens.end(), added.begin(), added.end());
      if (accepted[i] > 0) batch[i]->cut = false;
    }
    cache_.retire(begun).value();
    for (const sequence& s : open_) compare(s);
  }

  void compare(const sequence& s) {
    if (s.cut) return;  // its block is still the sealed one
    ++compared_;
    const auto lies = [&](const auto& entry_of) {
      return stored(
          s.tokens.size(), block_size_, [&](std::uint32_t layer) { return cache_.view(layer); }, entry_of);
    };
    CAPTURE(block_size_, wide_, s.tokens.size());
    const bool same =
        lies([&](std::uint32_t b) { return entry(s, b); }) == appended_at_once<Policies>(s.tokens, block_size_, wide_);
    REQUIRE(same);
    if (wide_ == 0 || s.tokens.size() < block_size_) return;
    ++wide_compared_;
    // Sealed they are all the same, for when their place is needed.
    const bool same_sealed = lies([&](std::uint32_t b) {
                               const bool whole = (b + 1) * block_size_ <= s.tokens.size();
                               return whole ? cache_.manager().table(s.id).value()[b] : entry(s, b);
                             }) == appended_at_once<Policies>(s.tokens, block_size_, 0);
    REQUIRE(same_sealed);
  }

  kvcache::cache<Policies> cache_;
  std::uint32_t block_size_;
  std::uint32_t wide_;
  std::mt19937 random_;
  std::vector<sequence> open_;
  std::int32_t next_id_ = 1;
  std::size_t compared_ = 0;
  std::size_t wide_compared_ = 0;
};

}  // namespace

TEMPLATE_TEST_CASE("R20 however tokens came, were cut, forked and sealed, they lie there as from one append", "",
                   keys_by_channel, both_by_channel, beside_elements, turned) {
  const std::uint32_t wide_tokens = GENERATE(0u, 7u);
  for (const std::uint32_t block_size : {5u, 16u, 32u}) {
    const std::uint32_t seed = 20261201 + block_size;
    INFO("seed " << seed);
    driver<TestType> random(block_size, wide_tokens, seed);
    for (std::size_t i = 0; i < kvcache_test::calls(300); ++i) random.call();
    random.close_all();
  }
}
