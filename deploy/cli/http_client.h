#pragma once

// JSON over HTTP, as the commands that talk to a running server need it.
//
// Thread-safe: every call has a connection of its own. Errors: UNAVAILABLE when the server cannot
// be reached, DEADLINE_EXCEEDED, and for an HTTP status other than 200 INTERNAL with the server's
// message; each names the URL.

#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"

namespace tandem {

class HttpClient {
 public:
  // `base_url` like "http://127.0.0.1:8080"; an empty key sends none.
  HttpClient(std::string base_url, std::string api_key);

  using Json = nlohmann::ordered_json;

  absl::StatusOr<Json> Get(const std::string& path) const;
  absl::StatusOr<Json> Post(const std::string& path, const Json& body) const;

 private:
  absl::StatusOr<Json> Ask(const std::string& path, const std::string* body) const;

  std::string base_url_;
  std::string api_key_;
};

}  // namespace tandem
