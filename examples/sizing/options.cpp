// SPDX-License-Identifier: Apache-2.0
#include "options.hpp"

#include "bytes.hpp"

#include <kvcache/quantise.hpp>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <cstdio>
#include <string_view>

namespace sizing {
namespace {

// Small enough that no size in bytes leaves 64 bits: 4096^3 elements of two f32 a token, 2^24 tokens.
constexpr std::int64_t most_of_shape = 4096;
constexpr std::int64_t most_tokens = std::int64_t{1} << 24;
constexpr std::int64_t most_block_size = std::int64_t{1} << 20;

template <class To>
To in_range(const char* option, std::int64_t value, std::int64_t most) {
  if (value < 1 || value > most)
    throw bad_input(std::string(option) + " is " + std::to_string(value) + ", it has to be from 1 to " +
                    std::to_string(most));
  return static_cast<To>(value);
}

model find_model(const std::string& wanted) {
  const auto* found = std::ranges::find(models, wanted, &model::name);
  if (found != models.end()) return *found;
  std::string known;
  for (const model& m : models) known.append(known.empty() ? "" : ", ").append(m.name);
  throw bad_input("model '" + wanted + "' is not known; choose one of " + known +
                  ", or give --layers, --kv-heads and --head-dim");
}

bool is_known(kvcache::dtype_id id) { return std::string_view(kvcache::name(id)) != "unknown"; }

/// Calls `use` with the dtypes that K and V can be stored in, rotation apart.
template <class Use>
void for_each_dtype(Use use) {
  for (std::uint8_t i = 0; is_known(kvcache::dtype_id{i}); ++i) use(kvcache::dtype_id{i});
}

std::string known_dtypes() {
  std::string known;
  for_each_dtype([&](kvcache::dtype_id id) { known.append(known.empty() ? "" : ", ").append(kvcache::name(id)); });
  return known + ", or one of these with rotated_ before it";
}

kvcache::dtype_id find_dtype(std::string_view wanted) {
  std::optional<kvcache::dtype_id> found;
  for_each_dtype([&](kvcache::dtype_id id) {
    const auto turned = static_cast<kvcache::dtype_id>(static_cast<std::uint8_t>(id) | kvcache::rotated_bit);
    if (wanted == kvcache::name(id)) found = id;
    if (wanted == kvcache::name(turned)) found = turned;
  });
  if (!found)
    throw bad_input("dtype '" + std::string(wanted.substr(0, 80)) + "' is not known; choose one of " + known_dtypes() +
                    ", or K:V where they differ");
  return *found;
}

/// One name for both, or K:V.
kvcache::kv_format find_format(std::string_view wanted) {
  const std::size_t colon = wanted.find(':');
  if (colon == std::string_view::npos) return {find_dtype(wanted), find_dtype(wanted)};
  return {find_dtype(wanted.substr(0, colon)), find_dtype(wanted.substr(colon + 1))};
}

/// A storage would refuse it.
void validate_head_dim(const model& m, kvcache::kv_format format) {
  for (const kvcache::dtype_id id : {format.k, format.v}) {
    const bool limited = kvcache::quantization_of(id).bits != 0 || kvcache::is_rotated(id);
    if (limited && m.shape.head_dim > kvcache::max_quantised_dim)
      throw bad_input("head_dim of " + std::string(m.name) + " is " + std::to_string(m.shape.head_dim) + ", " +
                      kvcache::name(id) + " stores at most " + std::to_string(kvcache::max_quantised_dim) +
                      "; take an element type, say bf16");
  }
}

}  // namespace

std::optional<options> parse_options(int argc, const char* const* argv) {
  CLI::App app{
      "Sizes a paged KV cache: bytes a token and a request take, how many requests a memory holds at once,\n"
      "and what the block size trades."};
  std::vector<std::string> names;
  std::string dtype = "f16", memory = "24GiB";
  std::int64_t own_layers = 0, own_kv_heads = 0, own_head_dim = 0;
  std::int64_t tokens = 2048, block_size = 16, ranks = 1;
  options o;
  app.add_option("--model", names, "a model of the table; may be given again (default: all)");
  auto* const layers = app.add_option("--layers", own_layers, "a shape of your own: layers");
  auto* const kv_heads = app.add_option("--kv-heads", own_kv_heads, "... kv heads")->needs(layers);
  auto* const head_dim = app.add_option("--head-dim", own_head_dim, "... elements of one K or V vector");
  layers->needs(kv_heads)->needs(head_dim);
  head_dim->needs(layers);
  app.add_option("--dtype", dtype, "stored type of K and V, or K:V where they differ: " + known_dtypes())
      ->capture_default_str();
  app.add_option("--memory", memory, "memory for KV on each rank, such as 24GiB")->capture_default_str();
  app.add_option("--tokens", tokens, "tokens of one request, prompt and answer")->capture_default_str();
  app.add_option("--block-size", block_size, "tokens of one block")->capture_default_str();
  app.add_option("--ranks", ranks, "devices that share the kv heads")->capture_default_str();
  app.add_flag("--json", o.json, "print JSON instead of tables");
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return std::nullopt;
  } catch (const CLI::ParseError& refused) {
    throw bad_input(std::string(refused.what()) + "; --help lists the options");
  }

  o.tokens = in_range<std::uint64_t>("--tokens", tokens, most_tokens);
  o.block_size = in_range<std::uint32_t>("--block-size", block_size, most_block_size);
  o.ranks = in_range<std::uint32_t>("--ranks", ranks, most_of_shape);
  o.format = find_format(dtype);
  o.memory = parse_bytes(memory);
  for (const std::string& name : names) o.chosen.push_back(find_model(name));
  if (layers->count() > 0)
    o.chosen.push_back({"(given)",
                        {.layers = in_range<std::uint32_t>("--layers", own_layers, most_of_shape),
                         .kv_heads = in_range<std::uint32_t>("--kv-heads", own_kv_heads, most_of_shape),
                         .head_dim = in_range<std::uint32_t>("--head-dim", own_head_dim, most_of_shape)}});
  for (const model& m : o.chosen) validate_head_dim(m, o.format);
  o.all_models = o.chosen.empty();
  if (o.all_models) o.chosen.assign(models.begin(), models.end());
  return o;
}

}  // namespace sizing
