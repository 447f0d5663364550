// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

namespace engine {

/// Element types of GGUF tensors that this reader knows; the numbers are the format's own.
enum class tensor_type : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q5_0 = 6,
  q5_1 = 7,
  q8_0 = 8,
  q4_k = 12,
  q5_k = 13,
  q6_k = 14,
  bf16 = 30,
};

/// How many elements one quantised block of a tensor holds and how many bytes it takes.
struct tensor_type_layout {
  const char* name;
  std::uint32_t elements;
  std::uint32_t bytes;
};

/// Throws bad_input for a number that is none of `tensor_type`.
[[nodiscard]] tensor_type_layout layout_of(std::uint32_t type);
[[nodiscard]] inline tensor_type_layout layout_of(tensor_type type) {
  return layout_of(static_cast<std::uint32_t>(type));
}

/// One tensor: its bytes lie in the file. `shape[0]` runs fastest; unused dimensions are 1.
struct gguf_tensor {
  std::string_view name;
  std::array<std::uint64_t, 4> shape{1, 1, 1, 1};
  std::uint64_t elements = 0;
  tensor_type type{};
  std::span<const std::byte> bytes;
};

/// Reader of GGUF versions 2 and 3, little endian (the format: ggml's docs/gguf.md). It checks everything it reads
/// against the size of the file, so that no file, however damaged, is read beyond its end; every fault throws
/// bad_input. Strings and tensors are views into the bytes given, which must outlive the reader.
class gguf {
 public:
  using value = std::variant<std::uint64_t, std::int64_t, double, bool, std::string_view, std::vector<std::uint64_t>,
                             std::vector<std::int64_t>, std::vector<double>, std::vector<std::string_view>>;

  explicit gguf(std::span<const std::byte> file);

  [[nodiscard]] bool has(std::string_view key) const { return metadata_.contains(key); }

  /// The value of a key. Throw bad_input where it is missing, of another type, or (for counts) negative.
  [[nodiscard]] std::uint64_t count(std::string_view key) const;
  [[nodiscard]] double real(std::string_view key) const;
  [[nodiscard]] bool flag(std::string_view key) const;
  [[nodiscard]] std::string_view text(std::string_view key) const;
  [[nodiscard]] const std::vector<std::string_view>& texts(std::string_view key) const;
  [[nodiscard]] std::vector<std::int64_t> integers(std::string_view key) const;

  [[nodiscard]] const std::vector<gguf_tensor>& tensors() const noexcept { return tensors_; }

  /// Null where the file has no such tensor.
  [[nodiscard]] const gguf_tensor* find(std::string_view name) const noexcept;

 private:
  [[nodiscard]] const value& at(std::string_view key) const;

  std::unordered_map<std::string_view, value> metadata_;
  std::vector<gguf_tensor> tensors_;
  std::unordered_map<std::string_view, std::size_t> tensor_index_;
};

}  // namespace engine
