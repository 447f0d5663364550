// SPDX-License-Identifier: Apache-2.0
// Writes a model with random weights, for where no real one can be had: make_model FILE.gguf [SEED]
#include "random_model.hpp"

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string_view>

int main(int argc, char** argv) {
  std::uint64_t seed = 1;
  bool understood = argc == 2 || argc == 3;
  if (argc == 3) {
    const std::string_view text = argv[2];
    const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), seed);
    understood = fault == std::errc{} && end == text.data() + text.size();
  }
  const bool help = argc == 2 && std::string_view(argv[1]) == "--help";
  if (help || !understood || argv[1][0] == '-') {
    std::fputs("usage: make_model FILE.gguf [SEED]; SEED is an integer from 0\n", help ? stdout : stderr);
    return help ? 0 : 2;
  }
  const auto bytes = engine::random_model(seed);
  std::ofstream out(argv[1], std::ios::binary);
  out.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  out.close();
  if (!out) {
    std::fprintf(stderr, "make_model: cannot write %s\n", argv[1]);
    return 2;
  }
  std::printf("%s: %zu bytes of random weights, seed %llu; no trained model\n", argv[1], bytes.size(),
              static_cast<unsigned long long>(seed));
  return 0;
}
