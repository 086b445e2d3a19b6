#include "tests/gateway/api/http_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"

namespace tandem::gateway {
namespace {

// Long enough for a loaded machine; nothing waits for it to pass where the server answers.
constexpr timeval kReadLimit = {.tv_sec = 20, .tv_usec = 0};

std::string Lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return text;
}

std::string ErrorField(const nlohmann::json& body, const char* field) {
  if (!body.is_object() || !body.contains("error")) return "no error";
  const nlohmann::json& value = body["error"][field];
  return value.is_string() ? value.get<std::string>() : "null";
}

}  // namespace

std::string ClientResponse::Header(std::string_view name) const {
  for (const auto& [key, value] : headers) {
    if (key == name) return value;
  }
  return {};
}

nlohmann::json ClientResponse::Json() const {
  const nlohmann::json parsed = nlohmann::json::parse(body, nullptr, false);
  return parsed.is_discarded() ? nlohmann::json() : parsed;
}

std::string ClientResponse::ErrorParam() const { return ErrorField(Json(), "param"); }
std::string ClientResponse::ErrorCode() const { return ErrorField(Json(), "code"); }

HttpClient::HttpClient(int port) {
  fd_ = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &kReadLimit, sizeof(kReadLimit));
  if (::connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) Close();
}

HttpClient::~HttpClient() { Close(); }

void HttpClient::Close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void HttpClient::Reset() {
  const linger at_once = {.l_onoff = 1, .l_linger = 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  Close();
}

bool HttpClient::Send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

bool HttpClient::Fill() {
  char buffer[65536];
  const ssize_t got = ::recv(fd_, buffer, sizeof(buffer), 0);
  if (got <= 0) return false;
  received_.append(buffer, static_cast<size_t>(got));
  return true;
}

bool HttpClient::ReadUntil(std::string_view text) {
  while (received_.find(text) == std::string::npos) {
    if (!Fill()) return false;
  }
  return true;
}

bool HttpClient::ReadToEnd() {
  while (Fill()) {
  }
  return errno != EAGAIN && errno != EWOULDBLOCK;
}

ClientResponse HttpClient::Read(ReadOptions options) {
  ClientResponse response;
  if (!ReadUntil("\r\n\r\n")) return response;
  const size_t end = received_.find("\r\n\r\n");
  const std::string head = received_.substr(0, end + 2);
  received_.erase(0, end + 4);
  for (size_t at = head.find("\r\n") + 2; at < head.size();) {
    const size_t line_end = head.find("\r\n", at);
    const std::string line = head.substr(at, line_end - at);
    const size_t colon = line.find(": ");
    if (colon != std::string::npos) {
      response.headers.emplace_back(Lower(line.substr(0, colon)), line.substr(colon + 2));
    }
    at = line_end + 2;
  }
  response.status = std::atoi(head.c_str() + 9);
  if (options.head_only || response.status == 204 || response.status == 100) return response;
  if (response.Header("transfer-encoding") == "chunked") {
    for (;;) {
      if (!ReadUntil("\r\n")) return {};
      const size_t size = std::strtoul(received_.c_str(), nullptr, 16);
      const size_t start = received_.find("\r\n") + 2;
      while (received_.size() < start + size + 2) {
        if (!Fill()) return {};
      }
      response.body.append(received_, start, size);
      received_.erase(0, start + size + 2);
      if (size == 0) return response;
    }
  }
  const size_t length = std::strtoul(response.Header("content-length").c_str(), nullptr, 10);
  while (received_.size() < length) {
    if (!Fill()) return {};
  }
  response.body = received_.substr(0, length);
  received_.erase(0, length);
  return response;
}

std::string PostText(std::string_view path, std::string_view body, std::string_view extra_headers) {
  return absl::StrCat("POST ", std::string(path), " HTTP/1.1\r\nHost: test\r\n",
                      "Content-Type: application/json\r\nContent-Length: ", body.size(), "\r\n",
                      std::string(extra_headers), "\r\n", std::string(body));
}

std::string GetText(std::string_view path, std::string_view extra_headers) {
  return absl::StrCat("GET ", std::string(path), " HTTP/1.1\r\nHost: test\r\n",
                      std::string(extra_headers), "\r\n");
}

ClientResponse Post(int port, std::string_view path, std::string_view body,
                    std::string_view extra_headers) {
  HttpClient client(port);
  client.Send(PostText(path, body, extra_headers));
  return client.Read();
}

ClientResponse Get(int port, std::string_view path, std::string_view extra_headers) {
  HttpClient client(port);
  client.Send(GetText(path, extra_headers));
  return client.Read();
}

std::vector<std::string> SseData(std::string_view body) {
  constexpr std::string_view kPrefix = "data: ";
  std::vector<std::string> data;
  while (!body.empty()) {
    const size_t end = std::min(body.find('\n'), body.size());
    const std::string_view line = body.substr(0, end);
    if (line.starts_with(kPrefix)) data.emplace_back(line.substr(kPrefix.size()));
    body.remove_prefix(std::min(end + 1, body.size()));
  }
  return data;
}

}  // namespace tandem::gateway
