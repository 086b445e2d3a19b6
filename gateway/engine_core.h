#pragma once

// The logic of the engine thread: connects to the worker, feeds it steps from the scheduler, turns
// results into events, and notices when it is gone. Does no I/O and does not wait: the worker is a
// WorkerPort, time is a Clock, and the owner calls Tick when NextDeadlineNs() has come.
//
//            connect            loaded             step UNAVAILABLE
//   waiting ---------> loading ---------> serving <---------------> recovering
//      ^                  |                  |      worker is ready      |
//      +----- lost -------+----- lost -------+---------- lost -----------+
//   (a load that cannot succeed: broken, for good)
//
// Every request given to Submit ends with exactly one event with `finished`. Events are collected
// and given out by DeliverEvents, after the next step is on its way.
//
// Thread safety: one owner (the engine thread), EngineBoard is shared.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/base/clock.h"
#include "common/base/trace.h"
#include "gateway/engine_board.h"
#include "gateway/engine_metrics.h"
#include "gateway/open_request.h"
#include "gateway/scheduling/scheduler.h"
#include "gateway/serving_engine.h"
#include "gateway/worker_port.h"

namespace tandem::gateway {

class EngineCore {
 public:
  // All pointers outlive it.
  EngineCore(const EngineOptions& options, const Clock* clock, EngineMetrics* metrics,
             EngineBoard* board, WorkerPort* worker);
  ~EngineCore();

  // REQUIRES: the board has let it in.
  void Submit(std::unique_ptr<OpenRequest> request);
  void Cancel(uint64_t handle);
  void Handle(WorkerEvent event);
  // Acts on what is due, and sends steps while there is something to do.
  void Tick();
  // Gives the collected events to their listeners.
  void DeliverEvents();
  // Ends everything.
  void Shutdown();

  // When Tick must be called at the latest.
  int64_t NextDeadlineNs() const;

 private:
  enum class State : uint8_t { kWaiting, kLoading, kServing, kRecovering, kBroken };
  // A step whose result has not come.
  struct StepOut {
    uint64_t id = 0;
    int64_t sent_ns = 0;
    uint32_t decodes = 0;
    uint32_t prompt_tokens = 0;
  };

  void OnLoading(const WorkerLoading& loading);
  void OnConnected(const worker::v1::ModelInfo& info);
  void OnResponse(const worker::v1::StepResponse& response);
  void OnResult(const worker::v1::StepResult& result);
  void OnStepDone(const StepOut& step, const worker::v1::StepResult& result);
  // What a result gives the requests: text and ends.
  void AdvanceRequests(const std::vector<Progress>& progress, const worker::v1::StepResult& result,
                       int64_t now_ns);
  void OnStepFailed(const StepOut& step, const worker::v1::StepResult& result);
  void OnReadiness(const WorkerReadiness& readiness);
  void OnLost(const WorkerLost& lost);

  void Connect();
  // Ends all requests and tries again later.
  void LoseWorker(const absl::Status& why);
  void ConnectLater();
  void AdoptModel(const worker::v1::ModelInfo& info, CapacityLimits capacity);
  void StartServing();
  void SendSteps();
  void SendStep(const StepPlan& plan);
  bool StepIsOverdue();

  void Finish(OpenRequest* request, GenerationEvent event);
  void FailRequests(const std::vector<RequestId>& ids, const absl::Status& error);
  void UpdateGauges();

  const EngineOptions& options_;
  const Clock* clock_;
  EngineMetrics* metrics_;
  EngineBoard* board_;
  WorkerPort* worker_;
  TraceTrack* trace_;                        // of the engine thread
  std::array<TraceTrack*, 2> steps_traces_;  // steps out, by turns: at most two at a time

  State state_ = State::kWaiting;
  uint64_t connection_ = 0;
  int64_t retry_at_ns_ = 0;  // waiting: connect; recovering: ask again
  uint32_t retry_ms_;
  worker::v1::ModelInfo info_;
  CapacityLimits capacity_;
  std::unique_ptr<Scheduler> scheduler_;  // null until a model was loaded
  uint64_t counted_preemptions_ = 0;
  std::vector<StepOut> steps_out_;  // oldest first
  int64_t last_progress_ns_ = 0;    // last response, or first step sent after none was out
  bool grace_given_ = false;        // since then

  std::unordered_map<uint64_t, std::unique_ptr<OpenRequest>> requests_;
  std::vector<std::pair<std::shared_ptr<GenerationListener>, GenerationEvent>> events_;
};

}  // namespace tandem::gateway
