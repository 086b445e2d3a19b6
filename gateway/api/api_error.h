#pragma once

// Errors on their way to a client. Code below the front ends returns absl::Status; the field at
// fault and the machine-readable code ride along as payloads, so that each front end (HTTP in the
// OpenAI shape, gRPC) renders the same error its own way.
//
//   return FieldError("temperature", "must be at least 0");       // 400, param temperature
//   ApiError error = ToApiError(status);                          // HTTP status, type, code, ...
//
// Free functions without state: thread-safe.

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"

namespace tandem::gateway {

// INVALID_ARGUMENT with the name of the field at fault ("messages[0].content").
absl::Status FieldError(std::string_view param, std::string_view message);

// Adds the name of the field at fault to another status; the status must not be OK.
absl::Status WithParam(absl::Status status, std::string_view param);

// Adds a machine-readable code ("context_length_exceeded"); the status must not be OK.
absl::Status WithCode(absl::Status status, std::string_view code);

std::optional<std::string> ErrorParam(const absl::Status& status);
std::optional<std::string> ErrorCode(const absl::Status& status);

struct ApiError {
  int http_status = 500;
  std::string type;
  std::string message;
  std::optional<std::string> param;
  std::optional<std::string> code;
  std::optional<int> retry_after_s;
};

// REQUIRES: `status` is not OK. Internal errors lose their message: it is for the log only.
ApiError ToApiError(const absl::Status& status);

// An error that has no absl counterpart (405, 413, 431 ...); the type follows from the status.
ApiError HttpError(int http_status, std::string_view message, std::string_view code = {});

// {"error": {"message", "type", "param", "code", "request_id"}}
std::string ErrorBody(const ApiError& error, std::string_view request_id);

}  // namespace tandem::gateway
