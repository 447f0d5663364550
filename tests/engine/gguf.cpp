// SPDX-License-Identifier: Apache-2.0
#include "gguf.hpp"

#include "bad_input.hpp"
#include "catch.hpp"
#include "gguf_writer.hpp"
#include "llama.hpp"
#include "random_model.hpp"
#include "tokeniser.hpp"

#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

using namespace engine;
using kvcache_test::contains_text;

namespace {

using file = std::vector<std::byte>;

template <class T>
void write_at(file& bytes, std::size_t at, T value) {
  std::memcpy(bytes.data() + at, &value, sizeof(T));
}

/// A file with one key of each kind and one tensor of 8 x 4 f32.
gguf_writer small_writer() {
  gguf_writer out;
  out.add("count", std::uint32_t{7});
  out.add("real", 0.5f);
  out.add("flag", true);
  out.add("text", std::string_view("words"));
  out.add("texts", std::vector<std::string>{"one", "", "three"});
  out.add("integers", std::vector<std::int32_t>{-1, 0, 5});
  std::vector<float> values(32);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  out.add_tensor("weights", {8, 4}, tensor_type::f32, values);
  return out;
}

/// Where the tensor's header says its type and its offset: they end the header section of small_writer's file.
constexpr std::size_t offset_from_end_of_headers = 8;

std::size_t end_of_headers(const file& bytes) {
  const std::string name = "weights";
  const std::string_view all(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  return all.find(name) + name.size() + 4 + 2 * 8 + 4 + 8;
}

std::string fault_of(const file& bytes) {
  try {
    gguf read{bytes};
  } catch (const bad_input& fault) {
    return fault.what();
  }
  return {};
}

}  // namespace

TEST_CASE("A GGUF file gives back what was written into it") {
  const file bytes = small_writer().bytes();
  const gguf read{bytes};
  CHECK(read.count("count") == 7);
  CHECK(read.real("real") == 0.5);
  CHECK(read.flag("flag"));
  CHECK(read.text("text") == "words");
  CHECK(read.texts("texts") == std::vector<std::string_view>{"one", "", "three"});
  CHECK(read.integers("integers") == std::vector<std::int64_t>{-1, 0, 5});
  CHECK_FALSE(read.has("nothing"));
  REQUIRE(read.tensors().size() == 1);
  const gguf_tensor* tensor = read.find("weights");
  REQUIRE(tensor != nullptr);
  CHECK(tensor->shape == std::array<std::uint64_t, 4>{8, 4, 1, 1});
  CHECK(tensor->elements == 32);
  REQUIRE(tensor->bytes.size() == 128);
  float last = 0;
  std::memcpy(&last, tensor->bytes.data() + 124, 4);
  CHECK(last == 31.0f);
  CHECK(read.find("others") == nullptr);
}

TEST_CASE("A GGUF key that is missing or of another type is named") {
  const file bytes = small_writer().bytes();
  const gguf read{bytes};
  CHECK_THROWS_WITH(read.count("nothing"), contains_text("'nothing' is missing"));
  CHECK_THROWS_WITH(read.count("text"), contains_text("'text' is not an integer"));
  CHECK_THROWS_WITH(read.real("count"), contains_text("'count' is not a floating point number"));
  CHECK_THROWS_WITH(read.text("count"), contains_text("'count' is not a string"));
  CHECK_THROWS_WITH(read.flag("count"), contains_text("'count' is not a boolean"));
  CHECK_THROWS_WITH(read.texts("integers"), contains_text("'integers' is not an array of strings"));
  CHECK_THROWS_WITH(read.integers("texts"), contains_text("'texts' is not an array of integers"));
}

TEST_CASE("A foreign or impossible GGUF file is refused in a sentence that names value and limit") {
  file bytes = small_writer().bytes();
  const std::size_t headers = end_of_headers(bytes);

  SECTION("empty") { CHECK_THAT(fault_of({}), contains_text("needs 4 bytes, the file has 0 left")); }
  SECTION("magic") {
    write_at(bytes, 0, std::uint32_t{0x46554747});
    write_at(bytes, 0, 'P');
    CHECK_THAT(fault_of(bytes), contains_text("first four bytes are 'PGUF', a GGUF file begins with 'GGUF'"));
  }
  SECTION("version") {
    write_at(bytes, 4, std::uint32_t{0x03000000});  // 3, big endian
    CHECK_THAT(fault_of(bytes), contains_text("version is 50331648, this reader knows 2 and 3"));
  }
  SECTION("tensor count") {
    write_at(bytes, 8, ~std::uint64_t{0});
    CHECK_THAT(fault_of(bytes), contains_text("claims 18446744073709551615 tensors"));
  }
  SECTION("metadata count") {
    write_at(bytes, 16, std::uint64_t{1} << 60);
    CHECK_THAT(fault_of(bytes), contains_text("claims 1152921504606846976 metadata entries"));
  }
  SECTION("length of a string") {
    write_at(bytes, 24, std::uint64_t{1} << 40);  // the first key
    CHECK_THAT(fault_of(bytes), contains_text("a metadata key needs 1099511627776 bytes"));
  }
  SECTION("type of a value") {
    write_at(bytes, 24 + 8 + 5, std::uint32_t{13});
    CHECK_THAT(fault_of(bytes), contains_text("'count' has type 13, the highest known is 12"));
  }
  SECTION("tensor type") {
    write_at(bytes, headers - offset_from_end_of_headers - 4, std::uint32_t{99});
    CHECK_THAT(fault_of(bytes), contains_text("tensor type 99 is not one of F32"));
  }
  SECTION("tensor type whose blocks do not divide the rows") {
    write_at(bytes, headers - offset_from_end_of_headers - 4, static_cast<std::uint32_t>(tensor_type::q8_0));
    CHECK_THAT(fault_of(bytes), contains_text("rows of 8 elements, Q8_0 needs a multiple of 32"));
  }
  SECTION("tensor offset beyond the file") {
    write_at(bytes, headers - offset_from_end_of_headers, std::uint64_t{1} << 20);
    CHECK_THAT(fault_of(bytes), contains_text("takes 128 bytes at offset 1048576, the data section has 128"));
  }
  SECTION("tensor offset that would wrap around") {
    write_at(bytes, headers - offset_from_end_of_headers, ~std::uint64_t{31});
    CHECK_THAT(fault_of(bytes), contains_text("the data section has 128"));
  }
  SECTION("tensor offset that is not aligned") {
    write_at(bytes, headers - offset_from_end_of_headers, std::uint64_t{4});
    CHECK_THAT(fault_of(bytes), contains_text("offset 4, not a multiple of 32"));
  }
  SECTION("tensor dimensions") {
    const std::size_t dimensions = headers - 8 - 4 - 16 - 4;
    SECTION("none") {
      write_at(bytes, dimensions, std::uint32_t{0});
      CHECK_THAT(fault_of(bytes), contains_text("has 0 dimensions, 1 to 4 are possible"));
    }
    SECTION("an empty one") {
      write_at(bytes, dimensions + 4, std::uint64_t{0});
      CHECK_THAT(fault_of(bytes), contains_text("has a dimension of 0, the least is 1"));
    }
    SECTION("a product that 64 bits do not hold") {
      write_at(bytes, dimensions + 4, std::uint64_t{1} << 40);
      write_at(bytes, dimensions + 12, std::uint64_t{1} << 40);
      CHECK_THAT(fault_of(bytes), contains_text("more elements than 64 bits can count"));
    }
  }
}

TEST_CASE("A GGUF file that says a thing twice is refused") {
  gguf_writer out = small_writer();
  SECTION("key") {
    out.add("count", std::uint32_t{8});
    CHECK_THAT(fault_of(out.bytes()), contains_text("metadata key 'count' comes twice"));
  }
  SECTION("tensor") {
    out.add_tensor("weights", {1}, tensor_type::f32, {1.0f});
    CHECK_THAT(fault_of(out.bytes()), contains_text("tensor 'weights' comes twice"));
  }
  SECTION("alignment that is none") {
    out.add("general.alignment", std::uint32_t{48});
    CHECK_THAT(fault_of(out.bytes()), contains_text("general.alignment is 48, it must be a power of two"));
  }
}

TEST_CASE("A GGUF file that was cut anywhere is refused, never read beyond its end") {
  const file whole = random_model(3);
  REQUIRE(fault_of(whole).empty());
  // Every length in the first bytes and a sample of the rest; a vector of exactly that size, so that ASan sees its end.
  std::vector<std::size_t> lengths;
  for (std::size_t length = 0; length < 300; ++length) lengths.push_back(length);
  for (std::size_t length = 300; length < whole.size(); length += 1 + length / 23) lengths.push_back(length);
  lengths.push_back(whole.size() - 1);
  for (const std::size_t length : lengths) {
    const file cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
    INFO("cut to " << length << " bytes");
    CHECK_FALSE(fault_of(cut).empty());
  }
}

TEST_CASE("A GGUF file with damaged bytes is read or refused, but never breaks the reader") {
  const file whole = random_model(4, {.layers = 1, .query_heads = 2, .kv_heads = 1});
  const std::string_view all(reinterpret_cast<const char*>(whole.data()), whole.size());
  const std::size_t header = all.find("blk.0.ffn_down.weight") + 64;
  kvcache::thread_pool workers(1);
  std::size_t refused = 0;
  for (std::uint32_t seed = 0; seed < 400; ++seed) {
    INFO("seed " << seed);
    std::mt19937 random(seed);
    file damaged = whole;
    for (std::uint32_t i = 0; i <= seed % 3; ++i) {
      // Half of the damage in the counts and scalar values at the beginning.
      const std::size_t at = random() % (seed % 2 == 0 ? std::size_t{900} : header);
      const unsigned kinds[] = {0x00, 0xff, 0x80, 0x01, static_cast<unsigned>(random() & 0xffu)};
      damaged[at] = static_cast<std::byte>(kinds[random() % 5]);
    }
    try {
      const gguf read{damaged};
      const tokeniser words(read);
      const llama model(read, workers);
    } catch (const bad_input& fault) {
      CHECK(std::string(fault.what()).size() > 20);
      ++refused;
    }
  }
  CHECK(refused > 100);
}
