#include "gpu_worker/service.h"

#include <chrono>
#include <memory>
#include <string>

#include "common/base/log.h"
#include "common/base/worker_protocol.h"
#include "common/hw/cpu_features.h"
#include "common/rpc/rpc_status.h"

namespace tandem::gpu {
namespace {

namespace v1 = worker::v1;

// How often a Load stream tells how far it is.
constexpr std::chrono::milliseconds kProgressInterval{100};

class StreamSink final : public StepSink {
 public:
  using Stream = grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>;
  StreamSink(grpc::ServerContext* context, Stream* stream) : context_(context), stream_(stream) {}

  bool Write(const v1::StepResponse& response) override { return stream_->Write(response); }
  void Cancel() override { context_->TryCancel(); }

 private:
  grpc::ServerContext* const context_;
  Stream* const stream_;
};

}  // namespace

grpc::Status GpuWorkerService::Load(grpc::ServerContext* context,
                                    const v1::LoadModelRequest* request,
                                    grpc::ServerWriter<v1::LoadModelResponse>* writer) {
  absl::Status status = CheckProtocolVersion(request->protocol_version(), "gpu worker");
  if (status.ok()) status = engine_->StartLoad(request->model_dir());
  if (!status.ok()) return ToGrpc(status);
  v1::LoadModelResponse response;
  while (true) {
    const GpuEngine::State state = engine_->WaitForLoad(kProgressInterval);
    if (state.phase == GpuEngine::Phase::kFailed) return ToGrpc(state.error);
    if (context->IsCancelled()) return {grpc::StatusCode::CANCELLED, "the caller has left"};
    response.set_phase(state.progress.phase);
    response.set_loaded_bytes(state.progress.loaded_bytes);
    response.set_total_bytes(state.progress.total_bytes);
    // Without all experts no step would run: a gateway that comes while one is lost waits here.
    if (state.info && !state.ready) response.set_phase("experts");
    if (state.ready) *response.mutable_info() = *state.info;
    if (!writer->Write(response)) return {grpc::StatusCode::CANCELLED, "the caller has left"};
    if (state.ready) return grpc::Status::OK;
  }
}

grpc::Status GpuWorkerService::GetInfo(grpc::ServerContext*, const v1::GetGpuWorkerInfoRequest*,
                                       v1::GetGpuWorkerInfoResponse* response) {
  const GpuEngine::State state = engine_->state();
  const WorkerOptions& options = engine_->options();
  response->set_protocol_version(kWorkerProtocolVersion);
  response->set_version(TANDEM_VERSION);
  response->set_device("cpu");
  response->set_isa(options.kernels->name);
  response->set_threads(static_cast<uint32_t>(options.threads));
  response->set_link(options.inprocess_experts ? "inprocess" : "shm");
  response->set_ready(state.ready);
  response->set_loaded_bytes(state.progress.loaded_bytes);
  response->set_total_bytes(state.progress.total_bytes);
  if (state.info) *response->mutable_model() = *state.info;
  response->set_steps(engine_->counters().steps);
  return grpc::Status::OK;
}

grpc::Status GpuWorkerService::Step(grpc::ServerContext* context, StreamSink::Stream* stream) {
  StreamSink sink(context, stream);
  absl::StatusOr<std::unique_ptr<GpuEngine::Session>> session = engine_->OpenSession(&sink);
  if (!session.ok()) return ToGrpc(session.status());
  // The gateway may wait for this before it sends anything.
  stream->SendInitialMetadata();
  LogInfo("step_stream_opened", {{"peer", context->peer()}});
  while (v1::StepRequest* request = (*session)->Acquire()) {
    if (!stream->Read(request)) break;
    (*session)->Push();
  }
  session->reset();
  LogInfo("step_stream_closed", {{"peer", context->peer()}});
  return grpc::Status::OK;
}

}  // namespace tandem::gpu
