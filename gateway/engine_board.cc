#include "gateway/engine_board.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/status.h"
#include "gateway/step_codec.h"

namespace tandem::gateway {

absl::Status EngineBoard::Enter(const GenerationRequest& request) {
  const std::lock_guard lock(mutex_);
  if (draining_) return absl::UnavailableError("the server is shutting down");
  // Whatever keeps the model from serving, callers can only wait or go elsewhere.
  if (!not_serving_.ok()) return absl::UnavailableError(not_serving_.message());
  RETURN_IF_ERROR(CheckRequest(request, *model_));
  const uint64_t prompt_tokens = request.prompt.size();
  RETURN_IF_ERROR(CheckFits(capacity_, prompt_tokens, request.stopping.max_tokens));
  RETURN_IF_ERROR(admission_.TryEnter(prompt_tokens));
  ++open_;
  return absl::OkStatus();
}

void EngineBoard::LeftQueue(uint64_t prompt_tokens) {
  const std::lock_guard lock(mutex_);
  admission_.Leave(prompt_tokens);
}

void EngineBoard::Closed() {
  const std::lock_guard lock(mutex_);
  if (--open_ == 0) empty_.notify_all();
}

void EngineBoard::SetServing(ServedModel model, CapacityLimits capacity) {
  const std::lock_guard lock(mutex_);
  model_ = std::move(model);
  capacity_ = std::move(capacity);
  if (listener_) listener_(!draining_);
  not_serving_ = absl::OkStatus();
}

void EngineBoard::SetNotServing(absl::Status why) {
  const std::lock_guard lock(mutex_);
  not_serving_ = std::move(why);
  if (listener_) listener_(false);
}

void EngineBoard::StartDraining() {
  const std::lock_guard lock(mutex_);
  draining_ = true;
  if (listener_) listener_(false);
}

void EngineBoard::FollowServing(std::function<void(bool)> listener) {
  const std::lock_guard lock(mutex_);
  listener_ = std::move(listener);
  if (listener_) listener_(not_serving_.ok() && !draining_);
}

bool EngineBoard::WaitUntilEmpty(int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  return empty_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return open_ == 0; });
}

void EngineBoard::Tick(int64_t now_ns) {
  const std::lock_guard lock(mutex_);
  last_tick_ns_ = now_ns;
}

absl::Status EngineBoard::Ready() const {
  const std::lock_guard lock(mutex_);
  if (draining_) return absl::UnavailableError("the server is shutting down");
  return not_serving_;
}

std::optional<ServedModel> EngineBoard::Model() const {
  const std::lock_guard lock(mutex_);
  return model_;
}

int64_t EngineBoard::last_tick_ns() const {
  const std::lock_guard lock(mutex_);
  return last_tick_ns_;
}

uint32_t EngineBoard::waiting_requests() const {
  const std::lock_guard lock(mutex_);
  return admission_.requests();
}

uint64_t EngineBoard::waiting_tokens() const {
  const std::lock_guard lock(mutex_);
  return admission_.tokens();
}

}  // namespace tandem::gateway
