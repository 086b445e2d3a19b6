#include "gpu_worker/expert_worker_client.h"

#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "common/base/worker_protocol.h"
#include "common/rpc/rpc_status.h"
#include "gpu_worker/links/shm_expert_link.h"

namespace tandem::gpu {
namespace {

namespace v1 = worker::v1;

// Reading hundreds of GB from a slow disk; progress messages and keepalive tell a dead peer
// earlier.
constexpr std::chrono::hours kLoadTimeout{4};
// Attach makes a segment and touches it: 100 MB take 50 ms.
constexpr std::chrono::seconds kAttachTimeout{10};

absl::Status ToAbsl(const grpc::Status& status, const std::string& address) {
  return Annotate(FromGrpc(status), "expert worker " + address);
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  // A restarted worker is to be seen at once, not after gRPC's minutes of back-off.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 500);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  // A stopped process accepts connections and says nothing.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

v1::AttachRequest MakeAttachRequest(const ExpertAttach& attach) {
  const shm::BatchLimits& limits = attach.limits;
  v1::AttachRequest request;
  request.set_protocol_version(kWorkerProtocolVersion);
  request.set_max_rows(limits.max_rows);
  request.set_hidden(limits.hidden);
  request.set_top_k(limits.top_k);
  request.set_lanes(limits.lanes);
  request.set_row_type(limits.row_type == shm::RowType::kF32 ? v1::ROW_TYPE_F32
                                                             : v1::ROW_TYPE_BF16);
  for (const int cpu : attach.thread_cpus) {
    if (cpu >= 0) request.add_gpu_thread_cpus(static_cast<uint32_t>(cpu));
  }
  request.set_co_located(attach.placement == shm::Placement::kColocated);
  request.set_gpu_worker_pid(getpid());
  return request;
}

}  // namespace

class ExpertWorkerClient::ActiveCall {
 public:
  ActiveCall(ExpertWorkerClient& client, std::chrono::system_clock::duration timeout)
      : client_(client) {
    context_.set_deadline(std::chrono::system_clock::now() + timeout);
    const std::lock_guard lock(client_.mutex_);
    client_.active_ = &context_;
    if (client_.cancelled_) context_.TryCancel();
  }
  ~ActiveCall() {
    const std::lock_guard lock(client_.mutex_);
    client_.active_ = nullptr;
  }
  grpc::ClientContext* context() { return &context_; }

 private:
  ExpertWorkerClient& client_;
  grpc::ClientContext context_;
};

ExpertWorkerClient::ExpertWorkerClient(const std::string& address)
    : address_(address),
      channel_(MakeChannel(address)),
      stub_(v1::ExpertWorkerService::NewStub(channel_)) {}

void ExpertWorkerClient::Cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (active_ != nullptr) active_->TryCancel();
}

absl::Status ExpertWorkerClient::WaitForConnection(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kSlice{100};  // how soon Cancel is noticed
  for (auto waited = std::chrono::milliseconds(0); waited < timeout; waited += kSlice) {
    {
      const std::lock_guard lock(mutex_);
      if (cancelled_) return absl::CancelledError("stopping");
    }
    if (channel_->WaitForConnected(std::chrono::system_clock::now() + kSlice)) {
      return absl::OkStatus();
    }
  }
  return absl::UnavailableError(
      absl::StrCat("expert worker ", address_, ": no connection within ", timeout.count(), " ms"));
}

absl::Status ExpertWorkerClient::Load(const ExpertLoad& load) {
  RETURN_IF_ERROR(WaitForConnection(load.connect_timeout));
  v1::LoadExpertsRequest request;
  request.set_protocol_version(kWorkerProtocolVersion);
  request.set_model_dir(load.model_dir);
  request.set_worker_index(load.index);
  request.mutable_shares()->Add(load.shares.begin(), load.shares.end());
  ActiveCall call(*this, kLoadTimeout);
  const auto reader = stub_->Load(call.context(), request);
  v1::LoadExpertsResponse response;
  bool done = false;
  while (reader->Read(&response)) {
    loaded_.store(response.loaded_bytes(), std::memory_order_relaxed);
    total_.store(response.total_bytes(), std::memory_order_relaxed);
    done = done || response.done();
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return ToAbsl(status, address_);
  if (done) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("expert worker ", address_, ": Load ended early"));
}

absl::StatusOr<std::unique_ptr<ExpertLink>> ExpertWorkerClient::Attach(const ExpertAttach& attach) {
  v1::AttachResponse response;
  {
    ActiveCall call(*this, kAttachTimeout);
    const grpc::Status status = stub_->Attach(call.context(), MakeAttachRequest(attach), &response);
    if (!status.ok()) return ToAbsl(status, address_);
  }
  ShmLinkOptions options;
  options.ticket.socket_path = response.link_socket();
  options.ticket.epoch = response.epoch();
  options.ticket.segment_bytes = response.segment_bytes();
  if (response.nonce().size() != options.ticket.nonce.size()) {
    return absl::InternalError(absl::StrCat("expert worker ", address_, ": bad nonce"));
  }
  std::copy(response.nonce().begin(), response.nonce().end(), options.ticket.nonce.begin());
  if (response.model_hash() != attach.model_hash) {
    return absl::FailedPreconditionError(absl::StrCat(
        "expert worker ", address_, " has loaded another model or another copy of it"));
  }
  options.model_hash = attach.model_hash;
  options.limits = attach.limits;
  options.thread_cpus = attach.thread_cpus;
  options.placement = attach.placement;
  options.deadline = attach.link_deadline;
  options.weights = attach.weights;
  absl::StatusOr<std::unique_ptr<ExpertLink>> link = AttachShmExpertLink(options);
  if (!link.ok()) return Annotate(link.status(), absl::StrCat("expert worker ", address_));
  return link;
}

}  // namespace tandem::gpu
