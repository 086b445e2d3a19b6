#pragma once

// absl::Status and grpc::Status have the same codes with the same numbers; these carry code and
// message across. Thread-safe.

#include <grpcpp/support/status.h>

#include <cstdint>
#include <string_view>

#include "absl/status/status.h"

namespace tandem {

grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// FAILED_PRECONDITION naming both versions unless the peer speaks kWorkerProtocolVersion. `self`
// is who answers, as in "gpu worker".
absl::Status CheckProtocolVersion(uint32_t version, std::string_view self);

}  // namespace tandem
