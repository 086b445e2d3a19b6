#pragma once

// One Generate call over gRPC's callback API: prepares on a worker thread, then writes one response
// at a time while events gather behind it (GenerationStream merges and bounds them).
//
// A client that cancels, leaves or passes its deadline has its generation cancelled at once,
// without waiting for a write. A client that does not read is cancelled once too much has gathered.
//
// Ownership: the object owns itself until gRPC reports OnDone; wakeups that come later find it
// finished. Thread safety: reactions and wakeups come from any thread.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>

#include "gateway/api/grpc_server.h"
#include "tandem/serving/v1/inference.grpc.pb.h"

namespace tandem::gateway {

class GenerateCall final : public grpc::ServerWriteReactor<serving::v1::GenerateResponse>,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  // The reactor that gRPC drives. `request` and `context` live until OnDone.
  static GenerateCall* Start(const GrpcParts& parts, grpc::CallbackServerContext* context,
                             const serving::v1::GenerateRequest* request);

 private:
  GenerateCall(const GrpcParts& parts, grpc::CallbackServerContext* context,
               const serving::v1::GenerateRequest* request);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  void Prepare();
  absl::Status Submit();
  // Writes the next event or finishes, if no write is under way.
  void Pump();
  void FillResponse(const GenerationStream::Item& item);
  void End(const absl::Status& status);

  const GrpcParts parts_;
  grpc::CallbackServerContext* const context_;
  const serving::v1::GenerateRequest* const request_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  const std::shared_ptr<GenerationStream> events_;
  std::string request_id_;
  serving::v1::GenerateResponse response_;
  std::shared_ptr<GenerateCall> self_;

  std::mutex mutex_;
  bool started_ = false;  // submitted: events may be written
  bool writing_ = false;
  bool finished_ = false;   // Finish was called
  bool cancelled_ = false;  // by the client
  uint32_t prompt_tokens_ = 0;
  std::vector<uint32_t> completion_tokens_;  // by choice
  std::vector<uint32_t> cached_tokens_;
};

}  // namespace tandem::gateway
