// SPDX-License-Identifier: Apache-2.0
// Reads Prometheus' text format 0.0.4 and is strict about it: what a server would refuse or misread is a fault.
#pragma once

#include <cctype>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvcache_test {

class prometheus_page {
 public:
  using labels = std::map<std::string, std::string>;
  struct family {
    std::string help;
    std::string type;
    std::map<std::pair<std::string, labels>, double> samples;          ///< by name and labels
    std::map<labels, std::vector<std::pair<double, double>>> buckets;  ///< histograms: bound and count
  };

  /// Throws std::runtime_error, naming the line.
  explicit prometheus_page(const std::string& text) {
    if (text.empty() || text.back() != '\n') fail("the page does not end with a line feed");
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
      ++number_;
      line_ = line;
      at_ = 0;
      if (take("# HELP "))
        begin_family();
      else if (take("# TYPE "))
        read_type();
      else
        read_sample();
    }
    for (const auto& [name, f] : families) {
      current_ = name;
      if (f.type.empty()) fail("family " + name + " has no type");
      if (f.type == "histogram") check_histogram(f);
    }
  }

  std::map<std::string, family> families;

  /// The value of a counter or gauge, or of a histogram's _sum or _count.
  [[nodiscard]] double value(const std::string& name, const labels& l = {}) const {
    for (const auto& [family_name, f] : families)
      if (const auto found = f.samples.find({name, l}); found != f.samples.end()) return found->second;
    throw std::runtime_error("no sample " + name);
  }
  /// The count of a histogram at a bound.
  [[nodiscard]] double bucket(const std::string& name, double bound, const labels& l = {}) const {
    for (const auto& [b, count] : families.at(name).buckets.at(l))
      if (b == bound) return count;
    throw std::runtime_error("no bucket");
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("line " + std::to_string(number_) + " '" + line_ + "': " + what);
  }
  bool take(const std::string& text) {
    if (line_.compare(at_, text.size(), text) != 0) return false;
    at_ += text.size();
    return true;
  }
  std::string take_name(bool colon) {
    std::string name;
    for (; at_ < line_.size(); ++at_) {
      const char c = line_[at_];
      const bool good = std::isalpha(static_cast<unsigned char>(c)) != 0 || c == '_' || (colon && c == ':') ||
                        (!name.empty() && std::isdigit(static_cast<unsigned char>(c)) != 0);
      if (!good) break;
      name += c;
    }
    if (name.empty()) fail("a name is missing");
    return name;
  }
  std::string unescape(char end) {
    std::string text;
    for (; at_ < line_.size() && line_[at_] != end; ++at_) {
      if (line_[at_] != '\\') {
        text += line_[at_];
        continue;
      }
      if (++at_ == line_.size()) fail("a backslash ends the line");
      if (line_[at_] == 'n')
        text += '\n';
      else if (line_[at_] == '\\' || (line_[at_] == '"' && end == '"'))
        text += line_[at_];
      else
        fail("unknown escape");
    }
    return text;
  }
  double take_number() {
    const std::string text = line_.substr(at_);
    if (text == "+Inf") return std::numeric_limits<double>::infinity();
    if (text.empty() || text.find_first_not_of("0123456789.") != std::string::npos) fail("'" + text + "' is no number");
    return std::strtod(text.c_str(), nullptr);
  }

  void begin_family() {
    current_ = take_name(true);
    if (!take(" ")) fail("no space after the name");
    if (!families.emplace(current_, family{}).second) fail("the family comes twice");
    families[current_].help = unescape('\0');
  }
  void read_type() {
    if (take_name(true) != current_ || !take(" ")) fail("not the type of the family that has just begun");
    family& f = families[current_];
    if (!f.type.empty() || !f.samples.empty()) fail("the type is told too late or twice");
    f.type = line_.substr(at_);
    if (f.type != "counter" && f.type != "gauge" && f.type != "histogram") fail("unknown type");
    const bool total = current_.size() > 6 && current_.substr(current_.size() - 6) == "_total";
    if (total != (f.type == "counter")) fail("a counter's name, and only that, ends in _total");
  }
  void read_sample() {
    if (current_.empty()) fail("a sample without a family");
    const std::string name = take_name(true);
    labels l;
    if (take("{")) {
      do {
        const std::string label = take_name(false);
        if (!take("=\"")) fail("no value of a label");
        const std::string text = unescape('"');
        if (!take("\"")) fail("a label's value has no end");
        if (!l.emplace(label, text).second) fail("label " + label + " comes twice");
      } while (take(","));
      if (!take("}")) fail("labels have no end");
    }
    if (!take(" ")) fail("no space before the value");
    const double number = take_number();
    family& f = families[current_];
    if (f.type == "histogram" && name == current_ + "_bucket") {
      const auto le = l.find("le");
      if (le == l.end()) fail("a bucket without bound");
      const double bound =
          le->second == "+Inf" ? std::numeric_limits<double>::infinity() : std::strtod(le->second.c_str(), nullptr);
      l.erase(le);
      f.buckets[l].emplace_back(bound, number);
      return;
    }
    const bool good =
        f.type == "histogram" ? name == current_ + "_sum" || name == current_ + "_count" : name == current_;
    if (!good) fail("not a sample of " + current_);
    if (!f.samples.emplace(std::pair(name, l), number).second) fail("the sample comes twice");
  }
  void check_histogram(const family& f) const {
    if (f.samples.size() != 2 * f.buckets.size()) fail(current_ + " has not one sum and one count for each series");
    for (const auto& [l, buckets] : f.buckets) {
      for (std::size_t i = 1; i < buckets.size(); ++i)
        if (buckets[i].first <= buckets[i - 1].first || buckets[i].second < buckets[i - 1].second)
          fail(current_ + ": buckets do not rise");
      if (!std::isinf(buckets.back().first)) fail(current_ + ": no bucket for all");
      const auto count = f.samples.find({current_ + "_count", l});
      if (count == f.samples.end() || count->second != buckets.back().second) fail(current_ + ": counts differ");
      if (f.samples.count({current_ + "_sum", l}) == 0) fail(current_ + ": no sum");
    }
  }

  std::string line_;
  std::size_t at_ = 0;
  int number_ = 0;
  std::string current_;
};

}  // namespace kvcache_test
