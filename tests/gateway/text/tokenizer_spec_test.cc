// What a tokenizer.json may say, and that everything else is refused naming the key.

#include "gateway/text/tokenizer_spec.h"

#include <gtest/gtest.h>

#include "gateway/text/pre_tokenizer.h"
#include "tests/gateway/text/text_testing.h"

namespace tandem::gateway {
namespace {

using nlohmann::ordered_json;
using testing::SmallTokenizerJson;

struct Refusal {
  const char* pointer;  // where
  const char* value;    // JSON
  const char* expect;   // part of the message
};

TEST(TokenizerSpec, RefusesWhatItDoesNotKnow) {
  const Refusal refusals[] = {
      {"/normalizer", R"({"type": "Lowercase"})", "normalizer: type \"Lowercase\""},
      {"/normalizer",
       R"({"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Strip"}]})",
       "normalizer.normalizers[1]"},
      {"/normalizer", "3", "normalizer: must be an object"},
      {"/pre_tokenizer", R"({"type": "Metaspace"})", "Metaspace"},
      {"/pre_tokenizer", R"({"type": "Sequence", "pretokenizers": [{"type": "Whitespace"}]})",
       "pre_tokenizer.pretokenizers[0]"},
      {"/pre_tokenizer", R"({"type": "Sequence", "pretokenizers": []})", "no ByteLevel"},
      {"/pre_tokenizer", "null", "pre_tokenizer"},
      {"/pre_tokenizer",
       R"({"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}, {"type": "Digits"}]})",
       "after ByteLevel"},
      {"/pre_tokenizer",
       R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "a"},
           "behavior": "Sideways"}, {"type": "ByteLevel"}]})",
       "Sideways"},
      {"/pre_tokenizer",
       R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "(a"},
           "behavior": "Isolated"}, {"type": "ByteLevel"}]})",
       "does not compile"},
      {"/pre_tokenizer",
       R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "[a-z&&[^b]]"},
           "behavior": "Isolated"}, {"type": "ByteLevel"}]})",
       "&&"},
      {"/pre_tokenizer", R"({"type": "ByteLevel", "trim": true})", "\"trim\""},
      {"/decoder", "null", "decoder"},
      {"/decoder", R"({"type": "WordPiece"})", "WordPiece"},
      {"/post_processor", R"({"type": "RobertaProcessing"})", "RobertaProcessing"},
      {"/model/type", R"("Unigram")", "Unigram"},
      {"/model/dropout", "0.1", "model.dropout"},
      {"/model/byte_fallback", "true", "model.byte_fallback"},
      {"/model/end_of_word_suffix", R"("</w>")", "model.end_of_word_suffix"},
      {"/model/extra", "1", "\"extra\""},
      {"/model/vocab/a", "3000000", "id of \"a\""},
      {"/model/vocab/a", R"("x")", "id of \"a\""},
      {"/model/vocab/b", "97", "id 97 is given to two tokens"},
      {"/model/merges", R"([["a", "zz"]])", "\"zz\" is not in the vocabulary"},
      {"/model/merges", R"(["a"])", "model.merges[0]"},
      {"/model/merges", R"(["a b c"])", "model.merges[0]"},
      {"/model/merges", R"([["a", "b", "c"]])", "model.merges[0]"},
      {"/model/merges", R"([["", "b"]])", "model.merges[0]"},
      {"/added_tokens", R"([{"id": -1, "content": "x"}])", "added_tokens[0].id"},
      {"/added_tokens", R"([{"id": 99999999, "content": "x"}])", "added_tokens[0]"},
      {"/added_tokens", R"([{"id": 300}])", "added_tokens[0].content"},
      {"/added_tokens", R"([{"id": 300, "content": "x", "fuzzy": true}])", "fuzzy"},
      {"/surprise", "{}", "\"surprise\""},
  };
  for (const Refusal& refusal : refusals) {
    ordered_json json = SmallTokenizerJson({});
    json[ordered_json::json_pointer(refusal.pointer)] = ordered_json::parse(refusal.value);
    const auto result = Tokenizer::FromJson(json.dump(), "m/tokenizer.json");
    ASSERT_FALSE(result.ok()) << refusal.pointer << " " << refusal.value;
    const std::string message(result.status().message());
    EXPECT_NE(message.find(refusal.expect), std::string::npos) << message;
    EXPECT_NE(message.find("m/tokenizer.json: "), std::string::npos) << message;
  }
}

TEST(TokenizerSpec, RefusesMissingBytes) {
  ordered_json json = SmallTokenizerJson({});
  json["model"]["vocab"].erase("a");
  const auto result = Tokenizer::FromJson(json.dump(), "t");
  EXPECT_NE(result.status().message().find("no token for byte 97"), std::string::npos)
      << result.status();
}

TEST(TokenizerSpec, RefusesBrokenJson) {
  const std::string whole = SmallTokenizerJson({{"a", "b"}}).dump();
  for (const size_t size : {size_t{0}, size_t{1}, whole.size() / 2, whole.size() - 1}) {
    EXPECT_EQ(Tokenizer::FromJson(whole.substr(0, size), "t").status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  const std::string deep = std::string(1000, '[') + std::string(1000, ']');
  EXPECT_FALSE(Tokenizer::FromJson(deep, "t").ok());
  EXPECT_FALSE(Tokenizer::FromJson("[]", "t").ok());
}

TEST(TokenizerSpec, BothSpellingsOfMergesAreEqual) {
  ordered_json json = SmallTokenizerJson({{"a", "b"}, {"ab", "c"}});
  const auto pairs = Tokenizer::FromJson(json.dump(), "t");
  json["model"]["merges"] = {"a b", "ab c"};
  const auto strings = Tokenizer::FromJson(json.dump(), "t");
  ASSERT_TRUE(pairs.ok() && strings.ok());
  EXPECT_EQ(*(*pairs)->Encode("abcab", {}), (std::vector<TokenId>{257, 256}));
  EXPECT_EQ(*(*strings)->Encode("abcab", {}), (std::vector<TokenId>{257, 256}));
}

std::vector<std::string> SplitWords(const PreTokenizerStep& step, const std::string& text) {
  const auto splitter = PreTokenizer::Build({step}, "t");
  EXPECT_TRUE(splitter.ok()) << splitter.status();
  Words words{text, {{0, text.size()}}};
  Regex::Scratch scratch;
  EXPECT_TRUE(splitter->Split(&words, &scratch).ok());
  std::vector<std::string> out;
  for (const WordSpan& span : words.spans) {
    out.push_back(words.text.substr(span.begin, span.end - span.begin));
  }
  return out;
}

// The example of the tokenizers library's documentation of its split behaviors.
TEST(PreTokenizer, BehaviorsCutAsDocumented) {
  using Strings = std::vector<std::string>;
  const std::string text = "the-final--countdown";
  const struct {
    SplitBehavior behavior;
    Strings expected;
  } cases[] = {
      {SplitBehavior::kRemoved, {"the", "final", "countdown"}},
      {SplitBehavior::kIsolated, {"the", "-", "final", "-", "-", "countdown"}},
      {SplitBehavior::kMergedWithPrevious, {"the-", "final-", "-", "countdown"}},
      {SplitBehavior::kMergedWithNext, {"the", "-final", "-", "-countdown"}},
      {SplitBehavior::kContiguous, {"the", "-", "final", "--", "countdown"}},
  };
  for (const auto& [behavior, expected] : cases) {
    PreTokenizerStep step;
    step.pattern = "-";
    step.literal = true;
    step.behavior = behavior;
    EXPECT_EQ(SplitWords(step, text), expected) << static_cast<int>(behavior);
  }
  PreTokenizerStep inverted;
  inverted.pattern = "[a-z]+";
  inverted.invert = true;
  inverted.behavior = SplitBehavior::kRemoved;
  EXPECT_EQ(SplitWords(inverted, text), (Strings{"the", "final", "countdown"}));
}

TEST(PreTokenizer, PrefixSpaceComesBeforeEachWord) {
  PreTokenizerStep step;
  step.kind = PreTokenizerStep::Kind::kPrefixSpace;
  EXPECT_EQ(SplitWords(step, "ab"), (std::vector<std::string>{" ab"}));
  EXPECT_EQ(SplitWords(step, " ab"), (std::vector<std::string>{" ab"}));
}

TEST(Regex, TranslatesWhatOnigurumaReadsDifferently) {
  EXPECT_EQ(*TranslateOniguruma(R"(\p{L}+|a\h)"), R"(\p{L}+|a[0-9A-Fa-f])");
  EXPECT_FALSE(TranslateOniguruma("[a[bc]]").ok());
  EXPECT_FALSE(TranslateOniguruma("[a&&b]").ok());
  EXPECT_FALSE(TranslateOniguruma("(*UTF8)a").ok());
  EXPECT_FALSE(TranslateOniguruma(R"([\S])").ok());
  EXPECT_FALSE(TranslateOniguruma("a\\").ok());
  EXPECT_TRUE(TranslateOniguruma("[[:alpha:]]").ok());
  EXPECT_TRUE(TranslateOniguruma("[]a]").ok());
}

TEST(Regex, SpacesAreUnicodeWhiteSpace) {
  const auto regex = Regex::Compile(R"(\s)");
  ASSERT_TRUE(regex.ok()) << regex.status();
  Regex::Scratch scratch;
  const auto matches = [&](std::string_view text) {
    size_t count = 0;
    EXPECT_TRUE(regex->ForEach(text, &scratch, [&](size_t, size_t) { ++count; }).ok());
    return count;
  };
  EXPECT_EQ(matches(" \t\n\xC2\x85\xC2\xA0\xE3\x80\x80"), 6u);
  EXPECT_EQ(matches("\xE1\xA0\x8E\x1C\xE2\x80\x8B"), 0u);  // U+180E, FS, zero width space
}

TEST(Regex, EndlessBacktrackingIsAnError) {
  const auto regex = Regex::Compile(R"((a+)+$)");
  ASSERT_TRUE(regex.ok()) << regex.status();
  Regex::Scratch scratch;
  const std::string text = std::string(64, 'a') + "b";
  EXPECT_EQ(regex->ForEach(text, &scratch, [](size_t, size_t) {}).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tandem::gateway
