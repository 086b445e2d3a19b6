#include "gateway/text/chat_request.h"

#include <algorithm>
#include <bit>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/text/json_walker.h"

namespace tandem::gateway {
namespace {

using Author = ContentGuard::Author;

// U+FDD0 + index.
std::string SentinelUtf8(int index) { return {'\xEF', '\xB7', static_cast<char>(0x90 + index)}; }

// Indices of the messages whose role is "assistant".
absl::StatusOr<std::set<size_t>> AssistantMessages(std::string_view messages_json) {
  std::set<size_t> out;
  const JsonVisitor visitor = {
      .value =
          [&](const JsonPath& path, const std::string& value) {
            if (path.size() == 2 && path[1].in_object && path[1].key == "role" &&
                value == "assistant") {
              out.insert(path[0].index);
            }
            return std::string();
          },
      .key = [](const JsonPath&, const std::string&) { return std::string(); }};
  const absl::StatusOr<std::string> unused = CopyJson(messages_json, visitor);
  if (!unused.ok()) return Annotate(unused.status(), "messages");
  return out;
}

// messages[i].tool_calls[j].function.arguments
bool IsToolCallArguments(const JsonPath& path) {
  return path.size() == 5 && path[1].key == "tool_calls" && !path[2].in_object &&
         path[3].key == "function" && path[4].in_object && path[4].key == "arguments";
}

class RequestWriter {
 public:
  RequestWriter(const ContentGuard* guard, std::string sentinel)
      : guard_(guard), sentinel_(std::move(sentinel)) {}

  std::string Text(std::string_view text, Author author) const {
    return guard_ == nullptr ? JsonString(text) : JsonString(guard_->Mark(text, author, sentinel_));
  }

  // A copy of `json` whose strings one author wrote.
  absl::StatusOr<std::string> Copy(std::string_view json, Author author) const {
    const JsonVisitor visitor = {
        .value = [&](const JsonPath&, const std::string& value) { return Text(value, author); },
        .key = [&](const JsonPath&, const std::string& key) { return Text(key, author); }};
    return CopyJson(json, visitor);
  }

  absl::StatusOr<std::string> Messages(std::string_view json) const {
    ASSIGN_OR_RETURN(const std::set<size_t> assistant, AssistantMessages(json));
    const auto author = [&](const JsonPath& path) {
      return !path.empty() && assistant.contains(path[0].index) ? Author::kAssistant
                                                                : Author::kClient;
    };
    const JsonVisitor visitor = {
        .value =
            [&](const JsonPath& path, const std::string& value) {
              if (IsToolCallArguments(path)) {
                if (auto object = Arguments(value, author(path))) return *object;
              }
              return Text(value, author(path));
            },
        .key = [&](const JsonPath& path,
                   const std::string& key) { return Text(key, author(path)); }};
    return CopyJson(json, visitor);
  }

 private:
  // What a tool call's arguments say, if it is an object; calls without any are sent as "".
  std::optional<std::string> Arguments(const std::string& text, Author author) const {
    if (text.find_first_not_of(" \t\r\n") == std::string::npos) return "{}";
    if (!JsonBeginsWith(text, '{')) return std::nullopt;
    absl::StatusOr<std::string> object = Copy(text, author);
    if (!object.ok()) return std::nullopt;
    return *std::move(object);
  }

  const ContentGuard* guard_;  // null: control tokens in content are wanted
  std::string sentinel_;
};

// Client variables must not take the place of what the request itself says.
absl::StatusOr<std::string> WriteKwargs(const RequestWriter& writer, std::string_view json) {
  if (!JsonBeginsWith(json, '{')) {
    return absl::InvalidArgumentError("template variables: must be an object");
  }
  bool reserved = false;
  const JsonVisitor check = {
      .value = [](const JsonPath&, const std::string&) { return std::string(); },
      .key =
          [&](const JsonPath& path, const std::string& key) {
            reserved |= path.empty() && (key == "messages" || key == "tools");
            return std::string();
          }};
  const absl::StatusOr<std::string> checked = CopyJson(json, check);
  if (!checked.ok()) return Annotate(checked.status(), "template variables");
  if (reserved) {
    return absl::InvalidArgumentError(
        "template variables: \"messages\" and \"tools\" cannot be set this way");
  }
  return writer.Copy(json, Author::kClient);
}

}  // namespace

SentinelSet SentinelsIn(std::string_view text) {
  SentinelSet out = 0;
  for (size_t i = text.find("\xEF\xB7"); i != std::string_view::npos;
       i = text.find("\xEF\xB7", i + 1)) {
    const int index = i + 2 < text.size() ? static_cast<unsigned char>(text[i + 2]) - 0x90 : -1;
    if (index >= 0 && index < 32) out |= SentinelSet{1} << index;
  }
  const auto hex = [](char c) {
    return c >= '0' && c <= '9'                     ? c - '0'
           : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10
                                                    : -1;
  };
  for (size_t i = text.find("\\u"); i != std::string_view::npos; i = text.find("\\u", i + 1)) {
    if (i + 5 >= text.size() || hex(text[i + 2]) != 0xF || hex(text[i + 3]) != 0xD) continue;
    const int index = (hex(text[i + 4]) - 0xD) * 16 + hex(text[i + 5]);
    if (index >= 0 && index < 32) out |= SentinelSet{1} << index;
  }
  return out;
}

std::string JsonString(std::string_view text) {
  constexpr char kHex[] = "0123456789abcdef";
  std::string out = "\"";
  out.reserve(text.size() + 2);
  for (const char c : text) {
    if (c == '"' || c == '\\') out.push_back('\\');
    if (static_cast<unsigned char>(c) < 0x20) {
      out += "\\u00";
      out.push_back(kHex[c >> 4]);
      out.push_back(kHex[c & 15]);
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
  return out;
}

absl::StatusOr<HelperRequest> WriteHelperRequest(
    const ChatRequest& request, std::string_view template_name,
    const std::map<std::string, std::string>& special_tokens, const ContentGuard& guard,
    SentinelSet taken) {
  taken |= SentinelsIn(request.messages_json) | SentinelsIn(request.tools_json) |
           SentinelsIn(request.kwargs_json);
  const int index = std::countr_one(taken);
  if (index >= 32) {
    return absl::InvalidArgumentError("messages use all of the noncharacters U+FDD0 to U+FDEF");
  }
  const std::string sentinel = SentinelUtf8(index);
  const RequestWriter writer(request.parse_special_in_content ? nullptr : &guard, sentinel);
  if (!JsonBeginsWith(request.messages_json, '[')) {
    return absl::InvalidArgumentError("messages: must be an array");
  }
  std::string variables = "{";
  for (const auto& [name, spelling] : special_tokens) {
    absl::StrAppend(&variables, JsonString(name), ":", JsonString(spelling), ",");
  }
  ASSIGN_OR_RETURN(const std::string messages, writer.Messages(request.messages_json));
  std::string tools = "null";
  if (!request.tools_json.empty()) {
    if (!JsonBeginsWith(request.tools_json, '[')) {
      return absl::InvalidArgumentError("tools: must be an array");
    }
    absl::StatusOr<std::string> copy = writer.Copy(request.tools_json, Author::kClient);
    if (!copy.ok()) return Annotate(copy.status(), "tools");
    tools = *std::move(copy);
  }
  absl::StrAppend(&variables, "\"messages\":", messages, ",\"tools\":", tools,
                  ",\"documents\":null,\"add_generation_prompt\":",
                  request.add_generation_prompt ? "true" : "false");
  if (!request.kwargs_json.empty()) {
    ASSIGN_OR_RETURN(const std::string kwargs, WriteKwargs(writer, request.kwargs_json));
    const size_t first = kwargs.find('{') + 1;
    // Of equal keys the last one counts, so these overrule the defaults above.
    if (kwargs[first] != '}')
      absl::StrAppend(&variables, ",", kwargs.substr(first, kwargs.size() - first - 1));
  }
  variables += "}";
  const std::string now = request.now_unix_s ? absl::StrCat(*request.now_unix_s) : "null";
  return HelperRequest{
      absl::StrCat("{\"template\":", JsonString(template_name), ",\"now\":", now,
                   ",\"sentinel\":", JsonString(sentinel), ",\"variables\":", variables, "}"),
      sentinel};
}

PromptText TakeOutSentinels(std::string_view rendered, std::string_view sentinel) {
  PromptText out;
  out.text.reserve(rendered.size());
  size_t done = 0;
  while (true) {
    const size_t next = rendered.find(sentinel, done);
    out.text.append(rendered.substr(done, next - done));
    if (next == std::string_view::npos) break;
    if (!out.text.empty() && (out.breaks.empty() || out.breaks.back() != out.text.size())) {
      out.breaks.push_back(out.text.size());
    }
    done = next + sentinel.size();
  }
  if (!out.breaks.empty() && out.breaks.back() == out.text.size()) out.breaks.pop_back();
  return out;
}

}  // namespace tandem::gateway
