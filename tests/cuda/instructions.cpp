// SPDX-License-Identifier: Apache-2.0
// The host's instructions, held against what PTX says of the device's: "Matrix fragments for mma.m16n8k16" and
// "ldmatrix", whose pictures are written out here.
#include "catch.hpp"
#include "host_context.hpp"

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

using namespace kvcache_test;

namespace {

struct warp_body {
  static constexpr unsigned threads = 32;
  struct shared {
    alignas(16) std::uint16_t halves[32 * 8];
    alignas(16) float floats[64];
  };
  using params = std::function<void(host_context&, shared&)>;
  static void run(host_context& c, shared& s, const params& p) { p(c, s); }
};

std::uint16_t half(float x) { return kvcache::from_float<f16>(x).bits; }
std::uint32_t halves(float low, float high) { return half(low) | static_cast<std::uint32_t>(half(high)) << 16; }

/// Row and column of elements of lane 5 of each fragment, and of lane 30, as the pictures show them.
struct golden {
  unsigned lane;
  unsigned a[8][2];
  unsigned b[4][2];
  unsigned c[4][2];
};
constexpr golden table[] = {
    {0,
     {{0, 0}, {0, 1}, {8, 0}, {8, 1}, {0, 8}, {0, 9}, {8, 8}, {8, 9}},
     {{0, 0}, {1, 0}, {8, 0}, {9, 0}},
     {{0, 0}, {0, 1}, {8, 0}, {8, 1}}},
    {5,
     {{1, 2}, {1, 3}, {9, 2}, {9, 3}, {1, 10}, {1, 11}, {9, 10}, {9, 11}},
     {{2, 1}, {3, 1}, {10, 1}, {11, 1}},
     {{1, 2}, {1, 3}, {9, 2}, {9, 3}}},
    {19,
     {{4, 6}, {4, 7}, {12, 6}, {12, 7}, {4, 14}, {4, 15}, {12, 14}, {12, 15}},
     {{6, 4}, {7, 4}, {14, 4}, {15, 4}},
     {{4, 6}, {4, 7}, {12, 6}, {12, 7}}},
    {30,
     {{7, 4}, {7, 5}, {15, 4}, {15, 5}, {7, 12}, {7, 13}, {15, 12}, {15, 13}},
     {{4, 7}, {5, 7}, {12, 7}, {13, 7}},
     {{7, 4}, {7, 5}, {15, 4}, {15, 5}}},
};

}  // namespace

TEST_CASE("device context: fragments lie where PTX says", "[cuda]") {
  for (const golden& g : table) {
    INFO("lane " << g.lane);
    for (unsigned i = 0; i < 8; ++i) {
      CHECK(mma_place::a(g.lane, i).row == g.a[i][0]);
      CHECK(mma_place::a(g.lane, i).column == g.a[i][1]);
    }
    for (unsigned i = 0; i < 4; ++i) {
      CHECK(mma_place::b(g.lane, i).row == g.b[i][0]);
      CHECK(mma_place::b(g.lane, i).column == g.b[i][1]);
      CHECK(mma_place::c(g.lane, i).row == g.c[i][0]);
      CHECK(mma_place::c(g.lane, i).column == g.c[i][1]);
    }
  }
}

TEST_CASE("device context: a product of matrices, through shared memory", "[cuda]") {
  // left[r][k] = r + k / 16, right[k][n] = (k == n) + 2 (k == n + 8), so the product is left[r][n] + 2 left[r][n + 8].
  std::vector<float> out(16 * 8, -1);
  run_on_host<warp_body>(1, [&](host_context& c, warp_body::shared& s) {
    const auto left = [](unsigned r, unsigned k) { return static_cast<float>(r) + static_cast<float>(k) / 16; };
    const auto right = [](unsigned k, unsigned n) { return k == n ? 1.0f : k == n + 8 ? 2.0f : 0.0f; };
    // Four matrices of 8 x 8: rows 0 to 7 and 8 to 15 of columns 0 to 7, then of columns 8 to 15.
    const unsigned lane = c.lane();
    for (unsigned i = 0; i < 8; ++i) s.halves[lane * 8 + i] = half(left(lane % 16, lane / 16 * 8 + i));
    c.sync_warp();
    std::uint32_t a[4];
    c.load_matrices(s.halves + lane * 8, a);
    c.sync_warp();
    // Rows of `right`: 16 of 8 elements, read transposed.
    if (lane < 16)
      for (unsigned i = 0; i < 8; ++i) s.halves[lane * 8 + i] = half(right(lane, i));
    c.sync_warp();
    std::uint32_t b[4];
    c.load_matrices_transposed(s.halves + lane % 16 * 8, b);
    float sums[4] = {100, 100, 100, 100};
    c.multiply_add(f16{}, sums, a, {b[0], b[1]});
    for (unsigned i = 0; i < 4; ++i) {
      const unsigned row = lane / 4 + i / 2 * 8;
      const unsigned column = lane % 4 * 2 + i % 2;
      out[row * 8 + column] = sums[i];
    }
  });
  for (unsigned r = 0; r < 16; ++r)
    for (unsigned n = 0; n < 8; ++n) {
      const float r_n = static_cast<float>(r) + static_cast<float>(n) / 16;
      CHECK(out[r * 8 + n] == 100 + r_n + 2 * (r_n + 0.5f));
    }
}

TEST_CASE("device context: shuffles, votes and packing", "[cuda]") {
  run_on_host<warp_body>(1, [](host_context& c, warp_body::shared&) {
    const auto must = [](bool right, const char* what) {
      if (!right) throw kernel_fault(what);
    };
    must(c.shuffle(c.lane() * 3, 7) == 21, "shuffle");
    must(c.shuffle_xor(c.lane(), 5) == (c.lane() ^ 5u), "shuffle_xor");
    must(c.any(c.lane() == 31), "any, one");
    must(!c.any(false), "any, none");
    must(c.pack(f16{}, 1.0f, -2.0f) == halves(1.0f, -2.0f), "pack f16");
    must(c.pack(bf16{}, 1.0f, -2.0f) == 0xc000'3f80u, "pack bf16");
    must(c.widen(kvcache::fp8_e4m3{}, 0x7f38) == (half(1.0f) | 0x7e00u << 16), "widen e4m3, a NaN above");
    must(c.widen(kvcache::fp8_e5m2{}, 0xfc3c) == (half(1.0f) | 0xfc00u << 16), "widen e5m2, -infinity above");
  });
}

TEST_CASE("device context: copies are there when they have been waited for, and not before", "[cuda]") {
  std::vector<float> from(64);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<float>(i);
  run_on_host<warp_body>(1, [&](host_context& c, warp_body::shared& s) {
    const auto must = [](bool right, const char* what) {
      if (!right) throw kernel_fault(what);
    };
    const unsigned lane = c.lane();
    must(std::isnan(s.floats[lane]), "shared memory begins as no numbers");
    c.sync_warp();
    c.copy_async<4>(s.floats + lane, from.data() + lane, true);
    c.copy_async_commit();
    c.copy_async<4>(s.floats + 32 + lane, from.data() + 32 + lane, lane % 2 == 0);
    c.copy_async_commit();
    must(std::isnan(s.floats[lane]), "not before it was waited for");
    c.copy_async_wait<1>();
    must(s.floats[lane] == static_cast<float>(lane), "the older group");
    must(std::isnan(s.floats[32 + lane]), "the newer group is on its way");
    c.copy_async_wait<0>();
    must(s.floats[32 + lane] == (lane % 2 == 0 ? static_cast<float>(32 + lane) : 0.0f), "zeros where nothing is there");
  });
}
