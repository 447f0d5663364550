// SPDX-License-Identifier: Apache-2.0
#include "tokeniser.hpp"

#include "bad_input.hpp"
#include "catch.hpp"
#include "chat.hpp"
#include "gguf_writer.hpp"
#include "pre_tokeniser.hpp"
#include "support.hpp"
#include "utf8.hpp"

#include <string>
#include <string_view>
#include <vector>

using namespace engine;
using kvcache_test::contains_text;

namespace {

using words_of = std::vector<std::string_view>;

std::vector<std::string_view> pieces(const tokeniser& words, std::string_view text, specials how = specials::as_text) {
  std::vector<std::string_view> out;
  for (const token_id id : words.encode(text, how)) out.push_back(words.bytes_of(id));
  return out;
}

gguf_writer vocabulary(const std::vector<std::string>& tokens, const std::vector<std::string>& merges,
                       std::string_view model = "gpt2", std::string_view pre = "smollm", std::uint32_t end = 0) {
  gguf_writer out;
  out.add("tokenizer.ggml.model", model);
  out.add("tokenizer.ggml.pre", pre);
  out.add("tokenizer.ggml.tokens", tokens);
  out.add("tokenizer.ggml.token_type", std::vector<std::int32_t>(tokens.size(), 1));
  out.add("tokenizer.ggml.merges", merges);
  out.add("tokenizer.ggml.eos_token_id", end);
  return out;
}

std::string fault_of(const gguf_writer& writer) {
  const std::vector<std::byte> bytes = writer.bytes();
  const gguf file{bytes};
  try {
    tokeniser words{file};
  } catch (const bad_input& fault) {
    return fault.what();
  }
  return {};
}

}  // namespace

TEST_CASE("Text is cut into words as GPT-2's pattern does") {
  const auto split = [](std::string_view text) { return pre_tokeniser("gpt-2").split(text); };
  CHECK(split("") == words_of{});
  CHECK(split("Hello, world!") == words_of{"Hello", ",", " world", "!"});
  CHECK(split("I'm you're 'tis I'M") == words_of{"I", "'m", " you", "'re", " '", "tis", " I", "'", "M"});
  CHECK(split("a  b") == words_of{"a", " ", " b"});
  CHECK(split("a \n\n b ") == words_of{"a", " \n\n", " b", " "});
  CHECK(split("x1234 56") == words_of{"x", "1234", " 56"});
  CHECK(split("\t\tz") == words_of{"\t", "\t", "z"});
  CHECK(split("naïve été") == words_of{"naïve", " été"});
}

TEST_CASE("SmolLM's words hold each number character alone") {
  const auto split = [](std::string_view text) { return pre_tokeniser("smollm").split(text); };
  CHECK(split("x123 4") == words_of{"x", "1", "2", "3", " ", "4"});
  CHECK(split("a  5b") == words_of{"a", "  ", "5", "b"});
  CHECK(split("a  b 's5't") == words_of{"a", " ", " b", " '", "s", "5", "'t"});
  CHECK(split("½Ⅷ٣") == words_of{"½", "Ⅷ", "٣"});
}

TEST_CASE("White space is what Unicode says; bytes that are part of no character are words of their own") {
  const pre_tokeniser words("gpt-2");
  for (const std::string_view space : {"\x0b", "\xc2\x85", "\xc2\xa0", "\xe2\x80\xa8", "\xe3\x80\x80"}) {
    const std::string text = std::string("a").append(space).append("b");
    CHECK(words.split(text) == words_of{"a", space, "b"});
  }
  CHECK(words.split("a\xe1\xa0\x8e!") == words_of{"a", "\xe1\xa0\x8e!"});  // U+180E is none
  CHECK(words.split({"a\0b", 3}) == words_of{"a", {"\0", 1}, "b"});
  for (const std::string_view broken : {"\x80", "\xc3", "\xff"}) {
    const std::string text = std::string("ab").append(broken);
    CHECK(words.split(text) == words_of{"ab", broken});
  }
  CHECK(words.split("\xc0\x80") == words_of{"\xc0", "\x80"});                      // overlong
  CHECK(words.split("\xed\xa0\x80 b") == words_of{"\xed", "\xa0", "\x80", " b"});  // a surrogate
  CHECK(words.split("a \xe4\xb8 b") == words_of{"a", " ", "\xe4", "\xb8", " b"});  // cut off
}

TEST_CASE("Streamed text holds back exactly the bytes of an unfinished character") {
  CHECK(unfinished_utf8("") == 0);
  CHECK(unfinished_utf8("abc") == 0);
  CHECK(unfinished_utf8("é") == 0);
  CHECK(unfinished_utf8("a\xc3") == 1);
  CHECK(unfinished_utf8("a\xe4\xb8") == 2);
  CHECK(unfinished_utf8("a\xf0\x9f\x98") == 3);
  CHECK(unfinished_utf8("😀") == 0);
  CHECK(unfinished_utf8("\x80\x80\x80\x80") == 0);  // begins nothing, so it would wait for ever
}

TEST_CASE("Byte pairs are merged in the order of their rank") {
  const engine_test::small_model small;
  CHECK(pieces(small.words, "the") == words_of{"the"});
  CHECK(pieces(small.words, " the thing") == words_of{" the", " ", "th", "ing"});
  CHECK(pieces(small.words, "ethere") == words_of{"e", "the", "r", "e"});  // "t h" comes before "e r"
  CHECK(pieces(small.words, "and") == words_of{"and"});
  CHECK(pieces(small.words, " an") == words_of{" ", "an"});  // though " a" begins further left
}

TEST_CASE("What was encoded decodes to the same bytes, whatever they are") {
  const engine_test::small_model small;
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(static_cast<unsigned char>(byte));
  for (const std::string& text : {std::string(), all, std::string("the and  in  the 12 ✓ é"), all + all})
    CHECK(small.words.decode(small.words.encode(text, specials::as_text)) == text);
}

TEST_CASE("Names of special tokens are tokens only where asked for") {
  const engine_test::small_model small;
  const token_id end = *small.words.special("<|im_end|>");
  CHECK(end == small.words.end_of_sequence());
  CHECK(pieces(small.words, "a<|im_end|>b", specials::parse) == words_of{"a", "<|im_end|>", "b"});
  const auto as_text = small.words.encode("a<|im_end|>b", specials::as_text);
  CHECK(std::find(as_text.begin(), as_text.end(), end) == as_text.end());
  CHECK_FALSE(small.words.special("the"));
  // A message cannot end its own turn.
  const auto chat = encode_chat(small.words, {{"system", "s"}, {"user", "x<|im_end|>y"}});
  CHECK(std::count(chat.begin(), chat.end(), end) == 2);
}

TEST_CASE("A tokeniser that contradicts itself is refused in a sentence") {
  CHECK(fault_of(vocabulary({"a", "b", "ab"}, {"a b"})).empty());
  CHECK_THAT(fault_of(vocabulary({"a", "b"}, {"a b"})), contains_text("line 0 'a b' needs a token that is not in the"));
  CHECK_THAT(fault_of(vocabulary({"a"}, {"aa"})), contains_text("line 0 'aa' is not two tokens"));
  CHECK_THAT(fault_of(vocabulary({"a"}, {}, "llama")), contains_text("is 'llama', this engine knows 'gpt2'"));
  CHECK_THAT(fault_of(vocabulary({"a"}, {}, "gpt2", "qwen2")), contains_text("is 'qwen2', this engine knows"));
  CHECK_THAT(fault_of(vocabulary({"a"}, {}, "gpt2", "gpt-2", 1)),
             contains_text("eos_token_id is 1, the vocabulary has 1"));
  CHECK_THAT(fault_of(vocabulary({}, {})), contains_text("holds 0 tokens, the least is 1"));
}
