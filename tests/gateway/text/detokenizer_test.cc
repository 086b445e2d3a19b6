// Streams of ids become text as soon as it is certain and equal the whole decoding.

#include "gateway/text/detokenizer.h"

#include <gtest/gtest.h>
#include <simdjson.h>

#include "gateway/text/stop_matcher.h"
#include "tests/gateway/text/text_testing.h"

namespace tandem::gateway {
namespace {

using testing::SharedJson;
using testing::SharedTokenizer;
using Ids = std::vector<TokenId>;

bool IsUtf8(const std::string& text) { return simdjson::validate_utf8(text.data(), text.size()); }

std::vector<std::string> Deltas(const Tokenizer& tokenizer, const Ids& ids, DecodeOptions options) {
  std::vector<std::string> out;
  Detokenizer detokenizer(&tokenizer, options);
  for (const TokenId id : ids) {
    out.emplace_back();
    detokenizer.Append(id, &out.back());
  }
  out.emplace_back();
  detokenizer.Flush(&out.back());
  return out;
}

std::string Join(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& part : parts) out += part;
  return out;
}

class GoldenDeltas : public ::testing::TestWithParam<const char*> {};

TEST_P(GoldenDeltas, AreEqual) {
  const std::string name = GetParam();
  const Tokenizer* tokenizer = SharedTokenizer("data/tokenizers/" + name);
  const auto golden = SharedJson("golden/tokenizers/" + name + ".json");
  if (tokenizer == nullptr || !golden) GTEST_SKIP() << "no reference data for " << name;
  for (const char* list : {"encode", "decode"}) {
    for (const auto& entry : (*golden)[list]) {
      const auto expected = entry["deltas"].get<std::vector<std::string>>();
      const auto deltas = Deltas(*tokenizer, entry["ids"].get<Ids>(), {});
      for (const std::string& delta : deltas) EXPECT_TRUE(IsUtf8(delta));
      // When an invalid sequence becomes certain is the library's choice; its text is not.
      if (Join(expected).find("\xEF\xBF\xBD") != std::string::npos) {
        EXPECT_EQ(Join(deltas), Join(expected));
      } else {
        EXPECT_EQ(deltas, expected);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Published, GoldenDeltas, ::testing::Values("qwen3", "deepseek_v3"));

TEST(TK_8, NoBlanksAroundAddedTokens) {
  const Tokenizer* tokenizer = SharedTokenizer("data/tokenizers/qwen3");
  if (tokenizer == nullptr) GTEST_SKIP() << "no data/tokenizers/qwen3";
  const Ids ids = {151667, 562, 151668, 16};
  EXPECT_EQ(tokenizer->Decode(ids, {}), "<think>ok</think>1");
  EXPECT_EQ(Deltas(*tokenizer, ids, {}),
            (std::vector<std::string>{"<think>", "ok", "</think>", "1", ""}));
  std::string pairs;
  Detokenizer detokenizer(tokenizer, {});
  for (size_t i = 0; i < ids.size(); i += 2) {
    std::string two;
    detokenizer.Append(ids[i], &two);
    detokenizer.Append(ids[i + 1], &two);
    pairs += two + "|";
  }
  detokenizer.Flush(&pairs);
  EXPECT_EQ(pairs, "<think>ok|</think>1|");
}

TEST(TK_10, CutCharactersEndAsOneReplacement) {
  const Tokenizer* tokenizer = SharedTokenizer("data/tokenizers/qwen3");
  const auto trial = SharedJson("trials/cut_tail.json");
  if (tokenizer == nullptr || !trial) GTEST_SKIP() << "no trials/cut_tail.json";
  constexpr TokenId kImEnd = 151645;
  for (const auto& entry : *trial) {
    const Ids cut = entry["cut"].get<Ids>();
    const std::string prefix = entry["complete_prefix"];
    // Ended by its length.
    const auto deltas = Deltas(*tokenizer, cut, {});
    EXPECT_EQ(Join(deltas), prefix + "\xEF\xBF\xBD");
    EXPECT_EQ(Join(deltas), tokenizer->Decode(cut, {}));
    for (const std::string& delta : deltas) EXPECT_TRUE(IsUtf8(delta));
    // Ended by a stop id, which is not shown.
    Ids stopped = cut;
    stopped.push_back(kImEnd);
    EXPECT_EQ(Join(Deltas(*tokenizer, stopped, {.skip_special = true})), prefix + "\xEF\xBF\xBD");
    // The last token's raw bytes, for logprobs.
    const Ids whole = entry["ids"].get<Ids>();
    std::string bytes;
    for (const TokenId id : whole) bytes += tokenizer->TokenBytes(id);
    EXPECT_EQ(bytes, entry["text"].get<std::string>());
    EXPECT_FALSE(IsUtf8(std::string(tokenizer->TokenBytes(cut.back()))));
  }
}

struct Case {
  std::string_view bytes;
  std::string_view text;
};

#define R "\xEF\xBF\xBD"

TEST(Utf8Stream, ReplacesMaximalSubparts) {
  const Case cases[] = {
      {"a\xC3\xA9z", "a\xC3\xA9z"},
      {"\x80", R},
      {"\xC0\xAF", R R},  // never valid leads
      {"\xE2\x82", R},    // cut euro sign: one
      {"\xE2\x82z", R "z"},
      {"\xE2z\x82", R "z" R},
      {"\xF0\x9F\x92", R},
      {"\xF0\x80\x80\x80", R R R R},  // overlong: the second byte cannot follow
      {"\xED\xA0\x80", R R R},        // surrogate
      {"\xF4\x90\x80\x80", R R R R},  // beyond U+10FFFF
      {"\xF0\x9F\xE2\x82\xAC", R "\xE2\x82\xAC"},
      {"\xFF\xFE", R R},
  };
  for (const Case& c : cases) {
    for (size_t step = 1; step <= c.bytes.size(); ++step) {
      Utf8Stream stream;
      std::string out;
      for (size_t i = 0; i < c.bytes.size(); i += step) {
        stream.Append(c.bytes.substr(i, step), &out);
        EXPECT_TRUE(IsUtf8(out));
      }
      stream.Flush(&out);
      EXPECT_EQ(out, c.text);
      EXPECT_TRUE(stream.empty());
    }
  }
}

#undef R

TEST(Utf8Stream, HoldsBackOnlyWhatIsIncomplete) {
  Utf8Stream stream;
  std::string out;
  stream.Append("a\xF0\x9F", &out);
  EXPECT_EQ(out, "a");
  stream.Append("\xA6", &out);
  EXPECT_EQ(out, "a");
  stream.Append(
      "\x99"
      "b",
      &out);
  EXPECT_EQ(out,
            "a\xF0\x9F\xA6\x99"
            "b");
}

}  // namespace
}  // namespace tandem::gateway
