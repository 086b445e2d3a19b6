#include "gateway/text/tokenizer_config.h"

#include <simdjson.h>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/text/file_reader.h"
#include "gateway/text/json_reader.h"

namespace tandem::gateway {
namespace {

// Added-token tables of published models make about 200 KB.
constexpr size_t kMaxConfigBytes = size_t{64} << 20;
constexpr size_t kMaxTemplateBytes = size_t{1} << 20;
constexpr size_t kMaxTemplates = 32;
constexpr size_t kMaxDepth = 64;
constexpr const char* kSpecialTokens[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                          "pad_token", "cls_token", "mask_token"};

absl::StatusOr<std::optional<bool>> OptionalBool(const JsonReader& value) {
  if (value.is_null()) return std::optional<bool>();
  ASSIGN_OR_RETURN(const bool flag, value.Bool(false));
  return std::optional<bool>(flag);
}

absl::Status AddTemplate(const JsonReader& where, std::string_view name, std::string_view text,
                         TokenizerConfig* config) {
  if (text.size() > kMaxTemplateBytes) return where.Invalid("chat template is too large");
  if (config->chat_templates.size() >= kMaxTemplates) return where.Invalid("too many templates");
  config->chat_templates[std::string(name)] = text;
  return absl::OkStatus();
}

absl::Status ParseTemplates(const JsonReader& value, TokenizerConfig* config) {
  if (value.is_null()) return absl::OkStatus();
  if (value.is_string()) return AddTemplate(value, "default", *value.String(), config);
  if (!value.is_array()) return value.Invalid("must be a string or a list of named templates");
  ASSIGN_OR_RETURN(const auto list, value.Array());
  size_t index = 0;
  for (const auto element : list) {
    const JsonReader entry = value.Element(element, index++);
    ASSIGN_OR_RETURN(const std::string_view name, entry.Member("name").String());
    ASSIGN_OR_RETURN(const std::string_view text, entry.Member("template").String());
    RETURN_IF_ERROR(AddTemplate(entry, name, text, config));
  }
  return absl::OkStatus();
}

}  // namespace

std::optional<std::string> TokenizerConfig::SpecialToken(const std::string& name) const {
  const auto it = special_tokens.find(name);
  if (it == special_tokens.end()) return std::nullopt;
  return it->second;
}

absl::StatusOr<TokenizerConfig> ParseTokenizerConfig(std::string_view json,
                                                     std::string_view source) {
  simdjson::dom::parser parser(kMaxConfigBytes + 1);
  simdjson::dom::element document;
  simdjson::error_code error = parser.allocate(json.size() + 1, kMaxDepth);
  if (error == simdjson::SUCCESS) error = parser.parse(json.data(), json.size()).get(document);
  if (error != simdjson::SUCCESS) {
    return absl::InvalidArgumentError(
        absl::StrCat(std::string(source), ": not JSON: ", simdjson::error_message(error)));
  }
  const JsonReader root(document, std::string(source) + ": ");
  if (!root.is_object()) return root.Invalid("must be an object");
  TokenizerConfig config;
  ASSIGN_OR_RETURN(config.add_bos_token, OptionalBool(root.Member("add_bos_token")));
  ASSIGN_OR_RETURN(config.add_eos_token, OptionalBool(root.Member("add_eos_token")));
  for (const char* name : kSpecialTokens) {
    const JsonReader token = root.Member(name);
    if (token.is_null()) continue;
    ASSIGN_OR_RETURN(const std::string_view text,
                     (token.is_object() ? token.Member("content") : token).String());
    config.special_tokens[name] = text;
  }
  RETURN_IF_ERROR(ParseTemplates(root.Member("chat_template"), &config));
  return config;
}

absl::StatusOr<TokenizerConfig> LoadTokenizerConfig(const std::filesystem::path& model_dir) {
  TokenizerConfig config;
  const std::filesystem::path path = model_dir / "tokenizer_config.json";
  const absl::StatusOr<std::string> json = ReadTextFile(path, kMaxConfigBytes);
  if (json.ok()) {
    ASSIGN_OR_RETURN(config, ParseTokenizerConfig(*json, path.string()));
  } else if (!absl::IsNotFound(json.status())) {
    return json.status();
  }
  const absl::StatusOr<std::string> jinja =
      ReadTextFile(model_dir / "chat_template.jinja", kMaxTemplateBytes);
  if (jinja.ok()) {
    config.chat_templates["default"] = *jinja;
  } else if (!absl::IsNotFound(jinja.status())) {
    return jinja.status();
  }
  return config;
}

}  // namespace tandem::gateway
