#pragma once

// The worker without its RPC: one executor thread that loads the model and runs steps, a session
// for the gateway's Step stream, and a thread that sends heartbeats while a step makes progress.
//
//   session: the stream's reader takes a free request, fills it, pushes it; at most
//   kQueuedSteps wait, then the reader waits. The executor answers through the session's sink.
//
// Opening a session ends the one before and forgets its sequences, as closing does: a gateway that
// restarted must find no leftovers.
//
// Thread safety: all methods from any thread, but a Session belongs to its reader.
// Errors: FAILED_PRECONDITION (no model, another model), those of loading.

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu_worker/loaded_model.h"
#include "tandem/worker/v1/gpu_worker.pb.h"

namespace tandem::gpu {

// Where a session's responses go. Calls are serialized. Write returns false when the peer is gone;
// Cancel makes the reader's blocking read fail.
class StepSink {
 public:
  virtual ~StepSink() = default;
  virtual bool Write(const worker::v1::StepResponse& response) = 0;
  virtual void Cancel() = 0;
};

class GpuEngine {
 public:
  static constexpr size_t kQueuedSteps = 2;

  enum class Phase : uint8_t { kIdle, kLoading, kReady, kFailed };
  struct State {
    Phase phase = Phase::kIdle;
    absl::Status error;
    LoadProgress::Snapshot progress;
    bool ready = false;  // loaded, and every expert worker attached
    std::optional<worker::v1::ModelInfo> info;
  };
  struct Counters {
    uint64_t steps = 0;
    uint64_t failed_steps = 0;
    uint64_t rows = 0;
    uint64_t step_us = 0;
    uint64_t expert_wait_us = 0;
    uint64_t reattachments = 0;
    uint64_t kv_bytes = 0;
    uint64_t activation_bytes = 0;
    PipelineCounters pipeline;
    HotExpertCounters hot_experts;
    std::vector<StepMeter::LayerStall> stalls;
  };

  explicit GpuEngine(const WorkerOptions& options);
  ~GpuEngine();  // Stop
  GpuEngine(const GpuEngine&) = delete;
  GpuEngine& operator=(const GpuEngine&) = delete;

  // Starts loading, or joins what is in progress or done. FAILED_PRECONDITION for another model.
  absl::Status StartLoad(const std::string& dir);
  // Returns at the latest after `timeout`, earlier when loading has ended and, if it went well,
  // every expert worker is attached: one may have been lost since.
  State WaitForLoad(std::chrono::milliseconds timeout);
  State state() const;
  Counters counters() const;
  const WorkerOptions& options() const { return options_; }

  class Session {
   public:
    ~Session();  // waits for the step in progress
    // A request to fill, or null when the session was ended. Blocks while the queue is full.
    worker::v1::StepRequest* Acquire();
    // Queues what Acquire gave.
    void Push();

   private:
    friend class GpuEngine;
    Session(GpuEngine* engine, StepSink* sink) : engine_(engine), sink_(sink) {}

    GpuEngine* const engine_;
    StepSink* const sink_;
    // A ring: [head, head + queued) is the one that runs and those that wait, the one after is
    // being filled.
    static constexpr size_t kHeld = kQueuedSteps + 1;
    std::array<worker::v1::StepRequest, kHeld + 1> ring_;
    size_t head_ = 0;
    size_t queued_ = 0;
    bool ended_ = false;
  };
  // Ends the session before, then waits until it is closed. The sink must outlive the session.
  absl::StatusOr<std::unique_ptr<Session>> OpenSession(StepSink* sink);

  // Ends session, load and threads. Idempotent.
  void Stop();

 private:
  void ExecutorMain();
  void Load(const std::string& dir);
  void RunStep(Session& session);
  void Count(const worker::v1::StepResult& result);
  void HeartbeatMain();
  void Send(Session& session, const worker::v1::StepResponse& response);
  void SendHeartbeat(std::unique_lock<std::mutex>& lock);
  State StateLocked() const;

  const WorkerOptions options_;
  LoadProgress progress_;

  mutable std::mutex mutex_;
  std::condition_variable executor_wake_;
  std::condition_variable changed_;  // load ended, queue moved, step ended, session closed
  std::condition_variable heartbeat_wake_;
  Phase phase_ = Phase::kIdle;
  absl::Status error_;
  std::string dir_;
  bool load_wanted_ = false;
  bool stopped_ = false;
  Session* session_ = nullptr;
  bool running_ = false;            // the executor is in a step of session_
  bool heartbeat_writing_ = false;  // the heartbeat thread uses session_'s sink
  std::atomic<uint64_t> running_step_id_{0};
  Counters counters_;  // the model's own ones are copied in after each step
  // Made by the executor before phase_ becomes kReady; destroyed by it.
  std::unique_ptr<LoadedModel> model_;

  std::mutex write_mutex_;             // one writer of a sink at a time
  worker::v1::StepResponse response_;  // of the executor, reused
  std::thread executor_;
  std::thread heartbeat_;
};

}  // namespace tandem::gpu
