#pragma once

// tandem.trace.v1.TraceService over a process's Tracer. A call records for the time it asks for and
// sends what was recorded only then, so that the sending disturbs nothing.
//
// Thread-safe (synchronous gRPC: one thread a call). The tracer must outlive the service.

#include <grpcpp/grpcpp.h>

#include <string>

#include "common/base/trace.h"
#include "tandem/trace/v1/trace.grpc.pb.h"

namespace tandem {

// Longest recording.
inline constexpr uint32_t kMaxTraceMs = 60'000;

class TraceService final : public trace::v1::TraceService::Service {
 public:
  // `service` names the process in traces, as in "gpu_worker".
  TraceService(std::string service, Tracer* tracer);

  grpc::Status Trace(grpc::ServerContext* context, const trace::v1::TraceRequest* request,
                     grpc::ServerWriter<trace::v1::TraceResponse>* writer) override;

 private:
  trace::v1::TraceStart MakeStart() const;

  const std::string service_;
  Tracer* const tracer_;
};

// This machine's boot: processes that name the same one share CLOCK_MONOTONIC. Empty where the
// kernel does not tell.
std::string BootId();

}  // namespace tandem
