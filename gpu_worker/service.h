#pragma once

// tandem.worker.v1.GpuWorkerService over a GpuEngine: checks and converts messages, nothing else.
// Thread-safe (synchronous gRPC: one thread a call). The engine must outlive the service.

#include <grpcpp/grpcpp.h>

#include "gpu_worker/engine.h"
#include "tandem/worker/v1/gpu_worker.grpc.pb.h"

namespace tandem::gpu {

class GpuWorkerService final : public worker::v1::GpuWorkerService::Service {
 public:
  explicit GpuWorkerService(GpuEngine* engine) : engine_(engine) {}

  grpc::Status Load(grpc::ServerContext* context, const worker::v1::LoadModelRequest* request,
                    grpc::ServerWriter<worker::v1::LoadModelResponse>* writer) override;
  grpc::Status GetInfo(grpc::ServerContext* context,
                       const worker::v1::GetGpuWorkerInfoRequest* request,
                       worker::v1::GetGpuWorkerInfoResponse* response) override;
  grpc::Status Step(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<worker::v1::StepResponse, worker::v1::StepRequest>* stream) override;

 private:
  GpuEngine* const engine_;
};

}  // namespace tandem::gpu
