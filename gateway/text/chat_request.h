#pragma once

// Writes the request that the template helper gets: the chat request's JSON with its numbers and
// the order of its keys as they came, strings guarded against forged control tokens, and tool-call
// arguments as objects (clients send them as JSON strings, templates iterate over them).
//
// Thread safety: functions without state. Errors: INVALID_ARGUMENT naming what is wrong.

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "gateway/text/chat_template.h"
#include "gateway/text/content_guard.h"
#include "gateway/text/prompt_text.h"

namespace tandem::gateway {

// A set of the 32 noncharacters U+FDD0 to U+FDEF, one of which marks places in a prompt: Unicode
// keeps them for a program's inside, so text hardly ever has one; the first that it lacks is taken.
using SentinelSet = uint32_t;

// The sentinels that occur in text, as UTF-8 or as an escape \uFDD0.
SentinelSet SentinelsIn(std::string_view text);

struct HelperRequest {
  std::string json;
  std::string sentinel;  // UTF-8
};

// `special_tokens`: variables such as bos_token. `taken`: sentinels that the templates contain.
absl::StatusOr<HelperRequest> WriteHelperRequest(
    const ChatRequest& request, std::string_view template_name,
    const std::map<std::string, std::string>& special_tokens, const ContentGuard& guard,
    SentinelSet taken);

// `text` as a JSON string.
std::string JsonString(std::string_view text);

// Takes the sentinels out of a rendered prompt and makes them its breaks.
PromptText TakeOutSentinels(std::string_view rendered, std::string_view sentinel);

}  // namespace tandem::gateway
