// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "gguf.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace engine {

/// Writes GGUF version 3: what make_model and tests need of it.
class gguf_writer {
 public:
  void add(std::string_view key, std::uint32_t value);
  void add(std::string_view key, float value);
  void add(std::string_view key, bool value);
  void add(std::string_view key, std::string_view value);
  void add(std::string_view key, const std::vector<std::string>& values);
  void add(std::string_view key, const std::vector<std::int32_t>& values);

  /// `shape[0]` runs fastest. The type is f32 or f16; values are rounded to it.
  void add_tensor(std::string_view name, const std::vector<std::uint64_t>& shape, tensor_type type,
                  const std::vector<float>& values);

  [[nodiscard]] std::vector<std::byte> bytes() const;

 private:
  using buffer = std::vector<std::byte>;

  void begin_value(std::string_view key, std::uint32_t type);

  buffer metadata_;
  std::uint64_t metadata_count_ = 0;
  buffer headers_;
  std::uint64_t tensor_count_ = 0;
  buffer data_;
};

}  // namespace engine
