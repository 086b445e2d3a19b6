#include "common/rpc/rpc_status.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/worker_protocol.h"

namespace tandem {

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return {static_cast<grpc::StatusCode>(status.code()), std::string(status.message())};
}

absl::Status FromGrpc(const grpc::Status& status) {
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

absl::Status CheckProtocolVersion(uint32_t version, std::string_view self) {
  if (version == kWorkerProtocolVersion) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("protocol version ", version, " where this ", std::string(self), " speaks ",
                   kWorkerProtocolVersion, "; install one release everywhere"));
}

}  // namespace tandem
