// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <kvcache/concepts.hpp>
#include <kvcache/detail/config.hpp>
#include <kvcache/error.hpp>
#include <kvcache/fwd.hpp>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>

namespace kvcache {

// A variant states only what it adds to the plain softmax; `combine` joins several. `sliding_window` implies causal;
// the others do not, so that an encoder can use them too: a decoder writes combine<causal, soft_cap>.

/// A query sees no token after its own position.
struct causal {
  static constexpr const char* name = "causal";
  static constexpr variant_features features{.causal = true};
};

/// A query sees every token of its sequence.
struct full {
  static constexpr const char* name = "full";
  static constexpr variant_features features{};
};

/// A query sees the newest `variant_values::window` tokens, its own included, and none after its own.
struct sliding_window {
  static constexpr const char* name = "sliding_window";
  static constexpr variant_features features{.causal = true, .window = true};
};

/// Logits pass through cap * tanh(logit / cap).
struct soft_cap {
  static constexpr const char* name = "soft_cap";
  static constexpr variant_features features{.soft_cap = true};
};

/// Adds -slope * |query position - key position| to each logit, after the soft cap (Press et al., "Train Short, Test
/// Long", 2021).
struct alibi {
  static constexpr const char* name = "alibi";
  static constexpr variant_features features{.alibi = true};
};

/// One learned logit for each query head joins the softmax and adds no value (Xiao et al., "Efficient Streaming
/// Language Models with Attention Sinks", 2023, in its learned form).
struct sinks {
  static constexpr const char* name = "sinks";
  static constexpr variant_features features{.sinks = true};
};

/// The caller's mask says which tokens a query sees.
struct custom_mask {
  static constexpr const char* name = "custom_mask";
  static constexpr variant_features features{.mask = true};
};

namespace detail {

template <class First, class... Rest>
struct joined_name {
  static constexpr std::size_t length(const char* text) noexcept {
    std::size_t n = 0;
    while (text[n] != '\0') ++n;
    return n;
  }
  static constexpr auto value = [] {
    std::array<char, length(First::name) + (0 + ... + (1 + length(Rest::name))) + 1> text{};
    std::size_t at = 0;
    for (const char* c = First::name; *c != '\0'; ++c) text[at++] = *c;
    [[maybe_unused]] const auto append = [&](const char* part) {
      text[at++] = '+';
      for (; *part != '\0'; ++part) text[at++] = *part;
    };
    (append(Rest::name), ...);
    return text;
  }();
};

}  // namespace detail

/// The variants together: a feature is there when one of them has it.
template <attention_variant First, attention_variant... Rest>
struct combine {
  static constexpr const char* name = detail::joined_name<First, Rest...>::value.data();
  static constexpr variant_features features{
      .causal = (First::features.causal || ... || Rest::features.causal),
      .window = (First::features.window || ... || Rest::features.window),
      .soft_cap = (First::features.soft_cap || ... || Rest::features.soft_cap),
      .alibi = (First::features.alibi || ... || Rest::features.alibi),
      .sinks = (First::features.sinks || ... || Rest::features.sinks),
      .mask = (First::features.mask || ... || Rest::features.mask),
  };
};

/// Which tokens each query row of a step sees, one bit each: query row r of the step sees token t of its sequence when
/// bit t % 8 of data[r * row_stride + t / 8] is set. All query heads of a row share its bits. Owns nothing.
struct mask_view {
  const std::uint8_t* data = nullptr;
  std::uint32_t rows = 0;
  std::int64_t row_stride = 0;  ///< bytes from one row to the next; 8 times as many tokens fit

  [[nodiscard]] KVCACHE_HOST_DEVICE constexpr bool sees(std::uint32_t row, std::uint32_t token) const noexcept {
    return ((data[row * row_stride + (token >> 3)] >> (token & 7u)) & 1u) != 0;
  }
};

/// The run-time values of a variant; layers of one model may differ in them. Owns nothing.
struct variant_values {
  float scale = 0;                        ///< of q . k; 0: 1 / sqrt(head_dim)
  std::uint32_t window = 0;               ///< sliding_window: tokens seen, the query's own included
  float soft_cap = 0;                     ///< soft_cap: the cap
  std::span<const float> alibi_slopes{};  ///< alibi: one for each query head
  std::span<const float> sinks{};         ///< sinks: one logit for each query head, natural scale; -inf adds nothing
  mask_view mask{};                       ///< custom_mask
};

/// Holds `values` against what the variant uses. Raises invalid_argument, naming value, limit and remedy, where a value
/// is missing, impossible, or given though the variant does not use it. `rows` and `longest` are the batch's query rows
/// and its longest kv length. Scales and caps may be from 2^-100 to 2^100 and slopes up to 2^60 either way, so that no
/// product with them leaves f32, denormals aside. O(query_heads).
template <class = void>
KVCACHE_NOINLINE void validate(const variant_features& features, const variant_values& values,
                               std::uint32_t query_heads, std::uint32_t rows, std::uint32_t longest) {
  const auto refuse = [](const std::string& text) { detail::raise<invalid_argument>("attention: " + text); };
  // By bits, so that -ffast-math cannot let a NaN through.
  const auto bits_of = [](float x) { return std::bit_cast<std::uint32_t>(x); };
  const auto usual = [&](float x) { return bits_of(x) >= bits_of(0x1p-100f) && bits_of(x) <= bits_of(0x1p100f); };
  const auto shown = [](float x) {
    char text[32];
    std::snprintf(text, sizeof text, "%g", static_cast<double>(x));
    return std::string(text);
  };
  const auto unused = [&](const char* what, const char* variant) {
    refuse(std::string("a ") + what + " is given, but the variant uses none; add " + variant +
           " to the policy bundle's variant, or leave it out");
  };

  if (bits_of(values.scale) << 1 != 0 && !usual(values.scale))
    refuse("scale is " + shown(values.scale) + ", 2^-100 to 2^100 possible; 0 means 1/sqrt(head_dim)");

  if (features.window && values.window == 0)
    refuse("window is 0, at least 1 needed; a window counts the query's own position");
  if (!features.window && values.window != 0) unused("window", "sliding_window");

  if (features.soft_cap && !usual(values.soft_cap))
    refuse("soft_cap is " + shown(values.soft_cap) +
           ", 2^-100 to 2^100 possible; give the model's value, or leave soft_cap out of the variant");
  if (!features.soft_cap && std::bit_cast<std::uint32_t>(values.soft_cap) != 0) unused("soft_cap", "soft_cap");

  const auto per_head = [&](bool used, std::size_t size, const char* what, const char* variant) {
    if (used && size != query_heads)
      refuse(std::to_string(size) + ' ' + what + " given, " + std::to_string(query_heads) +
             " needed; give one for each query head");
    if (!used && size != 0) unused(what, variant);
  };
  per_head(features.alibi, values.alibi_slopes.size(), "alibi_slopes", "alibi");
  per_head(features.sinks, values.sinks.size(), "sinks", "sinks");
  for (const float slope : values.alibi_slopes)
    if ((bits_of(slope) & 0x7fff'ffffu) > bits_of(0x1p60f))
      refuse("an ALiBi slope is " + shown(slope) + ", -2^60 to 2^60 possible; give the model's slopes");
  for (const float sink : values.sinks)
    if ((bits_of(sink) & 0x7fff'ffffu) >= 0x7f80'0000u && bits_of(sink) != 0xff80'0000u)
      refuse("a sink is " + shown(sink) + ", it has to be finite, or -inf to add nothing; give the model's sinks");

  if (features.mask) {
    if (values.mask.rows < rows || (values.mask.data == nullptr && rows > 0))
      refuse("the mask has " + std::to_string(values.mask.data == nullptr ? 0 : values.mask.rows) + " rows, " +
             std::to_string(rows) + " needed; give one for each query row of the step");
    if (rows > 0 && values.mask.row_stride < (std::int64_t{longest} + 7) / 8)
      refuse("the mask's row_stride of " + std::to_string(values.mask.row_stride) + " bytes holds " +
             std::to_string(values.mask.row_stride * 8) + " tokens, the longest sequence has " +
             std::to_string(longest) + "; make the rows longer");
  }
  if (!features.mask && values.mask.data != nullptr) unused("mask", "custom_mask");
}

/// The tokens [begin, end) that a query sees, its mask apart.
struct visible_range {
  std::uint32_t begin = 0;
  std::uint32_t end = 0;
};

/// What the query at `position` (negative: before the first token) sees of a sequence of `kv_length` tokens.
[[nodiscard]] KVCACHE_HOST_DEVICE constexpr visible_range visible(const variant_features& features,
                                                                  std::uint32_t window, std::int64_t position,
                                                                  std::uint32_t kv_length) noexcept {
  std::int64_t begin = 0;
  std::int64_t end = kv_length;
  if (features.causal) end = position + 1 < end ? position + 1 : end;
  if (features.window) begin = position + 1 - std::int64_t{window};
  begin = begin < 0 ? 0 : begin;
  if (begin >= end) return {};
  return {static_cast<std::uint32_t>(begin), static_cast<std::uint32_t>(end)};
}

static_assert(attention_variant<causal> && attention_variant<full> && attention_variant<sliding_window> &&
              attention_variant<soft_cap> && attention_variant<alibi> && attention_variant<sinks> &&
              attention_variant<custom_mask> && attention_variant<combine<sliding_window, soft_cap>>);

}  // namespace kvcache
