// Chat messages of the OpenAI dialect.

#include <algorithm>
#include <array>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/api/api_error.h"
#include "gateway/api/openai_request.h"

namespace tandem::gateway {
namespace {

constexpr std::array<std::string_view, 6> kRoles = {"system",    "developer", "user",
                                                    "assistant", "tool",      "function"};

// Text parts become one text, a line each, as templates that know only texts expect.
absl::StatusOr<std::string> JoinParts(const Json& parts, const std::string& path) {
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string part_path = absl::StrCat(path, "[", i, "]");
    const Json& part = parts[i];
    if (!part.is_object()) return FieldError(part_path, part_path + " must be an object");
    FieldReader reader(part, part_path + ".");
    std::optional<std::string> type;
    reader.Text("type", &type);
    RETURN_IF_ERROR(reader.status());
    if (type.value_or("text") != "text") {
      return FieldError(part_path + ".type",
                        absl::StrCat(part_path, ": parts of type `", type->substr(0, 64),
                                     "` are not supported, only `text`"));
    }
    std::optional<std::string> part_text;
    reader.Text("text", &part_text);
    RETURN_IF_ERROR(reader.status());
    if (!part_text) return FieldError(part_path + ".text", part_path + ".text is required");
    if (i > 0) text += '\n';
    text += *part_text;
  }
  return text;
}

absl::StatusOr<Json> NormalizeMessage(const Json& message, const std::string& path) {
  if (!message.is_object()) return FieldError(path, path + " must be an object");
  FieldReader reader(message, path + ".");
  std::optional<std::string> role;
  reader.Text("role", &role);
  RETURN_IF_ERROR(reader.status());
  if (!role) return FieldError(path + ".role", path + ".role is required");
  if (std::find(kRoles.begin(), kRoles.end(), *role) == kRoles.end()) {
    return FieldError(path + ".role",
                      absl::StrCat(path, ".role: `", role->substr(0, 64), "` is not a role"));
  }
  Json normalized = message;
  normalized["role"] = *role == "developer" ? "system" : *role;
  const std::string content_path = path + ".content";
  const Json* const content = reader.Find("content");
  if (content == nullptr) {
    // An assistant's turn may consist of tool calls alone.
    if (*role != "assistant") return FieldError(content_path, content_path + " is required");
    normalized["content"] = nullptr;
  } else if (content->is_array()) {
    ASSIGN_OR_RETURN(normalized["content"], JoinParts(*content, content_path));
  } else if (!content->is_string()) {
    return FieldError(content_path, content_path + " must be a string or an array of parts");
  }
  return normalized;
}

}  // namespace

absl::StatusOr<std::string> NormalizeMessages(const Json& messages, std::string_view param) {
  const std::string name(param);
  if (!messages.is_array()) return FieldError(name, name + " must be an array");
  if (messages.empty()) return FieldError(name, name + " must have at least one message");
  Json normalized = Json::array();
  for (size_t i = 0; i < messages.size(); ++i) {
    ASSIGN_OR_RETURN(Json message, NormalizeMessage(messages[i], absl::StrCat(name, "[", i, "]")));
    normalized.push_back(std::move(message));
  }
  return normalized.dump();
}

}  // namespace tandem::gateway
