// The tokenizer against the reference library's results on published tokenizers, and the trials
// about tokenization that users of such servers ran into.

#include "gateway/text/tokenizer.h"

#include <gtest/gtest.h>

#include "tests/gateway/text/text_testing.h"
#include "tests/testing/shared_data.h"

namespace tandem::gateway {
namespace {

using nlohmann::ordered_json;
using testing::SharedJson;
using testing::SharedTokenizer;
using testing::SmallTokenizerJson;
using Ids = std::vector<TokenId>;

std::unique_ptr<Tokenizer> Build(const ordered_json& json, TokenizerConfig config = {}) {
  auto result = Tokenizer::FromJson(json.dump(), "test.json", std::move(config));
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? std::move(*result) : nullptr;
}

Ids Encode(const Tokenizer& tokenizer, std::string_view text, EncodeOptions options = {}) {
  auto ids = tokenizer.Encode(text, options);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? *ids : Ids{};
}

class GoldenTokenizer : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    const std::string name = GetParam();
    tokenizer_ = SharedTokenizer("data/tokenizers/" + name);
    golden_ = SharedJson("golden/tokenizers/" + name + ".json");
    if (tokenizer_ == nullptr || !golden_) GTEST_SKIP() << "no reference data for " << name;
  }
  const Tokenizer* tokenizer_ = nullptr;
  std::optional<ordered_json> golden_;
};

TEST_P(GoldenTokenizer, EncodesEveryText) {
  EXPECT_EQ(tokenizer_->vocab_size(), (*golden_)["vocab_size"].get<uint32_t>());
  ASSERT_GT((*golden_)["encode"].size(), 200u);
  for (const auto& entry : (*golden_)["encode"]) {
    const auto text = entry["text"].get<std::string>();
    EXPECT_EQ(Encode(*tokenizer_, text), entry["ids"].get<Ids>()) << text;
  }
}

TEST_P(GoldenTokenizer, DecodesWhole) {
  for (const char* list : {"encode", "decode"}) {
    for (const auto& entry : (*golden_)[list]) {
      const auto ids = entry["ids"].get<Ids>();
      const std::string decoded = entry.contains("decoded") ? entry["decoded"] : entry["text"];
      EXPECT_EQ(tokenizer_->Decode(ids, {}), decoded);
      const std::string skipped = entry.value("decoded_skip_special", decoded);
      EXPECT_EQ(tokenizer_->Decode(ids, {.skip_special = true}), skipped);
    }
  }
}

TEST_P(GoldenTokenizer, MarksSpecialTokens) {
  // The file lists the first of them.
  Ids special;
  for (const auto& id : (*golden_)["special_ids"]) {
    if (id.is_number()) special.push_back(id);
  }
  ASSERT_FALSE(special.empty());
  Ids found;
  for (TokenId id = 0; id < tokenizer_->vocab_size() && found.size() < special.size(); ++id) {
    if (tokenizer_->IsSpecial(id)) found.push_back(id);
  }
  EXPECT_EQ(found, special);
}

INSTANTIATE_TEST_SUITE_P(Published, GoldenTokenizer, ::testing::Values("qwen3", "deepseek_v3"));

TEST(TK_1, RunsOfSpacesAreKept) {
  const auto trial = SharedJson("trials/tokens.json");
  if (!trial) GTEST_SKIP() << "no trials/tokens.json";
  for (const auto& [name, entries] : trial->items()) {
    const Tokenizer* tokenizer = SharedTokenizer("data/tokenizers/" + name);
    if (tokenizer == nullptr) GTEST_SKIP() << "no data/tokenizers/" << name;
    for (const auto& entry : entries) {
      const auto ids = Encode(*tokenizer, entry["text"].get<std::string>());
      EXPECT_EQ(ids, entry["ids"].get<Ids>()) << name << entry["text"];
      EXPECT_EQ(tokenizer->Decode(ids, {}), entry["decoded"].get<std::string>());
    }
  }
}

TEST(TK_3, BareByteLevelMeansTheGpt2Pattern) {
  const auto json = SharedJson("trials/tok_bare_bytelevel.json");
  const auto expected = SharedJson("trials/tok_bare_bytelevel.expected.json");
  if (!json || !expected) GTEST_SKIP() << "no trials/tok_bare_bytelevel.json";
  const auto tokenizer = Build(*json);
  ASSERT_NE(tokenizer, nullptr);
  for (const auto& entry : *expected) {
    EXPECT_EQ(Encode(*tokenizer, entry["text"].get<std::string>()), entry["ids"].get<Ids>());
    EXPECT_EQ(tokenizer->Decode(entry["ids"].get<Ids>(), {}), entry["decoded"].get<std::string>());
  }
}

TEST(TK_3, UnknownPreTokenizerIsRefusedByName) {
  ordered_json json = SmallTokenizerJson({});
  json["pre_tokenizer"] = {{"type", "UnicodeScripts"}};
  const auto result = Tokenizer::FromJson(json.dump(), "dir/tokenizer.json");
  ASSERT_EQ(result.status().code(), absl::StatusCode::kUnimplemented);
  const std::string message(result.status().message());
  EXPECT_NE(message.find("dir/tokenizer.json: pre_tokenizer"), std::string::npos) << message;
  EXPECT_NE(message.find("UnicodeScripts"), std::string::npos) << message;
}

TEST(TK_5, NonSpecialAddedTokensAreWhole) {
  const Tokenizer* tokenizer = SharedTokenizer("data/tokenizers/qwen3");
  if (tokenizer == nullptr) GTEST_SKIP() << "no data/tokenizers/qwen3";
  EXPECT_EQ(Encode(*tokenizer, "<think>ok</think>1"), (Ids{151667, 562, 151668, 16}));
}

TEST(Tokenizer, LoadsTheShippedModelsTokenizer) {
  const Tokenizer* tokenizer = SharedTokenizer("models/tandem-tiny");
  if (tokenizer == nullptr) GTEST_SKIP() << "no models/tandem-tiny";
  EXPECT_EQ(tokenizer->vocab_size(), 1024u);
  EXPECT_EQ(tokenizer->eos_id(), std::optional<TokenId>(1017));
  EXPECT_EQ(tokenizer->bos_id(), std::nullopt);
  const std::string text = "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n";
  const Ids ids = Encode(*tokenizer, text);
  EXPECT_EQ(ids.front(), 1016u);
  EXPECT_EQ(tokenizer->Decode(ids, {}), text);
  EXPECT_EQ(tokenizer->Decode(ids, {.skip_special = true}), "user\nWhat is 17 + 25?\n");
}

TEST(Tokenizer, AddsTheBosThatTheConfigAsksFor) {
  const Tokenizer* tokenizer = SharedTokenizer("data/tokenizers/deepseek_v3");
  if (tokenizer == nullptr) GTEST_SKIP() << "no data/tokenizers/deepseek_v3";
  const Ids plain = Encode(*tokenizer, "Hello");
  Ids with = Encode(*tokenizer, "Hello", {.add_special_tokens = true});
  ASSERT_EQ(with.size(), plain.size() + 1);
  EXPECT_EQ(with.front(), 0u);
  EXPECT_EQ(tokenizer->bos_id(), std::optional<TokenId>(0));
  EXPECT_EQ(tokenizer->eos_id(), std::optional<TokenId>(1));
}

TEST(Tokenizer, TemplateProcessingAddsItsTokensOnlyWhenAsked) {
  ordered_json json = SmallTokenizerJson({});
  json["added_tokens"] = {{{"id", 300}, {"content", "<s>"}, {"special", true}},
                          {{"id", 301}, {"content", "</s>"}, {"special", true}}};
  json["post_processor"] = ordered_json::parse(R"({"type": "Sequence", "processors": [
      {"type": "ByteLevel", "trim_offsets": true},
      {"type": "TemplateProcessing",
       "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                  {"SpecialToken": {"id": "</s>", "type_id": 0}}],
       "pair": [],
       "special_tokens": {"<s>": {"id": "<s>", "ids": [300], "tokens": ["<s>"]},
                          "</s>": {"id": "</s>", "ids": [301], "tokens": ["</s>"]}}}]})");
  TokenizerConfig config;
  config.add_bos_token = true;  // already in the template: not doubled
  config.special_tokens["bos_token"] = "<s>";
  const auto tokenizer = Build(json, config);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(Encode(*tokenizer, "a"), (Ids{'a'}));
  EXPECT_EQ(Encode(*tokenizer, "a", {.add_special_tokens = true}), (Ids{300, 'a', 301}));
  EXPECT_EQ(Encode(*tokenizer, "", {.add_special_tokens = true}), (Ids{300, 301}));
}

TEST(Tokenizer, AddedTokensFollowTheirRules) {
  ordered_json json = SmallTokenizerJson({});
  const auto token = [](int id, const char* text, const char* rule) {
    ordered_json entry = {{"id", id}, {"content", text}, {"special", true}};
    if (*rule != '\0') entry[rule] = true;
    return entry;
  };
  json["added_tokens"] = {token(300, "<l>", "lstrip"), token(301, "<r>", "rstrip"),
                          token(302, "<w>", "single_word"), token(303, "<a", ""),
                          token(304, "<ab>", "")};
  const auto tokenizer = Build(json);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(Encode(*tokenizer, "a \n<l> b"), (Ids{'a', 300, ' ', 'b'}));
  EXPECT_EQ(Encode(*tokenizer,
                   "a <r> \xE3\x80\x80"
                   "b"),
            (Ids{'a', ' ', 301, 'b'}));
  EXPECT_EQ(Encode(*tokenizer, "<w>.<w>"), (Ids{302, '.', 302}));
  EXPECT_EQ(Encode(*tokenizer, "a<w>"), (Ids{'a', '<', 'w', '>'}));
  EXPECT_EQ(Encode(*tokenizer, "<ab><ab"), (Ids{304, 303, 'b'}));
  EXPECT_EQ(Encode(*tokenizer, "<ab>", {.parse_special = false}), (Ids{'<', 'a', 'b', '>'}));
}

TEST(Tokenizer, NormalizedAddedTokensMatchNormalizedText) {
  ordered_json json = SmallTokenizerJson({});
  json["normalizer"] = {{"type", "NFC"}};
  json["added_tokens"] = {
      {{"id", 300}, {"content", "\xC3\xA9!"}, {"special", false}, {"normalized", true}},
      {{"id", 301}, {"content", "\xC3\xA8!"}, {"special", false}, {"normalized", false}}};
  const auto tokenizer = Build(json);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(Encode(*tokenizer, "e\xCC\x81!"), (Ids{300}));              // e + acute
  EXPECT_EQ(Encode(*tokenizer, "e\xCC\x80!"), (Ids{0xC3, 0xA8, '!'}));  // e + grave
}

TEST(Tokenizer, BreaksKeepTokensFromMatchingAcross) {
  ordered_json json = SmallTokenizerJson({});
  json["normalizer"] = {{"type", "NFC"}};
  json["added_tokens"] = {
      {{"id", 300}, {"content", "<e>"}, {"special", true}, {"normalized", false}},
      {{"id", 301}, {"content", "<n>"}, {"special", false}, {"normalized", true}},
      {{"id", 302}, {"content", "<e>x"}, {"special", true}, {"normalized", false}}};
  const auto tokenizer = Build(json);
  ASSERT_NE(tokenizer, nullptr);
  const auto encode = [&](PromptText prompt) {
    auto ids = tokenizer->Encode(prompt, {});
    EXPECT_TRUE(ids.ok()) << ids.status();
    return *ids;
  };
  EXPECT_EQ(encode({"<e><e>", {1}}), (Ids{'<', 'e', '>', 300}));
  EXPECT_EQ(encode({"<e><e>", {4}}), (Ids{300, '<', 'e', '>'}));
  // The template's <e> followed by a message's x.
  EXPECT_EQ(encode({"<e>x", {3}}), (Ids{300, 'x'}));
  // Breaks move along when normalization changes the text's length.
  EXPECT_EQ(encode({"e\xCC\x81<n><n>", {4}}), (Ids{0xC3, 0xA9, '<', 'n', '>', 301}));
}

TEST(Tokenizer, RefusesInvalidUtf8) {
  const auto tokenizer = Build(SmallTokenizerJson({}));
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->Encode("a\xC3", {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(tokenizer->Encode("\xED\xA0\x80", {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Tokenizer, EmptyTextGivesNoIds) {
  const auto tokenizer = Build(SmallTokenizerJson({}));
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_TRUE(Encode(*tokenizer, "").empty());
  EXPECT_EQ(tokenizer->Decode({}, {}), "");
  EXPECT_EQ(tokenizer->TokenBytes(1000000), "");
  EXPECT_EQ(tokenizer->Decode(Ids{1000000, 'a'}, {}), "a");
}

TEST(Tokenizer, MissingDirectoryIsNotFound) {
  const auto result = Tokenizer::Load("/nonexistent-model");
  EXPECT_EQ(result.status().code(), absl::StatusCode::kNotFound);
}

// A megabyte in one word: with a quadratic merge this would take hours, not a moment.
TEST(Tokenizer, LongRunsStayFast) {
  const auto tokenizer = Build(SmallTokenizerJson({{"a", "a"}, {"aa", "aa"}, {"aaaa", "aaaa"}}));
  ASSERT_NE(tokenizer, nullptr);
  const std::string run(1 << 20, 'a');
  EXPECT_EQ(Encode(*tokenizer, run), Ids((1 << 20) / 8, 258));
  for (const char* unit : {" ", "\n", "\xCC\x81\xCC\xA3", "'", "1"}) {
    std::string text = "x";
    while (text.size() < (1 << 20)) text += unit;
    EXPECT_EQ(tokenizer->Decode(Encode(*tokenizer, text), {}), text);
  }
}

}  // namespace
}  // namespace tandem::gateway
