#include "deploy/cli/worker_probe.h"

#include <grpcpp/grpcpp.h>

#include <chrono>

#include "tandem/worker/v1/expert_worker.grpc.pb.h"
#include "tandem/worker/v1/gpu_worker.grpc.pb.h"

namespace tandem {
namespace {

namespace pb = worker::v1;

template <typename Response>
LoadState FromInfo(const Response& info) {
  return {info.loaded_bytes(), info.total_bytes(), info.ready(), info.isa(), info.threads()};
}

}  // namespace

std::optional<LoadState> ProbeWorker(WorkerKind kind, const std::string& address, int timeout_ms) {
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
  if (kind == WorkerKind::kGpuWorker) {
    pb::GetGpuWorkerInfoResponse info;
    if (!pb::GpuWorkerService::NewStub(channel)->GetInfo(&context, {}, &info).ok()) {
      return std::nullopt;
    }
    return FromInfo(info);
  }
  pb::GetExpertWorkerInfoResponse info;
  if (!pb::ExpertWorkerService::NewStub(channel)->GetInfo(&context, {}, &info).ok()) {
    return std::nullopt;
  }
  return FromInfo(info);
}

}  // namespace tandem
