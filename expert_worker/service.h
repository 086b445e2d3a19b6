#pragma once

// tandem.worker.v1.ExpertWorkerService over an ExpertWorker: checks and converts messages, nothing
// else. Thread-safe (synchronous gRPC: one thread a call). The worker must outlive the service.

#include <grpcpp/grpcpp.h>

#include "common/hw/isa.h"
#include "expert_worker/expert_worker.h"
#include "tandem/worker/v1/expert_worker.grpc.pb.h"

namespace tandem::expert {

class ExpertWorkerService final : public worker::v1::ExpertWorkerService::Service {
 public:
  explicit ExpertWorkerService(ExpertWorker* worker) : worker_(worker) {}

  grpc::Status Load(grpc::ServerContext* context, const worker::v1::LoadExpertsRequest* request,
                    grpc::ServerWriter<worker::v1::LoadExpertsResponse>* writer) override;
  grpc::Status Attach(grpc::ServerContext* context, const worker::v1::AttachRequest* request,
                      worker::v1::AttachResponse* response) override;
  grpc::Status GetInfo(grpc::ServerContext* context,
                       const worker::v1::GetExpertWorkerInfoRequest* request,
                       worker::v1::GetExpertWorkerInfoResponse* response) override;
  grpc::Status Drain(grpc::ServerContext* context, const worker::v1::DrainRequest* request,
                     worker::v1::DrainResponse* response) override;

 private:
  ExpertWorker* const worker_;
};

}  // namespace tandem::expert
