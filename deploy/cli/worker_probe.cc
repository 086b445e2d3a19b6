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

struct WorkerProbe::Impl {
  std::unique_ptr<pb::GpuWorkerService::Stub> gpu;
  std::unique_ptr<pb::ExpertWorkerService::Stub> expert;
};

WorkerProbe::WorkerProbe(Kind kind, const std::string& address) : impl_(std::make_unique<Impl>()) {
  // A restarted worker must be seen within a second, not after gRPC's minutes of back-off.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  const auto channel =
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  if (kind == Kind::kGpuWorker) {
    impl_->gpu = pb::GpuWorkerService::NewStub(channel);
  } else {
    impl_->expert = pb::ExpertWorkerService::NewStub(channel);
  }
}

WorkerProbe::~WorkerProbe() = default;

std::optional<LoadState> WorkerProbe::Ask(int timeout_ms) const {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
  if (impl_->gpu != nullptr) {
    pb::GetGpuWorkerInfoResponse info;
    if (!impl_->gpu->GetInfo(&context, {}, &info).ok()) return std::nullopt;
    return FromInfo(info);
  }
  pb::GetExpertWorkerInfoResponse info;
  if (!impl_->expert->GetInfo(&context, {}, &info).ok()) return std::nullopt;
  return FromInfo(info);
}

}  // namespace tandem
