#include "gateway/api/api_error.h"

#include "absl/strings/cord.h"
#include "gateway/api/json_writer.h"

namespace tandem::gateway {
namespace {

constexpr char kParamPayload[] = "tandem/param";
constexpr char kCodePayload[] = "tandem/code";
// Clients of the OpenAI SDKs honour this delay and try twice.
constexpr int kRetryAfterS = 1;

std::optional<std::string> Payload(const absl::Status& status, const char* name) {
  const auto payload = status.GetPayload(name);
  if (!payload) return std::nullopt;
  return std::string(*payload);
}

struct StatusShape {
  int http_status;
  const char* type;
  const char* code;  // nullptr: none unless the status carries one
  bool retry;
};

StatusShape ShapeOf(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kOutOfRange:
    case absl::StatusCode::kFailedPrecondition:
      return {400, "invalid_request_error", nullptr, false};
    case absl::StatusCode::kUnauthenticated:
      return {401, "authentication_error", "invalid_api_key", false};
    case absl::StatusCode::kPermissionDenied:
      return {403, "permission_error", nullptr, false};
    case absl::StatusCode::kNotFound:
      return {404, "invalid_request_error", nullptr, false};
    case absl::StatusCode::kResourceExhausted:
      return {429, "rate_limit_error", "queue_full", true};
    case absl::StatusCode::kCancelled:
      return {499, "cancelled_error", "cancelled", false};
    case absl::StatusCode::kUnavailable:
      return {503, "unavailable_error", "unavailable", true};
    case absl::StatusCode::kDeadlineExceeded:
      return {504, "timeout_error", "timeout", false};
    default:
      return {500, "internal_error", "internal_error", false};
  }
}

}  // namespace

absl::Status FieldError(std::string_view param, std::string_view message) {
  return WithParam(absl::InvalidArgumentError(absl::string_view(message.data(), message.size())),
                   param);
}

absl::Status WithParam(absl::Status status, std::string_view param) {
  status.SetPayload(kParamPayload, absl::Cord(absl::string_view(param.data(), param.size())));
  return status;
}

absl::Status WithCode(absl::Status status, std::string_view code) {
  status.SetPayload(kCodePayload, absl::Cord(absl::string_view(code.data(), code.size())));
  return status;
}

std::optional<std::string> ErrorParam(const absl::Status& status) {
  return Payload(status, kParamPayload);
}

std::optional<std::string> ErrorCode(const absl::Status& status) {
  return Payload(status, kCodePayload);
}

ApiError ToApiError(const absl::Status& status) {
  const StatusShape shape = ShapeOf(status.code());
  ApiError error;
  error.http_status = shape.http_status;
  error.type = shape.type;
  error.param = ErrorParam(status);
  error.code = ErrorCode(status);
  if (!error.code && shape.code != nullptr) error.code = shape.code;
  if (shape.retry) error.retry_after_s = kRetryAfterS;
  if (shape.http_status == 500) {
    error.message = "The server failed to handle this request; its log has the details.";
  } else {
    error.message = std::string(status.message());
  }
  return error;
}

ApiError HttpError(int http_status, std::string_view message, std::string_view code) {
  ApiError error;
  error.http_status = http_status;
  error.type = http_status >= 500 ? "internal_error" : "invalid_request_error";
  if (http_status == 503) {
    error.type = "unavailable_error";
    error.retry_after_s = kRetryAfterS;
  }
  error.message = std::string(message);
  if (!code.empty()) error.code = std::string(code);
  return error;
}

std::string ErrorBody(const ApiError& error, std::string_view request_id) {
  JsonWriter json;
  json.BeginObject().Key("error").BeginObject();
  json.Key("message").String(error.message);
  json.Key("type").String(error.type);
  json.Key("param").OptionalString(error.param);
  json.Key("code").OptionalString(error.code);
  json.Key("request_id").String(request_id);
  json.EndObject().EndObject();
  return json.Take();
}

}  // namespace tandem::gateway
