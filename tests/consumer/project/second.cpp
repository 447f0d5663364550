// SPDX-License-Identifier: Apache-2.0
// The second translation unit: the headers define nothing twice.
#include <kvcache/attention/cpu/cpu.hpp>
#include <kvcache/kvcache.hpp>

#include <string>

std::string second_version() {
  return std::to_string(KVCACHE_VERSION_MAJOR) + "." + std::to_string(KVCACHE_VERSION_MINOR) + "." +
         std::to_string(KVCACHE_VERSION_PATCH);
}
