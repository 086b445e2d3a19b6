#pragma once

// Requests and responses of the HTTP server as its handlers see them.

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tandem::gateway {

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpRequest {
  std::string method;
  std::string path;     // of the target, percent-decoded; the query is dropped
  HttpHeaders headers;  // names in lower case
  std::string body;

  // Empty where absent.
  std::string_view Header(std::string_view lower_case_name) const {
    const auto found = std::find_if(headers.begin(), headers.end(), [&](const auto& header) {
      return header.first == lower_case_name;
    });
    return found == headers.end() ? std::string_view() : std::string_view(found->second);
  }
};

struct HttpResponse {
  int status = 200;
  std::string body;
  std::string content_type = "application/json";
  HttpHeaders headers;
};

}  // namespace tandem::gateway
