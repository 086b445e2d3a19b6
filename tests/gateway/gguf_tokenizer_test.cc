// Tokenizers carried by a GGUF file: published ones written as converters do encode as their
// tokenizer.json does; pattern names; what is refused.

#include "gateway/gguf_tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "gateway/text/tokenizer.h"
#include "tests/gateway/text/text_testing.h"
#include "tests/testing/gguf_builder.h"
#include "tests/testing/shared_data.h"
#include "tests/testing/temp_dir.h"

namespace tandem::gateway {
namespace {

using tandem::testing::GgufBuilder;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::SharedJson;
using Ids = std::vector<TokenId>;

constexpr int kNormal = 1;
constexpr int kControl = 3;
constexpr int kUserDefined = 4;
constexpr int kUnused = 5;

struct Tokens {
  std::vector<std::string> texts;
  std::vector<int32_t> types;
  std::vector<std::string> merges;

  void Set(size_t id, const std::string& text, int type) {
    texts.resize(std::max(texts.size(), id + 1));
    types.resize(texts.size(), kUnused);
    texts[id] = text;
    types[id] = type;
  }
};

// A tokenizer.json's contents as a GGUF has them.
Tokens FromJson(const nlohmann::json& json) {
  Tokens tokens;
  for (const auto& [text, id] : json["model"]["vocab"].items()) tokens.Set(id, text, kNormal);
  for (const auto& merge : json["model"]["merges"]) {
    tokens.merges.push_back(merge.is_string()
                                ? merge.get<std::string>()
                                : merge[0].get<std::string>() + " " + merge[1].get<std::string>());
  }
  if (!json.contains("added_tokens")) return tokens;
  for (const auto& token : json["added_tokens"]) {
    tokens.Set(token["id"], token["content"], token["special"] ? kControl : kUserDefined);
  }
  return tokens;
}

// The 256 bytes and the merges h+e, he+y.
Tokens Small() {
  return FromJson(nlohmann::json(testing::SmallTokenizerJson({{"h", "e"}, {"he", "y"}})));
}

class GgufTokenizerTest : public ::testing::Test {
 protected:
  static GgufBuilder Builder(const Tokens& tokens, const std::string& pre) {
    GgufBuilder builder;
    builder.String("tokenizer.ggml.model", "gpt2").String("tokenizer.ggml.pre", pre);
    builder.Strings("tokenizer.ggml.tokens", tokens.texts);
    builder.Ints("tokenizer.ggml.token_type", tokens.types);
    builder.Strings("tokenizer.ggml.merges", tokens.merges);
    return builder;
  }
  absl::StatusOr<GgufTokenizer> Read(const GgufBuilder& builder) {
    auto model = GgufModel::Open(dir_.Write("t.gguf", builder.Build()));
    if (!model.ok()) return model.status();
    model_ = *std::move(model);
    return ReadGgufTokenizer(*model_);
  }
  std::unique_ptr<Tokenizer> Make(const GgufBuilder& builder) {
    auto read = Read(builder);
    EXPECT_TRUE(read.ok()) << read.status();
    if (!read.ok()) return nullptr;
    auto tokenizer = Tokenizer::FromSpec(std::move(read->spec), "t.gguf", std::move(read->config));
    EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
    return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
  }
  std::string ErrorOf(const GgufBuilder& builder) {
    return std::string(Read(builder).status().message());
  }

  tandem::testing::TempDir dir_;
  std::unique_ptr<GgufModel> model_;
};

struct Published {
  const char* name;
  const char* pre;
};

class PublishedGgufTokenizer : public GgufTokenizerTest,
                               public ::testing::WithParamInterface<Published> {};

TEST_P(PublishedGgufTokenizer, EncodesAsItsTokenizerJson) {
  const std::string name = GetParam().name;
  const auto path = tandem::testing::SharedPath("data/tokenizers/" + name + "/tokenizer.json");
  const auto golden = SharedJson("golden/tokenizers/" + name + ".json");
  if (!path || !golden) GTEST_SKIP() << "no reference data for " << name;
  // Not ordered_json, which compares each new key of a vocabulary with all before it.
  const auto json = nlohmann::json::parse(tandem::testing::ReadWholeFile(*path));
  const auto tokenizer = Make(Builder(FromJson(json), GetParam().pre));
  ASSERT_NE(tokenizer, nullptr);
  for (const auto& entry : (*golden)["encode"]) {
    const auto text = entry["text"].get<std::string>();
    const auto ids = tokenizer->Encode(text, {});
    ASSERT_TRUE(ids.ok()) << ids.status();
    ASSERT_EQ(*ids, entry["ids"].get<Ids>()) << text;
    const std::string decoded = entry.contains("decoded") ? entry["decoded"] : entry["text"];
    ASSERT_EQ(tokenizer->Decode(*ids, {}), decoded);
  }
}

INSTANTIATE_TEST_SUITE_P(All, PublishedGgufTokenizer,
                         ::testing::Values(Published{"qwen3", "qwen2"},
                                           Published{"deepseek_v3", "deepseek-v3"}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(GgufTokenizerTest, PatternNamesDecideHowDigitsAreCut) {
  Tokens tokens = FromJson(
      nlohmann::json(testing::SmallTokenizerJson({{"1", "2"}, {"12", "3"}, {"123", "4"}})));
  const auto pieces = [&](const char* pre) {
    const auto tokenizer = Make(Builder(tokens, pre).U32("tokenizer.ggml.bos_token_id", 0));
    return tokenizer == nullptr ? 0 : tokenizer->Encode("1234", {})->size();
  };
  EXPECT_EQ(pieces("gpt-2"), 1u);      // all at once
  EXPECT_EQ(pieces("llama-bpe"), 2u);  // in threes
  EXPECT_EQ(pieces("smollm"), 4u);     // one by one
  EXPECT_EQ(pieces("qwen2"), 4u);
}

TEST_F(GgufTokenizerTest, BytesWithoutATokenAreLeftOut) {
  Tokens tokens = Small();
  tokens.Set(4, "", kNormal);  // SmolLM2 has no token for byte 4
  const auto tokenizer = Make(Builder(tokens, "smollm"));
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(*tokenizer->Encode("hey\x04", {}), (Ids{257}));
  EXPECT_EQ(*tokenizer->Encode("\x04", {}), Ids{});
  EXPECT_EQ(*tokenizer->Encode("\x04\x05\x04\x05", {}), (Ids{5, 5}));
}

TEST_F(GgufTokenizerTest, SpecialTokensFlagsAndTemplates) {
  Tokens tokens = Small();
  tokens.Set(300, "<s>", kControl);
  tokens.Set(301, "<think>", kUserDefined);
  tokens.Set(302, "[PAD]", kUnused);
  GgufBuilder builder = Builder(tokens, "llama-bpe");
  builder.U32("tokenizer.ggml.bos_token_id", 300).U32("tokenizer.ggml.eos_token_id", 300);
  builder.String("tokenizer.chat_template", "{{ 1 }}");
  builder.Strings("tokenizer.chat_templates", {"tool_use"});
  builder.String("tokenizer.chat_template.tool_use", "{{ 2 }}");
  const auto tokenizer = Make(builder);
  ASSERT_NE(tokenizer, nullptr);
  EXPECT_EQ(tokenizer->bos_id(), 300u);
  EXPECT_EQ(tokenizer->eos_id(), 300u);
  EXPECT_EQ(*tokenizer->Encode("hey", {.add_special_tokens = true}), (Ids{300, 257}));
  EXPECT_EQ(*tokenizer->Encode("<s><think>", {}), (Ids{300, 301}));
  EXPECT_TRUE(tokenizer->IsSpecial(300));
  EXPECT_FALSE(tokenizer->IsSpecial(301));
  EXPECT_FALSE(tokenizer->TokenToId("[PAD]").has_value());
  EXPECT_EQ(tokenizer->config().chat_templates.at("default"), "{{ 1 }}");
  EXPECT_EQ(tokenizer->config().chat_templates.at("tool_use"), "{{ 2 }}");
  builder.Bool("tokenizer.ggml.add_bos_token", false);
  EXPECT_EQ(*Make(builder)->Encode("hey", {.add_special_tokens = true}), (Ids{257}));
}

TEST_F(GgufTokenizerTest, UnknownKindsAreNamedWithTheKnown) {
  EXPECT_EQ(Read(GgufBuilder()).status().code(), absl::StatusCode::kNotFound);
  GgufBuilder sentencepiece;
  sentencepiece.String("tokenizer.ggml.model", "llama");
  EXPECT_EQ(Read(sentencepiece).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(ErrorOf(sentencepiece), HasSubstr("key 'tokenizer.ggml.model': 'llama'"));
  EXPECT_EQ(Read(Builder(Small(), "tekken")).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(ErrorOf(Builder(Small(), "tekken")),
              AllOf(HasSubstr("key 'tokenizer.ggml.pre': 'tekken'"), HasSubstr("smollm")));
}

TEST_F(GgufTokenizerTest, BrokenContentsAreRefusedByKey) {
  Tokens tokens = Small();
  tokens.types.pop_back();
  EXPECT_THAT(ErrorOf(Builder(tokens, "qwen2")), HasSubstr("key 'tokenizer.ggml.token_type'"));
  tokens = Small();
  tokens.texts.back() = "\xff";
  EXPECT_THAT(ErrorOf(Builder(tokens, "qwen2")), HasSubstr("is not UTF-8"));
  for (const char* merge : {"one", "", " x", "x ", "a b c"}) {
    tokens = Small();
    tokens.merges.back() = merge;
    EXPECT_THAT(ErrorOf(Builder(tokens, "qwen2")), HasSubstr("is not two tokens")) << merge;
  }
  EXPECT_THAT(ErrorOf(Builder(Small(), "llama-bpe")), HasSubstr("there is no bos_token_id"));
  EXPECT_THAT(ErrorOf(Builder(Small(), "qwen2").U32("tokenizer.ggml.eos_token_id", 9999)),
              HasSubstr("key 'tokenizer.ggml.eos_token_id': is 9999"));
  EXPECT_THAT(ErrorOf(Builder(Small(), "qwen2").String("tokenizer.chat_template", "\xff")),
              HasSubstr("key 'tokenizer.chat_template'"));
}

}  // namespace
}  // namespace tandem::gateway
