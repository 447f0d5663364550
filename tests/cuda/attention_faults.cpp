// SPDX-License-Identifier: Apache-2.0
// Faults that kernels of attention have had elsewhere, planted into ours: each has to be seen.
#include "attention_support.hpp"

#include <set>
#include <source_location>
#include <string>
#include <utility>

using namespace kvcache_test;

namespace {

/// A line of a kernel's body.
using place = std::pair<std::string, unsigned>;
place place_of(const std::source_location& l) { return {l.file_name(), l.line()}; }

/// What a context does wrong.
struct planted {
  place skipped{};  ///< the barrier, or the wait, of this line is left out
  bool swaps_fragment = false;
  bool loses_row = false;
  const void* lost_from = nullptr;  ///< stores to [lost_from, lost_to) do not arrive
  const void* lost_to = nullptr;
  std::set<place> barriers{};  ///< that were met
  std::set<place> waits{};
};

class faulty_context : public host_context {
 public:
  faulty_context(host_context&& c, planted& p) : host_context(std::move(c)), planted_(&p) {}

  void sync(std::source_location where = std::source_location::current()) {
    planted_->barriers.insert(place_of(where));
    if (place_of(where) != planted_->skipped) host_context::sync();
  }
  void sync_warp(std::source_location where = std::source_location::current()) {
    planted_->barriers.insert(place_of(where));
    if (place_of(where) != planted_->skipped) host_context::sync_warp();
  }
  template <unsigned Newer>
  void copy_async_wait(std::source_location where = std::source_location::current()) {
    planted_->waits.insert(place_of(where));
    if (place_of(where) != planted_->skipped) host_context::copy_async_wait<Newer>();
  }
  template <class T>
  void multiply_add(T t, float (&c)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    if (planted_->swaps_fragment)
      host_context::multiply_add(t, c, a, {b[1], b[0]});
    else
      host_context::multiply_add(t, c, a, b);
  }
  template <class T>
  void store(T* to, std::type_identity_t<T> x) const {
    if (to >= planted_->lost_from && to < planted_->lost_to) return;
    host_context::store(to, x);
  }

 private:
  planted* planted_;
};

/// Long enough for several chunks, and for one block of threads to go from unit to unit.
const scene<bf16>& victim() {
  static const scene<bf16> s({.kv_heads = 2, .group = 2}, {{1, 300}, {3, 70}});
  return s;
}

/// Whether the fault is seen in one of the orders in which threads may run: a wrong result, or a fault in words.
template <class Variant = causal>
bool seen(device_kernel kernel, planted& p, void (*spoil)(device_call&) = nullptr) {
  const expectation e = expected<causal>(victim());
  for (const thread_order order : {thread_order::forward, thread_order::backward, thread_order::shuffled}) {
    const device_run how{.kernel = kernel, .order = order, .blocks = 1};
    outcome o = nothing_written(victim());
    device_call call(victim(), causal::features, {}, how, o);
    if (spoil != nullptr) spoil(call);
    if (p.loses_row) {
      p.lost_from = o.out.data() + 64;
      p.lost_to = o.out.data() + 128;
    }
    try {
      run_device<Variant, bf16, bf16, bf16, 64, 64>(call, how,
                                                    [&](host_context&& c) { return faulty_context(std::move(c), p); });
    } catch (const kernel_fault&) {
      return true;
    }
    o.rounding = device_rounding<bf16, bf16>(kernel);
    if (!(distance(o, e) < 1)) return true;
  }
  return false;
}

template <class F>
void each_kernel(const F& f) {
  for (const device_kernel kernel : {device_kernel::few_rows, device_kernel::many_rows, device_kernel::one_row}) {
    INFO(name(kernel));
    f(kernel);
  }
}

}  // namespace

TEST_CASE("Device attention without faults is right in every order", "[cuda]") {
  each_kernel([](device_kernel kernel) {
    planted none;
    CHECK_FALSE(seen(kernel, none));
    CHECK(none.barriers.size() > 3);
    CHECK(none.waits.size() == 2);
  });
}

TEST_CASE("Device attention: every barrier and every wait for copies that is left out shows", "[cuda]") {
  each_kernel([](device_kernel kernel) {
    planted none;
    static_cast<void>(seen(kernel, none));
    std::set<place> all = none.barriers;
    all.insert(none.waits.begin(), none.waits.end());
    for (const place& line : all) {
      planted p{.skipped = line};
      INFO(line.first << ':' << line.second);
      CHECK(seen(kernel, p));
    }
  });
}

TEST_CASE("Device attention: a swapped fragment shows", "[cuda]") {
  for (const device_kernel kernel : {device_kernel::few_rows, device_kernel::many_rows}) {
    planted p{.swaps_fragment = true};
    CHECK(seen(kernel, p));
  }
}

TEST_CASE("Device attention: a row that is not written shows", "[cuda]") {
  each_kernel([](device_kernel kernel) {
    planted p{.loses_row = true};
    CHECK(seen(kernel, p));
  });
}

TEST_CASE("Device attention: a wrong mask shows", "[cuda]") {
  each_kernel([](device_kernel kernel) {
    planted none;
    CHECK(seen<full>(kernel, none));
    CHECK(seen<sliding_window>(kernel, none, [](device_call& call) { call.params.window = 299; }));
  });
}

TEST_CASE("Device attention: a tile that ends one token early or late shows", "[cuda]") {
  each_kernel([](device_kernel kernel) {
    planted none;
    CHECK(seen(kernel, none, [](device_call& call) { --call.units.front().kv_end; }));
    CHECK(seen(kernel, none, [](device_call& call) { ++call.units.front().kv_begin; }));
    CHECK(seen(kernel, none, [](device_call& call) { --call.units.back().kv_end; }));
  });
}
