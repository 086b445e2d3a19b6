#include "tests/gateway/text/text_testing.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/testing/shared_data.h"

namespace tandem::gateway::testing {

using nlohmann::ordered_json;

std::optional<ordered_json> SharedJson(std::string_view relative) {
  const auto path = tandem::testing::SharedPath(relative);
  if (!path) return std::nullopt;
  return ordered_json::parse(tandem::testing::ReadWholeFile(*path));
}

const Tokenizer* SharedTokenizer(const std::string& relative) {
  static auto& loaded = *new std::map<std::string, std::unique_ptr<Tokenizer>>();
  const auto path = tandem::testing::SharedPath(relative + "/tokenizer.json");
  if (!path) return nullptr;
  std::unique_ptr<Tokenizer>& tokenizer = loaded[relative];
  if (tokenizer == nullptr) {
    auto result = Tokenizer::Load(path->parent_path());
    EXPECT_TRUE(result.ok()) << result.status();
    if (result.ok()) tokenizer = std::move(*result);
  }
  return tokenizer.get();
}

ChatTemplateOptions PatientOptions() {
  ChatTemplateOptions options;
  options.render_limit = std::chrono::minutes(1);
  options.start_limit = std::chrono::minutes(2);
  options.wait_limit = std::chrono::minutes(2);
  return options;
}

std::string ByteSpelling(int byte) {
  int code = byte;
  const auto printable = [](int b) {
    return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
  };
  if (!printable(byte)) {
    code = 0x100;
    for (int b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

ordered_json SmallTokenizerJson(const std::vector<std::pair<std::string, std::string>>& merges) {
  ordered_json vocab = ordered_json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[ByteSpelling(byte)] = byte;
  ordered_json list = ordered_json::array();
  for (const auto& [left, right] : merges) {
    vocab[left + right] = 256 + list.size();
    list.push_back({left, right});
  }
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens", ordered_json::array()},
          {"normalizer", nullptr},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
          {"post_processor", nullptr},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", list}}}};
}

}  // namespace tandem::gateway::testing
