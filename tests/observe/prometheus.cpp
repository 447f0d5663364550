// SPDX-License-Identifier: Apache-2.0
#include <kvcache/observe/prometheus.hpp>

#include <algorithm>
#include <clocale>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "catch.hpp"
#include "prometheus_parser.hpp"

using kvcache::cache_figures;
using kvcache::histogram;
using kvcache::prometheus_label;
using kvcache::prometheus_text;
using kvcache::prometheus_type;
using kvcache_test::prometheus_page;
using series = prometheus_page::labels;

namespace {

struct everything {
  kvcache::block_counts counts{1, 20, 300, 4'000};
  kvcache::block_statistics statistics{5, 600, 70, 8};
  kvcache::hit_sums window{5, 90, 18};
  kvcache::hit_sums again{1, 33, 11};
  std::uint64_t storms = 2;
  histogram age, idle, gap, distances;
  std::vector<kvcache::predicted_hits> curve{{1'000, 0.25}, {2'000, 2.0 / 3}, {4'000, 1}};
  std::vector<prometheus_label> own;

  everything() {
    for (std::uint64_t v = 1; v <= 1'000; ++v) age.add(v * 1'000), idle.add(v), gap.add(v * v), distances.add(v, 8);
  }
  [[nodiscard]] cache_figures figures() const {
    return {.labels = own,
            .counts = &counts,
            .statistics = &statistics,
            .window = &window,
            .again = &again,
            .storms = &storms,
            .age = &age,
            .idle = &idle,
            .gap = &gap,
            .distances = &distances,
            .curve = curve};
  }
};

std::string page_of(std::span<const cache_figures> caches, const kvcache::time_unit& unit = {}) {
  std::string text;
  prometheus_text page(text);
  kvcache::write_prometheus(page, caches, unit);
  CHECK(page.size() == text.size());
  CHECK(page.complete());
  return text;
}

std::string number(std::uint64_t value, unsigned decimals) {
  std::string text;
  prometheus_text page(text);
  page.family("x", "", prometheus_type::gauge);
  const std::size_t before = text.size();
  page.sample({}, value, decimals);
  return text.substr(before + 2, text.size() - before - 3);
}

}  // namespace

TEST_CASE("a page for Prometheus says what the figures say") {
  everything all;
  const cache_figures figures = all.figures();
  const prometheus_page page(page_of({&figures, 1}, {"seconds", 6}));
  CHECK(page.value("kvcache_blocks", {{"state", "free"}}) == 1);
  CHECK(page.value("kvcache_blocks", {{"state", "evictable"}}) == 20);
  CHECK(page.value("kvcache_blocks", {{"state", "referenced"}}) == 300);
  CHECK(page.value("kvcache_blocks", {{"state", "held"}}) == 4'000);
  CHECK(page.value("kvcache_opened_sequences_total") == 5);
  CHECK(page.value("kvcache_queried_tokens_total") == 600);
  CHECK(page.value("kvcache_hit_tokens_total") == 70);
  CHECK(page.value("kvcache_evicted_blocks_total") == 8);
  CHECK(page.value("kvcache_window_requests") == 5);
  CHECK(page.value("kvcache_window_queried_tokens") == 90);
  CHECK(page.value("kvcache_window_hit_tokens") == 18);
  CHECK(page.value("kvcache_window_hit_ratio") == 0.2);
  CHECK(page.value("kvcache_readmitted_requests_total") == 1);
  CHECK(page.value("kvcache_readmitted_queried_tokens_total") == 33);
  CHECK(page.value("kvcache_readmitted_hit_tokens_total") == 11);
  CHECK(page.value("kvcache_hit_storms_total") == 2);
  CHECK(page.value("kvcache_predicted_hit_ratio", {{"blocks", "2000"}}) == 0.666667);
  CHECK(page.value("kvcache_predicted_hit_ratio", {{"blocks", "4000"}}) == 1);
  CHECK(page.families.at("kvcache_blocks").type == "gauge");
  CHECK(page.families.at("kvcache_hit_tokens_total").type == "counter");
  for (const auto& [name, family] : page.families) {
    CAPTURE(name);
    CHECK(family.help.size() > 10);
  }
  CHECK(page.families.size() == 18);

  // A bucket holds what its bound does not exceed: 1,000 to 262,000 microseconds are 262.
  CHECK(page.bucket("kvcache_block_age_seconds", 0.262143) == 262);
  CHECK(page.bucket("kvcache_block_age_seconds", 0.000511) == 0);
  CHECK(page.value("kvcache_block_age_seconds_count") == 1'000);
  CHECK(page.value("kvcache_block_age_seconds_sum") == 500.5);
  CHECK(page.value("kvcache_block_idle_seconds_sum") == 0.5005);
  CHECK(page.value("kvcache_reuse_gap_seconds_sum") == 333.8335);
  CHECK(page.bucket("kvcache_reuse_distance_blocks", 255) == 8 * 255);
  CHECK(page.bucket("kvcache_reuse_distance_blocks", 0) == 0);
}

TEST_CASE("several caches share a page: each family once, each series told by its labels") {
  everything a, b;
  b.storms = 9;
  b.counts.free = 77;
  a.own = {{"model", "small \"one\"\\\n"}, {"rank", "0"}};
  b.own = {{"model", "other"}, {"rank", "1"}};
  cache_figures none;
  cache_figures fewer = b.figures();
  fewer.age = nullptr;
  fewer.curve = {};
  const cache_figures caches[]{a.figures(), none, fewer};
  const prometheus_page page(page_of(caches));
  const series of_a{{"model", "small \"one\"\\\n"}, {"rank", "0"}};
  const series of_b{{"model", "other"}, {"rank", "1"}};
  CHECK(page.value("kvcache_hit_storms_total", of_a) == 2);
  CHECK(page.value("kvcache_hit_storms_total", of_b) == 9);
  series free = of_b;
  free["state"] = "free";
  CHECK(page.value("kvcache_blocks", free) == 77);
  CHECK(page.families.at("kvcache_block_age_requests").buckets.size() == 1);
  CHECK(page.families.at("kvcache_block_idle_requests").buckets.size() == 2);
  CHECK(page.bucket("kvcache_block_idle_requests", 1'023, of_b) == 1'000);
}

TEST_CASE("a page of nothing is empty, and a figure that is not there has no family") {
  CHECK(page_of({}) == "");
  const cache_figures none;
  CHECK(page_of({&none, 1}) == "");
  const std::uint64_t storms = 0;
  const cache_figures one{.storms = &storms};
  CHECK(page_of({&one, 1}) ==
        "# HELP kvcache_hit_storms_total Falls of the hit ratio off a cliff.\n"
        "# TYPE kvcache_hit_storms_total counter\n"
        "kvcache_hit_storms_total 0\n");
}

TEST_CASE("a caller's buffer gets the same page, or its beginning and how long it is") {
  everything all;
  all.own = {{"rank", "3"}};
  const cache_figures figures = all.figures();
  const std::string whole = page_of({&figures, 1});
  std::vector<std::size_t> rooms{whole.size() + 10, whole.size(), whole.size() - 1};
  for (std::size_t room = 0; room < 300; ++room) rooms.push_back(room);
  for (const std::size_t room : rooms) {
    CAPTURE(room);
    std::vector<char> buffer(room + 8, '#');
    prometheus_text page{std::span<char>(buffer).first(room)};
    kvcache::write_prometheus(page, {&figures, 1});
    CHECK(page.size() == whole.size());
    CHECK(page.complete() == (room >= whole.size()));
    const std::size_t there = room < whole.size() ? room : whole.size();
    CHECK(std::string(buffer.data(), there) == whole.substr(0, there));
    CHECK(std::string(buffer.data() + there, buffer.size() - there) == std::string(buffer.size() - there, '#'));
  }
}

TEST_CASE("numbers are exact, decimal, and free of the locale") {
  const char* const before = std::setlocale(LC_ALL, nullptr);
  const std::string kept = before == nullptr ? "C" : before;
  std::setlocale(LC_ALL, "de_DE.UTF-8");  // where it is installed, its point is a comma
  constexpr std::uint64_t highest = std::numeric_limits<std::uint64_t>::max();
  CHECK(number(0, 0) == "0");
  CHECK(number(0, 6) == "0");
  CHECK(number(7, 0) == "7");
  CHECK(number(100, 0) == "100");
  CHECK(number(63, 6) == "0.000063");
  CHECK(number(500'000, 6) == "0.5");
  CHECK(number(1'000'000, 6) == "1");
  CHECK(number(120'300'000, 6) == "120.3");
  CHECK(number(10'000'001, 6) == "10.000001");
  CHECK(number(highest, 0) == "18446744073709551615");
  CHECK(number(highest, 6) == "18446744073709.551615");
  CHECK(number(highest, 19) == "1.8446744073709551615");
  CHECK(number(1, 19) == "0.0000000000000000001");
  std::setlocale(LC_ALL, kept.c_str());
}

TEST_CASE("help texts and labels are escaped") {
  std::string text;
  prometheus_text page(text);
  page.family("a:b_1", "back\\slash, \"quotes\"\nand a line", prometheus_type::gauge);
  const prometheus_label odd[]{{"_x", "\\n is not \n, \" ends nothing, {a=\"b\"}"}, {"y", ""}};
  page.sample(odd, 1);
  CHECK(text ==
        "# HELP a:b_1 back\\\\slash, \"quotes\"\\nand a line\n# TYPE a:b_1 gauge\n"
        "a:b_1{_x=\"\\\\n is not \\n, \\\" ends nothing, {a=\\\"b\\\"}\",y=\"\"} 1\n");
  const prometheus_page read(text);
  CHECK(read.families.at("a:b_1").help == "back\\slash, \"quotes\"\nand a line");
  CHECK(read.value("a:b_1", {{"_x", odd[0].value.data()}, {"y", ""}}) == 1);
}

TEST_CASE("values beyond the last bound of a histogram are counted in the bucket for all") {
  histogram h;
  h.add((std::uint64_t{1} << 48) - 1);
  h.add(std::uint64_t{1} << 48);
  h.add(std::numeric_limits<std::uint64_t>::max());
  std::string text;
  prometheus_text page(text);
  page.family("h", "some", prometheus_type::histogram);
  page.sample({}, h);
  const prometheus_page read(text);
  CHECK(read.bucket("h", 281'474'976'710'655.0) == 1);
  CHECK(read.value("h_count") == 3);
}

#if KVCACHE_HAS_EXCEPTIONS
TEST_CASE("names that the format does not allow are refused with value and remedy") {
  std::string text;
  prometheus_text page(text);
  for (const char* const bad : {"", "1x", "a-b", "a b", "\xc3\xa4"})
    CHECK_THROWS_AS(page.family(bad, "", prometheus_type::gauge), kvcache::invalid_argument);
  CHECK(text.empty());
  page.family("good", "", prometheus_type::gauge);
  const std::string before = text;
  const prometheus_label colon[]{{"a:b", ""}};
  CHECK_THROWS_WITH(page.sample(colon, 1),
                    "prometheus: the label name 'a:b' has to be letters, digits and _, and not begin with a digit; "
                    "rename it");
  const prometheus_label twice[]{{"a", "1"}, {"b", "2"}, {"a", "3"}};
  CHECK_THROWS_WITH(page.sample(twice, 1),
                    "prometheus: the label 'a' comes twice in one sample, 1 time possible; rename it");
  CHECK(text == before);
  const prometheus_label le[]{{"le", "1"}};
  CHECK_THROWS_WITH(
      page.sample(le, 1),
      "prometheus: the label name 'le' is the format's own, as le and all that begins with __; rename it");
  const prometheus_label own[]{{"__name__", "other"}};
  CHECK_THROWS_AS(page.sample(own, 1), kvcache::invalid_argument);
  CHECK_THROWS_AS(page.sample({}, own[0], 1), kvcache::invalid_argument);
  CHECK(text == before);
  page.family("h", "", prometheus_type::histogram);
  CHECK_THROWS_AS(page.sample(le, histogram{}), kvcache::invalid_argument);
}

TEST_CASE("a page that is refused has nothing of it written, in a string and in a buffer") {
  everything a, b;
  cache_figures caches[]{a.figures(), b.figures()};
  const prometheus_label one[]{{"rank", "1"}, {"model", ""}};
  const prometheus_label same[]{{"rank", "1"}};
  const prometheus_label other[]{{"rank", "2"}, {"model", "m"}};
  caches[0].labels = one;
  caches[1].labels = other;
  const auto refused = [&](const std::string& why, const kvcache::time_unit& unit = {}) {
    INFO(why);
    std::string text = "before";
    prometheus_text page(text);
    CHECK_THROWS_WITH(kvcache::write_prometheus(page, caches, unit), kvcache_test::contains_text(why));
    CHECK(text == "before");
    char buffer[100];
    std::fill(std::begin(buffer), std::end(buffer), '#');
    prometheus_text cut{std::span<char>(buffer)};
    CHECK_THROWS_AS(kvcache::write_prometheus(cut, caches, unit), kvcache::invalid_argument);
    CHECK(cut.size() == 0);
    CHECK(std::count(std::begin(buffer), std::end(buffer), '#') == 100);
  };
  const prometheus_page good(page_of(caches));
  SECTION("labels") {
    for (const char* const name : {"state", "blocks", "le", "__name__", "1x", "a:b"}) {
      const prometheus_label bad[]{{"rank", "2"}, {name, "1"}};
      caches[1].labels = bad;
      refused("the label");
    }
  }
  SECTION("two caches of the same labels") {
    caches[1].labels = same;
    refused("caches 0 and 1 have the same labels and both have kvcache_blocks, 1 of them possible");
    // Of which one has what the other has not, they may be.
    caches[0] = {.labels = one, .counts = &a.counts};
    caches[1].counts = nullptr;
    CHECK_NOTHROW(prometheus_page(page_of(caches)));
    caches[0] = {.labels = one, .curve = a.curve};
    refused("both have kvcache_predicted_hit_ratio");
  }
  SECTION("ratios") {
    using limits = std::numeric_limits<double>;
    for (const double bad : {limits::quiet_NaN(), limits::infinity(), -limits::infinity(), -0.1, 1.1}) {
      b.curve[1].ratio = bad;
      refused(", from 0 to 1 possible; leave out what is not known");
    }
  }
  SECTION("a size twice") {
    b.curve.push_back({1'000, 0.5});
    caches[1].curve = b.curve;
    refused("a curve has 1000 blocks twice");
  }
  SECTION("units") {
    refused("the metric name 'kvcache_block_age_milli seconds'", {"milli seconds", 3});
    refused("a time unit of 20 decimals, at most 19 possible", {"seconds", 20});
  }
}
#endif

TEST_CASE("the parser of these tests finds what a server would refuse") {
  const auto refused = [](const std::string& text) {
    try {
      const prometheus_page page(text);
      return false;
    } catch (const std::runtime_error&) {
      return true;
    }
  };
  const std::string head = "# HELP a x\n# TYPE a gauge\n";
  CHECK_FALSE(refused(head + "a 1\n"));
  CHECK(refused(head + "a 1"));
  CHECK(refused(head + "a 1\na 2\n"));
  CHECK(refused(head + "b 1\n"));
  CHECK(refused(head + "a{x=\"1} 1\n"));
  CHECK(refused(head + "a{x=\"1\",x=\"1\"} 1\n"));
  CHECK(refused(head + "a 1,5\n"));
  CHECK(refused(head + head));
  CHECK(refused("# HELP a x\n# TYPE a counter\na 1\n"));
  const std::string buckets = "# HELP h x\n# TYPE h histogram\nh_bucket{le=\"1\"} 2\n";
  CHECK_FALSE(refused(buckets + "h_bucket{le=\"+Inf\"} 3\nh_sum 4\nh_count 3\n"));
  CHECK(refused(buckets + "h_bucket{le=\"+Inf\"} 3\nh_sum 4\nh_count 4\n"));
  CHECK(refused(buckets + "h_bucket{le=\"+Inf\"} 1\nh_sum 4\nh_count 1\n"));
  CHECK(refused(buckets + "h_sum 4\nh_count 2\n"));
}
