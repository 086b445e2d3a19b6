#include "gateway/api/openai_routes.h"

#include <array>
#include <utility>

namespace tandem::gateway {
namespace {

constexpr std::string_view kModelPrefix = "/v1/models/";

constexpr std::array<std::pair<std::string_view, Route>, 16> kRoutes = {{
    {"/health", {Endpoint::kHealthReady, "GET", "health", true}},
    {"/health/live", {Endpoint::kHealthLive, "GET", "health_live", true}},
    {"/health/ready", {Endpoint::kHealthReady, "GET", "health_ready", true}},
    {"/v1/models", {Endpoint::kModels, "GET", "models", false}},
    {"/v1/chat/completions", {Endpoint::kChat, "POST", "chat_completions", false}},
    {"/v1/completions", {Endpoint::kCompletions, "POST", "completions", false}},
    {"/tokenize", {Endpoint::kTokenize, "POST", "tokenize", false}},
    {"/detokenize", {Endpoint::kDetokenize, "POST", "detokenize", false}},
    {"/v1/messages", {Endpoint::kAnthropic, "POST", "messages", false}},
    {"/v1/messages/count_tokens", {Endpoint::kAnthropic, "POST", "messages", false}},
    {"/v1/responses", {Endpoint::kNotServed, "POST", "not_served", false}},
    {"/v1/embeddings", {Endpoint::kNotServed, "POST", "not_served", false}},
    {"/v1/rerank", {Endpoint::kNotServed, "POST", "not_served", false}},
    {"/v1/audio/transcriptions", {Endpoint::kNotServed, "POST", "not_served", false}},
    {"/v1/images/generations", {Endpoint::kNotServed, "POST", "not_served", false}},
    {"/v1/moderations", {Endpoint::kNotServed, "POST", "not_served", false}},
}};

}  // namespace

Route FindRoute(std::string_view path) {
  for (const auto& [known, route] : kRoutes) {
    if (path == known) return route;
  }
  if (path.size() > kModelPrefix.size() && path.starts_with(kModelPrefix)) {
    return {Endpoint::kModel, "GET", "model", false};
  }
  return {Endpoint::kUnknown, "", "unknown", false};
}

std::string_view ModelIdOf(std::string_view path) { return path.substr(kModelPrefix.size()); }

}  // namespace tandem::gateway
