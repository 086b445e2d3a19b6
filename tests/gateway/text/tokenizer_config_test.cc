// tokenizer_config.json in the shapes that published models use, and broken ones.

#include "gateway/text/tokenizer_config.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"

namespace tandem::gateway {
namespace {

TEST(TokenizerConfig, ReadsTokensInBothShapes) {
  const auto config = ParseTokenizerConfig(
      R"({"add_bos_token": true, "add_eos_token": null, "bos_token": {"content": "<s>", "lstrip": false},
          "eos_token": "</s>", "pad_token": null, "chat_template": "{{ 1 }}", "model_max_length": 1e30})",
      "c.json");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->add_bos_token, std::optional<bool>(true));
  EXPECT_EQ(config->add_eos_token, std::nullopt);
  EXPECT_EQ(config->SpecialToken("bos_token"), std::optional<std::string>("<s>"));
  EXPECT_EQ(config->SpecialToken("eos_token"), std::optional<std::string>("</s>"));
  EXPECT_EQ(config->SpecialToken("pad_token"), std::nullopt);
  EXPECT_EQ(config->chat_templates.at("default"), "{{ 1 }}");
}

TEST(TokenizerConfig, ReadsNamedTemplates) {
  const auto config = ParseTokenizerConfig(
      R"({"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]})",
      "c.json");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->chat_templates.at("default"), "a");
  EXPECT_EQ(config->chat_templates.at("tool_use"), "b");
}

TEST(TokenizerConfig, RefusesOtherShapesNamingTheKey) {
  const std::pair<const char*, const char*> cases[] = {
      {R"([])", "must be an object"},
      {R"({"add_bos_token": "yes"})", "add_bos_token"},
      {R"({"eos_token": 3})", "eos_token"},
      {R"({"chat_template": 3})", "chat_template"},
      {R"({"chat_template": [{}]})", "name"},
      {R"({)", "not JSON"},
      {R"({"bos_token": {}})", "bos_token.content"},
  };
  for (const auto& [json, expect] : cases) {
    const auto config = ParseTokenizerConfig(json, "dir/c.json");
    EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument) << json;
    EXPECT_NE(std::string(config.status().message()).find(expect), std::string::npos)
        << config.status();
    EXPECT_NE(std::string(config.status().message()).find("dir/c.json: "), std::string::npos);
  }
}

TEST(TokenizerConfig, TemplateFileTakesPrecedence) {
  const auto dir = std::filesystem::path(::testing::TempDir()) /
                   absl::StrCat("tokenizer_config_test.", getpid());
  std::filesystem::create_directories(dir);
  EXPECT_TRUE(LoadTokenizerConfig(dir)->chat_templates.empty());
  std::ofstream(dir / "tokenizer_config.json") << R"({"chat_template": "from config"})";
  EXPECT_EQ(LoadTokenizerConfig(dir)->chat_templates.at("default"), "from config");
  std::ofstream(dir / "chat_template.jinja") << "from file";
  EXPECT_EQ(LoadTokenizerConfig(dir)->chat_templates.at("default"), "from file");
  std::ofstream(dir / "tokenizer_config.json") << "{";
  EXPECT_EQ(LoadTokenizerConfig(dir).status().code(), absl::StatusCode::kInvalidArgument);
  std::filesystem::remove_all(dir);
}

}  // namespace
}  // namespace tandem::gateway
