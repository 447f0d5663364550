// SPDX-License-Identifier: Apache-2.0
#include "opened_model.hpp"

#include "bad_input.hpp"
#include "utf8.hpp"

#include <cstddef>
#include <span>

namespace engine {
namespace {

gguf open_gguf(std::span<const std::byte> bytes, const std::string& path) {
  try {
    return gguf(bytes);
  } catch (const bad_input& fault) {
    throw bad_input(path + ": " + fault.what());
  }
}

}  // namespace

opened_model::opened_model(const std::string& path, unsigned threads)
    : mapped(path), file(open_gguf(mapped.bytes(), path)), words(file), workers(threads), weights(file, workers) {}

std::string opened_model::name() const {
  return printable(file.has("general.name") ? file.text("general.name") : "unnamed");
}

}  // namespace engine
