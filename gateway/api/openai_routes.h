#pragma once

// The HTTP surface as a table: which path is which endpoint, by which method, open to whom.
// Free functions without state: thread-safe.

#include <optional>
#include <string>
#include <string_view>

namespace tandem::gateway {

enum class Endpoint {
  kHealthLive,
  kHealthReady,
  kModels,
  kModel,
  kChat,
  kCompletions,
  kTokenize,
  kDetokenize,
  kAnthropic,  // refused by name
  kNotServed,  // known to clients, not served here
  kUnknown,
};

struct Route {
  Endpoint endpoint = Endpoint::kUnknown;
  std::string_view method;  // GET or POST; GET stands for HEAD too
  std::string_view name;    // for logs and metrics
  bool open = false;        // needs no API key
};

Route FindRoute(std::string_view path);

// Of /v1/models/{id}.
std::string_view ModelIdOf(std::string_view path);

}  // namespace tandem::gateway
