// SPDX-License-Identifier: Apache-2.0
#include "share.hpp"

#include "catch.hpp"

using namespace engine;

TEST_CASE("Shares cover everything once, in whole grains") {
  for (const std::size_t size : {0u, 1u, 15u, 16u, 17u, 100u}) {
    for (const unsigned nth : {1u, 2u, 3u, 7u}) {
      std::size_t end = 0;
      for (unsigned ith = 0; ith < nth; ++ith) {
        const share s = share_of(size, 16, ith, nth);
        CHECK(s.begin == end);
        CHECK((s.begin % 16 == 0 || s.begin == size));
        end = s.end;
      }
      CHECK(end == size);
    }
  }
}
