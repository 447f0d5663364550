// SPDX-License-Identifier: Apache-2.0
// What the engine's tests share: models in memory, serving a list of requests, the real model where there is one.
#pragma once

#include "batcher.hpp"
#include "gguf.hpp"
#include "kv_cache.hpp"
#include "llama.hpp"
#include "mapped_file.hpp"
#include "random_model.hpp"
#include "tokeniser.hpp"

#include <kvcache/attention/cpu/thread_pool.hpp>
#include <kvcache/types.hpp>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace engine_test {

/// A model with everything that serves it.
struct loaded_model {
  engine::gguf file;
  engine::tokeniser words{file};
  kvcache::thread_pool workers;
  engine::llama model{file, workers};

  explicit loaded_model(std::span<const std::byte> bytes, unsigned threads = 2) : file(bytes), workers(threads) {}

  [[nodiscard]] std::unique_ptr<engine::kv_cache> cache(unsigned block_size, unsigned blocks,
                                                        const char* dtype = "f32") {
    return engine::make_kv_cache(model.shape(), {.block_size = block_size, .dtype = dtype, .blocks = blocks}, workers);
  }
};

/// The small random model.
struct small_model : private std::vector<std::byte>, loaded_model {
  explicit small_model(std::uint64_t seed = 1, unsigned threads = 2)
      : std::vector<std::byte>(engine::random_model(seed)),
        loaded_model(static_cast<const std::vector<std::byte>&>(*this), threads) {}
};

/// Hears nothing.
struct deaf final : engine::listener {};

/// Serves all requests, submitted before the first step.
inline std::vector<engine::answer> serve(loaded_model& model, engine::kv_cache& cache,
                                         const std::vector<engine::request>& requests,
                                         engine::batch_options options = {}) {
  deaf nobody;
  options.end_of_sequence = model.words.end_of_sequence();
  engine::batcher batcher(model.model, cache, options, nobody);
  for (const engine::request& r : requests) batcher.submit(r);
  batcher.run();
  return batcher.answers();
}

/// Some requests of different lengths for the small model. They do not stop before max_tokens.
inline std::vector<engine::request> some_requests(const engine::tokeniser& words) {
  const std::vector<std::pair<const char*, unsigned>> texts{
      {"the quick brown fox", 12},
      {"a", 30},
      {"counting and counting and counting the things in the house", 7},
      {"1234567890", 20},
      {"xyz", 1},
      {"another one in the batch, rather longer than most of the others are", 25},
  };
  std::vector<engine::request> out;
  for (const auto& [text, count] : texts) {
    engine::request& r = out.emplace_back();
    r.id = text;
    r.prompt = words.encode(text, engine::specials::as_text);
    r.max_tokens = count;
    r.ignore_end = true;
  }
  return out;
}

/// The real model's path: KVCACHE_MODEL, else where scripts/get_model.sh puts it. Nothing, and a line that says so,
/// where there is no such file.
inline std::optional<std::string> real_model() {
  const char* named = std::getenv("KVCACHE_MODEL");
  const std::string path = named != nullptr && *named != '\0' ? named : KVCACHE_DEFAULT_MODEL;
  if (std::filesystem::exists(path)) return path;
  std::fprintf(stderr, "SKIPPED: no model at %s; run scripts/get_model.sh or set KVCACHE_MODEL\n", path.c_str());
  return std::nullopt;
}

inline nlohmann::json read_json(const std::string& name) {
  std::ifstream in(KVCACHE_ENGINE_REFERENCE "/" + name);
  return nlohmann::json::parse(in);
}

}  // namespace engine_test
