#pragma once

// A client that sends bytes exactly as told, for tests of the HTTP server. One owner.

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"

namespace tandem::gateway {

struct ClientResponse {
  int status = 0;  // 0: the connection ended or timed out before a response
  std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
  std::string body;                                          // without chunk framing

  std::string Header(std::string_view name) const;
  nlohmann::json Json() const;  // null for a body that is not JSON
  std::string ErrorParam() const;
  std::string ErrorCode() const;
};

class HttpClient {
 public:
  explicit HttpClient(int port);
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  bool Send(std::string_view bytes);
  // The next whole response. `head_only`: of a HEAD request, which has no body.
  struct ReadOptions {
    bool head_only = false;
  };
  ClientResponse Read(ReadOptions options);
  ClientResponse Read() { return Read({}); }
  // Waits until the stream holds `text`; false when it ends or times out first.
  bool ReadUntil(std::string_view text);
  // Bytes received and not consumed by Read.
  const std::string& received() const { return received_; }
  // Whether the server has closed the connection.
  bool ReadToEnd();
  void Close();
  // Closes so that the server gets a reset.
  void Reset();

 private:
  bool Fill();

  int fd_ = -1;
  std::string received_;
};

std::string PostText(std::string_view path, std::string_view body,
                     std::string_view extra_headers = {});
std::string GetText(std::string_view path, std::string_view extra_headers = {});

// One request on a connection of its own.
ClientResponse Post(int port, std::string_view path, std::string_view body,
                    std::string_view extra_headers = {});
ClientResponse Get(int port, std::string_view path, std::string_view extra_headers = {});

// The payloads of "data: " lines.
std::vector<std::string> SseData(std::string_view body);

}  // namespace tandem::gateway
