// SPDX-License-Identifier: Apache-2.0
// A cache whose layers are of several kinds, with attention: every layer of every token against a computation that
// knows no blocks.
#include <kvcache/attention/variant.hpp>
#include <kvcache/kvcache.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "../support/catch.hpp"
#include "../support/cpu_kernels.hpp"
#include "../support/how_far.hpp"

namespace {

struct mine : kvcache::policies {
  using dtype = kvcache::kv_dtype<float>;
};
struct full : mine {
  static constexpr unsigned block_size = 4;
};
struct window : mine {
  static constexpr unsigned block_size = 8;
  using variant = kvcache::sliding_window;
};
struct equal_window : full {
  using variant = kvcache::sliding_window;
};

constexpr std::uint32_t head_dim = 64;

/// q, k or v of one token in one layer: what its id, its position and the layer say.
std::vector<float> values(std::uint32_t kind, std::int32_t token, std::uint32_t position, std::uint32_t layer,
                          std::uint32_t count) {
  std::minstd_rand random((kind * 131 + layer) * 2654435761u + position * 40503u + static_cast<std::uint32_t>(token));
  random.discard(3);
  std::vector<float> v(count);
  for (float& x : v) x = static_cast<float>(random()) / 1.0e9f - 1.0f;
  return v;
}

struct layer_kind {
  std::uint32_t group = 0;
  std::uint32_t kv_heads = 0;
  std::uint32_t window = 0;  // 0: all
};

/// The newest `count` rows of a layer's attention over `tokens`, in double.
std::vector<double> expected(const std::vector<std::int32_t>& tokens, std::uint32_t count, std::uint32_t layer,
                             const layer_kind& kind, std::uint32_t query_heads) {
  const auto length = static_cast<std::uint32_t>(tokens.size());
  std::vector<double> out;
  for (std::uint32_t p = length - count; p < length; ++p) {
    const auto q = values(0, tokens[p], p, layer, query_heads * head_dim);
    const std::uint32_t first = kind.window != 0 && p + 1 > kind.window ? p + 1 - kind.window : 0;
    for (std::uint32_t h = 0; h < query_heads; ++h) {
      const std::uint32_t kv_head = h / (query_heads / kind.kv_heads);
      std::vector<double> sum(head_dim);
      double total = 0;
      for (std::uint32_t t = first; t <= p; ++t) {
        const auto k = values(1, tokens[t], t, layer, kind.kv_heads * head_dim);
        const auto v = values(2, tokens[t], t, layer, kind.kv_heads * head_dim);
        double dot = 0;
        for (std::uint32_t d = 0; d < head_dim; ++d)
          dot += static_cast<double>(q[h * head_dim + d]) * static_cast<double>(k[kv_head * head_dim + d]);
        const double weight = std::exp(dot / 8);
        total += weight;
        for (std::uint32_t d = 0; d < head_dim; ++d) sum[d] += weight * static_cast<double>(v[kv_head * head_dim + d]);
      }
      for (const double s : sum) out.push_back(s / total);
    }
  }
  return out;
}

template <class Full, class Window>
class engine {
 public:
  static constexpr std::uint32_t query_heads = 4;
  using cache_type = kvcache::cache<mine, Full, Window>;

  engine(std::uint32_t blocks, std::uint32_t window_tokens, kvcache::block_manager_options bookkeeping = {})
      : cache({.blocks = blocks,
               .groups = {{{.shape = {.layers = 1, .kv_heads = 2, .head_dim = head_dim}},
                           {.shape = {.layers = 2, .kv_heads = 1, .head_dim = head_dim}, .window = window_tokens}}},
               .layers = {1, 0, 1}},
              bookkeeping),
        window_tokens_(window_tokens),
        windowed_({.window = window_tokens}) {}

  struct sequence {
    kvcache::sequence_id id;
    std::vector<std::int32_t> tokens;
    std::uint32_t computed = 0;
  };

  sequence open(std::vector<std::int32_t> prompt) {
    const auto o = cache.open({.content = prompt}).value();
    return {o.sequence, std::move(prompt), o.reused_tokens};
  }

  /// Computes up to `chunk` further tokens of each sequence in one step. The largest error of any layer.
  double run(std::vector<sequence*> batch, std::uint32_t chunk) {
    std::vector<kvcache::want> wants;
    for (const sequence* s : batch)
      wants.push_back({s->id, std::min(chunk, static_cast<std::uint32_t>(s->tokens.size()) - s->computed)});
    auto step = cache.begin(wants).value();
    cache.prepare(step);
    const auto plan_full = full_.plan(step.batch(0));
    const auto plan_window = windowed_.plan(step.batch(1));
    double worst = 0;
    for (std::uint32_t layer = 0; layer < cache.layers(); ++layer) {
      const layer_kind kind = cache.group(layer) == 0 ? layer_kind{0, 2, 0} : layer_kind{1, 1, window_tokens_};
      std::vector<float> q, k, v;
      const auto append = [](std::vector<float>& to, const std::vector<float>& more) {
        to.insert(to.end(), more.begin(), more.end());
      };
      std::uint32_t rows = 0;
      for (std::size_t i = 0; i < batch.size(); ++i)
        for (std::uint32_t t = 0; t < wants[i].tokens; ++t, ++rows) {
          const std::uint32_t p = batch[i]->computed + t;
          append(q, values(0, batch[i]->tokens[p], p, layer, query_heads * head_dim));
          append(k, values(1, batch[i]->tokens[p], p, layer, kind.kv_heads * head_dim));
          append(v, values(2, batch[i]->tokens[p], p, layer, kind.kv_heads * head_dim));
        }
      using in = kvcache::rows_view<const float>;
      cache.append(step, layer, in(k.data(), rows, kind.kv_heads, head_dim),
                   in(v.data(), rows, kind.kv_heads, head_dim));
      std::vector<float> out(q.size(), -9.0f);
      const in queries(q.data(), rows, query_heads, head_dim);
      const kvcache::rows_view<float> results(out.data(), rows, query_heads, head_dim);
      if (kind.group == 0)
        full_.run(plan_full, cache, layer, queries, results);
      else
        windowed_.run(plan_window, cache, layer, queries, results, {.window = window_tokens_});
      auto at = out.begin();
      for (std::size_t i = 0; i < batch.size(); ++i) {
        const std::vector<std::int32_t> so_far(batch[i]->tokens.begin(),
                                               batch[i]->tokens.begin() + batch[i]->computed + wants[i].tokens);
        for (const double x : expected(so_far, wants[i].tokens, layer, kind, query_heads))
          worst = (std::max)(worst, kvcache_test::how_far(*at++, x));
      }
    }
    step.accept().value();
    for (std::size_t i = 0; i < batch.size(); ++i) {
      cache.commit(batch[i]->id, kvcache::content_view(batch[i]->tokens).sub(batch[i]->computed, wants[i].tokens))
          .value();
      batch[i]->computed += wants[i].tokens;
    }
    cache.retire(step).value();
    return worst;
  }

  cache_type cache;

 private:
  std::uint32_t window_tokens_;
  kvcache::attention<Full> full_;
  kvcache::attention<Window> windowed_;
};

std::vector<std::int32_t> numbers(std::int32_t first, std::size_t count) {
  std::vector<std::int32_t> v(count);
  for (std::size_t i = 0; i < count; ++i) v[i] = first + static_cast<std::int32_t>(i);
  return v;
}

constexpr double tolerance = 1e-5;

}  // namespace

TEST_CASE(
    "cache<Policies, full, window>: prompts in chunks, decodes, reuse and forks read their own KV in every layer") {
  const std::uint32_t window_tokens = GENERATE(1u, 5u, 16u, 23u);
  const std::uint32_t chunk = GENERATE(3u, 17u, 64u);
  CAPTURE(window_tokens, chunk);
  engine<full, window> e(60, window_tokens);
  auto a = e.open(numbers(100, 50));
  auto b = e.open(numbers(900, 21));
  while (a.computed < a.tokens.size()) REQUIRE(e.run({&a, &b}, chunk) <= tolerance);
  // The window group holds no more than it needs.
  const auto held = *e.cache.manager().table(a.id, 1);
  const auto holes = std::count(held.begin(), held.end(), kvcache::null_block);
  CHECK(holes == (50 - static_cast<int>(window_tokens) + 1) / 8);

  auto again = e.open(numbers(100, 48));
  CHECK(again.computed == 40);
  auto longer = e.open(numbers(100, 70));
  CHECK(longer.computed == 48);
  while (longer.computed < longer.tokens.size()) REQUIRE(e.run({&again, &longer}, chunk) <= tolerance);

  auto fork = longer;
  fork.id = e.cache.manager().fork(longer.id, 70).value();
  for (std::int32_t t = 0; t < 12; ++t) {
    fork.tokens.push_back(5000 + t);
    longer.tokens.push_back(6000 + t);
    REQUIRE(e.run({&fork, &longer}, 1) <= tolerance);
  }
  for (const auto& s : {a, b, again, longer, fork}) REQUIRE(e.cache.close(s.id).has_value());
  CHECK(e.cache.manager().counts().available() == 60);
}

TEST_CASE("cache<Policies, full, window>: a pool so small that groups take each other's blocks reads no stale bytes") {
  engine<full, window> e(26, 12);
  std::minstd_rand random(7);
  for (int round = 0; round < 40; ++round) {
    const auto topic = static_cast<std::int32_t>(random() % 4) * 1000;
    auto s = e.open(numbers(topic, 20 + random() % 40));
    while (s.computed < s.tokens.size())
      REQUIRE(e.run({&s}, 1 + static_cast<std::uint32_t>(random() % 20)) <= tolerance);
    REQUIRE(e.cache.close(s.id).has_value());
  }
  CHECK(e.cache.manager().statistics().evicted_blocks > 50);
  CHECK(e.cache.manager().statistics().hit_tokens > 100);
}

TEST_CASE("cache<Policies, full, window>: the heads of blocks are reused by copy in every group") {
  engine<full, equal_window> e(40, 6, {.partial_reuse = true});
  auto a = e.open(numbers(100, 20));
  REQUIRE(e.run({&a}, 64) <= tolerance);
  auto tokens = numbers(100, 18);
  tokens.push_back(7);
  auto b = e.open(tokens);
  CHECK(b.computed == 18);
  for (int t = 0; t < 6; ++t) {
    REQUIRE(e.run({&b}, 1) <= tolerance);
    b.tokens.push_back(50 + t);
  }
}

TEST_CASE("cache<Policies, full, window>: blocks of equal bytes, and what a group leaves of them") {
  using cache = kvcache::cache<mine, full, window>;
  const cache c({.blocks = 4,
                 .groups = {{{.shape = {.layers = 1, .kv_heads = 2, .head_dim = 64}},
                             {.shape = {.layers = 2, .kv_heads = 1, .head_dim = 64}, .window = 8}}}});
  CHECK(c.bytes_per_block() == 2 * 8 * 64 * 4 * 2);
  CHECK(c.padding(0) == c.bytes_per_block() - 1 * 4 * 2 * 64 * 4 * 2);
  CHECK(c.padding(1) == 0);
  CHECK(c.bytes() == 5 * c.bytes_per_block());
  CHECK(c.layers() == 3);
  CHECK(c.group(0) == 0);
  CHECK(c.group(2) == 1);
  CHECK(c.block_size(1) == 8);
  CHECK(c.view(0).kv_heads == 2);
  CHECK(c.view(2).block_size == 8);
}

TEST_CASE("cache<Policies, full, window>: a key offset goes to its layer, with the heads of the layer's group") {
  using cache = kvcache::cache<mine, full, window>;
  cache c({.blocks = 4,
           .groups = {{{.shape = {.layers = 1, .kv_heads = 2, .head_dim = 64}},
                       {.shape = {.layers = 2, .kv_heads = 1, .head_dim = 64}, .window = 8}}},
           .layers = {1, 0, 1}});
  std::vector<float> offset(2 * 64, 1.0f);
  CHECK_THROWS_WITH(c.set_key_offset(2, offset), Catch::Contains("128 floats given, 64 needed"));
  CHECK_THROWS_WITH(c.set_key_offset(3, offset), Catch::Contains("layer 3"));
  c.set_key_offset(1, offset);
  offset.assign(64, 2.0f);
  c.set_key_offset(2, offset);
  CHECK(c.view(0).key_offset == nullptr);
  CHECK(c.view(1).key_offset[127] == 1.0f);
  CHECK(c.view(2).key_offset[63] == 2.0f);

  kvcache::cache<full> single({.layers = 2, .kv_heads = 1, .head_dim = 64}, {.blocks = 4});
  single.set_key_offset(1, offset);
  CHECK(single.view(0).key_offset == nullptr);
  CHECK(single.view(1).key_offset[63] == 2.0f);
}

TEST_CASE("cache<Policies, full, window> refuses layers that belong nowhere") {
  using cache = kvcache::cache<mine, full, window>;
  const auto options = [](std::vector<std::uint32_t> layers) {
    return cache::options{.blocks = 4,
                          .groups = {{{.shape = {.layers = 1, .kv_heads = 2, .head_dim = 64}},
                                      {.shape = {.layers = 2, .kv_heads = 1, .head_dim = 64}, .window = 8}}},
                          .layers = std::move(layers)};
  };
  CHECK_THROWS_WITH(cache(options({0, 2, 1})), Catch::Contains("layer 1 is in group 2"));
  CHECK_THROWS_WITH(cache(options({0, 1})), Catch::Contains("1 layers named for group 1"));
  cache c(options({1, 0, 1}));
  CHECK_THROWS_WITH(c.view(3), Catch::Contains("layer 3"));
  auto huge = options({});
  huge.groups[1].shape.kv_heads = ~0u;
  huge.groups[1].shape.head_dim = ~0u;
  CHECK_THROWS_WITH(cache(huge), Catch::Contains("2^63"));
}

TEST_CASE("cache<Policies, full, window>: attention that sees behind a group's window is refused, and only that") {
  using cache = kvcache::cache<mine, full, window>;
  constexpr std::uint32_t kept = 8;
  cache c({.blocks = 16,
           .groups = {{{.shape = {.layers = 1, .kv_heads = 1, .head_dim = head_dim}},
                       {.shape = {.layers = 1, .kv_heads = 1, .head_dim = head_dim}, .window = kept}}}});
  const std::uint32_t length = GENERATE(8u, 9u);
  const auto prompt = numbers(1, length);
  const auto s = c.open({.content = prompt})->sequence;
  const kvcache::want all{s, length};
  auto step = c.begin({&all, 1}).value();
  std::vector<float> rows(length * head_dim, 0.5f);
  std::vector<float> out(length * head_dim);
  const kvcache::rows_view<const float> in(rows.data(), length, 1, head_dim);
  const kvcache::rows_view<float> to(out.data(), length, 1, head_dim);
  for (const std::uint32_t layer : {0u, 1u}) c.append(step, layer, in, in);
  const kvcache::attention<full> sees_all;
  const kvcache::attention<window> sees_some;
  CHECK_NOTHROW(sees_all.run(sees_all.plan(step.batch(0)), c, 0, in, to));
  CHECK_NOTHROW(sees_some.run(sees_some.plan(step.batch(1)), c, 1, in, to, {.window = kept}));
  const auto wider = [&] { sees_some.run(sees_some.plan(step.batch(1)), c, 1, in, to, {.window = kept + 1}); };
  const auto unbounded = [&] { sees_all.run(sees_all.plan(step.batch(1)), c, 1, in, to); };
  if (length == kept) {
    CHECK_NOTHROW(wider());
    CHECK_NOTHROW(unbounded());
  } else {
    CHECK_THROWS_WITH(wider(),
                      Catch::Contains("newest 8 tokens, but a query sees 9") && Catch::Contains(".window = 8"));
    CHECK_THROWS_WITH(unbounded(), Catch::Contains("a query sees all before it; take the variant sliding_window"));
  }
}
