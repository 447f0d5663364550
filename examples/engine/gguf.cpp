// SPDX-License-Identifier: Apache-2.0
#include "gguf.hpp"

#include "bad_input.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

namespace engine {
namespace {

static_assert(std::endian::native == std::endian::little, "this reader copies little-endian values as they are");

[[noreturn]] void fail(const std::string& what) { throw bad_input("not a usable GGUF file: " + what); }

std::string quoted(std::string_view name) {
  constexpr std::size_t most = 80;  // a damaged length must not flood the message
  std::string out = "'";
  for (const char c : name.substr(0, most)) out += (c >= ' ' && c <= '~') ? c : '?';
  if (name.size() > most) out += "...";
  return out + "'";
}

/// Reads forward through the file and never beyond its end.
class cursor {
 public:
  explicit cursor(std::span<const std::byte> file) : file_(file) {}

  [[nodiscard]] std::uint64_t position() const noexcept { return position_; }
  [[nodiscard]] std::uint64_t left() const noexcept { return file_.size() - position_; }

  template <class T>
  T number(const char* what) {
    need(sizeof(T), what);
    T out;
    std::memcpy(&out, file_.data() + position_, sizeof(T));
    position_ += sizeof(T);
    return out;
  }

  std::string_view string(const char* what) {
    const auto length = number<std::uint64_t>(what);
    need(length, what);
    const char* text = reinterpret_cast<const char*>(file_.data() + position_);
    position_ += length;
    return {text, static_cast<std::size_t>(length)};
  }

  void need(std::uint64_t bytes, const char* what) const {
    if (bytes <= left()) return;
    fail("at byte " + std::to_string(position_) + " " + what + " needs " + std::to_string(bytes) +
         " bytes, the file has " + std::to_string(left()) + " left (is it truncated?)");
  }

  /// A count of things of at least `bytes` bytes each must fit in what is left.
  void need_each(std::uint64_t count, std::uint64_t bytes, const char* what) const {
    if (count <= left() / bytes) return;
    fail("it claims " + std::to_string(count) + " " + what + ", the " + std::to_string(left()) +
         " bytes left can hold at most " + std::to_string(left() / bytes) + " (is it truncated?)");
  }

 private:
  std::span<const std::byte> file_;
  std::uint64_t position_ = 0;
};

enum class value_type : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

std::uint64_t least_bytes(value_type type) {
  switch (type) {
    case value_type::u8:
    case value_type::i8:
    case value_type::boolean: return 1;
    case value_type::u16:
    case value_type::i16: return 2;
    case value_type::u32:
    case value_type::i32:
    case value_type::f32: return 4;
    case value_type::u64:
    case value_type::i64:
    case value_type::f64:
    case value_type::string: return 8;
    case value_type::array: break;
  }
  return 0;
}

value_type read_type(cursor& in, std::string_view key) {
  const auto type = in.number<std::uint32_t>("a metadata type");
  if (type > static_cast<std::uint32_t>(value_type::f64))
    fail("metadata key " + quoted(key) + " has type " + std::to_string(type) + ", the highest known is 12");
  return static_cast<value_type>(type);
}

template <class Out, class In>
std::vector<Out> read_array(cursor& in, std::uint64_t count) {
  std::vector<Out> out;
  out.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) out.push_back(static_cast<Out>(in.number<In>("an array element")));
  return out;
}

gguf::value read_array(cursor& in, std::string_view key) {
  const value_type type = read_type(in, key);
  const auto count = in.number<std::uint64_t>("an array length");
  if (type == value_type::array) fail("metadata key " + quoted(key) + " is an array of arrays, the depth limit is 1");
  in.need_each(count, least_bytes(type), "array elements");
  switch (type) {
    case value_type::u8:
    case value_type::boolean: return read_array<std::uint64_t, std::uint8_t>(in, count);
    case value_type::u16: return read_array<std::uint64_t, std::uint16_t>(in, count);
    case value_type::u32: return read_array<std::uint64_t, std::uint32_t>(in, count);
    case value_type::u64: return read_array<std::uint64_t, std::uint64_t>(in, count);
    case value_type::i8: return read_array<std::int64_t, std::int8_t>(in, count);
    case value_type::i16: return read_array<std::int64_t, std::int16_t>(in, count);
    case value_type::i32: return read_array<std::int64_t, std::int32_t>(in, count);
    case value_type::i64: return read_array<std::int64_t, std::int64_t>(in, count);
    case value_type::f32: return read_array<double, float>(in, count);
    case value_type::f64: return read_array<double, double>(in, count);
    case value_type::string:
    case value_type::array: break;
  }
  std::vector<std::string_view> out;
  out.reserve(count);
  for (std::uint64_t i = 0; i < count; ++i) out.push_back(in.string("a string of an array"));
  return out;
}

gguf::value read_value(cursor& in, std::string_view key) {
  constexpr const char* what = "a metadata value";
  switch (read_type(in, key)) {
    case value_type::u8: return std::uint64_t{in.number<std::uint8_t>(what)};
    case value_type::u16: return std::uint64_t{in.number<std::uint16_t>(what)};
    case value_type::u32: return std::uint64_t{in.number<std::uint32_t>(what)};
    case value_type::u64: return in.number<std::uint64_t>(what);
    case value_type::i8: return std::int64_t{in.number<std::int8_t>(what)};
    case value_type::i16: return std::int64_t{in.number<std::int16_t>(what)};
    case value_type::i32: return std::int64_t{in.number<std::int32_t>(what)};
    case value_type::i64: return in.number<std::int64_t>(what);
    case value_type::f32: return double{in.number<float>(what)};
    case value_type::f64: return in.number<double>(what);
    case value_type::boolean: return in.number<std::uint8_t>(what) != 0;
    case value_type::string: return in.string(what);
    case value_type::array: break;
  }
  return read_array(in, key);
}

std::uint64_t product(std::uint64_t a, std::uint64_t b, std::string_view name) {
  if (b != 0 && a > std::numeric_limits<std::uint64_t>::max() / b)
    fail("tensor " + quoted(name) + " has more elements than 64 bits can count");
  return a * b;
}

/// A tensor's header; its bytes are found once the data section's start is known.
struct tensor_header {
  gguf_tensor tensor;
  std::uint64_t offset = 0;
  std::uint64_t size = 0;
};

tensor_header read_tensor_header(cursor& in) {
  tensor_header out;
  gguf_tensor& tensor = out.tensor;
  tensor.name = in.string("a tensor name");
  const auto dimensions = in.number<std::uint32_t>("a tensor's dimension count");
  if (dimensions == 0 || dimensions > tensor.shape.size())
    fail("tensor " + quoted(tensor.name) + " has " + std::to_string(dimensions) + " dimensions, 1 to 4 are possible");
  tensor.elements = 1;
  for (std::uint32_t i = 0; i < dimensions; ++i) {
    tensor.shape[i] = in.number<std::uint64_t>("a tensor dimension");
    if (tensor.shape[i] == 0) fail("tensor " + quoted(tensor.name) + " has a dimension of 0, the least is 1");
    tensor.elements = product(tensor.elements, tensor.shape[i], tensor.name);
  }
  const auto type = in.number<std::uint32_t>("a tensor type");
  const tensor_type_layout layout = layout_of(type);
  tensor.type = static_cast<tensor_type>(type);
  if (tensor.shape[0] % layout.elements != 0)
    fail("tensor " + quoted(tensor.name) + " has rows of " + std::to_string(tensor.shape[0]) + " elements, " +
         layout.name + " needs a multiple of " + std::to_string(layout.elements));
  out.size = product(tensor.elements / layout.elements, layout.bytes, tensor.name);
  out.offset = in.number<std::uint64_t>("a tensor offset");
  return out;
}

void read_magic(cursor& in) {
  const auto magic = in.number<std::array<char, 4>>("the magic number");
  if (std::string_view(magic.data(), magic.size()) != "GGUF")
    fail("its first four bytes are " + quoted({magic.data(), magic.size()}) + ", a GGUF file begins with 'GGUF'");
  const auto version = in.number<std::uint32_t>("the version");
  if (version != 2 && version != 3)
    fail("its version is " + std::to_string(version) + ", this reader knows 2 and 3 (little endian)");
}

}  // namespace

tensor_type_layout layout_of(std::uint32_t type) {
  switch (static_cast<tensor_type>(type)) {
    case tensor_type::f32: return {"F32", 1, 4};
    case tensor_type::f16: return {"F16", 1, 2};
    case tensor_type::bf16: return {"BF16", 1, 2};
    case tensor_type::q4_0: return {"Q4_0", 32, 18};
    case tensor_type::q4_1: return {"Q4_1", 32, 20};
    case tensor_type::q5_0: return {"Q5_0", 32, 22};
    case tensor_type::q5_1: return {"Q5_1", 32, 24};
    case tensor_type::q8_0: return {"Q8_0", 32, 34};
    case tensor_type::q4_k: return {"Q4_K", 256, 144};
    case tensor_type::q5_k: return {"Q5_K", 256, 176};
    case tensor_type::q6_k: return {"Q6_K", 256, 210};
  }
  fail("tensor type " + std::to_string(type) +
       " is not one of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K; convert the model to one of "
       "these");
}

gguf::gguf(std::span<const std::byte> file) {
  cursor in(file);
  read_magic(in);
  const auto tensor_count = in.number<std::uint64_t>("the tensor count");
  const auto metadata_count = in.number<std::uint64_t>("the metadata count");

  in.need_each(metadata_count, 8 + 4 + 1, "metadata entries");
  for (std::uint64_t i = 0; i < metadata_count; ++i) {
    const std::string_view key = in.string("a metadata key");
    if (!metadata_.emplace(key, read_value(in, key)).second) fail("metadata key " + quoted(key) + " comes twice");
  }

  in.need_each(tensor_count, 8 + 4 + 8 + 4 + 8, "tensors");
  std::vector<tensor_header> headers;
  headers.reserve(tensor_count);
  for (std::uint64_t i = 0; i < tensor_count; ++i) headers.push_back(read_tensor_header(in));

  const std::uint64_t alignment = has("general.alignment") ? count("general.alignment") : 32;
  if (!std::has_single_bit(alignment) || alignment > (1u << 20))
    fail("general.alignment is " + std::to_string(alignment) + ", it must be a power of two up to 1048576");
  const std::uint64_t start = (in.position() + alignment - 1) / alignment * alignment;
  const std::uint64_t data_size = file.size() > start ? file.size() - start : 0;
  for (tensor_header& header : headers) {
    const std::string_view name = header.tensor.name;
    if (header.offset % alignment != 0)
      fail("tensor " + quoted(name) + " lies at offset " + std::to_string(header.offset) + ", not a multiple of " +
           std::to_string(alignment));
    if (header.offset > data_size || header.size > data_size - header.offset)
      fail("tensor " + quoted(name) + " takes " + std::to_string(header.size) + " bytes at offset " +
           std::to_string(header.offset) + ", the data section has " + std::to_string(data_size) +
           " (is it truncated?)");
    header.tensor.bytes = file.subspan(start + header.offset, header.size);
    if (!tensor_index_.emplace(name, tensors_.size()).second) fail("tensor " + quoted(name) + " comes twice");
    tensors_.push_back(header.tensor);
  }
}

const gguf::value& gguf::at(std::string_view key) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) fail("metadata key " + quoted(key) + " is missing");
  return found->second;
}

std::uint64_t gguf::count(std::string_view key) const {
  const value& v = at(key);
  if (const auto* u = std::get_if<std::uint64_t>(&v)) return *u;
  const auto* i = std::get_if<std::int64_t>(&v);
  if (i == nullptr) fail("metadata key " + quoted(key) + " is not an integer");
  if (*i < 0) fail("metadata key " + quoted(key) + " is " + std::to_string(*i) + ", the least is 0");
  return static_cast<std::uint64_t>(*i);
}

double gguf::real(std::string_view key) const {
  const auto* v = std::get_if<double>(&at(key));
  if (v == nullptr) fail("metadata key " + quoted(key) + " is not a floating point number");
  return *v;
}

bool gguf::flag(std::string_view key) const {
  const auto* v = std::get_if<bool>(&at(key));
  if (v == nullptr) fail("metadata key " + quoted(key) + " is not a boolean");
  return *v;
}

std::string_view gguf::text(std::string_view key) const {
  const auto* v = std::get_if<std::string_view>(&at(key));
  if (v == nullptr) fail("metadata key " + quoted(key) + " is not a string");
  return *v;
}

const std::vector<std::string_view>& gguf::texts(std::string_view key) const {
  const auto* v = std::get_if<std::vector<std::string_view>>(&at(key));
  if (v == nullptr) fail("metadata key " + quoted(key) + " is not an array of strings");
  return *v;
}

std::vector<std::int64_t> gguf::integers(std::string_view key) const {
  const value& v = at(key);
  if (const auto* i = std::get_if<std::vector<std::int64_t>>(&v)) return *i;
  const auto* u = std::get_if<std::vector<std::uint64_t>>(&v);
  if (u == nullptr) fail("metadata key " + quoted(key) + " is not an array of integers");
  std::vector<std::int64_t> out(u->size());
  std::transform(u->begin(), u->end(), out.begin(), [](std::uint64_t x) { return static_cast<std::int64_t>(x); });
  return out;
}

const gguf_tensor* gguf::find(std::string_view name) const noexcept {
  const auto found = tensor_index_.find(name);
  return found == tensor_index_.end() ? nullptr : &tensors_[found->second];
}

}  // namespace engine
