#pragma once

// One expert worker's control plane as blocking calls: Load, then Attach and the hand-over of the
// shared-memory link. Thread safety: one call at a time; Cancel and the counters from any thread.
// Errors: the worker's, with its address in front; UNAVAILABLE when it cannot be reached in time.

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/shm/expert_batch.h"
#include "common/shm/thread_pairs.h"
#include "common/shm/unique_fd.h"
#include "gpu_worker/expert_link.h"
#include "tandem/worker/v1/expert_worker.grpc.pb.h"

namespace tandem::gpu {

struct ExpertLoad {
  std::string model_dir;
  uint32_t index = 0;
  std::vector<uint32_t> shares;
  std::chrono::milliseconds connect_timeout{30000};
};

struct ExpertAttach {
  shm::BatchLimits limits;
  uint64_t model_hash = 0;
  std::vector<int> thread_cpus;
  shm::Placement placement = shm::Placement::kAuto;
  std::chrono::milliseconds link_deadline{1500};
  // Where the descriptor of the worker's weight store goes; null: not asked for.
  shm::UniqueFd* weights = nullptr;
};

class ExpertWorkerClient {
 public:
  explicit ExpertWorkerClient(const std::string& address);

  absl::Status Load(const ExpertLoad& load);
  absl::StatusOr<std::unique_ptr<ExpertLink>> Attach(const ExpertAttach& attach);
  // Ends the call in progress and every later one.
  void Cancel();

  const std::string& address() const { return address_; }
  uint64_t loaded_bytes() const { return loaded_.load(std::memory_order_relaxed); }
  uint64_t total_bytes() const { return total_.load(std::memory_order_relaxed); }

 private:
  // Makes a call cancellable while it runs.
  class ActiveCall;
  absl::Status WaitForConnection(std::chrono::milliseconds timeout);

  const std::string address_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<worker::v1::ExpertWorkerService::Stub> stub_;
  std::atomic<uint64_t> loaded_{0};
  std::atomic<uint64_t> total_{0};

  std::mutex mutex_;
  grpc::ClientContext* active_ = nullptr;
  bool cancelled_ = false;
};

}  // namespace tandem::gpu
