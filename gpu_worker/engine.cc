#include "gpu_worker/engine.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/base/log.h"
#include "common/base/status.h"

namespace tandem::gpu {
namespace {

// A gateway gives a worker up after two seconds of silence.
constexpr std::chrono::milliseconds kHeartbeatInterval{200};

}  // namespace

GpuEngine::GpuEngine(const WorkerOptions& options) : options_(options) {
  executor_ = std::thread([this] { ExecutorMain(); });
  heartbeat_ = std::thread([this] { HeartbeatMain(); });
}

GpuEngine::~GpuEngine() { Stop(); }

void GpuEngine::Stop() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(stopped_, true)) return;
    if (session_ != nullptr) {
      session_->ended_ = true;
      session_->sink_->Cancel();
    }
  }
  progress_.Cancel();
  executor_wake_.notify_all();
  changed_.notify_all();
  heartbeat_wake_.notify_all();
  executor_.join();
  heartbeat_.join();
}

absl::Status GpuEngine::StartLoad(const std::string& dir) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return absl::UnavailableError("the worker is stopping");
  if ((phase_ == Phase::kLoading || phase_ == Phase::kReady) && dir != dir_) {
    return absl::FailedPreconditionError(
        absl::StrCat("model ", dir_, " is loaded; a worker serves one model"));
  }
  if (phase_ == Phase::kLoading || phase_ == Phase::kReady) return absl::OkStatus();
  phase_ = Phase::kLoading;
  error_ = absl::OkStatus();
  dir_ = dir;
  load_wanted_ = true;
  progress_.Reset();
  executor_wake_.notify_all();
  return absl::OkStatus();
}

GpuEngine::State GpuEngine::StateLocked() const {
  State state;
  state.phase = phase_;
  state.error = error_;
  state.progress = progress_.Read();
  if (phase_ == Phase::kReady) {
    state.info = model_->info();
    state.ready = model_->ready() && !stopped_;
  }
  return state;
}

GpuEngine::State GpuEngine::state() const {
  const std::lock_guard lock(mutex_);
  return StateLocked();
}

GpuEngine::State GpuEngine::WaitForLoad(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, timeout, [this] {
    if (phase_ == Phase::kReady) return model_->ready();
    return phase_ != Phase::kLoading || stopped_;
  });
  return StateLocked();
}

GpuEngine::Counters GpuEngine::counters() const {
  const std::lock_guard lock(mutex_);
  Counters counters = counters_;
  if (phase_ == Phase::kReady) {
    counters.reattachments = model_->reattachments();
    counters.kv_bytes = model_->kv_bytes();
    counters.activation_bytes = model_->activation_bytes();
  }
  return counters;
}

absl::StatusOr<std::unique_ptr<GpuEngine::Session>> GpuEngine::OpenSession(StepSink* sink) {
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::kReady) return absl::FailedPreconditionError("no model is loaded");
  // Newcomers end whoever is there, also another newcomer that was quicker.
  while (session_ != nullptr && !stopped_) {
    session_->ended_ = true;
    session_->sink_->Cancel();
    changed_.notify_all();
    changed_.wait(lock, [&, old = session_] { return session_ != old || stopped_; });
  }
  if (stopped_) return absl::UnavailableError("the worker is stopping");
  std::unique_ptr<Session> session(new Session(this, sink));
  session_ = session.get();
  return session;
}

GpuEngine::Session::~Session() {
  std::unique_lock lock(engine_->mutex_);
  ended_ = true;
  engine_->changed_.wait(lock,
                         [this] { return !engine_->running_ && !engine_->heartbeat_writing_; });
  if (engine_->model_ != nullptr) engine_->model_->Reset();
  engine_->session_ = nullptr;
  engine_->changed_.notify_all();
}

worker::v1::StepRequest* GpuEngine::Session::Acquire() {
  std::unique_lock lock(engine_->mutex_);
  engine_->changed_.wait(lock, [this] { return ended_ || queued_ < kHeld; });
  if (ended_) return nullptr;
  return &ring_[(head_ + queued_) % ring_.size()];
}

void GpuEngine::Session::Push() {
  const std::lock_guard lock(engine_->mutex_);
  ++queued_;
  engine_->executor_wake_.notify_one();
}

void GpuEngine::ExecutorMain() {
  while (true) {
    std::string dir;
    Session* session = nullptr;
    {
      std::unique_lock lock(mutex_);
      executor_wake_.wait(lock, [this] {
        return stopped_ || load_wanted_ ||
               (session_ != nullptr && !session_->ended_ && session_->queued_ > 0);
      });
      if (stopped_) break;
      if (std::exchange(load_wanted_, false)) {
        dir = dir_;
      } else {
        session = session_;
        running_ = true;
        heartbeat_wake_.notify_one();
      }
    }
    if (session == nullptr) {
      Load(dir);
    } else {
      RunStep(*session);
    }
  }
  // The backend belongs to this thread.
  std::unique_ptr<LoadedModel> model;
  {
    const std::lock_guard lock(mutex_);
    model = std::move(model_);
    phase_ = Phase::kFailed;
    error_ = absl::UnavailableError("the worker is stopping");
  }
  changed_.notify_all();
}

void GpuEngine::Load(const std::string& dir) {
  LogInfo("loading", {{"model", dir}});
  absl::StatusOr<std::unique_ptr<LoadedModel>> model =
      LoadedModel::Create(dir, options_, progress_);
  {
    const std::lock_guard lock(mutex_);
    if (model.ok()) {
      model_ = *std::move(model);
      phase_ = Phase::kReady;
    } else {
      phase_ = Phase::kFailed;
      error_ = model.status();
    }
  }
  changed_.notify_all();
  if (model.ok()) {
    LogInfo("loaded", {{"model", dir}});
  } else {
    LogError("load_failed", {{"reason", model.status().ToString()}});
  }
}

void GpuEngine::RunStep(Session& session) {
  const worker::v1::StepRequest& request = session.ring_[session.head_];
  // Masks belong to steps with `masked`, which are refused.
  if (request.has_step()) {
    running_step_id_.store(request.step().step_id(), std::memory_order_relaxed);
    model_->Run(request.step(), *response_.mutable_result());
    Count(response_.result());
    Send(session, response_);
  }
  const std::lock_guard lock(mutex_);
  running_ = false;
  session.head_ = (session.head_ + 1) % session.ring_.size();
  --session.queued_;
  changed_.notify_all();
}

void GpuEngine::Count(const worker::v1::StepResult& result) {
  const std::lock_guard lock(mutex_);
  ++counters_.steps;
  if (result.outcome() != worker::v1::STEP_OUTCOME_OK) ++counters_.failed_steps;
  counters_.rows += result.timing().rows();
  counters_.step_us += result.timing().total_us();
  counters_.expert_wait_us += result.timing().expert_wait_us();
  counters_.pipeline = model_->pipeline().counters();
  counters_.hot_experts = model_->hot_experts();
  counters_.stalls = model_->pipeline().stalls();
}

void GpuEngine::Send(Session& session, const worker::v1::StepResponse& response) {
  bool written = false;
  {
    const std::lock_guard lock(write_mutex_);
    written = session.sink_->Write(response);
  }
  if (written) return;
  const std::lock_guard lock(mutex_);
  session.ended_ = true;
  changed_.notify_all();
}

void GpuEngine::HeartbeatMain() {
  std::unique_lock lock(mutex_);
  while (!stopped_) {
    heartbeat_wake_.wait(lock, [this] { return stopped_ || running_; });
    uint64_t seen = running_ ? model_->progress() : 0;
    while (running_ && !stopped_) {
      heartbeat_wake_.wait_for(lock, kHeartbeatInterval);
      if (!running_ || stopped_) break;
      // A hung pool or a hung expert worker does not count on: the gateway is to notice.
      if (std::exchange(seen, model_->progress()) != seen) SendHeartbeat(lock);
    }
  }
}

void GpuEngine::SendHeartbeat(std::unique_lock<std::mutex>& lock) {
  Session* const session = session_;
  heartbeat_writing_ = true;
  lock.unlock();
  worker::v1::StepResponse response;
  response.mutable_heartbeat()->set_step_id(running_step_id_.load(std::memory_order_relaxed));
  Send(*session, response);
  lock.lock();
  heartbeat_writing_ = false;
  changed_.notify_all();
}

}  // namespace tandem::gpu
