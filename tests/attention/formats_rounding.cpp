// SPDX-License-Identifier: Apache-2.0
// What kernels round off where codes meet whole numbers: beside one large weight, one large channel of a query or the
// smallest scales it is a small part of what the format has lost.
#include "formats.hpp"

using namespace kvcache_test;

namespace {

/// Normal numbers.
class numbers {
 public:
  explicit numbers(unsigned seed) : random_(seed) {}
  float operator()() { return normal_(random_); }

 private:
  std::mt19937 random_;
  std::normal_distribution<float> normal_;
};

/// A scene, what attention over it is, and over the numbers as they were before they were stored.
template <class Dtype>
struct measured {
  scene_of<Dtype> s;
  expectation stored;
  expectation exact;

  /// `element` is write_all's; it is called twice and has to say the same.
  template <class F, class Q>
  measured(const shape& form, std::uint32_t kv_tokens, const F& element, const Q& query) : s(form, {{1, kv_tokens}}) {
    scene<f32> wide(form, {{1, kv_tokens}});
    s.write_all(element);
    wide.write_all(element);
    for (std::size_t i = 0; i < s.q.size(); ++i)
      s.q[i] = wide.q[i] = query(static_cast<std::uint32_t>(i % form.head_dim));
    stored = expected<causal>(s);
    exact = expected<causal>(wide);
  }
  /// The root of the mean square of differences of channels that `of` takes.
  template <class A, class B, class F>
  double apart(const A& a, const B& b, const F& of) const {
    double sum = 0;
    double count = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
      if (!of(static_cast<std::uint32_t>(i % s.form().v_dim()))) continue;
      const double off = static_cast<double>(a[i]) - static_cast<double>(b[i]);
      sum += off * off;
      ++count;
    }
    return std::sqrt(sum / count);
  }
  /// What kernels add to what the format loses of these channels, as a part of it: the worst of all instruction sets.
  template <class F>
  double added(const F& of) const {
    double worst = 0;
    for (const cpu_isa isa : isas()) worst = (std::max)(worst, apart(attend<causal>(s, {}, isa).out, stored.out, of));
    return worst / apart(stored.out, exact.out, of);
  }
};

bool any_channel(std::uint32_t) { return true; }

}  // namespace

TEMPLATE_TEST_CASE("values beside one that has nearly all of the weight lose little, biased channels and others", "",
                   int4, int4_asymmetric, int4_channels, int8_beside_int4, (kv_dtype<int4_per_channel_symmetric>)) {
  const bool per_channel = quantization_of(dtype_traits<typename TestType::v>::id).per_channel;
  for (const std::uint32_t group : {1u, 4u}) {
    const shape form{.block_size = 16, .kv_heads = 1, .group = group, .head_dim = 128};
    for (const std::uint32_t kv_tokens : {16u, 64u, 320u}) {
      for (const float above : {3.0f, 5.6f, 7.0f}) {
        for (const float bias : {0.0f, 16.0f}) {
          // Every 64th token is so far above the others, which are alike; values of channel 3 have a large mean.
          numbers normal(kv_tokens);
          std::vector<float> v(std::size_t{kv_tokens} * 128);
          for (float& x : v) x = normal();
          for (std::size_t t = 0; bias != 0 && t < kv_tokens; ++t) v[t * 128 + 3] = bias + 0.1f * v[t * 128 + 3];
          const measured<TestType> m(
              form, kv_tokens,
              [&](bool keys, std::size_t, std::uint32_t t, std::uint32_t, std::uint32_t d) {
                return !keys ? v[t * 128 + d] : t % 64 == 0 ? above / std::sqrt(128.0f) : 0.0f;
              },
              [](std::uint32_t) { return 1.0f; });
          INFO(name(dtype_traits<typename TestType::v>::id)
               << " group " << group << " kv_tokens " << kv_tokens << " above " << above << " bias " << bias);
          CHECK(m.added(any_channel) < 0.3);
          CHECK(m.added([&](std::uint32_t d) { return d / 32 != 0 || (per_channel && d != 3); }) < 0.3);
          // A mean stays what it is.
          for (const cpu_isa isa : isas())
            CHECK(how_far(attend<causal>(m.s, {}, isa).out[3], m.stored.out[3], bias == 0 ? 0.1 : 0.3) < 1);
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("values near the smallest scale weigh what they are", "", int8, int4, int4_asymmetric,
                   int8_beside_int4) {
  for (const std::uint32_t group : {1u, 4u}) {
    const shape form{.block_size = 16, .kv_heads = 1, .group = group, .head_dim = 128};
    constexpr std::uint32_t kv_tokens = 640;
    const double exact = quantization_of(dtype_traits<typename TestType::v>::id).bits == 8 ? 2e-4 : 0.02;
    for (const float size : {1.0f, 1e-28f, 2e-30f, 8e-31f}) {
      // Far below the first token are the others, whose values are of the other sign.
      const auto element = [&](bool keys, std::size_t, std::uint32_t t, std::uint32_t, std::uint32_t d) {
        if (keys) return t == 0 ? 0.25f : 0.0f;
        const float x = 0.5f + 0.5f * static_cast<float>((t * 37 + d * 11) % 64) / 64.0f;
        return size * (t == 0 ? -x : x);
      };
      const measured<TestType> m(form, kv_tokens, element, [](std::uint32_t) { return 2.0f; });
      double largest = 0;
      for (const double x : m.stored.out) largest = (std::max)(largest, std::fabs(x));
      REQUIRE(largest > static_cast<double>(size) * 0.2);
      for (const cpu_isa isa : isas()) {
        INFO(text(form, isa) << " size " << size);
        CHECK(m.apart(attend<causal>(m.s, {}, isa).out, m.stored.out, any_channel) / largest < exact);
      }
    }
  }
}

TEMPLATE_TEST_CASE("keys are seen beside a channel in which the query is large", "", int4, int4_asymmetric,
                   int4_channels) {
  for (const std::uint32_t group : {1u, 4u}) {
    const shape form{.block_size = 16, .kv_heads = 1, .group = group, .head_dim = 128};
    constexpr std::uint32_t kv_tokens = 512;
    for (const float channel : {1.0f, 8.0f, 30.0f, 300.0f, 2000.0f}) {
      for (const bool even : {false, true}) {  // where the others are alike, what they lose is
        numbers normal(7);
        std::vector<float> k(std::size_t{kv_tokens} * 128);
        std::vector<float> v(k.size());
        for (float& x : k) x = normal();
        for (float& x : v) x = normal();
        for (std::size_t t = 0; t < kv_tokens; ++t) k[t * 128 + 40] = 0;
        std::vector<float> q(128);
        for (float& x : q) x = even ? 1.0f : to_float(from_float<bf16>(normal()));
        q[40] = channel;
        const measured<TestType> m(
            form, kv_tokens,
            [&](bool keys, std::size_t, std::uint32_t t, std::uint32_t, std::uint32_t d) {
              return (keys ? k : v)[t * 128 + d];
            },
            [&](std::uint32_t d) { return q[d]; });
        INFO(name(dtype_traits<typename TestType::k>::id) << " group " << group << " channel " << channel);
        CHECK(m.added(any_channel) < 0.3);
      }
    }
  }
}

TEMPLATE_TEST_CASE("whole numbers do not move all logits of a query together", "", int4, int4_asymmetric, int4_channels,
                   (kv_dtype<int4_grouped_asymmetric<128>>)) {
  const shape form{.block_size = 16, .kv_heads = 1, .group = 4, .head_dim = 128};
  constexpr std::uint32_t kv_tokens = 512;
  for (const cpu_isa isa : isas()) {
    double squares = 0;
    double count = 0;
    for (unsigned seed = 0; seed < 16; ++seed) {
      scene_of<TestType> s(form, {{1, kv_tokens}}, seed);
      const expectation e = expected<causal>(s);
      const outcome o = attend<causal>(s, {}, isa);
      for (std::size_t i = 0; i < e.lse.size(); ++i, ++count)
        squares += (static_cast<double>(o.lse[i]) - e.lse[i]) * (static_cast<double>(o.lse[i]) - e.lse[i]);
    }
    INFO(text(form, isa));
    CHECK(std::sqrt(squares / count) < 0.004);  // of a logit in base 2
  }
}
