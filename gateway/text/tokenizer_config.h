#pragma once

// What tokenizer_config.json and chat_template.jinja of a model directory say: which special tokens
// prompts get, their spellings (variables of the chat template), and the chat templates themselves.
// Plain data, copyable. Everything read is bounded: the files come from outside.

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace tandem::gateway {

struct TokenizerConfig {
  std::optional<bool> add_bos_token;
  std::optional<bool> add_eos_token;
  // "bos_token", "eos_token", "pad_token", ... -> spelling; only those that are set.
  std::map<std::string, std::string> special_tokens;
  // Chat templates by name; "default" is the one used unless a request has tools and "tool_use"
  // exists. Empty: the model has no chat template.
  std::map<std::string, std::string> chat_templates;

  std::optional<std::string> SpecialToken(const std::string& name) const;
};

// Parses the text of a tokenizer_config.json. `source` names it in errors.
absl::StatusOr<TokenizerConfig> ParseTokenizerConfig(std::string_view json,
                                                     std::string_view source);

// Reads tokenizer_config.json (may be absent: everything unset) and chat_template.jinja (takes
// precedence over the file's own "default" template) of a model directory.
absl::StatusOr<TokenizerConfig> LoadTokenizerConfig(const std::filesystem::path& model_dir);

}  // namespace tandem::gateway
