// SPDX-License-Identifier: Apache-2.0
#include "gguf_writer.hpp"

#include "bad_input.hpp"

#include <kvcache/dtype.hpp>

#include <array>
#include <cstring>

namespace engine {
namespace {

constexpr std::size_t alignment = 32;

void put_bytes(std::vector<std::byte>& out, const void* from, std::size_t size) {
  const std::size_t before = out.size();
  out.resize(before + size);
  if (size > 0) std::memcpy(out.data() + before, from, size);
}

template <class T>
void put(std::vector<std::byte>& out, const T& value) {
  put_bytes(out, &value, sizeof(T));
}

void put_string(std::vector<std::byte>& out, std::string_view text) {
  put(out, std::uint64_t{text.size()});
  put_bytes(out, text.data(), text.size());
}

void align(std::vector<std::byte>& out) { out.resize((out.size() + alignment - 1) / alignment * alignment); }

enum : std::uint32_t { u32_value = 4, i32_value = 5, f32_value = 6, bool_value = 7, string_value = 8, array_value = 9 };

}  // namespace

void gguf_writer::begin_value(std::string_view key, std::uint32_t type) {
  put_string(metadata_, key);
  put(metadata_, type);
  ++metadata_count_;
}

void gguf_writer::add(std::string_view key, std::uint32_t value) {
  begin_value(key, u32_value);
  put(metadata_, value);
}

void gguf_writer::add(std::string_view key, float value) {
  begin_value(key, f32_value);
  put(metadata_, value);
}

void gguf_writer::add(std::string_view key, bool value) {
  begin_value(key, bool_value);
  put(metadata_, static_cast<std::uint8_t>(value));
}

void gguf_writer::add(std::string_view key, std::string_view value) {
  begin_value(key, string_value);
  put_string(metadata_, value);
}

void gguf_writer::add(std::string_view key, const std::vector<std::string>& values) {
  begin_value(key, array_value);
  put(metadata_, std::uint32_t{string_value});
  put(metadata_, std::uint64_t{values.size()});
  for (const std::string& value : values) put_string(metadata_, value);
}

void gguf_writer::add(std::string_view key, const std::vector<std::int32_t>& values) {
  begin_value(key, array_value);
  put(metadata_, std::uint32_t{i32_value});
  put(metadata_, std::uint64_t{values.size()});
  for (const std::int32_t value : values) put(metadata_, value);
}

void gguf_writer::add_tensor(std::string_view name, const std::vector<std::uint64_t>& shape, tensor_type type,
                             const std::vector<float>& values) {
  if (type != tensor_type::f32 && type != tensor_type::f16)
    throw bad_input(std::string("the writer knows F32 and F16, not ") + layout_of(type).name);
  align(data_);
  put_string(headers_, name);
  put(headers_, static_cast<std::uint32_t>(shape.size()));
  for (const std::uint64_t size : shape) put(headers_, size);
  put(headers_, static_cast<std::uint32_t>(type));
  put(headers_, std::uint64_t{data_.size()});
  ++tensor_count_;
  for (const float value : values) {
    if (type == tensor_type::f32)
      put(data_, value);
    else
      put(data_, kvcache::from_float<kvcache::f16>(value).bits);
  }
}

std::vector<std::byte> gguf_writer::bytes() const {
  buffer out;
  put(out, std::array<char, 4>{'G', 'G', 'U', 'F'});
  put(out, std::uint32_t{3});
  put(out, tensor_count_);
  put(out, metadata_count_);
  put_bytes(out, metadata_.data(), metadata_.size());
  put_bytes(out, headers_.data(), headers_.size());
  align(out);
  put_bytes(out, data_.data(), data_.size());
  return out;
}

}  // namespace engine
