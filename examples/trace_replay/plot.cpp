// SPDX-License-Identifier: Apache-2.0
#include "plot.hpp"

#include "bad_input.hpp"

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

namespace replay {
namespace {

std::string script(const std::vector<curve>& curves) {
  std::string text =
      "set terminal pngcairo noenhanced size 900,600\nset logscale x\nset grid\nset key left top\n"
      "set xlabel 'blocks'\nset ylabel 'hit ratio'\nset yrange [0:*]\nplot ";
  for (std::size_t i = 0; i < curves.size(); ++i)
    text += (i == 0 ? "'-' with linespoints title '" : ", '-' with linespoints title '") + curves[i].name + "'";
  text += "\n";
  for (const curve& c : curves) {
    for (std::size_t i = 0; i < c.blocks.size(); ++i)
      text += std::to_string(c.blocks[i]) + " " + std::to_string(c.hit_ratio[i]) + "\n";
    text += "e\n";
  }
  return text;
}

[[noreturn]] void unwritable(const std::string& path) {
  throw bad_input("cannot write " + path + ": " + std::strerror(errno));
}

}  // namespace

void check_plot(const std::string& path) {
  if (!std::ofstream(path, std::ios::app)) unwritable(path);
}

void plot(const std::vector<curve>& curves, const std::string& path) {
  // gnuplot does not look whether its picture could be written, so it hands it to us.
  const std::string command = "gnuplot <<'end of the script'\n" + script(curves) + "end of the script\n";
  std::FILE* const gnuplot = ::popen(command.c_str(), "r");
  if (gnuplot == nullptr) throw bad_input(std::string("cannot start a shell for gnuplot: ") + std::strerror(errno));
  std::string picture;
  std::array<char, 4096> part;
  while (const std::size_t size = std::fread(part.data(), 1, part.size(), gnuplot)) picture.append(part.data(), size);
  if (::pclose(gnuplot) != 0 || picture.empty())
    throw bad_input("gnuplot could not draw " + path + "; is it installed (Debian: gnuplot-nox)?");
  std::ofstream out(path, std::ios::binary);
  out << picture;
  out.close();
  if (!out) unwritable(path);
}

}  // namespace replay
