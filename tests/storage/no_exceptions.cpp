// SPDX-License-Identifier: Apache-2.0
// Built without exceptions and RTTI. Ends well when the refused append aborts.
#include <kvcache/layout/hnd.hpp>
#include <kvcache/memory/huge_page_allocator.hpp>
#include <kvcache/memory/mapped_file_allocator.hpp>
#include <kvcache/storage.hpp>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <vector>

struct mine : kvcache::policies {
  using dtype = kvcache::kv_dtype<kvcache::f16>;
  using layout = kvcache::hnd;
  using allocator = kvcache::huge_page_allocator;
};

int main() {
  std::signal(SIGABRT, [](int) {
    std::fputs("aborted\n", stderr);
    std::_Exit(0);
  });
  kvcache::storage<mine> pool({.layers = 1, .kv_heads = 2, .head_dim = 64}, {.blocks = 8});
  const std::vector<float> values(2 * 64, 1.0f);
  const kvcache::rows_view<const float> row(values.data(), 1, 2, 64);
  std::vector<kvcache::slot_id> slots{20};
  pool.append(0, row, row, slots);
  if (*reinterpret_cast<const kvcache::f16*>(pool.view(0).k_at(1, 4, 1)) != kvcache::f16{0x3c00}) return 1;
  slots[0] = 999;
  pool.append(0, row, row, slots);
  return 1;
}
