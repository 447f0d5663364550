// SPDX-License-Identifier: Apache-2.0
// Sizes a paged KV cache before there is one: what a token and a request of named models take, how many requests a
// memory holds at once, and what the block size trades. Exit status 2: the input cannot be used.
#include "bytes.hpp"
#include "options.hpp"
#include "trade.hpp"

#include <kvcache/error.hpp>
#include <kvcache/geometry.hpp>

#include <nlohmann/json.hpp>

#include <array>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

namespace {

constexpr std::array<std::uint32_t, 8> block_sizes{1, 8, 16, 32, 64, 128, 256, 512};

struct row {
  sizing::model model;
  std::string refused;  ///< why the model cannot be split over the ranks; the numbers are then 0
  kvcache::geometry on_rank;
  std::uint64_t token_and_layer = 0, token = 0, request = 0, blocks = 0, at_once = 0;
  std::uint64_t tails = 0;  ///< bytes of the tail pool of so many requests, one block each
};

/// Whether tokens wait in a tail pool until their block is whole.
bool has_tails(const sizing::options& o) { return kvcache::seals(o.format.k) || kvcache::seals(o.format.v); }

double percent_of_memory(std::uint64_t bytes, const sizing::options& o) {
  return 100 * static_cast<double>(bytes) / static_cast<double>(o.memory);
}

std::string dtype_name(const sizing::options& o) {
  const std::string k = kvcache::name(o.format.k);
  return o.format.k == o.format.v ? k : k + ':' + kvcache::name(o.format.v);
}

row size_model(const sizing::model& model, const sizing::options& o) {
  row r{.model = model, .refused = {}, .on_rank = {}};
  try {
    r.on_rank = kvcache::shard(model.shape, o.ranks);
  } catch (const kvcache::invalid_argument& refused) {
    if (!o.all_models) throw;
    r.refused = refused.what();
    return r;
  }
  r.token_and_layer = kvcache::bytes_per_token_and_layer(r.on_rank, o.format, o.block_size);
  r.token = kvcache::bytes_per_token(r.on_rank, o.format, o.block_size);
  r.request = kvcache::bytes_per_request(r.on_rank, o.tokens, o.block_size, o.format);
  r.at_once = kvcache::concurrency(o.memory, r.on_rank, o.tokens, o.block_size, o.format);
  r.tails = kvcache::tail_pool_bytes(r.on_rank, o.block_size, r.at_once, o.format);
  r.blocks = kvcache::blocks_in(o.memory, r.on_rank, o.block_size, o.format, r.tails);
  return r;
}

unsigned long long wide(std::uint64_t value) { return value; }

void print_models(const std::vector<row>& rows, const sizing::options& o) {
  std::printf("KV in %s, requests of %llu tokens, blocks of %u, %s on each of %u rank%s\n%s\n", dtype_name(o).c_str(),
              wide(o.tokens), o.block_size, sizing::format_bytes(o.memory).c_str(), o.ranks, o.ranks == 1 ? "" : "s",
              has_tails(o) ? "tail pool: one block at 16 bits for each of the requests at once\n" : "");
  std::printf("%-16s %6s %8s %8s %12s %12s %12s %10s %9s%s\n", "model", "layers", "kv heads", "head_dim", "bytes/token",
              "bytes/token", "a request", "blocks", "requests", has_tails(o) ? "         tail pool" : "");
  std::printf("%-16s %6s %8s %8s %12s %12s %12s %10s %9s\n", "", "", "on rank", "", "and layer", "", "", "", "at once");
  for (const row& r : rows) {
    const std::string name(r.model.name);
    if (!r.refused.empty()) {
      std::printf("%-16s %s\n", name.c_str(), r.refused.c_str());
      continue;
    }
    std::printf("%-16s %6u %8u %8u %12llu %12llu %12s %10llu %9llu", name.c_str(), r.on_rank.layers, r.on_rank.kv_heads,
                r.on_rank.head_dim, wide(r.token_and_layer), wide(r.token), sizing::format_bytes(r.request).c_str(),
                wide(r.blocks), wide(r.at_once));
    if (has_tails(o))
      std::printf(" %10s %4.1f %%", sizing::format_bytes(r.tails).c_str(), percent_of_memory(r.tails, o));
    std::printf("\n");
  }
}

std::vector<sizing::block_size_trade> trades(const row& r, const sizing::options& o) {
  std::vector<sizing::block_size_trade> table;
  for (const std::uint32_t block_size : block_sizes)
    table.push_back(sizing::trade(r.on_rank, o.format, o.memory, o.tokens, block_size));
  return table;
}

void print_trades(const row& r, const sizing::options& o) {
  std::printf("\nWhat the block size trades, %s, lengths even from 1 to %llu\n\n", std::string(r.model.name).c_str(),
              wide(2 * o.tokens - 1));
  std::printf("%10s %13s %12s %13s %9s %17s%s\n", "block_size", "table entries", "table bytes", "unused slots",
              "unused", "requests at once", has_tails(o) ? " tail pool" : "");
  for (const sizing::block_size_trade& t : trades(r, o)) {
    std::printf("%10u %13.1f %12.0f %13.1f %7.2f %% %17.1f", t.block_size, t.table_entries, t.table_bytes,
                t.unused_slots, t.unused_percent, t.requests);
    if (has_tails(o)) std::printf(" %7.1f %%", t.tail_percent);
    std::printf("\n");
  }
}

void print_json(const std::vector<row>& rows, const sizing::options& o) {
  nlohmann::ordered_json out{{"dtype", dtype_name(o)},     {"tokens", o.tokens},
                             {"block_size", o.block_size}, {"memory_bytes", o.memory},
                             {"ranks", o.ranks},           {"models", nlohmann::ordered_json::array()}};
  for (const row& r : rows) {
    nlohmann::ordered_json entry{{"model", r.model.name}};
    if (!r.refused.empty()) {
      entry["refused"] = r.refused;
      out["models"].push_back(entry);
      continue;
    }
    entry["layers"] = r.on_rank.layers;
    entry["kv_heads_on_rank"] = r.on_rank.kv_heads;
    entry["head_dim"] = r.on_rank.head_dim;
    entry["bytes_per_token_and_layer"] = r.token_and_layer;
    entry["bytes_per_token"] = r.token;
    entry["bytes_per_request"] = r.request;
    entry["blocks"] = r.blocks;
    entry["requests_at_once"] = r.at_once;
    if (has_tails(o)) {
      entry["tail_pool_bytes"] = r.tails;
      entry["tail_pool_percent"] = percent_of_memory(r.tails, o);
    }
    for (const sizing::block_size_trade& t : trades(r, o)) {
      entry["block_sizes"].push_back({{"block_size", t.block_size},
                                      {"table_entries", t.table_entries},
                                      {"table_bytes", t.table_bytes},
                                      {"unused_slots", t.unused_slots},
                                      {"unused_percent", t.unused_percent},
                                      {"requests_at_once", t.requests}});
      if (has_tails(o)) entry["block_sizes"].back()["tail_pool_percent"] = t.tail_percent;
    }
    out["models"].push_back(entry);
  }
  std::printf("%s\n", out.dump(2).c_str());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto options = sizing::parse_options(argc, argv);
    if (!options) return 0;
    std::vector<row> rows;
    for (const sizing::model& model : options->chosen) rows.push_back(size_model(model, *options));
    if (options->json) {
      print_json(rows, *options);
    } else {
      print_models(rows, *options);
      for (const row& r : rows)
        if (r.refused.empty() && (!options->all_models || &r == rows.data())) print_trades(r, *options);
    }
    return 0;
  } catch (const std::exception& refused) {
    std::fprintf(stderr, "sizing: %s\n", refused.what());
    return 2;
  }
}
