#include "gateway/worker_client.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/rpc/rpc_status.h"
#include "tandem/worker/v1/gpu_worker.grpc.pb.h"

namespace tandem::gateway {
namespace {

using worker::v1::GetGpuWorkerInfoRequest;
using worker::v1::GetGpuWorkerInfoResponse;
using worker::v1::GpuWorkerService;
using worker::v1::LoadModelRequest;
using worker::v1::LoadModelResponse;
using worker::v1::ModelInfo;
using worker::v1::StepRequest;
using worker::v1::StepResponse;

std::chrono::system_clock::time_point After(uint32_t milliseconds) {
  return std::chrono::system_clock::now() + std::chrono::milliseconds(milliseconds);
}

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  // Not shared with an earlier connection, whose back-off would delay this one.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // How long a peer that accepts but says nothing (a stopped process) is waited for.
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
  // Prompt logprobs of a whole step: 8,192 rows x 20 entries x 16 bytes are 2.6 MB.
  arguments.SetMaxReceiveMessageSize(64 << 20);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

// Reactors and calls of one connection. They delete themselves when done and the connection waits
// for them, so that it, and the channel with it, is never destroyed on one of gRPC's threads (which
// would wait for itself). The mutex also makes what one thread wrote visible to gRPC's threads in a
// way that ThreadSanitizer sees.
class WorkerClient::Connection {
 public:
  Connection(const WorkerClientOptions& options, WorkerEventSink sink, uint64_t number)
      : options_(options),
        sink_(std::move(sink)),
        number_(number),
        stub_(GpuWorkerService::NewStub(MakeChannel(options.address))) {}
  // Returns when no callback runs or will.
  ~Connection() {
    Cancel();
    std::unique_lock lock(mutex_);
    quiet_.wait(lock, [&] { return calls_ == 0; });
  }

  void Load();
  void Send(StepRequest request);
  void QueryReady();
  // Cancels all calls.
  void Cancel();

 private:
  class LoadReactor;
  class StepReactor;
  struct Query {
    grpc::ClientContext context;
    GetGpuWorkerInfoRequest request;
    GetGpuWorkerInfoResponse response;
  };

  template <typename What>
  void Post(What what) {
    sink_({.connection = number_, .what = std::move(what)});
  }
  void OpenSteps(ModelInfo info);
  void Lost(absl::Status status, bool while_loading);
  void Enter() {
    const std::lock_guard lock(mutex_);
    ++calls_;
  }
  // The last thing a callback does: the connection may be gone when it returns.
  void Exit() {
    const std::lock_guard lock(mutex_);
    if (--calls_ == 0) quiet_.notify_all();
  }

  const WorkerClientOptions options_;
  const WorkerEventSink sink_;
  const uint64_t number_;
  const std::unique_ptr<GpuWorkerService::Stub> stub_;

  std::mutex mutex_;
  std::condition_variable quiet_;
  int calls_ = 0;
  bool cancelled_ = false;
  bool lost_ = false;
  LoadReactor* load_ = nullptr;
  StepReactor* steps_ = nullptr;
  std::vector<Query*> queries_;
};

class WorkerClient::Connection::LoadReactor final
    : public grpc::ClientReadReactor<LoadModelResponse> {
 public:
  explicit LoadReactor(Connection* connection) : connection_(connection) {
    const WorkerClientOptions& options = connection_->options_;
    request_.set_protocol_version(kWorkerProtocolVersion);
    request_.set_model_dir(options.model_dir);
    context_.set_deadline(After(options.load_timeout_ms));
  }

  // Under the connection's lock.
  void Start() {
    connection_->stub_->async()->Load(&context_, &request_, this);
    StartRead(&response_);
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (response_.has_info()) {
      info_ = response_.info();
    } else {
      connection_->Post(WorkerLoading{.phase = response_.phase(),
                                      .loaded_bytes = response_.loaded_bytes(),
                                      .total_bytes = response_.total_bytes()});
    }
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    Connection* const connection = connection_;
    {
      const std::lock_guard lock(connection->mutex_);
      connection->load_ = nullptr;
    }
    if (status.ok() && info_) {
      connection->OpenSteps(std::move(*info_));
    } else if (status.ok()) {
      connection->Lost(absl::InternalError("Load ended without a model"), true);
    } else {
      connection->Lost(FromGrpc(status), true);
    }
    delete this;
    connection->Exit();
  }

 private:
  Connection* const connection_;
  grpc::ClientContext context_;
  LoadModelRequest request_;
  LoadModelResponse response_;
  std::optional<ModelInfo> info_;
};

class WorkerClient::Connection::StepReactor final
    : public grpc::ClientBidiReactor<StepRequest, StepResponse> {
 public:
  explicit StepReactor(Connection* connection) : connection_(connection) {}

  // Under the connection's lock. The hold keeps the reactor for Send until reading has ended.
  void Start() {
    connection_->stub_->async()->Step(&context_, this);
    AddHold();
    StartRead(&response_);
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }

  void Send(StepRequest request) {
    {
      const std::lock_guard lock(mutex_);
      if (broken_) return;
      queue_.push_back(std::move(request));
      if (writing_) return;
      writing_ = true;
      AddHold();
    }
    WriteNext();
    RemoveHold();
  }

  void OnWriteDone(bool ok) override {
    {
      const std::lock_guard lock(mutex_);
      if (!ok || broken_ || queue_.empty()) {
        writing_ = false;
        return;
      }
    }
    WriteNext();
  }

  void OnReadDone(bool ok) override {
    if (ok) {
      connection_->Post(std::move(response_));
      response_.Clear();
      StartRead(&response_);
      return;
    }
    {
      const std::lock_guard lock(mutex_);
      broken_ = true;
    }
    RemoveHold();
  }

  void OnDone(const grpc::Status& status) override {
    Connection* const connection = connection_;
    {
      const std::lock_guard lock(connection->mutex_);
      connection->steps_ = nullptr;
    }
    connection->Lost(status.ok() ? absl::UnavailableError("the worker closed its step stream")
                                 : FromGrpc(status),
                     false);
    delete this;
    connection->Exit();
  }

 private:
  void WriteNext() {
    {
      const std::lock_guard lock(mutex_);
      writing_request_ = std::move(queue_.front());
      queue_.pop_front();
    }
    StartWrite(&writing_request_);
  }

  Connection* const connection_;
  grpc::ClientContext context_;
  StepResponse response_;

  std::mutex mutex_;
  std::deque<StepRequest> queue_;  // at most the steps that may be out
  StepRequest writing_request_;
  bool writing_ = false;
  bool broken_ = false;
};

void WorkerClient::Connection::Load() {
  Enter();
  const std::lock_guard lock(mutex_);
  load_ = new LoadReactor(this);
  load_->Start();
}

void WorkerClient::Connection::OpenSteps(ModelInfo info) {
  Enter();
  {
    const std::lock_guard lock(mutex_);
    if (!cancelled_) {
      steps_ = new StepReactor(this);
      // Before the call starts, whose end must come after it; Send waits for the lock.
      Post(WorkerConnected{.info = std::move(info)});
      steps_->Start();
      return;
    }
  }
  Lost(absl::CancelledError("disconnected"), true);
  Exit();
}

void WorkerClient::Connection::Lost(absl::Status status, bool while_loading) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(lost_, true)) return;
  }
  Post(WorkerLost{.status = std::move(status), .while_loading = while_loading});
}

void WorkerClient::Connection::Send(StepRequest request) {
  const std::lock_guard lock(mutex_);
  if (steps_ != nullptr) steps_->Send(std::move(request));
}

void WorkerClient::Connection::QueryReady() {
  Enter();
  auto* query = new Query;
  query->context.set_deadline(After(options_.query_timeout_ms));
  {
    const std::lock_guard lock(mutex_);
    if (cancelled_) query->context.TryCancel();
    queries_.push_back(query);
  }
  const auto done = [this, query](const grpc::Status& status) {
    {
      const std::lock_guard lock(mutex_);
      std::erase(queries_, query);
    }
    Post(WorkerReadiness{.ready = status.ok() && query->response.ready()});
    delete query;
    Exit();
  };
  stub_->async()->GetInfo(&query->context, &query->request, &query->response, done);
}

void WorkerClient::Connection::Cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  if (load_ != nullptr) load_->Cancel();
  if (steps_ != nullptr) steps_->Cancel();
  for (Query* query : queries_) query->context.TryCancel();
}

WorkerClient::WorkerClient(WorkerClientOptions options, WorkerEventSink sink)
    : options_(std::move(options)), sink_(std::move(sink)) {}

WorkerClient::~WorkerClient() { Disconnect(); }

void WorkerClient::Connect(uint64_t connection) {
  Disconnect();
  connection_ = std::make_unique<Connection>(options_, sink_, connection);
  connection_->Load();
}

void WorkerClient::Send(StepRequest request) {
  if (connection_) connection_->Send(std::move(request));
}

void WorkerClient::QueryReady() {
  if (connection_) connection_->QueryReady();
}

void WorkerClient::Disconnect() { connection_.reset(); }

}  // namespace tandem::gateway
