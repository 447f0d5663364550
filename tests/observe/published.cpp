// SPDX-License-Identifier: Apache-2.0
// Figures read while they are written: whole, in order, without a lock.
#include <kvcache/observe/histogram.hpp>
#include <kvcache/observe/published.hpp>

#include <array>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "catch.hpp"

using kvcache::published;

namespace {

/// All fields say the same, so that a torn one shows.
template <std::size_t Count>
struct figures {
  std::array<std::uint64_t, Count> values{};

  static figures of(std::uint64_t n) {
    figures f;
    for (std::size_t i = 0; i < Count; ++i) f.values[i] = n * (i + 1);
    return f;
  }
  [[nodiscard]] bool whole() const {
    for (std::size_t i = 0; i < Count; ++i)
      if (values[i] != values[0] * (i + 1)) return false;
    return true;
  }
};

/// One thread writes 1, 2, ... while others read, until each has seen many values. Whether all that was read was whole
/// and nobody went back in time.
template <std::size_t Count>
bool race(unsigned readers) {
  published<figures<Count>> shared;
  std::atomic<unsigned> reading{readers};
  std::atomic<bool> good{true};
  std::vector<std::thread> team;
  for (unsigned i = 0; i < readers; ++i)
    team.emplace_back([&] {
      std::uint64_t last = 0;
      for (unsigned seen = 0; seen < 4'000;) {
        const auto f = shared.load();
        if (!f.whole() || f.values[0] < last) good = false;
        if (f.values[0] != last)
          ++seen;
        else
          std::this_thread::yield();
        last = f.values[0];
      }
      --reading;
    });
  for (std::uint64_t n = 1; reading != 0; ++n) {
    shared.store(figures<Count>::of(n));
    std::this_thread::yield();  // a reader that is always overtaken would not end
  }
  for (std::thread& t : team) t.join();
  return good;
}

struct odd_size {
  char text[13] = "twelve chars";
};

}  // namespace

TEST_CASE("published figures are read whole and in order while another thread writes them") {
  CHECK(race<1>(2));
  CHECK(race<5>(3));
  CHECK(race<512>(2));
}

TEST_CASE("published gives back what was stored, whatever its size, and at first what it began with") {
  published<std::uint8_t> small_one(std::uint8_t{7});
  CHECK(small_one.load() == 7);
  small_one.store(255);
  CHECK(small_one.load() == 255);
  published<odd_size> text;
  CHECK(std::string(text.load().text) == "twelve chars");
  odd_size other;
  other.text[11] = '!';
  text.store(other);
  CHECK(std::string(text.load().text) == "twelve char!");
  odd_size tried;
  CHECK(text.try_load(tried));
  CHECK(std::string(tried.text) == "twelve char!");

  kvcache::histogram h;
  for (std::uint64_t v = 1; v < 100'000; v *= 3) h.add(v);
  published<kvcache::histogram> histogram;
  CHECK(histogram.load() == kvcache::histogram{});
  histogram.store(h);
  CHECK(histogram.load() == h);
}
