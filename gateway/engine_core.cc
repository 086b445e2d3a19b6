#include "gateway/engine_core.h"

#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "common/base/check.h"
#include "common/base/log.h"
#include "common/base/status.h"
#include "gateway/step_codec.h"

namespace tandem::gateway {
namespace {

constexpr int64_t kNsPerMs = 1'000'000;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
// How often a recovering worker is asked whether it is ready.
constexpr int64_t kRecoveryPollNs = 100 * kNsPerMs;
// See StepIsOverdue.
constexpr int64_t kLateNs = 50 * kNsPerMs;
constexpr int64_t kGraceNs = 200 * kNsPerMs;

constexpr TraceKind kTraceSchedule = {
    "schedule", TraceRole::kBusy, {"step", "decodes", "prompt_tokens"}};
constexpr TraceKind kTraceSend = {"send step", TraceRole::kBusy, {"step", "sequences"}};
constexpr TraceKind kTraceStepOut = {
    "step out", TraceRole::kFrame, {"step", "decodes", "prompt_tokens"}};
constexpr TraceKind kTraceComplete = {"complete", TraceRole::kBusy, {"step"}};
constexpr TraceKind kTraceDetokenize = {"detokenize", TraceRole::kBusy, {"step", "sequences"}};
constexpr TraceKind kTraceDeliver = {"deliver", TraceRole::kBusy, {"events"}};

TraceTrack* MakeTrack(const EngineOptions& options, const char* name) {
  return options.tracer != nullptr ? options.tracer->AddTrack(name) : TraceTrack::None();
}

int64_t Signed(uint64_t id) { return static_cast<int64_t>(id); }

// Loading again would fail again.
bool IsPermanent(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kResourceExhausted:
    case absl::StatusCode::kUnimplemented:
      return true;
    default:
      return false;
  }
}

std::string Text(const absl::Status& status) { return std::string(status.message()); }

bool SameShape(const worker::v1::ModelInfo& a, const worker::v1::ModelInfo& b) {
  return a.SerializeAsString() == b.SerializeAsString();
}

}  // namespace

EngineCore::EngineCore(const EngineOptions& options, const Clock* clock, EngineMetrics* metrics,
                       EngineBoard* board, WorkerPort* worker)
    : options_(options),
      clock_(clock),
      metrics_(metrics),
      board_(board),
      worker_(worker),
      trace_(MakeTrack(options, "engine")),
      steps_traces_{MakeTrack(options, "steps out, even"), MakeTrack(options, "steps out, odd")},
      retry_ms_(options.reconnect_min_ms) {}

EngineCore::~EngineCore() = default;

void EngineCore::Submit(std::unique_ptr<OpenRequest> request) {
  OpenRequest* raw = request.get();
  requests_[raw->handle()] = std::move(request);
  if (state_ != State::kServing) {
    // The worker went between the board's answer and here.
    Finish(raw, raw->End(FinishReason::kError, absl::UnavailableError("the worker was lost")));
    return;
  }
  const GenerationRequest& r = raw->request();
  scheduler_->Add({.id = raw->handle(),
                   .tenant = r.tenant,
                   .prompt = r.prompt,
                   .max_tokens = r.stopping.max_tokens,
                   .use_prefix_cache = !r.prompt_top_logprobs.has_value()});
}

void EngineCore::Cancel(uint64_t handle) {
  const auto it = requests_.find(handle);
  if (it == requests_.end()) return;
  if (scheduler_) scheduler_->End(handle);
  Finish(it->second.get(), it->second->End(FinishReason::kCancelled, absl::OkStatus()));
}

void EngineCore::Handle(WorkerEvent event) {
  if (event.connection != connection_ || state_ == State::kWaiting || state_ == State::kBroken) {
    return;
  }
  std::visit(
      [&](const auto& what) {
        using What = std::decay_t<decltype(what)>;
        if constexpr (std::is_same_v<What, WorkerLoading>) OnLoading(what);
        if constexpr (std::is_same_v<What, WorkerConnected>) OnConnected(what.info);
        if constexpr (std::is_same_v<What, worker::v1::StepResponse>) OnResponse(what);
        if constexpr (std::is_same_v<What, WorkerReadiness>) OnReadiness(what);
        if constexpr (std::is_same_v<What, WorkerLost>) OnLost(what);
      },
      event.what);
}

void EngineCore::OnLoading(const WorkerLoading& loading) {
  const uint64_t total = std::max<uint64_t>(loading.total_bytes, 1);
  board_->SetNotServing(absl::UnavailableError(
      absl::StrCat("the model is loading: ", loading.phase, ", ",
                   100 * std::min(loading.loaded_bytes, total) / total, " %")));
}

void EngineCore::OnConnected(const worker::v1::ModelInfo& info) {
  absl::StatusOr<CapacityLimits> capacity = DecodeCapacity(info);
  if (!capacity.ok()) return OnLost({.status = capacity.status(), .while_loading = true});
  AdoptModel(info, std::move(*capacity));
  retry_ms_ = options_.reconnect_min_ms;
  last_progress_ns_ = clock_->NowNs();
  LogInfo("worker_connected", {{"epoch", LogValue(info.epoch())},
                               {"model_type", info.model_type()},
                               {"max_context_tokens", LogValue(info.max_context_tokens())},
                               {"max_step_rows", LogValue(info.max_step_rows())},
                               {"kv_blocks", LogValue(capacity_.groups.front().block_count)}});
  StartServing();
}

// Prefixes in the worker's cache outlive a connection, but not an epoch.
void EngineCore::AdoptModel(const worker::v1::ModelInfo& info, CapacityLimits capacity) {
  const bool keep = scheduler_ != nullptr && SameShape(info, info_);
  info_ = info;
  capacity_ = std::move(capacity);
  if (keep) return;
  SchedulerOptions options;
  options.groups = capacity_.groups;
  options.max_step_rows = info.max_step_rows();
  options.max_sequences = info.max_sequences();
  options.chunks.fixed_tokens = options_.prefill_chunk_tokens;
  options.chunks.target_ns = options_.itl_target_ms * kNsPerMs;
  options.prefix_cache = options_.prefix_cache;
  options.tenants_in_turn = options_.tenant_fairness;
  const uint64_t first_id = scheduler_ ? scheduler_->next_id() : 1;
  scheduler_ = std::make_unique<Scheduler>(std::move(options), first_id);
  counted_preemptions_ = 0;
}

void EngineCore::StartServing() {
  state_ = State::kServing;
  metrics_->SetWorkerUp(true);
  board_->SetServing({.name = options_.served_name,
                      .model_type = info_.model_type(),
                      .vocab_size = info_.vocab_size(),
                      .max_context_tokens = UsableContext(capacity_),
                      .max_logprobs = info_.max_logprobs(),
                      .parity = info_.parity(),
                      .end_ids = options_.end_ids},
                     capacity_);
}

void EngineCore::OnResponse(const worker::v1::StepResponse& response) {
  last_progress_ns_ = clock_->NowNs();
  grace_given_ = false;
  if (response.has_result()) OnResult(response.result());
}

void EngineCore::OnResult(const worker::v1::StepResult& result) {
  if (result.epoch() != info_.epoch()) {
    return LoseWorker(absl::UnavailableError("the worker has lost its state"));
  }
  if (steps_out_.empty() || steps_out_.front().id != result.step_id()) {
    return LoseWorker(absl::InternalError(
        absl::StrCat("the worker answered step ", result.step_id(), " out of turn")));
  }
  const StepOut step = steps_out_.front();
  steps_out_.erase(steps_out_.begin());
  if (TraceTrack& trace = *steps_traces_[step.id % 2]; trace.on()) {
    trace.Add(kTraceStepOut, step.sent_ns, clock_->NowNs(),
              {Signed(step.id), step.decodes, step.prompt_tokens});
  }
  switch (result.outcome()) {
    case worker::v1::STEP_OUTCOME_OK:
      return OnStepDone(step, result);
    case worker::v1::STEP_OUTCOME_UNAVAILABLE:
      return OnStepFailed(step, result);
    default:
      return LoseWorker(absl::InternalError(
          absl::StrCat("the worker refused step ", result.step_id(), ": ", result.error())));
  }
}

void EngineCore::OnStepDone(const StepOut& step, const worker::v1::StepResult& result) {
  TraceLaps laps(*trace_);
  laps.Lap(kTraceComplete);
  const auto progress = scheduler_->Complete(step.id, DecodeOutcomes(result));
  if (!progress.ok()) return LoseWorker(progress.status());
  const int64_t now = clock_->NowNs();
  const int64_t measured_us = static_cast<int64_t>(result.timing().total_us());
  const int64_t duration = measured_us > 0 ? measured_us * 1000 : now - step.sent_ns;
  if (step.decodes + step.prompt_tokens > 0) {
    scheduler_->ObserveStep(step.decodes, step.prompt_tokens, duration);
    scheduler_->Advise(step.decodes, result.timing().advised_prefill_rows());
    metrics_->ObserveStep(duration, step.decodes + step.prompt_tokens);
  }
  laps.Lap(kTraceComplete, {Signed(step.id)});
  AdvanceRequests(*progress, result, now);
  laps.Lap(kTraceDetokenize, {Signed(step.id), result.sequences_size()});
}

void EngineCore::AdvanceRequests(const std::vector<Progress>& progress,
                                 const worker::v1::StepResult& result, int64_t now_ns) {
  for (const Progress& p : progress) {
    OpenRequest* request = requests_.at(p.request).get();
    std::optional<GenerationEvent> event =
        request->Advance(p, result.sequences(static_cast<int>(p.outcome)), now_ns, metrics_);
    if (!event) continue;
    if (!event->finished) {
      events_.emplace_back(request->listener(), std::move(*event));
      continue;
    }
    // A stop string: the scheduler does not know yet.
    if (p.end == SequenceEnd::kNone) scheduler_->End(p.request);
    Finish(request, std::move(*event));
  }
}

// An expert worker was lost. Open requests end; new ones wait until the worker says that it is
// ready.
void EngineCore::OnStepFailed(const StepOut& step, const worker::v1::StepResult& result) {
  const absl::StatusOr<std::vector<RequestId>> ended = scheduler_->Fail(step.id);
  if (!ended.ok()) return LoseWorker(ended.status());
  const absl::Status error =
      absl::UnavailableError(absl::StrCat("a step of the model failed: ", result.error()));
  LogWarn("step_failed", {{"step", LogValue(step.id)},
                          {"open_requests", LogValue(ended->size())},
                          {"error", result.error()}});
  FailRequests(*ended, error);
  board_->SetNotServing(error);
  metrics_->SetWorkerUp(false);
  if (state_ != State::kRecovering) {
    state_ = State::kRecovering;
    retry_at_ns_ = clock_->NowNs() + kRecoveryPollNs;
    worker_->QueryReady();
  }
}

void EngineCore::OnReadiness(const WorkerReadiness& readiness) {
  if (state_ != State::kRecovering || !readiness.ready) return;
  LogInfo("worker_recovered", {{"epoch", LogValue(info_.epoch())}});
  StartServing();
}

void EngineCore::OnLost(const WorkerLost& lost) {
  if (lost.while_loading && IsPermanent(lost.status)) {
    LogError("load_failed", {{"error", lost.status.ToString()}});
    board_->SetNotServing(Annotate(lost.status, "the model cannot be loaded"));
    worker_->Disconnect();
    state_ = State::kBroken;
    return;
  }
  LoseWorker(lost.status);
}

void EngineCore::LoseWorker(const absl::Status& why) {
  const bool served = state_ == State::kServing || state_ == State::kRecovering;
  worker_->Disconnect();
  // Steps and their blocks are void: the worker forgets all sequences when the stream ends.
  std::vector<RequestId> ended;
  if (scheduler_) ended = scheduler_->WorkerLost(/*forget_blocks=*/false);
  steps_out_.clear();
  const absl::Status error =
      absl::UnavailableError(absl::StrCat(served ? "the worker was lost: " : "", Text(why)));
  if (served) {
    metrics_->CountWorkerLoss();
    LogWarn("worker_lost", {{"open_requests", LogValue(ended.size())}, {"error", why.ToString()}});
  }
  FailRequests(ended, error);
  board_->SetNotServing(error);
  metrics_->SetWorkerUp(false);
  ConnectLater();
}

void EngineCore::ConnectLater() {
  state_ = State::kWaiting;
  retry_at_ns_ = clock_->NowNs() + retry_ms_ * kNsPerMs;
  retry_ms_ = std::min(2 * retry_ms_, options_.reconnect_max_ms);
}

void EngineCore::Connect() {
  state_ = State::kLoading;
  worker_->Connect(++connection_);
}

// On a machine so busy that this thread itself comes late, answers may be waiting to be read just
// like it: once, they get a moment more.
bool EngineCore::StepIsOverdue() {
  if (steps_out_.empty()) return false;
  const int64_t timeout_ns = options_.step_timeout_ms * kNsPerMs;
  const int64_t late_ns = clock_->NowNs() - last_progress_ns_ - timeout_ns;
  if (late_ns > kLateNs && !grace_given_) {
    grace_given_ = true;
    last_progress_ns_ += late_ns + kGraceNs;
    return false;
  }
  return late_ns >= 0;
}

void EngineCore::Tick() {
  const int64_t now = clock_->NowNs();
  if (state_ == State::kWaiting && now >= retry_at_ns_) Connect();
  if (StepIsOverdue()) {
    LoseWorker(absl::UnavailableError(
        absl::StrCat("no sign of progress for ", options_.step_timeout_ms, " ms")));
  }
  if (state_ == State::kRecovering && now >= retry_at_ns_) {
    retry_at_ns_ = now + kRecoveryPollNs;
    worker_->QueryReady();
  }
  if (state_ == State::kServing) SendSteps();
  UpdateGauges();
  board_->Tick(now);
}

void EngineCore::SendSteps() {
  TraceLaps laps(*trace_);
  laps.Lap(kTraceSchedule);
  while (const std::optional<StepPlan> plan = scheduler_->Plan()) {
    laps.Lap(kTraceSchedule, {Signed(plan->step_id), plan->decodes, plan->prompt_tokens});
    SendStep(*plan);
    laps.Lap(kTraceSend, {Signed(plan->step_id), static_cast<int64_t>(plan->sequences.size())});
  }
  const bool probe_due = options_.idle_probe_ms > 0 && steps_out_.empty() &&
                         clock_->NowNs() - last_progress_ns_ >= options_.idle_probe_ms * kNsPerMs;
  if (probe_due) SendStep(scheduler_->PlanProbe());
}

void EngineCore::SendStep(const StepPlan& plan) {
  const int64_t now = clock_->NowNs();
  for (const PlannedSequence& planned : plan.sequences) {
    if (!planned.start) continue;
    OpenRequest* request = requests_.at(planned.request).get();
    if (!request->started()) board_->LeftQueue(request->request().prompt.size());
    request->Start(now);
  }
  if (steps_out_.empty()) {
    last_progress_ns_ = now;
    grace_given_ = false;
  }
  steps_out_.push_back({.id = plan.step_id,
                        .sent_ns = now,
                        .decodes = plan.decodes,
                        .prompt_tokens = plan.prompt_tokens});
  worker_->Send(EncodeStep(plan, info_.epoch(), [&](RequestId id) {
    const OpenRequest& request = *requests_.at(id);
    return SequenceRules{.request = &request.request(),
                         .end_ids = options_.end_ids,
                         .wants_prompt_logprobs = request.wants_prompt_logprobs()};
  }));
}

void EngineCore::Finish(OpenRequest* request, GenerationEvent event) {
  metrics_->CountRequest(request->Figures(event.reason, clock_->NowNs()));
  if (!request->started()) board_->LeftQueue(request->request().prompt.size());
  events_.emplace_back(request->listener(), std::move(event));
  requests_.erase(request->handle());
}

void EngineCore::FailRequests(const std::vector<RequestId>& ids, const absl::Status& error) {
  for (const RequestId id : ids) {
    OpenRequest* request = requests_.at(id).get();
    Finish(request, request->End(FinishReason::kError, error));
  }
}

void EngineCore::DeliverEvents() {
  if (events_.empty()) return;
  const TraceSpan span(*trace_, kTraceDeliver, {static_cast<int64_t>(events_.size())});
  for (auto& [listener, event] : std::exchange(events_, {})) {
    const bool last = event.finished;
    listener->OnEvent(std::move(event));
    if (last) board_->Closed();
  }
}

void EngineCore::Shutdown() {
  worker_->Disconnect();
  if (scheduler_) scheduler_->WorkerLost(/*forget_blocks=*/true);
  std::vector<RequestId> ids;
  for (const auto& [id, request] : requests_) ids.push_back(id);
  FailRequests(ids, absl::UnavailableError("the server is shutting down"));
  DeliverEvents();
  state_ = State::kBroken;
  UpdateGauges();
}

void EngineCore::UpdateGauges() {
  metrics_->SetQueue(board_->waiting_requests(), board_->waiting_tokens());
  if (!scheduler_) return;
  metrics_->SetRunning(scheduler_->running());
  metrics_->SetBlocks(scheduler_->blocks());
  metrics_->CountPreemptions(scheduler_->preemptions() - counted_preemptions_);
  counted_preemptions_ = scheduler_->preemptions();
}

int64_t EngineCore::NextDeadlineNs() const {
  switch (state_) {
    case State::kWaiting:
      return retry_at_ns_;
    case State::kLoading:
    case State::kBroken:
      return kNever;
    case State::kServing:
    case State::kRecovering:
      break;
  }
  int64_t deadline = kNever;
  if (state_ == State::kRecovering) deadline = retry_at_ns_;
  if (!steps_out_.empty()) {
    deadline = std::min(deadline, last_progress_ns_ + options_.step_timeout_ms * kNsPerMs);
  } else if (state_ == State::kServing && options_.idle_probe_ms > 0) {
    deadline = std::min(deadline, last_progress_ns_ + options_.idle_probe_ms * kNsPerMs);
  }
  return deadline;
}

}  // namespace tandem::gateway
