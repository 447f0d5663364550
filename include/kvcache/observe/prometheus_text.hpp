// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/detail/config.hpp>
#include <kvcache/error.hpp>
#include <kvcache/observe/histogram.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kvcache {

/// A label of a time series, in UTF-8. Owns nothing.
struct prometheus_label {
  std::string_view name;
  std::string_view value;
};
using prometheus_labels = std::span<const prometheus_label>;

enum class prometheus_type : std::uint8_t { counter, gauge, histogram };

/// Writes a page in Prometheus' text format 0.0.4: families, each with its samples. The same numbers give the same
/// bytes under any locale, since nothing is formatted by the C library. Numbers are integers with a decimal point put
/// in: a `decimals` of 6 turns microseconds into seconds. One thread at a time.
class prometheus_text {
 public:
  static constexpr std::string_view content_type = "text/plain; version=0.0.4; charset=utf-8";

  /// Appends to `out`.
  explicit prometheus_text(std::string& out) noexcept : string_(&out) {}
  /// Fills `out` from its beginning; allocates nothing. What does not fit is left out.
  explicit prometheus_text(std::span<char> out) noexcept : buffer_(out) {}

  /// Bytes of the page so far, those left out included. O(1).
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  /// Whether all of it is there; a page that was cut is not valid. O(1).
  [[nodiscard]] bool complete() const noexcept { return string_ != nullptr || size_ <= buffer_.size(); }

  /// Begins a family: once a page for each name, with all its samples behind it. A counter's name ends in `_total`.
  /// `name` has to live until the last of them is written. Raises invalid_argument for a name that the format does not
  /// allow. O(length).
  void family(std::string_view name, std::string_view help, prometheus_type type) {
    static constexpr std::string_view types[]{"counter", "gauge", "histogram"};
    check_family(name);
    name_ = name;
    type_ = type;
    put("# HELP ", name, " ");
    put_escaped(help, false);
    put("\n# TYPE ", name, " ", types[static_cast<std::size_t>(type)], "\n");
  }

  /// A sample of the family begun last, a counter or gauge: `value` / 10^decimals. Raises invalid_argument as
  /// check_labels. O(length + labels^2). Preconditions, also below: decimals <= 19, and no sample of the family has the
  /// same labels.
  void sample(prometheus_labels labels, std::uint64_t value, unsigned decimals = 0) {
    sample(labels, {}, value, decimals);
  }
  /// The same, with one label more.
  void sample(prometheus_labels labels, const prometheus_label& more, std::uint64_t value, unsigned decimals = 0) {
    KVCACHE_ASSERT(!name_.empty() && type_ != prometheus_type::histogram, "the family begun last is for other samples");
    check_labels(labels, more.name);
    put_line("", labels, more, digits(value, decimals));
  }
  /// A histogram of the family begun last, a bucket for each power of two up to 2^48 and one for all. Raises as above.
  /// O(histogram::buckets + length).
  void sample(prometheus_labels labels, const histogram& values, unsigned decimals = 0) {
    KVCACHE_ASSERT(!name_.empty() && type_ == prometheus_type::histogram, "the family begun last is for other samples");
    check_labels(labels);
    std::uint64_t so_far = 0;
    std::size_t bucket = 0;
    for (unsigned octave = 0; octave <= octaves; ++octave) {
      const std::uint64_t greatest = (std::uint64_t{1} << octave) - 1;
      while (histogram::greatest(bucket) <= greatest) so_far += values.count(bucket++);
      put_line("_bucket", labels, {"le", digits(greatest, decimals).text()}, digits(so_far, 0));
    }
    put_line("_bucket", labels, {"le", "+Inf"}, digits(values.count(), 0));
    put_line("_sum", labels, {}, digits(values.sum(), decimals));
    put_line("_count", labels, {}, digits(values.count(), 0));
  }

  /// Raises invalid_argument for the name of a family that the format does not allow.
  static void check_family(std::string_view name) { check_name("metric", name, true); }
  /// Raises invalid_argument for names of labels that the format does not allow or keeps for itself (`le`, `__name__`
  /// and all that begins like that), that come twice or are `more`. O(length + labels^2).
  static void check_labels(prometheus_labels labels, std::string_view more = {}) {
    for (std::size_t i = 0; i < labels.size(); ++i) {
      const std::string_view name = labels[i].name;
      check_label(name);
      bool again = name == more;
      for (std::size_t j = 0; j < i; ++j) again = again || labels[j].name == name;
      if (again)
        detail::raise<invalid_argument>("prometheus: the label '" + std::string(name) +
                                        "' comes twice in one sample, 1 time possible; rename it");
    }
    if (!more.empty()) check_label(more);
  }

 private:
  static constexpr unsigned octaves = 48;

  /// value / 10^decimals in decimal, without zeros at the end of a fraction.
  class digits {
   public:
    digits(std::uint64_t value, unsigned decimals) noexcept {
      KVCACHE_ASSERT(decimals <= 19, "a 64-bit number has at most 20 digits");
      bool shown = decimals == 0;
      for (unsigned place = 0; place <= decimals || value != 0; ++place, value /= 10) {
        if (place == decimals && shown && decimals != 0) text_[--first_] = '.';
        shown = shown || value % 10 != 0 || place >= decimals;
        if (shown) text_[--first_] = static_cast<char>('0' + value % 10);
      }
    }
    [[nodiscard]] std::string_view text() const noexcept { return {text_ + first_, sizeof(text_) - first_}; }

   private:
    char text_[24];
    std::size_t first_ = sizeof(text_);
  };

  static bool allowed(char c, bool first, bool colon) noexcept {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || (colon && c == ':') ||
           (!first && c >= '0' && c <= '9');
  }
  static void check_name(const char* kind, std::string_view name, bool colon) {
    bool good = !name.empty();
    for (std::size_t i = 0; i < name.size(); ++i) good = good && allowed(name[i], i == 0, colon);
    if (!good)
      detail::raise<invalid_argument>("prometheus: the " + std::string(kind) + " name '" + std::string(name) +
                                      "' has to be letters, digits and _, and not begin with a digit; rename it");
  }
  static void check_label(std::string_view name) {
    check_name("label", name, false);
    if (name == "le" || name.starts_with("__"))
      detail::raise<invalid_argument>("prometheus: the label name '" + std::string(name) +
                                      "' is the format's own, as le and all that begins with __; rename it");
  }

  void put_line(std::string_view suffix, prometheus_labels labels, const prometheus_label& more, const digits& value) {
    put(name_, suffix);
    std::string_view before = "{";
    const auto put_label = [&](const prometheus_label& label) {
      put(before, label.name, "=\"");
      put_escaped(label.value, true);
      put("\"");
      before = ",";
    };
    for (const prometheus_label& label : labels) put_label(label);
    if (!more.name.empty()) put_label(more);
    put(before == "," ? "} " : " ", value.text(), "\n");
  }
  void put_escaped(std::string_view text, bool quoted) {
    for (const char& c : text) {
      if (c == '\\')
        put("\\\\");
      else if (c == '\n')
        put("\\n");
      else if (c == '"' && quoted)
        put("\\\"");
      else
        put(std::string_view(&c, 1));
    }
  }
  template <class... Text>
  void put(const Text&... text) {
    (put_one(text), ...);
  }
  void put_one(std::string_view text) {
    if (string_ != nullptr) {
      string_->append(text);
    } else if (size_ < buffer_.size()) {
      const std::size_t room = buffer_.size() - size_;
      text.copy(buffer_.data() + size_, text.size() < room ? text.size() : room);
    }
    size_ += text.size();
  }

  std::string* string_ = nullptr;
  std::span<char> buffer_;
  std::size_t size_ = 0;
  std::string_view name_;
  prometheus_type type_{};
};

}  // namespace kvcache
