#include "tests/fakes/fake_worker_port.h"

#include <utility>

namespace tandem::testing {

using worker::v1::StepRequest;

FakeWorkerPort::FakeWorkerPort(FakeGpuWorker* worker, gateway::WorkerEventSink sink)
    : worker_(worker), sink_(std::move(sink)), thread_([this] { Run(); }) {}

FakeWorkerPort::~FakeWorkerPort() {
  Disconnect();
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void FakeWorkerPort::Push(std::variant<Connected, Query, StepRequest> what) {
  {
    const std::lock_guard lock(mutex_);
    if (connection_ == 0) return;
    jobs_.push_back({.connection = connection_, .what = std::move(what)});
  }
  changed_.notify_all();
}

void FakeWorkerPort::Connect(uint64_t connection) {
  Disconnect();
  {
    const std::lock_guard lock(mutex_);
    connection_ = connection;
  }
  Push(Connected{});
}

void FakeWorkerPort::Send(StepRequest request) { Push(std::move(request)); }

void FakeWorkerPort::QueryReady() { Push(Query{}); }

void FakeWorkerPort::Disconnect() {
  std::unique_lock lock(mutex_);
  connection_ = 0;
  jobs_.clear();
  changed_.wait(lock, [&] { return !busy_; });
  worker_->ForgetSequences();
}

void FakeWorkerPort::Run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stop_ || !jobs_.empty(); });
    if (stop_) return;
    Job job = std::move(jobs_.front());
    jobs_.pop_front();
    busy_ = true;
    lock.unlock();
    Serve(std::move(job));
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void FakeWorkerPort::Serve(Job job) {
  gateway::WorkerEvent event{.connection = job.connection, .what = {}};
  if (std::holds_alternative<Connected>(job.what)) {
    event.what = gateway::WorkerConnected{.info = worker_->Model()};
  } else if (std::holds_alternative<Query>(job.what)) {
    event.what = gateway::WorkerReadiness{.ready = worker_->ready()};
  } else {
    worker::v1::StepResponse response;
    *response.mutable_result() = worker_->Execute(std::get<StepRequest>(job.what).step());
    event.what = std::move(response);
  }
  sink_(std::move(event));
}

}  // namespace tandem::testing
