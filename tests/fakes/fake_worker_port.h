#pragma once

// A WorkerPort that is served by a thread of this process, over a FakeGpuWorker that is not
// started: the engine's threads meet another thread, without gRPC in between.
//
// Thread safety: as WorkerPort says; `worker` may be controlled from any thread and outlives it.

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <variant>

#include "gateway/worker_port.h"
#include "tests/fakes/fake_gpu_worker.h"

namespace tandem::testing {

class FakeWorkerPort final : public gateway::WorkerPort {
 public:
  FakeWorkerPort(FakeGpuWorker* worker, gateway::WorkerEventSink sink);
  ~FakeWorkerPort() override;

  void Connect(uint64_t connection) override;
  void Send(worker::v1::StepRequest request) override;
  void QueryReady() override;
  void Disconnect() override;

 private:
  struct Connected {};
  struct Query {};
  struct Job {
    uint64_t connection = 0;
    std::variant<Connected, Query, worker::v1::StepRequest> what;
  };
  void Run();
  void Serve(Job job);
  void Push(std::variant<Connected, Query, worker::v1::StepRequest> what);

  FakeGpuWorker* const worker_;
  const gateway::WorkerEventSink sink_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  uint64_t connection_ = 0;  // 0: none
  bool busy_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace tandem::testing
