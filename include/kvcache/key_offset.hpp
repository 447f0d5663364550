// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/dtype.hpp>
#include <kvcache/error.hpp>
#include <kvcache/views.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

namespace kvcache {

/// The mean of a layer's keys, channel by channel: what storage::set_key_offset wants. Fed with the rows that `append`
/// would get, rotary positions and all; a few thousand tokens of any text are enough, and the mean is a property of the
/// model that can be kept in a file. One thread at a time.
class key_mean {
 public:
  /// O(kv_heads * head_dim) memory.
  key_mean(std::uint32_t kv_heads, std::uint32_t head_dim)
      : heads_(kv_heads), dim_(head_dim), sums_(std::size_t{kv_heads} * head_dim) {}

  /// Rows of further tokens, [rows, kv_heads, head_dim], of any element type. Raises invalid_argument where heads or
  /// head_dim are others. O(rows * kv_heads * head_dim).
  template <class K>
    requires element<std::remove_const_t<K>>
  void add(const rows_view<K>& k) {
    if (k.heads != heads_ || k.head_dim != dim_)
      detail::raise<invalid_argument>("key_mean: rows of " + std::to_string(k.heads) + " heads of " +
                                      std::to_string(k.head_dim) + " given, " + std::to_string(heads_) + " of " +
                                      std::to_string(dim_) + " needed; give the keys of one layer");
    for (std::uint32_t row = 0; row < k.rows; ++row)
      for (std::uint32_t head = 0; head < heads_; ++head)
        for (std::uint32_t d = 0; d < dim_; ++d)
          sums_[std::size_t{head} * dim_ + d] += static_cast<double>(to_float(k.at(row, head)[d]));
    rows_ += k.rows;
  }

  /// Rows so far.
  [[nodiscard]] std::uint64_t rows() const noexcept { return rows_; }
  /// [kv_heads, head_dim]; zeros before the first row. Where a key was not finite, neither is its channel's mean, which
  /// set_key_offset refuses. O(kv_heads * head_dim).
  [[nodiscard]] std::vector<float> mean() const {
    std::vector<float> out(sums_.size());
    for (std::size_t i = 0; rows_ != 0 && i < out.size(); ++i)
      out[i] = static_cast<float>(sums_[i] / static_cast<double>(rows_));
    return out;
  }

 private:
  std::uint32_t heads_;
  std::uint32_t dim_;
  std::uint64_t rows_ = 0;
  std::vector<double> sums_;  // [heads, dim]
};

}  // namespace kvcache
