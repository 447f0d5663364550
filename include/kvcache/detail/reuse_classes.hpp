// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache::detail {

/// Learns when blocks are used again: sorts them into classes, estimates for each class the hazard of the next
/// reference at every age, and turns it into the Gittins index, the best ratio of references to time in the cache that
/// any plan "keep it until age s" still has. Time is counted in requests. 250 KB whatever the pool.
///
/// A class is what a block is (a row: how often it was used, whether it ends its prompt, ...) crossed with what its
/// last request was (a column: how much was new, which turn of a conversation). A cell of that table that saw little
/// borrows from its row and its column, and a row from all blocks, so that little evidence suffices to start with.
class reuse_classes {
 public:
  /// Bins of age, ever wider: hazards change with the logarithm of age.
  static constexpr std::uint32_t bins = 24;
  static constexpr std::array<std::uint32_t, bins + 1> edges = [] {
    std::array<std::uint32_t, bins + 1> e{0, 1, 2, 3, 4, 6, 9};
    for (std::uint32_t i = 7; i <= bins; ++i) e[i] = e[i - 1] * 8 / 5;
    return e;
  }();

  static constexpr std::uint32_t lengths = 9;
  static constexpr std::uint32_t turns = 4;
  static constexpr std::uint32_t columns = lengths * turns;
  static constexpr std::uint32_t most_refs = 4;

  /// What was new in a request, and which turn of its conversation it was. In tokens, so that it means the same for
  /// every block size.
  [[nodiscard]] static std::uint32_t column(std::uint64_t new_tokens, std::uint32_t turn) noexcept {
    const std::uint32_t length =
        static_cast<std::uint32_t>((std::min<std::uint64_t>)(lengths - 1, std::bit_width((new_tokens + 511) / 512)));
    return length * turns + turn;
  }
  /// A block of a prompt that was used `refs` times; the last of a prompt are rarely continued just as they are.
  [[nodiscard]] static std::uint32_t prompt(std::uint32_t refs, bool last, std::uint32_t column) noexcept {
    return ((last ? most_refs : 0) + (std::min)(refs, most_refs) - 1) * columns + column;
  }
  /// Generated text that nobody has sent back yet.
  [[nodiscard]] static std::uint32_t generated(std::uint32_t column) noexcept {
    return generated_row * columns + column;
  }
  /// A root that many conversations share: its next use depends on how busy it is, so on the bin of its last wait.
  [[nodiscard]] static std::uint32_t shared(std::uint32_t bin) noexcept { return shared_first + bin; }
  /// The end of a conversation that went on differently.
  [[nodiscard]] static std::uint32_t superseded(bool used_twice) noexcept { return superseded_first + used_twice; }
  static constexpr std::uint32_t count = (2 * most_refs + 1) * columns + bins + 2;

  reuse_classes() : seen_(count), index_(std::size_t{count} * bins) {
    length_effect_.fill(1);
    turn_effect_.fill(1);
    learn();
  }

  /// A block was referenced and came into the class, together with `others` blocks of the same request.
  void joined(std::uint32_t c, std::uint32_t bin, std::uint32_t others) noexcept {
    evidence& e = seen_[c];
    e.risk[bin] += 1;
    e.blocks += 1;
    e.squares += 2.0 * others + 1;
  }
  /// So many blocks of the class reached the bin without a reference.
  void aged(std::uint32_t c, std::uint32_t bin, std::uint32_t blocks) noexcept { seen_[c].risk[bin] += blocks; }
  /// A block of the class was referenced in the bin.
  void hit(std::uint32_t c, std::uint32_t bin) noexcept { seen_[c].hit[bin] += 1; }

  /// References per request of time that a block of this class and age is worth keeping for. As of the last learn().
  [[nodiscard]] double index(std::uint32_t c, std::uint32_t bin) const noexcept { return index_[c * bins + bin]; }

  /// Takes what was seen into account, and lets it fade, as traffic changes.
  void learn() noexcept {
    std::array<evidence, rows> row{};
    evidence all;
    for (std::uint32_t c = 0; c < count; ++c) row[row_of(c)].add(seen_[c]);
    for (std::uint32_t r = 0; r < rows; ++r)
      if (r != shared_row) all.add(row[r]);
    // Before anything is known the hazard falls like 1 / age, which ranks blocks as LRU does. Shared roots follow a law
    // of their own, with which the law of conversations has nothing to do.
    hazards guess;
    for (std::uint32_t b = 0; b < bins; ++b) guess[b] = (std::min)(0.5, 0.3 * width(b) / (edges[b] + 20.0));
    const hazards law = estimate(all, guess);
    std::array<hazards, rows> row_law;
    for (std::uint32_t r = 0; r < rows; ++r) row_law[r] = estimate(row[r], r == shared_row ? guess : law);
    fit_columns(row_law);
    for (std::uint32_t c = 0; c < count; ++c) {
      const std::uint32_t r = row_of(c);
      hazards prior = row_law[r];
      if (r < crossed_rows)
        for (double& h : prior) h = (std::min)(1.0, h * column_effect(c % columns));
      rank(c, estimate(seen_[c], prior));
      seen_[c].fade();
    }
  }

 private:
  using hazards = std::array<double, bins>;

  struct evidence {
    hazards hit{};
    hazards risk{};
    double blocks = 0;
    double squares = 0;

    void add(const evidence& other) noexcept {
      for (std::uint32_t b = 0; b < bins; ++b) {
        hit[b] += other.hit[b];
        risk[b] += other.risk[b];
      }
      blocks += other.blocks;
      squares += other.squares;
    }
    void fade() noexcept {
      for (double& x : hit) x *= keep;
      for (double& x : risk) x *= keep;
      blocks *= keep;
      squares *= keep;
    }
    /// The blocks of one request come back together or not at all: they are one observation. How many there are in
    /// one, seen from a block, so that 100 blocks of one request do not pass for 100 observations, nor 16-token blocks
    /// for more than 512-token ones.
    [[nodiscard]] double observation() const noexcept { return (squares + 20) / (blocks + 1); }
  };

  static constexpr std::uint32_t generated_row = 2 * most_refs;
  static constexpr std::uint32_t crossed_rows = generated_row + 1;
  static constexpr std::uint32_t shared_row = crossed_rows;
  static constexpr std::uint32_t rows = crossed_rows + 2;
  static constexpr std::uint32_t shared_first = crossed_rows * columns;
  static constexpr std::uint32_t superseded_first = shared_first + bins;
  static constexpr double keep = 0.99;       // of the evidence, from one learn() to the next
  static constexpr double level_prior = 4;   // observations that a prior counts for: how high the hazards are,
  static constexpr double shape_prior = 16;  // and how they change with age

  [[nodiscard]] static constexpr double width(std::uint32_t bin) noexcept { return edges[bin + 1] - edges[bin]; }
  [[nodiscard]] static std::uint32_t row_of(std::uint32_t c) noexcept {
    return c < shared_first ? c / columns : c < superseded_first ? shared_row : shared_row + 1;
  }
  [[nodiscard]] double column_effect(std::uint32_t column) const noexcept {
    return length_effect_[column / turns] * turn_effect_[column % turns];
  }

  /// Proportional hazards first: as the prior, times one factor. Where there is enough evidence, each bin by itself.
  static hazards estimate(const evidence& e, const hazards& prior) noexcept {
    const double one = e.observation();
    double hits = level_prior * one;
    double expected = hits;
    for (std::uint32_t b = 0; b < bins; ++b) {
      hits += e.hit[b];
      expected += e.risk[b] * prior[b];
    }
    const double factor = hits / expected;
    const double strength = shape_prior * one;
    hazards h;
    for (std::uint32_t b = 0; b < bins; ++b) {
      const double at_most_one = (std::min)(1.0, factor * prior[b]);
      h[b] = (std::min)(1.0, (e.hit[b] + strength * at_most_one) / (e.risk[b] + strength));
    }
    return h;
  }

  /// What length and turn do to the hazard of their row: one factor each, over all rows, fitted in turn (iterative
  /// proportional fitting; it starts from the factors before, so one round each is enough).
  void fit_columns(const std::array<hazards, rows>& row_law) noexcept {
    std::array<double, columns> hits{};
    std::array<double, columns> expected{};
    for (std::uint32_t c = 0; c < shared_first; ++c) {
      const evidence& e = seen_[c];
      const hazards& law = row_law[c / columns];
      const double one = e.observation();
      double h = 0;
      double x = 0;
      for (std::uint32_t b = 0; b < bins; ++b) {
        h += e.hit[b];
        x += e.risk[b] * law[b];
      }
      hits[c % columns] += h / one;
      expected[c % columns] += x / one;
    }
    for (std::uint32_t t = 0; t < turns; ++t) {
      double h = level_prior;
      double x = level_prior;
      for (std::uint32_t l = 0; l < lengths; ++l) {
        h += hits[l * turns + t];
        x += expected[l * turns + t] * length_effect_[l];
      }
      turn_effect_[t] = h / x;
    }
    for (std::uint32_t l = 0; l < lengths; ++l) {
      double h = level_prior;
      double x = level_prior;
      for (std::uint32_t t = 0; t < turns; ++t) {
        h += hits[l * turns + t];
        x += expected[l * turns + t] * turn_effect_[t];
      }
      length_effect_[l] = h / x;
    }
  }

  /// The index at each age: the steepest way on from there. From the last bin backwards, a bin takes in the stretch
  /// after it as long as that one pays better than itself (so an age of certain silence before a likely return is
  /// judged by the return). Each stretch is taken in once.
  void rank(std::uint32_t c, const hazards& h) noexcept {
    struct stretch {
      double references;
      double time;
      double survival;
    };
    std::array<stretch, bins> after;
    std::uint32_t depth = 0;
    for (std::uint32_t b = bins; b-- > 0;) {
      stretch s{h[b], width(b) * (1 - h[b] / 2), 1 - h[b]};
      while (depth > 0 && after[depth - 1].references * s.time > s.references * after[depth - 1].time) {
        const stretch& next = after[--depth];
        s = {s.references + s.survival * next.references, s.time + s.survival * next.time, s.survival * next.survival};
      }
      after[depth++] = s;
      index_[c * bins + b] = s.references / s.time;
    }
  }

  std::array<double, lengths> length_effect_;
  std::array<double, turns> turn_effect_;
  std::vector<evidence> seen_;  // by class
  std::vector<double> index_;   // by class and bin
};

}  // namespace kvcache::detail
