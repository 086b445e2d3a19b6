#pragma once

// The engine's view of the gpu_worker: one connection at a time, events come back. A seam between
// the engine's logic (engine_core.h) and gRPC (worker_client.h).
//
// A connection is: load the model, then a Step stream. Its life in events: any number of
// WorkerLoading, then WorkerConnected, then responses; WorkerLost ends it at any point, once.
// Events carry the number of their connection: those of an older one are ignored.

#include <cstdint>
#include <functional>
#include <string>
#include <variant>

#include "absl/status/status.h"
#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gateway {

inline constexpr uint32_t kWorkerProtocolVersion = 1;

struct WorkerLoading {
  std::string phase;
  uint64_t loaded_bytes = 0;
  uint64_t total_bytes = 0;
};

struct WorkerConnected {
  worker::v1::ModelInfo info;
};

// The answer to QueryReady.
struct WorkerReadiness {
  bool ready = false;
};

struct WorkerLost {
  absl::Status status;
  bool while_loading = false;
};

struct WorkerEvent {
  uint64_t connection = 0;
  std::variant<WorkerLoading, WorkerConnected, worker::v1::StepResponse, WorkerReadiness,
               WorkerLost>
      what;
};

// May be called from any thread; must not block.
using WorkerEventSink = std::function<void(WorkerEvent)>;

class WorkerPort {
 public:
  virtual ~WorkerPort() = default;
  // Starts connection `connection` in the background. REQUIRES: no other one is alive.
  virtual void Connect(uint64_t connection) = 0;
  // Queues a request on the Step stream; ignored if there is none (WorkerLost is on its way).
  virtual void Send(worker::v1::StepRequest request) = 0;
  // Asks whether the worker, its expert workers included, can serve.
  virtual void QueryReady() = 0;
  // Drops the connection: a WorkerLost of it may still come.
  virtual void Disconnect() = 0;
};

}  // namespace tandem::gateway
