#include "deploy/cli/http_client.h"

#include <curl/curl.h>

#include <memory>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"

namespace tandem {
namespace {

// One answer of a large model on a small machine; a hung server is still found out.
constexpr long kTimeoutSeconds = 3600;
constexpr long kConnectSeconds = 10;
constexpr size_t kMaxAnswerBytes = 256 << 20;

size_t Append(char* data, size_t size, size_t count, void* to) {
  auto* const text = static_cast<std::string*>(to);
  if (text->size() + size * count > kMaxAnswerBytes) return 0;  // ends the transfer
  text->append(data, size * count);
  return size * count;
}

struct HeaderList {
  ~HeaderList() { curl_slist_free_all(list); }
  void Add(const std::string& line) { list = curl_slist_append(list, line.c_str()); }

  curl_slist* list = nullptr;
};

std::string MessageOf(const HttpClient::Json& answer) {
  if (!answer.is_object()) return "";
  const auto error = answer.find("error");
  if (error == answer.end() || !error->is_object()) return "";
  const auto message = error->find("message");
  return message != error->end() && message->is_string() ? ": " + message->get<std::string>() : "";
}

}  // namespace

HttpClient::HttpClient(std::string base_url, std::string api_key)
    : base_url_(std::move(base_url)), api_key_(std::move(api_key)) {
  // Not thread-safe in itself; a static runs it once.
  [[maybe_unused]] static const CURLcode initialized = curl_global_init(CURL_GLOBAL_DEFAULT);
  while (base_url_.ends_with('/')) base_url_.pop_back();
}

absl::StatusOr<HttpClient::Json> HttpClient::Get(const std::string& path) const {
  return Ask(path, nullptr);
}

absl::StatusOr<HttpClient::Json> HttpClient::Post(const std::string& path, const Json& body) const {
  const std::string text = body.dump(-1, ' ', false, Json::error_handler_t::replace);
  return Ask(path, &text);
}

absl::StatusOr<HttpClient::Json> HttpClient::Ask(const std::string& path,
                                                 const std::string* body) const {
  const std::string url = base_url_ + path;
  const std::unique_ptr<CURL, decltype(&curl_easy_cleanup)> curl(curl_easy_init(),
                                                                 curl_easy_cleanup);
  if (curl == nullptr) return absl::InternalError("libcurl cannot be set up");
  HeaderList headers;
  if (!api_key_.empty()) headers.Add("Authorization: Bearer " + api_key_);
  std::string answer;
  curl_easy_setopt(curl.get(), CURLOPT_URL, url.c_str());
  curl_easy_setopt(curl.get(), CURLOPT_PROTOCOLS_STR, "http,https");
  curl_easy_setopt(curl.get(), CURLOPT_NOSIGNAL, 1L);
  curl_easy_setopt(curl.get(), CURLOPT_CONNECTTIMEOUT, kConnectSeconds);
  curl_easy_setopt(curl.get(), CURLOPT_TIMEOUT, kTimeoutSeconds);
  curl_easy_setopt(curl.get(), CURLOPT_WRITEFUNCTION, Append);
  curl_easy_setopt(curl.get(), CURLOPT_WRITEDATA, &answer);
  if (body != nullptr) {
    headers.Add("Content-Type: application/json");
    curl_easy_setopt(curl.get(), CURLOPT_POSTFIELDS, body->c_str());
    curl_easy_setopt(curl.get(), CURLOPT_POSTFIELDSIZE_LARGE,
                     static_cast<curl_off_t>(body->size()));
  }
  curl_easy_setopt(curl.get(), CURLOPT_HTTPHEADER, headers.list);
  const CURLcode code = curl_easy_perform(curl.get());
  if (code != CURLE_OK) {
    const std::string what = absl::StrCat(url, ": ", curl_easy_strerror(code));
    return code == CURLE_OPERATION_TIMEDOUT ? absl::DeadlineExceededError(what)
                                            : absl::UnavailableError(what);
  }
  long status = 0;
  curl_easy_getinfo(curl.get(), CURLINFO_RESPONSE_CODE, &status);
  Json json = Json::parse(answer, nullptr, /*allow_exceptions=*/false);
  if (status != 200) {
    return absl::InternalError(
        absl::StrCat(url, ": HTTP status ", status, json.is_discarded() ? "" : MessageOf(json)));
  }
  if (json.is_discarded()) return absl::InternalError(url + ": the answer is not JSON");
  return json;
}

}  // namespace tandem
