#include "expert_worker/service.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/base/worker_protocol.h"
#include "common/hw/cpu_features.h"
#include "common/rpc/rpc_status.h"

namespace tandem::expert {
namespace {

namespace v1 = worker::v1;

constexpr const char* kSelf = "expert worker";
// How often a Load stream tells how far it is.
constexpr std::chrono::milliseconds kProgressInterval{100};

absl::StatusOr<shm::RowType> ToRowType(v1::RowType type) {
  switch (type) {
    case v1::ROW_TYPE_BF16:
      return shm::RowType::kBf16;
    case v1::ROW_TYPE_F32:
      return shm::RowType::kF32;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("row_type ", static_cast<int>(type), " is none"));
  }
}

v1::LoadExpertsResponse Progress(const ExpertWorker::Info& info) {
  v1::LoadExpertsResponse response;
  response.set_loaded_bytes(info.loaded_bytes);
  response.set_total_bytes(info.total_bytes);
  response.set_done(info.phase == ExpertWorker::Phase::kReady);
  response.set_reattached(info.reattached);
  return response;
}

}  // namespace

grpc::Status ExpertWorkerService::Load(grpc::ServerContext* context,
                                       const v1::LoadExpertsRequest* request,
                                       grpc::ServerWriter<v1::LoadExpertsResponse>* writer) {
  absl::Status status = CheckProtocolVersion(request->protocol_version(), kSelf);
  if (!status.ok()) return ToGrpc(status);
  ExpertWorker::LoadRequest load;
  load.model_dir = request->model_dir();
  load.index = request->worker_index();
  load.shares.assign(request->shares().begin(), request->shares().end());
  status = worker_->StartLoad(std::move(load));
  if (!status.ok()) return ToGrpc(status);
  while (true) {
    const ExpertWorker::Info info = worker_->WaitForLoad(kProgressInterval);
    if (info.phase == ExpertWorker::Phase::kFailed) return ToGrpc(info.error);
    if (context->IsCancelled()) return {grpc::StatusCode::CANCELLED, "the caller has left"};
    writer->Write(Progress(info));
    if (info.phase == ExpertWorker::Phase::kReady) return grpc::Status::OK;
  }
}

grpc::Status ExpertWorkerService::Attach(grpc::ServerContext*, const v1::AttachRequest* request,
                                         v1::AttachResponse* response) {
  if (const absl::Status status = CheckProtocolVersion(request->protocol_version(), kSelf);
      !status.ok()) {
    return ToGrpc(status);
  }
  const absl::StatusOr<shm::RowType> row_type = ToRowType(request->row_type());
  if (!row_type.ok()) return ToGrpc(row_type.status());
  ExpertWorker::AttachRequest attach;
  attach.max_rows = request->max_rows();
  attach.hidden = request->hidden();
  attach.top_k = request->top_k();
  attach.lanes = request->lanes();
  attach.row_type = *row_type;
  const absl::StatusOr<ExpertWorker::Attached> attached = worker_->Attach(attach);
  if (!attached.ok()) return ToGrpc(attached.status());
  const shm::LinkTicket& ticket = attached->ticket;
  response->set_link_socket(ticket.socket_path);
  response->set_epoch(ticket.epoch);
  response->set_nonce(ticket.nonce.data(), ticket.nonce.size());
  for (int cpu : worker_->options().cpus) response->add_thread_cpus(static_cast<uint32_t>(cpu));
  response->set_segment_bytes(ticket.segment_bytes);
  response->set_model_hash(attached->model_hash);
  return grpc::Status::OK;
}

grpc::Status ExpertWorkerService::GetInfo(grpc::ServerContext*,
                                          const v1::GetExpertWorkerInfoRequest*,
                                          v1::GetExpertWorkerInfoResponse* response) {
  const ExpertWorker::Info info = worker_->info();
  const ExpertWorker::Options& options = worker_->options();
  response->set_protocol_version(kWorkerProtocolVersion);
  response->set_version(TANDEM_VERSION);
  response->set_isa(options.kernels->name);
  response->set_threads(static_cast<uint32_t>(options.threads));
  for (int cpu : options.cpus) response->add_cpus(static_cast<uint32_t>(cpu));
  response->set_page_kind(std::string(PageKindName(info.page_kind)));
  response->set_weights_bytes(info.weights_bytes);
  response->set_loaded_bytes(info.loaded_bytes);
  response->set_total_bytes(info.total_bytes);
  response->set_ready(info.phase == ExpertWorker::Phase::kReady && !info.draining);
  response->set_attached(info.link.attached);
  response->set_epoch(info.link.epoch);
  response->set_numa_node(options.numa_node);
  return grpc::Status::OK;
}

grpc::Status ExpertWorkerService::Drain(grpc::ServerContext*, const v1::DrainRequest*,
                                        v1::DrainResponse*) {
  worker_->Drain();
  return grpc::Status::OK;
}

}  // namespace tandem::expert
