// SPDX-License-Identifier: Apache-2.0
#include "plot.hpp"

#include "bad_input.hpp"

#include <cstdio>
#include <filesystem>
#include <memory>

namespace replay {
namespace {

/// In gnuplot's single quotes, where only the quote itself is special.
std::string quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("''") : std::string(1, c);
  return out + "'";
}

}  // namespace

void plot(const std::vector<curve>& curves, const std::string& path) {
  std::FILE* const gnuplot = ::popen("gnuplot", "w");
  if (gnuplot == nullptr) throw bad_input("cannot start gnuplot; install it (Debian: gnuplot-nox)");
  std::string script = "set terminal pngcairo noenhanced size 900,600\nset output " + quoted(path) +
                       "\nset logscale x\nset grid\nset key left top\nset xlabel 'blocks'\nset ylabel 'hit ratio'\n"
                       "set yrange [0:*]\nplot ";
  for (std::size_t i = 0; i < curves.size(); ++i)
    script += (i == 0 ? "" : ", ") + std::string("'-' with linespoints title ") + quoted(curves[i].name);
  script += "\n";
  for (const curve& c : curves) {
    for (std::size_t i = 0; i < c.blocks.size(); ++i)
      script += std::to_string(c.blocks[i]) + " " + std::to_string(c.hit_ratio[i]) + "\n";
    script += "e\n";
  }
  const bool written = std::fputs(script.c_str(), gnuplot) >= 0;
  if (::pclose(gnuplot) != 0 || !written || !std::filesystem::exists(path))
    throw bad_input("gnuplot could not draw " + path + "; is it installed (Debian: gnuplot-nox), may it write there?");
}

}  // namespace replay
