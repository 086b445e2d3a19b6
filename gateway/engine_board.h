#pragma once

// What callers of the engine and its thread share: who may enter, whether the worker serves, how
// many requests are open. Everything else belongs to the engine thread.
//
// Thread safety: all methods may be called from any thread.

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gateway/engine.h"
#include "gateway/scheduling/admission.h"

namespace tandem::gateway {

class EngineBoard {
 public:
  explicit EngineBoard(QueueLimits limits) : admission_(limits) {}

  // Takes a request in; every one that is let in is followed by one Closed. UNAVAILABLE,
  // INVALID_ARGUMENT or RESOURCE_EXHAUSTED otherwise.
  absl::Status Enter(const GenerationRequest& request);
  // Its first step was planned, or it ended before.
  void LeftQueue(uint64_t prompt_tokens);
  void Closed();

  void SetServing(ServedModel model, CapacityLimits capacity);
  // `why` is what callers are told; its code is that of Ready.
  void SetNotServing(absl::Status why);
  void StartDraining();
  // See Engine.
  void FollowServing(std::function<void(bool)> listener);
  // False if requests were still open after `timeout_ms`.
  bool WaitUntilEmpty(int64_t timeout_ms);
  // The engine thread goes round.
  void Tick(int64_t now_ns);

  // OK, UNAVAILABLE (loading, worker lost, draining) or the error that keeps the model from
  // serving.
  absl::Status Ready() const;
  std::optional<ServedModel> Model() const;
  int64_t last_tick_ns() const;
  uint32_t waiting_requests() const;
  uint64_t waiting_tokens() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable empty_;
  Admission admission_;
  absl::Status not_serving_ = absl::UnavailableError("the worker is not connected yet");
  std::optional<ServedModel> model_;
  CapacityLimits capacity_;
  bool draining_ = false;
  std::function<void(bool)> listener_;
  uint64_t open_ = 0;
  int64_t last_tick_ns_ = 0;
};

}  // namespace tandem::gateway
