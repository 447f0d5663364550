// SPDX-License-Identifier: Apache-2.0
// Does not compile: the umbrella declares the policy, its own header defines it.
#include <kvcache/kvcache.hpp>

int main() {
  kvcache::block_manager<kvcache::priority> manager({.blocks = 4});
  return manager.capacity() == 4 ? 0 : 1;
}
