// SPDX-License-Identifier: Apache-2.0
#include "dequantise.hpp"

#include "catch.hpp"
#include "support.hpp"

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

using namespace engine;

namespace {

std::vector<std::byte> from_hex(const std::string& text) {
  std::vector<std::byte> out;
  for (std::size_t i = 0; i + 1 < text.size(); i += 2)
    out.push_back(static_cast<std::byte>(std::stoul(text.substr(i, 2), nullptr, 16)));
  return out;
}

std::string to_hex(const std::vector<float>& values) {
  std::string out;
  for (const float x : values) {
    char text[9];
    std::snprintf(text, sizeof text, "%08x", static_cast<unsigned>(std::bit_cast<std::uint32_t>(x)));
    out += text;
  }
  return out;
}

}  // namespace

TEST_CASE("Every tensor type is dequantised to the same bits as by an independent reader") {
  const nlohmann::json expected = engine_test::read_json("dequantised.json");
  CHECK(expected.size() == 10);  // all but F32, which has nothing to convert
  for (const tensor_type type :
       {tensor_type::f16, tensor_type::bf16, tensor_type::q4_0, tensor_type::q4_1, tensor_type::q5_0, tensor_type::q5_1,
        tensor_type::q8_0, tensor_type::q4_k, tensor_type::q5_k, tensor_type::q6_k}) {
    const tensor_type_layout layout = layout_of(type);
    INFO(layout.name);
    const nlohmann::json& sample = expected.at(layout.name);
    const std::vector<std::byte> bytes = from_hex(sample.at("bytes"));
    REQUIRE(bytes.size() % layout.bytes == 0);
    std::vector<float> out(bytes.size() / layout.bytes * layout.elements);
    dequantise(type, bytes, out);
    CHECK(to_hex(out) == sample.at("bits").get<std::string>());
  }
}
