#pragma once

// Between the public protobuf messages (tandem.serving.v1) and what both front ends work with. Free
// functions without state: thread-safe.

#include <grpcpp/support/status.h>

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "gateway/api/request_builder.h"
#include "tandem/serving/v1/inference.pb.h"

namespace tandem::gateway {

// INVALID_ARGUMENT, as FieldError, for what no model could accept.
absl::StatusOr<Prompt> PromptOf(const serving::v1::GenerateRequest& request);
absl::StatusOr<Prompt> PromptOf(const serving::v1::TokenizeRequest& request);
GenerationFields FieldsOf(const serving::v1::GenerateRequest& request);

// One event of choice `index`; usage is left to the caller. The tokenizer may be null.
serving::v1::GenerateResponse ResponseOf(const GenerationEvent& event, size_t index,
                                         const Tokenizer* tokenizer);

// The same code and message, with google.rpc.BadRequest (the field at fault) and
// google.rpc.ErrorInfo (the machine-readable code) as details. Internal errors lose their message.
grpc::Status ToGrpcStatus(const absl::Status& status);

// "OK", "INVALID_ARGUMENT", ... for metrics and logs.
std::string GrpcCodeName(const grpc::Status& status);

}  // namespace tandem::gateway
