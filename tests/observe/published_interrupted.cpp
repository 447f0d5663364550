// SPDX-License-Identifier: Apache-2.0
// A store that stands still half-way: a signal stops the writer, and its handler is the reader.
#include <kvcache/observe/published.hpp>

#include <array>
#include <csignal>
#include <cstddef>
#include <cstdint>

#include <sys/time.h>

#include "catch.hpp"

namespace {

using figures = std::array<std::uint64_t, 512>;
kvcache::published<figures> shared;
volatile std::sig_atomic_t refused = 0, whole = 0, torn = 0;

void look(int) {
  figures f;
  if (!shared.try_load(f)) {
    refused = refused + 1;
    return;
  }
  for (const std::uint64_t v : f)
    if (v != f[0]) torn = 1;
  whole = whole + 1;
}

}  // namespace

TEST_CASE("a reader is refused while a store is half done, and finds no part of it") {
  struct sigaction handler {};
  handler.sa_handler = look;
  struct sigaction before {};
  REQUIRE(sigaction(SIGALRM, &handler, &before) == 0);
  const itimerval often{{0, 100}, {0, 100}};
  REQUIRE(setitimer(ITIMER_REAL, &often, nullptr) == 0);
  figures f;
  for (std::uint64_t n = 1; (refused < 50 || whole < 50) && n < 50'000'000; ++n) {
    f.fill(n);
    shared.store(f);
  }
  const itimerval never{};
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  CHECK(torn == 0);
  CHECK(refused >= 50);
  CHECK(whole >= 50);
}
