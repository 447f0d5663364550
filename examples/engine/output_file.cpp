// SPDX-License-Identifier: Apache-2.0
#include "output_file.hpp"

#include "bad_input.hpp"

#include <cstdio>
#include <fstream>

namespace engine {

void check_writable(const std::string& path) {
  if (!std::ofstream(path, std::ios::app)) throw bad_input("cannot write " + path);
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream out(path);
  out << text;
  out.close();
  if (!out) throw bad_input("cannot write " + path);
}

void check_standard_output() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)
    throw bad_input("cannot write to the standard output; what was printed is not whole");
}

}  // namespace engine
