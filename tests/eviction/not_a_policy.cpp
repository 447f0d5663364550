// SPDX-License-Identifier: Apache-2.0
// Does not compile: victim() is missing. The compiler has to say what a policy needs, once.
#include <kvcache/blocks/block_manager.hpp>

struct forgetful {
  static constexpr const char* name = "forgetful";
  explicit forgetful(kvcache::block_id) {}
  void insert(kvcache::block_id) noexcept {}
  void erase(kvcache::block_id) noexcept {}
};

int main() {
  kvcache::block_manager<forgetful> manager({.blocks = 4});
  return manager.capacity() == 4 ? 0 : 1;
}
