// SPDX-License-Identifier: Apache-2.0
// A user's program of two translation units; both include the library. Ends with 0 when the version is the one given.
#include <kvcache/attention/cpu/cpu.hpp>
#include <kvcache/kvcache.hpp>

#include <cstdio>
#include <string>

std::string second_version();

int main(int argc, char** argv) {
  const std::string version = std::to_string(KVCACHE_VERSION_MAJOR) + "." + std::to_string(KVCACHE_VERSION_MINOR) +
                              "." + std::to_string(KVCACHE_VERSION_PATCH);
  std::printf("kvcache %s\n", version.c_str());
  return argc == 2 && version == argv[1] && version == second_version() ? 0 : 1;
}
